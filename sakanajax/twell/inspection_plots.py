"""Pictures of a sparsity report: by layer, by position, by token."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sakanajax.core import files
from sakanajax.twell.inspection import Report

_STYLE = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "axes.edgecolor": "#94a3b8",
}
_FIRST, _SECOND = "#c2410c", "#334155"


def draw(folder: str | os.PathLike, report: Report) -> list[pathlib.Path]:
  """Writes layers.png, positions.png and tokens.png into `folder`; returns their paths."""
  folder = pathlib.Path(folder)
  drawings = {"layers": _layers, "positions": _positions, "tokens": _tokens}
  paths = []
  for name, drawing in drawings.items():
    with _figure(folder / f"{name}.png") as axes:
      drawing(axes, report)
    paths.append(folder / f"{name}.png")
  return paths


def _layers(axes: Any, report: Report) -> None:
  places = np.arange(len(report.nnz_layer))
  axes.bar(places, report.nnz_layer, color=_FIRST, width=0.7)
  axes.set(title="Active neurons per token, by layer", xlabel="layer", ylabel="non-zeros")
  axes.set_xticks(places)
  right = axes.twinx()
  right.plot(places, [100 * share for share in report.dead_layer], "o-", color=_SECOND, markersize=4)
  right.set(ylabel="dead neurons, %", ylim=(0, 100))
  right.spines["right"].set_visible(True)


def _positions(axes: Any, report: Report) -> None:
  points = [(place + 1, nnz) for place, nnz in enumerate(report.nnz_position) if nnz is not None and nnz > 0]
  if points:
    axes.loglog(*zip(*points), "o-", color=_FIRST, markersize=3)
  title = "Active neurons by position in the document"
  axes.set(title=title, xlabel="position (from 1)", ylabel="non-zeros, mean over layers")


def _tokens(axes: Any, report: Report) -> None:
  rows = list(dict.fromkeys((row["token"], row["nnz"]) for row in [*report.most, *reversed(report.least)]))
  places = np.arange(len(rows))
  axes.barh(places, [nnz for _, nnz in rows], color=[_FIRST if i < len(report.most) else _SECOND for i in places])
  axes.set_yticks(places, [repr(token)[1:-1].replace("$", r"\$") or "(none)" for token, _ in rows], fontsize=7)
  axes.invert_yaxis()
  axes.set(title="Most and least active tokens", xlabel="non-zeros, mean over layers")


@contextlib.contextmanager
def _figure(path: pathlib.Path) -> Iterator[Any]:
  """Yields axes and writes the PNG at the end; nothing is written when the body raises."""
  import matplotlib
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  with matplotlib.rc_context(_STYLE):
    figure = Figure(figsize=(6.4, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots()
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
  files.write_bytes(path, content.getvalue())
