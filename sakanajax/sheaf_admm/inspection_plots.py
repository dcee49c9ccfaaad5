"""The still pictures of one negotiation; `inspection_artists` draws what is in them.

Legend: K iterations, N agents, E edges, d_v vertex stalk.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sakanajax.core import files
from sakanajax.sheaf_admm import inspection_artists as artists

STYLE = {
    "font.size": 9, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 4,
    "figure.titlesize": 11, "figure.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": False, "legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.6, "text.color": artists.INK,
    "axes.labelcolor": artists.INK, "xtick.color": "#475569", "ytick.color": "#475569", "axes.edgecolor": artists.MUTED,
}
MEASURES = (("primal residual ‖x - z‖", "primal", "#c2410c"), ("dual residual ρ‖z - z_prev‖", "dual", "#0e7490"),
            ("disagreement ‖F z‖ on edges", "disagreement", "#6d28d9"))


@contextlib.contextmanager
def canvas(width: float, height: float, dpi: int = 130) -> Iterator[Any]:
  """Yields a matplotlib figure of `width` x `height` inches in our style, without pyplot's global state."""
  import matplotlib
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  with matplotlib.rc_context(STYLE):
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure


def save(path: pathlib.Path, figure) -> None:
  """Writes the figure as a PNG, atomically."""
  content = io.BytesIO()
  figure.savefig(content, format="png", metadata={"Software": None})
  files.write_bytes(path, content.getvalue())


def moments(last: int, count: int, first: int = 0) -> list[int]:
  """At most `count` iterations from `first` to `last`, dense at the start, where most happens."""
  if last - first < count:
    return list(range(first, last + 1))
  steps = np.geomspace(1, last - first + 1, count).round().astype(int) - 1
  for i in range(1, count):
    steps[i] = max(steps[i], steps[i - 1] + 1)  # no two alike
  return (first + steps).tolist()


def draw_all(folder: pathlib.Path, n, given, report) -> None:
  """Writes evolution, residuals, disagreement, curves and trajectories as PNG files into `folder`."""
  draw_evolution(folder / "evolution.png", n, given, report)
  draw_residuals(folder / "residuals.png", n)
  draw_disagreement(folder / "disagreement.png", n)
  draw_curves(folder / "curves.png", n, report)
  draw_trajectories(folder / "trajectories.png", n)


