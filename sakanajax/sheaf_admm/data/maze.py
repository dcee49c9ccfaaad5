"""Perfect mazes by randomised depth-first search on the odd lattice, generated many at a time.

Vocabulary: 0 pad, 1 wall, 2 empty, 3 start, 4 goal, 5 path. Cells at odd (row, column) are rooms; a depth-first search carves the walls
between them, so the open cells of every maze form a tree and each start-goal path is unique. Start and goal are two random distinct
open cells; a maze is kept when that path has at least `min_path` edges. Splits never share a maze up to the symmetries of the grid.
Legend: n mazes, h rows, w columns (both odd).
"""

from typing import NamedTuple

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data.maze_text import EMPTY, GOAL, PAD, PATH, START, VOCAB, WALL  # noqa: F401
from sakanajax.sheaf_admm.data.maze_text import parse_maze, path_length, render, solve, validate  # noqa: F401
from sakanajax.sheaf_admm.data.symmetry import class_keys, dihedral, fresh  # noqa: F401


class Split(NamedTuple):
  """One split: n mazes of h x w whose path has at least `min_path` edges, drawn from `seed`."""

  n: int
  size: tuple[int, int]
  min_path: int
  seed: int


# Published sizes, path bounds and seeds (test and OOD: 1000 mazes each); `val` is ours.
PAPER_SPLITS = {
  "train": Split(10_000, (19, 19), 18, 0),
  "val": Split(1_000, (19, 19), 18, 500),
  "test": Split(1_000, (19, 19), 18, 1000),
  "1.5x": Split(1_000, (29, 29), 42, 2000),
  "2x": Split(1_000, (37, 37), 36, 3500),
  "2x_long": Split(1_000, (37, 37), 54, 3600),
  "2xW": Split(1_000, (19, 37), 35, 3000),
  "4xW": Split(1_000, (19, 73), 69, 4000),
  "4x": Split(1_000, (73, 73), 72, 5000),
  "4x_long": Split(1_000, (73, 73), 109, 6000),
}
# The laptop sizes: 25 agents in training.
CPU_SPLITS = {
  "train": Split(20_000, (11, 11), 10, 0),
  "val": Split(500, (11, 11), 10, 500),
  "test": Split(1_000, (11, 11), 10, 1000),
  "2x": Split(1_000, (23, 23), 20, 3500),
}
SMOKE_SPLITS = {
  "train": Split(1_000, (11, 11), 10, 0),
  "val": Split(64, (11, 11), 10, 500),
  "test": Split(128, (11, 11), 10, 1000),
  "2x": Split(64, (23, 23), 20, 3500),
}
SPLITS = {"paper": PAPER_SPLITS, "cpu": CPU_SPLITS, "smoke": SMOKE_SPLITS}


