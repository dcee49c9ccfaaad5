"""Plots that several experiments draw the same way: curves with a band over seeds, bars with error bars, training curves.

All take plain numbers, write one PNG atomically and return its path. matplotlib is imported on the first call.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sakanajax.core import files

COLOURS = ("#c2410c", "#334155", "#0e7490", "#a16207", "#6d28d9", "#15803d", "#be185d", "#94a3b8")
_STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": 9.5,
    "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9, "legend.frameon": False, "font.size": 10,
    "figure.dpi": 130, "lines.linewidth": 1.8,
}


@contextlib.contextmanager
def figure(path: str | os.PathLike, *, rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 4.0
           ) -> Iterator[tuple[Any, Any]]:
  """Yields (matplotlib figure, axes as of `plt.subplots`) in our style and writes the PNG `path` at the end.

  `width` and `height` are inches of the whole figure. Nothing is written when the body raises.
  """
  import matplotlib
  import matplotlib.figure

  with matplotlib.rc_context(_STYLE | {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
    # Figure, not pyplot: no global state, no display needed.
    canvas = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    yield canvas, canvas.subplots(rows, columns)
    content = io.BytesIO()
    canvas.savefig(content, format="png", metadata={"Software": None})
  files.write_bytes(path, content.getvalue())


def lines(
    path: str | os.PathLike,
    series: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]],
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    logx: bool = False,
    logy: bool = False,
    bars: Mapping[str, float] | None = None,
) -> pathlib.Path:
  """Draws one curve per series with a band from the lowest to the highest seed.

  Args:
    series: label -> (x [N], y [S, N]), one row of y per seed.
    bars: label -> height of a dashed horizontal line, such as a published number.
  """
  import numpy as np

  with figure(path) as (_, axes):
    for label, (x, y) in series.items():
      y = np.atleast_2d(np.asarray(y, float))
      drawn, = axes.plot(x, np.mean(y, axis=0), label=label, marker="o" if len(x) <= 12 else None, markersize=4)
      if len(y) > 1:
        axes.fill_between(x, np.min(y, axis=0), np.max(y, axis=0), color=drawn.get_color(), alpha=0.15, linewidth=0)
    for label, height in (bars or {}).items():
      axes.axhline(height, linestyle="--", linewidth=1, color="#64748b")
      axes.annotate(label, (0.995, height), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.set_xscale("log" if logx else "linear")
    axes.set_yscale("log" if logy else "linear")
    if series:
      axes.legend()
  return pathlib.Path(path)


def bars(
    path: str | os.PathLike,
    groups: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    title: str = "",
    ylabel: str = "",
) -> pathlib.Path:
  """Draws grouped bars with the sample standard deviation as error bar.

  Args:
    groups: group on the x axis -> label -> one number per seed; a label may be missing from a group.
  """
  import numpy as np

  labels = list(dict.fromkeys(label for group in groups.values() for label in group))
  width = 0.8 / max(1, len(labels))
  with figure(path, width=max(6.4, 0.35 * len(groups) * len(labels) + 2)) as (_, axes):
    for i, label in enumerate(labels):
      places = [x for x, group in enumerate(groups.values()) if group.get(label)]
      rows = [np.asarray(group[label], float) for group in groups.values() if group.get(label)]
      errors = [row.std(ddof=1) if len(row) > 1 else 0.0 for row in rows]
      offset = (i - (len(labels) - 1) / 2) * width
      axes.bar([x + offset for x in places], [row.mean() for row in rows], width * 0.92, yerr=errors, label=label,
               color=COLOURS[i % len(COLOURS)], error_kw={"linewidth": 1, "capsize": 2})
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(axis="x", visible=False)
    axes.set(title=title, ylabel=ylabel)
    if labels:
      axes.legend(ncols=min(4, len(labels)), loc="lower right", bbox_to_anchor=(1.0, 1.0))
  return pathlib.Path(path)


def training(
    path: str | os.PathLike,
    logs: Mapping[str, Sequence[str | os.PathLike]],
    *,
    key: str = "loss",
    title: str = "",
    logy: bool = True,
) -> pathlib.Path:
  """Draws `key` over steps from metrics.jsonl files: label -> one file per seed; files that are not there are left out."""
  from sakanajax.core import metrics

  series = {}
  for label, paths in logs.items():
    rows = [[(row["step"], row[key]) for row in metrics.read_jsonl(log) if row.get(key) is not None]
            for log in paths if pathlib.Path(log).exists()]
    shared = sorted(set.intersection(*(set(dict(row)) for row in rows))) if rows else []
    if shared:
      series[label] = (shared, [[dict(row)[step] for step in shared] for row in rows])
  return lines(path, series, title=title, xlabel="step", ylabel=key, logy=logy)