def _grid(n, count: int, wide: float = 0.0) -> tuple[int, int, float, float]:
  """(rows, columns, width, height in inches) for `count` pictures of the board."""
  aspect = n.board.shape[1] / n.board.shape[0]
  columns = min(count, 4 if 0.6 < aspect < 1.6 else 2 if aspect >= 1.6 else 8)
  rows = -(-count // columns)
  width = 10.0 / columns
  return rows, columns, 10.0 + wide, rows * (width / aspect + 0.16) + 0.4


def draw_evolution(path: pathlib.Path, n, given, report) -> None:
  """The merged prediction at some iterations."""
  shown = moments(len(n.prediction) - 1, 8)
  rows, columns, width, height = _grid(n, len(shown))
  extra = 2 if n.kind == "mnist" else 1  # the votes stand below the opinions
  with canvas(width, height + (0.9 * rows if extra == 2 else 0)) as figure:
    ratios = [1] * rows if extra == 1 else [4, 1] * rows
    places = figure.subplots(rows * extra, columns, squeeze=False, height_ratios=ratios)
    for i in range(rows * columns):
      stack = [places[i // columns * extra + j, i % columns] for j in range(extra)]
      if i >= len(shown):
        _hide(stack)
        continue
      artists.belief(stack[0], n, given)(shown[i])
      stack[0].set_title(_after(shown[i]))
      if extra == 2:
        artists.votes(stack[1], n)(shown[i])
    figure.suptitle(report.title[0].upper() + report.title[1:], x=0.01, ha="left")
    save(path, figure)


def draw_residuals(path: pathlib.Path, n) -> None:
  """Heat maps of both residuals over the agents at some iterations."""
  shown = moments(len(n.primal) - 1, 6, first=1)
  aspect = n.board.shape[1] / n.board.shape[0]
  each = 10.0 / len(shown)
  with canvas(11.2, 2 * (max(each / aspect, 0.8) + 0.2) + 0.35) as figure:
    places = figure.subplots(2, len(shown), squeeze=False)
    for row, name in zip(places, ("primal", "dual")):
      values = getattr(n, name)
      scale = artists.scale_of(values)
      for axes, k in zip(row, shown):
        artists.residual(axes, n, values, scale)(k)
        axes.set_title(_after(k))
      colour_bar(figure, row, artists.RESIDUALS, scale, name)
    layout = "columns above, rows at the left, boxes" if n.box else "laid out as on the board"
    figure.suptitle(f"Residuals of each agent: primal ‖x - z‖, dual ρ‖z - z_prev‖ ({layout})", x=0.01, ha="left")
    save(path, figure)


def draw_disagreement(path: pathlib.Path, n) -> None:
  """The edges on which neighbours disagree at some iterations."""
  shown = moments(len(n.primal) - 1, 8, first=1)
  rows, columns, width, height = _grid(n, len(shown), 0.9)
  scale = artists.scale_of(n.disagreement)
  with canvas(width, height) as figure:
    places = figure.subplots(rows, columns, squeeze=False)
    for i, axes in enumerate(places.ravel()):
      if i >= len(shown):
        _hide([axes])
        continue
      artists.disagreement(axes, n, scale)(shown[i])
      axes.set_title(_after(shown[i]))
    colour_bar(figure, places, artists.DISAGREEMENT, scale, "‖F_u z_u - F_v z_v‖")
    where = "in the cell that they share, the worst of three pairs" if n.box else "on each edge"
    figure.suptitle(f"Where neighbours disagree ({where})", x=0.01, ha="left")
    save(path, figure)


def draw_curves(path: pathlib.Path, n, report) -> None:
  """Residuals over iterations (median and 10 to 90 %), and how wrong the prediction was."""
  with canvas(10, 3.4) as figure:
    left, right = figure.subplots(1, 2)
    for label, name, colour in MEASURES:
      values = getattr(n, name)[1:]
      if values.size:
        low, middle, high = np.quantile(np.maximum(values, 1e-12), (0.1, 0.5, 0.9), axis=1)
        k = np.arange(1, len(values) + 1)
        left.plot(k, middle, color=colour, label=label)
        left.fill_between(k, low, high, color=colour, alpha=0.14, linewidth=0)
    left.set(yscale="log", xlabel="iteration", title="Residuals: median over agents or edges, 10 to 90 %")
    left.legend()
    k = np.arange(len(n.prediction))
    if report.wrong is None:
      shares = n.belief.mean(1)
      for c in np.argsort(-shares.max(0))[:5]:
        right.plot(k, shares[:, c], color=artists.CLASSES[c], label=f"digit {c}")
      right.set(ylim=(0, 1), title="Share of the vote")
      right.legend()
    else:
      right.step(k, report.wrong, where="mid", color=artists.WRONG)
      right.set(ylim=(0, max(1, report.wrong.max()) * 1.05), title="Wrong cells")
      right.yaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="iteration")
    for axes in (left, right):
      axes.xaxis.get_major_locator().set_params(integer=True)
    save(path, figure)


def draw_trajectories(path: pathlib.Path, n, count: int = 9) -> None:
  """x and z of some agents over all iterations, in the plane of the two strongest principal components."""
  chosen = np.unique(np.linspace(0, n.x.shape[1] - 1, count).round().astype(int))
  both = np.concatenate([n.x, n.z]).reshape(-1, n.x.shape[-1]).astype(np.float64)
  mean = both.mean(0)
  strength, axes_of = np.linalg.eigh(np.cov(both - mean, rowvar=False).reshape(len(mean), -1))
  plane = axes_of[:, ::-1][:, :2]
  share = strength[::-1][:2].sum() / max(strength.sum(), 1e-30)
  with canvas(7, 5.2) as figure:
    axes = figure.subplots()
    for i, agent in enumerate(chosen):
      colour = artists.CLASSES[i % len(artists.CLASSES)]
      for states, style, width in ((n.z, (0, (2, 1.5)), 1.1), (n.x, "-", 1.5)):
        track = (states[:, agent] - mean) @ plane
        track = np.pad(track, ((0, 0), (0, 2 - track.shape[1])))
        axes.plot(*track.T, linestyle=style, color=colour, linewidth=width, alpha=0.85)
        axes.scatter(*track[0], s=18, facecolors="white", edgecolors=colour, zorder=3)
        axes.scatter(*track[-1], s=26, color=colour, zorder=4, linewidths=0)
    axes.set(xlabel="first principal component", ylabel="second", title=(
        f"{len(chosen)} agents from iteration 1 (ring) to {len(n.x)} (dot): what each wants, x (solid),\n"
        f"and what is agreed, z (dashed); the plane holds {share:.0%} of the variance"))
    save(path, figure)


def _after(k: int) -> str:
  return "before" if k == 0 else f"k = {k}"


def _hide(axes) -> None:
  for place in axes:
    place.set_visible(False)


def colour_bar(figure, places, cmap: str, scale, label: str = "") -> None:
  """A colour bar with plain numbers on a logarithmic scale beside the axes `places`."""
  from matplotlib.cm import ScalarMappable
  from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

  bar = figure.colorbar(ScalarMappable(scale, cmap), ax=list(np.ravel(places)), pad=0.01, fraction=0.03, aspect=22)
  decades = np.log10(scale.vmax / scale.vmin)
  bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,), numticks=12))
  bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
  bar.ax.yaxis.set_minor_locator(NullLocator())
  bar.ax.tick_params(labelsize=7.5, length=2)
  bar.set_label(label)
  bar.outline.set_visible(False)