def generate(n: int, size: tuple[int, int], min_path: int, seed: int, exclude: set | None = None) -> dict[str, np.ndarray]:
  """n distinct mazes -> {"inputs": `[n, h, w]` uint8, "labels": `[n, h, w]` uint8}; a pure function of its arguments.

  exclude: class keys (see `symmetry.class_keys`) of mazes that may not appear; the keys of the result are ADDED to it, so that
    passing one set through all splits of a data set keeps them apart. No two mazes of the result are symmetric to each other.
  Raises UserError for an even or too small size, and when the requested mazes seem not to exist (too long a path, too small a grid).
  """
  h, w = _check(n, size, min_path)
  rng, seen = np.random.default_rng(seed), (set() if exclude is None else exclude)
  kept, count, dry = [], 0, 0
  while count < n:
    batch = min(max(64, int(1.5 * (n - count))), max(64, 4_000_000 // (h * w)))
    inputs, labels, length = _candidates(rng, batch, h, w)
    rows = np.flatnonzero(length >= min_path)
    rows = rows[fresh(class_keys(inputs[rows]), seen, n - count)]
    dry = 0 if len(rows) else dry + 1
    if dry == 50:
      raise UserError(f"maze: found only {count} of {n} distinct {h}x{w} mazes with min_path {min_path}; lower min_path or n, or take a larger size")
    kept.append((inputs[rows], labels[rows]))
    count += len(rows)
  stack = [np.concatenate(part) if part else np.zeros((0, h, w), np.uint8) for part in (zip(*kept) if kept else ((), ()))]
  return {"inputs": stack[0], "labels": stack[1]}


def _check(n, size, min_path) -> tuple[int, int]:
  h, w = size
  for name, value in (("height", h), ("width", w)):
    if value % 2 == 0 or value < 3:
      raise UserError(f"maze: {name} {value} in size {tuple(size)} must be odd and at least 3; try {value + 1 if value > 1 else 3}")
  open_cells = 2 * (h // 2) * (w // 2) - 1
  if open_cells < 2:
    raise UserError(f"maze: size {h}x{w} has a single open cell; take at least 3x5")
  if not 1 <= min_path < open_cells:
    raise UserError(f"maze: min_path {min_path} must lie in 1..{open_cells - 1} for a {h}x{w} maze (it has {open_cells} open cells)")
  if n < 0:
    raise UserError(f"maze: n {n} must not be negative")
  return h, w


def _candidates(rng, batch, h, w):
  """(inputs, labels, path length) of `batch` random mazes with random start and goal, before any selection."""
  parent, depth = _carve(rng, batch, h, w)
  opened = depth >= 0
  inputs = np.where(opened, EMPTY, WALL).astype(np.uint8)
  order = np.where(opened, rng.random(opened.shape, np.float32), 2.0).argpartition(1, axis=1)[:, :2]
  start, goal = order[:, 0].copy(), order[:, 1].copy()
  swap = rng.random(batch) < 0.5
  start[swap], goal[swap] = goal[swap], start[swap]
  labels, length = _paint(inputs, parent, depth, start, goal)
  rows = np.arange(batch)
  for grid in (inputs, labels):
    grid[rows, start], grid[rows, goal] = START, GOAL
  return inputs.reshape(batch, h, w), labels.reshape(batch, h, w), length


def _carve(rng, batch, h, w):
  """Depth-first search in lockstep: parent and depth (-1 in walls) of every cell in the tree of open cells, `[batch, h*w]` int32."""
  rooms = (h // 2) * (w // 2)
  depth = np.full((batch, h * w), -1, np.int32)
  parent = np.zeros((batch, h * w), np.int32)
  free = np.zeros((h + 2, w + 2), bool)
  free[2:-2:2, 2:-2:2] = True  # one ring of padding, so that a jump of two cells never wraps onto a room
  free = np.tile(free.reshape(-1), (batch, 1)).reshape(-1)
  steps = np.array([-(w + 2), w + 2, -1, 1])
  base = np.arange(batch) * ((h + 2) * (w + 2))
  row = np.arange(batch)
  r, c = 2 * rng.integers(h // 2, size=batch) + 1, 2 * rng.integers(w // 2, size=batch) + 1
  here, left = r * w + c, np.full(batch, rooms - 1)
  depth[row, here] = 0
  free[base + (r + 1) * (w + 2) + c + 1] = False
  jump = np.array([-w, w, -1, 1])
  while len(row):
    padded = base[row] + (here // w + 1) * (w + 2) + here % w + 1
    choice = free[padded[:, None] + 2 * steps] * rng.integers(1, 2**31, size=(len(row), 4))
    pick = choice.argmax(axis=1)
    forward = choice[np.arange(len(row)), pick] > 0
    i, p, at = row[forward], pick[forward], here[forward]
    wall, room = at + jump[p], at + 2 * jump[p]
    free[padded[forward] + 2 * steps[p]] = False
    parent[i, wall], parent[i, room] = at, wall
    depth[i, wall], depth[i, room] = depth[i, at] + 1, depth[i, at] + 2
    back = parent[row, here]
    here = np.where(forward, here + 2 * jump[pick], parent[row, back])
    left[i] -= 1
    going = left[row] > 0
    row, here = row[going], here[going]
  return parent, depth


def _paint(inputs, parent, depth, start, goal):
  """Walks start and goal up to their meeting point: (labels with PATH cells `[batch, h*w]`, edges of the path `[batch]`)."""
  labels, length = inputs.copy(), np.zeros(len(inputs), np.int64)
  row, a, b = np.arange(len(inputs)), start.copy(), goal.copy()
  while len(row):
    labels[row, a], labels[row, b] = PATH, PATH
    going = a != b
    row, a, b = row[going], a[going], b[going]
    da, db = depth[row, a], depth[row, b]
    length[row] += 1 + (da == db)
    a, b = np.where(da >= db, parent[row, a], a), np.where(db >= da, parent[row, b], b)
  return labels, length


def splits(table: dict[str, Split]) -> dict[str, dict[str, np.ndarray]]:
  """All splits of a table, in its order, none sharing a maze (up to symmetry) with another of the same size."""
  seen: dict[tuple, set] = {}
  out = {}
  for name, s in table.items():
    out[name] = generate(s.n, s.size, s.min_path, s.seed, seen.setdefault(tuple(s.size), set()))
  return out
