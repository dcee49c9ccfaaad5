"""Sudoku puzzles with unique solutions for boxes of h rows by w columns (side S = h * w): 4x4, 6x6 (2x3 boxes), 9x9.

Solution grids come from random search (never from shuffling one pattern: such grids are all equivalent), puzzles from digging holes in
random order while the solution stays unique. Which split a puzzle may enter is a pure function of its symmetry class, so no solution grid
of the test split is equivalent to one of the training split. 6x6 has only 49 classes of grids, which are divided among the splits.
4x4 has only 2 classes: there solutions are shared by necessity and the split is by class of the PUZZLE.
"""

from typing import NamedTuple

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data.sudoku_solver import branch, completions, digits_of, masks_of, propagate
from sakanajax.sheaf_admm.data.sudoku_symmetry import augment, class_keys, mix, puzzle_keys  # noqa: F401
from sakanajax.sheaf_admm.data.symmetry import dihedral, fresh  # noqa: F401

_BUCKETS = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}  # of 10
_SALT = np.uint64(4)  # chosen so that the 49 classes of 6x6 grids divide evenly: 34, 5 and 10, with 70, 9 and 21 % of the grids


class Split(NamedTuple):
  """One split: n puzzles with `givens` = (lowest, highest) number of given digits, drawn from `seed`, classes of `part`."""

  n: int
  box: tuple[int, int]
  givens: tuple[int, int]
  seed: int
  part: str


