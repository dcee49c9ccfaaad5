"""What can be drawn of one iteration of a negotiation, each as an artist: made once on an axes, then moved to iteration k.

Legend: K iterations, N agents, E edges, H x W board, S board side of a Sudoku, C classes.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm.data import maze_text

Axes = Any
Artist = Callable[[int], None]  # k -> what is seen after k iterations

INK, PAPER, PATH, START, GOAL, RIGHT, WRONG, MUTED = (
    "#1e293b", "#f8fafc", "#ea580c", "#15803d", "#7c3aed", "#0f766e", "#be123c", "#94a3b8")
CLASSES = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#c79c1d", "#b07aa1", "#ff7f9d", "#9c755f", "#6b7280")
RESIDUALS, DISAGREEMENT = "magma", "YlOrRd"  # colour maps


def rgb(colour: str) -> np.ndarray:
  """`[3]` in 0..1 of "#rrggbb"."""
  return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255.0


def blend(ground: np.ndarray, colour: str, share: np.ndarray) -> np.ndarray:
  """`share` `[...]` of `colour` on `ground` `[..., 3]`."""
  return ground + (rgb(colour) - ground) * share[..., None]


def scale_of(values: np.ndarray) -> Any:
  """A logarithmic colour scale over the positive values, at most four decades down from the largest."""
  from matplotlib.colors import LogNorm

  positive = values[np.isfinite(values) & (values > 0)]
  top = float(positive.max()) if positive.size else 1.0
  low = max(float(np.quantile(positive, 0.02)), top * 1e-4) if positive.size else 0.1
  return LogNorm(min(low, top / 3), top, clip=True)


def bare(axes: Axes) -> None:
  """No ticks, no frame."""
  axes.set_xticks([])
  axes.set_yticks([])
  for spine in axes.spines.values():
    spine.set_visible(False)


def belief(axes: Axes, n, given) -> Artist:
  """What the agents together believe: path probabilities, digits in cells, opinions on the digit."""
  bare(axes)
  return {"maze": _maze, "sudoku": _sudoku, "mnist": _opinions}[n.kind](axes, n, given)


def _maze(axes, n, given) -> Artist:
  board = n.board
  walls = board == maze_text.WALL
  ground = np.where(walls[..., None], rgb(INK), rgb(PAPER))
  for cell, colour, letter in ((maze_text.START, START, "S"), (maze_text.GOAL, GOAL, "G")):
    ground = np.where((board == cell)[..., None], rgb(colour), ground)
    row, column = np.argwhere(board == cell)[0]
    size = _points(axes, board.shape[1], 0.75)
    if size > 3:
      axes.text(column, row, letter, color="white", ha="center", va="center_baseline", fontsize=size, weight="bold")
  ends = (board == maze_text.START) | (board == maze_text.GOAL)
  image = axes.imshow(ground, interpolation="nearest")

  def update(k):
    share = np.where(ends, 0.0, n.belief[k])
    image.set_data(np.where(walls[..., None], blend(ground, WRONG, share), blend(ground, PATH, share)))

  return update


def _sudoku(axes, n, given) -> Artist:
  side, (height, width) = len(n.board), n.box
  image = axes.imshow(np.ones((side, side, 3)), interpolation="nearest")
  _rule(axes, side, height, width)
  size = _points(axes, side, 0.55)
  cells = [(row, column) for row in range(side) for column in range(side)]
  texts = {
      cell: axes.text(cell[1], cell[0], "", ha="center", va="center_baseline", fontsize=size) for cell in cells
  }
  empty = n.board == 0

  def update(k):
    digits = np.where(empty, n.prediction[k], n.board)
    right = (digits == given.truth) & (digits > 0)
    sure = np.take_along_axis(n.belief[k], n.prediction[k][..., None].astype(int), -1)[..., 0]
    ground = np.broadcast_to(rgb("#ffffff"), (side, side, 3))
    tint = np.where(right[..., None], blend(ground, RIGHT, 0.45 * sure), blend(ground, WRONG, 0.45 * sure))
    image.set_data(np.where(empty[..., None], tint, rgb("#e2e8f0")))
    for (row, column), text in texts.items():
      text.set_text(str(digits[row, column]) if digits[row, column] else "")
      text.set_color("#0f172a" if not empty[row, column] else RIGHT if right[row, column] else WRONG)
      text.set_weight("normal" if empty[row, column] else "bold")

  return update


def _opinions(axes, n, given) -> Artist:
  height, width = n.board.shape
  rows, columns = agents_of(n)
  stride, side = n.patch[1], n.patch[0]
  extent = (-0.5, columns * stride - 0.5, rows * stride - 0.5, -0.5)
  image = axes.imshow(np.ones((rows, columns, 3)), extent=extent, interpolation="nearest")
  ink = np.zeros((height, width, 4))
  ink[..., :3], ink[..., 3] = rgb(INK), 0.8 * n.board
  axes.imshow(ink, interpolation="nearest")
  axes.set_xlim(-0.5, max(width, columns * side) - 0.5)
  axes.set_ylim(max(height, rows * side) - 0.5, -0.5)
  colours = np.array([rgb(colour) for colour in CLASSES])

  def update(k):
    first, sure = n.belief[k].argmax(-1), n.belief[k].max(-1)
    strength = np.clip((sure - 0.1) / 0.9, 0.0, 1.0)[:, None]
    image.set_data((1.0 + (colours[first] - 1.0) * strength).reshape(rows, columns, 3))

  return update


def votes(axes: Axes, n) -> Artist:
  """The share of each class in the vote, in the colours of the opinions."""
  classes = n.belief.shape[-1]
  bars = axes.bar(range(classes), [0.0] * classes, color=CLASSES[:classes], width=0.85)
  axes.set_ylim(0, 1)
  axes.set_xticks(range(classes), [str(c) for c in range(classes)])
  axes.set_yticks([0, 0.5, 1], ["0", "", "1"])
  axes.tick_params(length=0)
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)

  def update(k):
    for bar, share in zip(bars, n.belief[k].mean(0)):
      bar.set_height(float(share))

  return update


def agents_of(n) -> tuple[int, int]:
  """Rows and columns of the agents on a grid."""
  return tuple(len(graph_lib.grid_centres(length, *n.patch)) for length in n.board.shape)


def agent_map(n, values: np.ndarray) -> np.ndarray:
  """Values of agents `[N]` laid out as on the board.

  A grid is `[rows, columns]`. Of a Sudoku the column agents stand above, the row agents to the left of the boxes.
  """
  if n.box is None:
    return values.reshape(agents_of(n))
  height, width = n.box
  side = height * width
  picture = np.full((side + 2, side + 2), np.nan)
  picture[2:, 0], picture[0, 2:] = values[:side], values[side : 2 * side]
  boxes = values[2 * side :].reshape(width, height)
  picture[2:, 2:] = np.kron(boxes, np.ones((height, width)))
  return picture


def residual(axes: Axes, n, values: np.ndarray, scale) -> Artist:
  """Heat map of a residual `[K+1, N]` over the agents."""
  bare(axes)
  axes.set_facecolor("#ffffff")
  image = axes.imshow(agent_map(n, values[-1]), cmap=RESIDUALS, norm=scale, interpolation="nearest")
  if n.box is not None:
    _rule(axes, len(n.board), *n.box, offset=2, colour="white", cells=False)

  def update(k):
    image.set_data(np.ma.masked_invalid(agent_map(n, values[k])))

  return update


def disagreement(axes: Axes, n, scale) -> Artist:
  """Where neighbours disagree: edges between agents over the pale board; of a Sudoku, the cells that they share."""
  bare(axes)
  return _shared_cells(axes, n, scale) if n.box is not None else _edges(axes, n, scale)


def _edges(axes, n, scale) -> Artist:
  from matplotlib.collections import LineCollection

  height, width = n.board.shape
  ground = (n.board == maze_text.WALL) * 0.09 if n.kind == "maze" else 0.35 * n.board
  axes.imshow(1.0 - ground, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
  down, right = (graph_lib.grid_centres(length, *n.patch) for length in (height, width))
  places = np.stack(np.meshgrid(right, down), -1).reshape(-1, 2)
  pixel = axes.get_position().width * axes.figure.get_figwidth() * 72 / width  # points of a cell of the board
  lines = LineCollection(places[n.edges], cmap=DISAGREEMENT, norm=scale, capstyle="round")
  axes.add_collection(lines)
  axes.scatter(*places.T, s=max(0.2, (0.22 * pixel) ** 2), color=INK, linewidths=0, zorder=3)
  axes.set_xlim(-0.5, width - 0.5)
  axes.set_ylim(height - 0.5, -0.5)

  def update(k):
    values = np.nan_to_num(n.disagreement[k])
    order = np.argsort(values, kind="stable")  # the loudest on top
    lines.set_segments(places[n.edges[order]])
    lines.set_array(values[order])
    share = np.asarray(scale(np.maximum(values[order], scale.vmin))).clip(0, 1)
    lines.set_linewidths(pixel * (0.05 + 0.3 * share))

  return update


def _shared_cells(axes, n, scale) -> Artist:
  side = len(n.board)
  cells = graph_lib.sudoku_cells(n.box)[n.edges[:, 0], n.slots[:, 0]]
  image = axes.imshow(np.ones((side, side)), cmap=DISAGREEMENT, norm=scale, interpolation="nearest")
  _rule(axes, side, *n.box)
  size = _points(axes, side, 0.38)
  givens = {
      (row, column): axes.text(column, row, str(n.board[row, column]), ha="center", va="center_baseline", fontsize=size)
      for row, column in np.argwhere(n.board > 0)
  }

  def update(k):
    loudest = np.zeros(side * side)
    np.maximum.at(loudest, cells, np.nan_to_num(n.disagreement[k]))
    loudest = np.maximum(loudest, scale.vmin).reshape(side, side)
    image.set_data(loudest)
    for cell, text in givens.items():
      text.set_color("white" if scale(loudest[cell]) > 0.5 else "#475569")

  return update


def _rule(axes, side, height, width, offset=0, colour=INK, cells=True) -> None:
  """Lines between cells, stronger between boxes."""
  at = np.arange(side + 1)
  ends = offset - 0.5, side - 0.5 + offset
  for draw, step in ((axes.hlines, height), (axes.vlines, width)):
    draw(at[::step] + ends[0], *ends, color=colour, linewidth=1.1)
    if cells:
      draw(at[at % step > 0] + ends[0], *ends, color=colour, linewidth=0.3)


def _points(axes, across: int, share: float) -> float:
  """Font size that fills `share` of one of `across` cells on the axes."""
  return axes.get_position().width * axes.figure.get_figwidth() * 72 / across * share
