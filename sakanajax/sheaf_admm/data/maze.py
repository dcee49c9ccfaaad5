"""Perfect mazes by randomised depth-first search on the odd lattice, generated many at a time.

Vocabulary: 0 pad, 1 wall, 2 empty, 3 start, 4 goal, 5 path. Cells at odd (row, column) are rooms; a depth-first search
carves the walls between them, so the open cells form a tree and every path is unique. Start and goal are two random
distinct open cells; a maze is kept when the path between them has at least `min_path` edges. Labels mark the path,
start and goal keep their own value. Splits never share a maze up to the symmetries of the grid (the published data
only drops equal grids, so mirrored twins may leak there).

Legend: n mazes, h rows, w columns (both odd).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data.maze_text import EMPTY, GOAL, PAD, PATH, START, VOCAB, WALL  # noqa: F401
from sakanajax.sheaf_admm.data.maze_text import parse_maze, path_length, render, solve, validate  # noqa: F401
from sakanajax.sheaf_admm.data.symmetry import class_keys, dihedral, fresh  # noqa: F401


def _check(n, size, min_path) -> None:
  h, w = size
  for name, value in (("height", h), ("width", w)):
    if value % 2 == 0 or value < 3:
      near = value + 1 if value > 1 else 3
      raise UserError(f"maze: {name} {value} in size {tuple(size)} must be odd and at least 3; try {near}")
  open_cells = 2 * (h // 2) * (w // 2) - 1
  if open_cells < 2:
    raise UserError(f"maze: size {h}x{w} has a single open cell; take at least 3x5")
  if not 1 <= min_path < open_cells:
    raise UserError(
        f"maze: min_path {min_path} must lie in 1..{open_cells - 1} for a {h}x{w} maze (it has {open_cells} open cells)"
    )
  if n < 0:
    raise UserError(f"maze: n {n} must not be negative")


@dataclasses.dataclass(frozen=True)
class Split:
  """One split: n mazes of size (h, w) whose path has at least `min_path` edges, drawn from `seed`."""

  n: int
  size: tuple[int, int]
  min_path: int
  seed: int

  def __post_init__(self):
    _check(self.n, self.size, self.min_path)
    if self.n < 1 or self.seed < 0:
      raise ValueError(f"a split needs n >= 1 and seed >= 0, got n {self.n} and seed {self.seed}")


# Published sizes, path bounds and seeds; `val` is ours. W = twice or four times as wide.
_PAPER = {
    "train": Split(10_000, (19, 19), 18, 0),
    "val": Split(1_000, (19, 19), 18, 500),
    "test": Split(1_000, (19, 19), 18, 1000),
    "1_5x": Split(1_000, (29, 29), 42, 2000),
    "2x": Split(1_000, (37, 37), 36, 3500),
    "2x_long": Split(1_000, (37, 37), 54, 3600),
    "2xW": Split(1_000, (19, 37), 35, 3000),
    "4xW": Split(1_000, (19, 73), 69, 4000),
    "4x": Split(1_000, (73, 73), 72, 5000),
    "4x_long": Split(1_000, (73, 73), 109, 6000),
}
# The laptop sizes: 25 agents in training, 121 at twice the size.
_CPU = {
    "train": Split(20_000, (11, 11), 10, 0),
    "val": Split(500, (11, 11), 10, 500),
    "test": Split(1_000, (11, 11), 10, 1000),
    "2x": Split(1_000, (23, 23), 20, 3501),
}
_SMOKE = {
    "train": Split(1_000, (11, 11), 10, 0),
    "val": Split(64, (11, 11), 10, 500),
    "test": Split(128, (11, 11), 10, 1000),
    "2x": Split(64, (23, 23), 20, 3500),
}
SPLITS = {"paper": _PAPER, "cpu": _CPU, "smoke": _SMOKE}


def splits(table: dict[str, Split], report: Callable[[int], object] | None = None) -> dict[str, dict[str, np.ndarray]]:
  """All splits of a table, none sharing a maze (up to symmetry) with another of the same size.

  Lower seeds choose first, then names in alphabetical order, so that the order of the table does not matter.
  """
  seen: dict[tuple, set] = {}
  out = dict.fromkeys(table)
  for name, s in sorted(table.items(), key=lambda item: (item[1].seed, item[0])):
    out[name] = generate(s.n, s.size, s.min_path, s.seed, seen.setdefault(tuple(s.size), set()), report)
  return out


def generate(
    n: int, size: tuple[int, int], min_path: int, seed: int, exclude: set | None = None,
    report: Callable[[int], object] | None = None,
) -> dict[str, np.ndarray]:
  """n mazes -> {"inputs": `[n, h, w]` uint8, "labels": `[n, h, w]` uint8}; a pure function of its arguments.

  No two mazes of the result are symmetric to each other (start and goal are part of a maze).
  exclude: class keys (`symmetry.class_keys`) that may not appear. The keys of the result are ADDED to it, so that
    passing one set through all splits keeps them apart.
  report: called with the number of mazes found since the last call.
  Raises UserError for an impossible size or path, and when so many different mazes do not seem to exist.
  """
  _check(n, size, min_path)
  (h, w), rng, seen = size, np.random.default_rng(seed), (set() if exclude is None else exclude)
  empty = np.zeros((0, h, w), np.uint8)
  inputs, labels, count, dry = [empty], [empty], 0, 0
  while count < n:
    batch = min(max(64, int(1.5 * (n - count))), max(64, 4_000_000 // (h * w)))
    boards, solved, length = _candidates(rng, batch, h, w)
    rows = np.flatnonzero(length >= min_path)
    rows = rows[fresh(class_keys(boards[rows]), seen, n - count)]
    dry = 0 if len(rows) else dry + 1
    if dry == 50:
      raise UserError(
          f"maze: found only {count} of {n} different {h}x{w} mazes with min_path {min_path}; lower min_path or n, or "
          "take a larger size"
      )
    inputs.append(boards[rows])
    labels.append(solved[rows])
    count += len(rows)
    if report:
      report(len(rows))
  return {"inputs": np.concatenate(inputs), "labels": np.concatenate(labels)}


def _candidates(rng, batch, h, w):
  """(inputs, labels, path length) of `batch` random mazes with random start and goal, before any selection."""
  parent, depth = _carve(rng, batch, h, w)
  opened = depth >= 0
  inputs = np.where(opened, EMPTY, WALL).astype(np.uint8)
  lots = np.where(opened, rng.random(opened.shape, np.float32), np.float32(2))
  start, goal = lots.argpartition(1, axis=1)[:, :2].T  # the two lowest lots: a uniform ordered pair of open cells
  labels, length = _paint(inputs, parent, depth, start, goal)
  rows = np.arange(batch)
  for grid in (inputs, labels):
    grid[rows, start], grid[rows, goal] = START, GOAL
  return inputs.reshape(batch, h, w), labels.reshape(batch, h, w), length


def _carve(rng, batch, h, w):
  """Depth-first searches in lockstep -> parent and depth (-1 in walls) of each cell, `[batch, h*w]` int32.

  One step moves every search to a random unvisited neighbour room, or back to the parent room when there is none.
  """
  row, base = np.arange(batch), np.arange(batch) * ((h + 2) * (w + 2))
  depth, parent = np.full((batch, h * w), -1, np.int32), np.zeros((batch, h * w), np.int32)
  free = np.zeros((h + 2, w + 2), bool)
  free[2:-2:2, 2:-2:2] = True  # rooms; the ring of padding keeps a jump of two cells from wrapping onto one
  free = np.tile(free.reshape(-1), batch)
  near, near_padded = np.array([-w, w, -1, 1]), np.array([-(w + 2), w + 2, -1, 1])
  r, c = 2 * rng.integers(h // 2, size=batch) + 1, 2 * rng.integers(w // 2, size=batch) + 1
  here, left = r * w + c, np.full(batch, (h // 2) * (w // 2) - 1)
  depth[row, here] = 0
  free[base + (r + 1) * (w + 2) + c + 1] = False
  row = row[left > 0]
  here = here[row]
  while len(row):
    padded = base[row] + (here // w + 1) * (w + 2) + here % w + 1
    choice = free[padded[:, None] + 2 * near_padded] * rng.integers(1, 2**31, size=(len(row), 4))
    pick = choice.argmax(axis=1)
    forward = choice[np.arange(len(row)), pick] > 0
    i, p, at = row[forward], pick[forward], here[forward]
    wall, room = at + near[p], at + 2 * near[p]
    free[padded[forward] + 2 * near_padded[p]] = False
    parent[i, wall], parent[i, room] = at, wall
    depth[i, wall], depth[i, room] = depth[i, at] + 1, depth[i, at] + 2
    left[i] -= 1
    here = np.where(forward, here + 2 * near[pick], parent[row, parent[row, here]])
    going = left[row] > 0
    row, here = row[going], here[going]
  return parent, depth


def _paint(inputs, parent, depth, start, goal):
  """Walks from start and goal up to where they meet: (labels with PATH cells `[batch, h*w]`, path edges `[batch]`)."""
  labels, length = inputs.copy(), np.zeros(len(inputs), np.int64)
  row, a, b = np.arange(len(inputs)), start, goal
  while len(row):
    labels[row, a], labels[row, b] = PATH, PATH
    going = a != b
    row, a, b = row[going], a[going], b[going]
    da, db = depth[row, a], depth[row, b]
    length[row] += 1 + (da == db)
    a, b = np.where(da >= db, parent[row, a], a), np.where(db >= da, parent[row, b], b)
  return labels, length