def generate(n: int, box: tuple[int, int], givens: tuple[int, int], seed: int, part: str | None = None) -> dict[str, np.ndarray]:
  """n distinct puzzles -> {"inputs": `[n, S, S]` uint8 (0 = empty), "labels": `[n, S, S]` uint8}; a pure function of its arguments.

  part: None for puzzles of every class, else "train", "val" or "test": only classes of that part, so that calls with different parts
    never share a class (of solutions; of puzzles when S = 4) whatever their seeds and sizes.
  The number of givens is uniform in the range as far as unique solutions allow. Raises UserError for bad boxes or ranges.
  """
  side = _check(n, box, givens, part)
  rng, seen = np.random.default_rng(seed), set()
  kept, count, dry = [], 0, 0
  while count < n:
    want = min(max(64, int(1.1 * (n - count))), 8192)
    labels = fill(rng, want, box, part if side > 4 else None)
    inputs = dig(rng, labels, box, givens)
    rows = np.flatnonzero((inputs > 0).sum(axis=(1, 2)) <= givens[1])
    if side == 4 and part is not None:
      rows = rows[in_part(puzzle_keys(inputs[rows], labels[rows]), part)]
    weights = np.random.default_rng(side).integers(0, 2**64, side * side, np.uint64)
    keys = (inputs[rows].reshape(len(rows), -1).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    rows = rows[fresh(keys, seen, n - count)]
    dry = 0 if len(rows) else dry + 1
    if dry == 20:
      raise UserError(f"sudoku: found only {count} of {n} distinct {side}x{side} puzzles with {givens[0]}..{givens[1]} givens; raise the upper bound or lower n")
    kept.append((inputs[rows], labels[rows]))
    count += len(rows)
  empty = np.zeros((0, side, side), np.uint8)
  return {"inputs": np.concatenate([empty] + [k[0] for k in kept]), "labels": np.concatenate([empty] + [k[1] for k in kept])}


def _check(n, box, givens, part) -> int:
  if tuple(box) not in ((2, 2), (2, 3), (3, 2), (3, 3)):
    raise UserError(f"sudoku: boxes of {tuple(box)} are not supported; use (2, 2), (2, 3), (3, 2) or (3, 3)")
  side = box[0] * box[1]
  if not 0 <= givens[0] <= givens[1] <= side * side:
    raise UserError(f"sudoku: givens {tuple(givens)} must be a rising pair within 0..{side * side}")
  if part is not None and part not in _BUCKETS:
    raise UserError(f"sudoku: unknown part {part!r}; use one of {', '.join(_BUCKETS)} or None")
  if n < 0:
    raise UserError(f"sudoku: n {n} must not be negative")
  return side


def in_part(keys: np.ndarray, part: str) -> np.ndarray:
  """Which class keys `[B]` belong to a part of the data (70 % of the classes train, 10 % val, 20 % test)."""
  return np.isin(mix(keys ^ _SALT) % np.uint64(10), list(_BUCKETS[part]))


def fill(rng: np.random.Generator, n: int, box: tuple[int, int], part: str | None = None) -> np.ndarray:
  """n random full grids `[n, S, S]` uint8 (of one part of the classes unless None).

  Each grid starts empty; a random cell among those with the fewest candidates takes a random candidate, singles follow, and a
  grid that runs into a contradiction is thrown away whole.
  """
  kept, count = [], 0
  while count < n:
    grids = _fill_once(rng, min(max(64, 2 * (n - count)), 4096), box)
    if part is not None:
      grids = grids[in_part(class_keys(grids, box), part)]
    kept.append(grids[: n - count])
    count += len(kept[-1])
  return np.concatenate(kept) if kept else np.zeros((0, box[0] * box[1], box[0] * box[1]), np.uint8)


def _fill_once(rng, batch, box):
  side = box[0] * box[1]
  masks = np.full((side * side, batch), (1 << side) - 1, np.uint16)
  out, alive = np.zeros((batch, side, side), np.uint8), np.arange(batch)
  while len(alive):
    sizes = np.bitwise_count(masks).astype(np.float32)
    cell = np.where(sizes > 1, sizes + rng.random(sizes.shape, np.float32) * np.float32(0.9), np.float32(99)).argmin(axis=0)
    column = np.arange(len(alive))
    options = masks[cell, column][:, None] >> np.arange(side, dtype=np.uint16) & 1
    digit = (options * rng.integers(1, 2**31, options.shape)).argmax(axis=1)
    masks[cell, column] = np.uint16(1) << digit.astype(np.uint16)
    work, possible = propagate(masks.reshape(side, side, -1), box)
    solved = possible & (np.bitwise_count(work) == 1).all(axis=(0, 1))
    out[alive[solved]] = digits_of(work[:, :, solved])
    going = possible & ~solved
    alive, masks = alive[going], np.ascontiguousarray(work[:, :, going]).reshape(side * side, -1)
  return out[out[:, 0, 0] > 0]


def dig(rng: np.random.Generator, solutions: np.ndarray, box: tuple[int, int], givens: tuple[int, int]) -> np.ndarray:
  """Removes digits of full grids `[B, S, S]` in random order while the solution stays unique -> puzzles `[B, S, S]` uint8.

  Stops at a target drawn uniformly from `givens`, or when no digit can go (then more givens than asked for may remain).
  A digit may go when the puzzle with every OTHER digit allowed in its cell has no completion.
  """
  batch, side = len(solutions), solutions.shape[-1]
  puzzles = solutions.reshape(batch, -1).copy()
  order = rng.random((batch, side * side)).argsort(axis=1)
  target = rng.integers(givens[0], givens[1] + 1, size=batch)
  left = np.full(batch, side * side)
  for step in range(side * side):
    rows = np.flatnonzero(left > target)
    if not len(rows):
      break
    cell = order[rows, step]
    digit = puzzles[rows, cell]
    puzzles[rows, cell] = 0
    masks = masks_of(puzzles[rows].reshape(-1, side, side))
    masks.reshape(side * side, -1)[cell, np.arange(len(rows))] &= ~(np.uint16(1) << (digit - 1).astype(np.uint16))
    needed = completions(masks, box, limit=1)[0] > 0
    puzzles[rows[needed], cell[needed]] = digit[needed]
    left[rows[~needed]] -= 1
  return puzzles.reshape(batch, side, side)
