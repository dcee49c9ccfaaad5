"""Sudoku puzzles with unique solutions for boxes of h rows by w columns (side S = h * w): 4x4, 6x6 (2x3 boxes), 9x9.

Solution grids come from random search (shuffling one pattern gives equivalent grids only, a leak), puzzles from digging
holes in random order while the solution stays unique. The part (train, val, test) a puzzle may enter is a pure function
of its symmetry class, so no solution of the test split is equivalent to one of the training split.

  6x6 has only 49 classes of grids (28,200,960 grids): 34 are for training, 5 for validation, 10 for the test.
  4x4 has only 2 classes (288 grids): solutions are shared by necessity, and the part goes by the class of the PUZZLE.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data.sudoku_solver import completions, digits_of, masks_of, propagate
from sakanajax.sheaf_admm.data.sudoku_symmetry import augment, class_keys, mix, puzzle_keys  # noqa: F401
from sakanajax.sheaf_admm.data.sudoku_text import Puzzle, parse_puzzle, render, solve  # noqa: F401
from sakanajax.sheaf_admm.data.symmetry import dihedral, fresh  # noqa: F401

BOXES = ((2, 2), (2, 3), (3, 2), (3, 3))
FEWEST = {4: 4, 6: 8, 9: 17}  # givens of a puzzle with a unique solution, by side
_BUCKETS = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}  # of 10
_SALT = np.uint64(4)  # divides the 49 classes of 6x6 evenly: 34, 5 and 10 of them hold 70, 9 and 21 % of the grids


@dataclasses.dataclass(frozen=True)
class Split:
  """One split: n puzzles with `givens` = (fewest, most) given digits, drawn from `seed` among the classes of `part`."""

  n: int
  givens: tuple[int, int]
  seed: int
  part: str

  def __post_init__(self):
    if self.part not in _BUCKETS:
      raise ValueError(f"unknown part {self.part!r}; use one of {', '.join(_BUCKETS)}")
    if self.n < 1 or self.seed < 0:
      raise ValueError(f"a split needs n >= 1 and seed >= 0, got n {self.n} and seed {self.seed}")


def _table(train, val, test, givens):
  return {
      "train": Split(train, givens, 0, "train"),
      "val": Split(val, givens, 500, "val"),
      "test": Split(test, givens, 1000, "test"),
  }


SPLITS = {
    "4x4": _table(20_000, 500, 1_000, (4, 7)),
    "6x6": _table(20_000, 500, 1_000, (12, 20)),
    "9x9": _table(20_000, 500, 1_000, (36, 50)),
    "paper": _table(50_000, 2_000, 2_000, (30, 36)),  # the published puzzles are easy ones of about 33 givens
    "smoke": _table(1_000, 64, 128, (4, 7)),
}


def splits(
    box: tuple[int, int], table: dict[str, Split], report: Callable[[int], object] | None = None
) -> dict[str, dict[str, np.ndarray]]:
  """All splits of a table for one box shape."""
  return {name: generate(s.n, box, s.givens, s.seed, s.part, report) for name, s in table.items()}


def generate(
    n: int, box: tuple[int, int], givens: tuple[int, int], seed: int, part: str | None = None,
    report: Callable[[int], object] | None = None,
) -> dict[str, np.ndarray]:
  """n puzzles -> {"inputs": `[n, S, S]` uint8 (0 = empty), "labels": `[n, S, S]` uint8}; pure in its arguments.

  All puzzles differ. The number of givens is uniform in `givens` as far as unique solutions allow.
  part: None for all classes, else "train", "val" or "test": only classes of that part, so that calls with different
    parts never share a class (of solutions; of puzzles when S = 4), whatever their seeds and sizes.
  report: called with the number of puzzles found since the last call.
  Raises UserError for unsupported boxes, ranges or parts, and when so many puzzles do not seem to exist.
  """
  side = _check(n, box, givens, part)
  rng, seen = np.random.default_rng(seed), set()
  empty = np.zeros((0, side, side), np.uint8)
  inputs, labels, count, dry = [empty], [empty], 0, 0
  spare = 1.1 * (_rarity(part) if side == 4 else 1)  # 4x4 puzzles of other parts are dropped after digging
  while count < n:
    grids = fill(rng, min(max(64, int(spare * (n - count))), 4096), box, part if side > 4 else None)
    puzzles = dig(rng, grids, box, givens)
    rows = np.flatnonzero((puzzles > 0).sum(axis=(1, 2)) <= givens[1])
    if side == 4 and part is not None:
      rows = rows[in_part(puzzle_keys(puzzles[rows], grids[rows]), part)]
    rows = rows[fresh([p.tobytes() for p in puzzles[rows]], seen, n - count)]
    dry = 0 if len(rows) else dry + 1
    if dry == 20:
      raise UserError(
          f"sudoku: found only {count} of {n} different {side}x{side} puzzles with {givens[0]}..{givens[1]} givens; "
          "raise the upper bound or lower n"
      )
    inputs.append(puzzles[rows])
    labels.append(grids[rows])
    count += len(rows)
    if report:
      report(len(rows))
  return {"inputs": np.concatenate(inputs), "labels": np.concatenate(labels)}


def _check(n, box, givens, part) -> int:
  if tuple(box) not in BOXES:
    raise UserError(f"sudoku: boxes of {tuple(box)} are not supported; use one of {', '.join(map(str, BOXES))}")
  side = box[0] * box[1]
  if not 0 <= givens[0] <= givens[1] <= side * side:
    raise UserError(f"sudoku: givens {tuple(givens)} must be a rising pair within 0..{side * side}")
  if givens[1] < FEWEST[side]:
    raise UserError(f"sudoku: no {side}x{side} puzzle with fewer than {FEWEST[side]} givens has a unique solution; raise the "
                    f"upper end of givens {tuple(givens)}")
  if part is not None and part not in _BUCKETS:
    raise UserError(f"sudoku: unknown part {part!r}; use one of {', '.join(_BUCKETS)} or None")
  if n < 0:
    raise UserError(f"sudoku: n {n} must not be negative")
  return side


def in_part(keys: np.ndarray, part: str) -> np.ndarray:
  """Which class keys `[B]` belong to a part (about 70 % of the classes train, 10 % val, 20 % test)."""
  return np.isin(mix(keys ^ _SALT) % np.uint64(10), list(_BUCKETS[part]))


def _rarity(part) -> float:
  return 10 / len(_BUCKETS[part]) if part else 1.0


def fill(rng: np.random.Generator, n: int, box: tuple[int, int], part: str | None = None) -> np.ndarray:
  """n random full grids `[n, S, S]` uint8 (of one part of the classes unless None).

  Each grid starts empty; a random cell among those with the fewest candidates takes a random candidate, singles follow,
  and a grid that runs into a contradiction is thrown away whole. Near uniform, not exactly.
  """
  side = box[0] * box[1]
  kept, count = [np.zeros((0, side, side), np.uint8)], 0
  while count < n:
    grids = _fill_once(rng, min(max(64, int(1.5 * _rarity(part) * (n - count))), 4096), box)
    if part is not None:
      grids = grids[in_part(class_keys(grids, box), part)]
    kept.append(grids[: n - count])
    count += len(kept[-1])
  return np.concatenate(kept)


def _fill_once(rng, batch, box):
  side = box[0] * box[1]
  masks = np.full((side * side, batch), (1 << side) - 1, np.uint16)
  out, alive = np.zeros((batch, side, side), np.uint8), np.arange(batch)
  while len(alive):
    sizes = np.bitwise_count(masks).astype(np.float32)
    lots = sizes + rng.random(sizes.shape, np.float32) * np.float32(0.9)
    cell, column = np.where(sizes > 1, lots, np.float32(99)).argmin(axis=0), np.arange(len(alive))
    options = masks[cell, column][:, None] >> np.arange(side, dtype=np.uint16) & 1
    digit = (options * rng.integers(1, 2**31, options.shape)).argmax(axis=1)
    masks[cell, column] = np.uint16(1) << digit.astype(np.uint16)
    work, possible = propagate(masks.reshape(side, side, -1), box)
    solved = possible & (np.bitwise_count(work) == 1).all(axis=(0, 1))
    out[alive[solved]] = digits_of(work[:, :, solved])
    going = possible & ~solved
    alive, masks = alive[going], np.ascontiguousarray(work[:, :, going]).reshape(side * side, -1)
  return out[out[:, 0, 0] > 0]


def dig(
    rng: np.random.Generator, solutions: np.ndarray, box: tuple[int, int], givens: tuple[int, int]
) -> np.ndarray:
  """Removes digits of full grids `[B, S, S]` in random order while the solution stays unique -> puzzles `[B, S, S]`.

  Stops at a target drawn uniformly from `givens`, or when no digit can go (then more givens than asked for remain).
  A digit may go when the puzzle with every OTHER digit allowed in its cell has no completion.
  """
  batch, side = len(solutions), solutions.shape[-1]
  puzzles = solutions.reshape(batch, -1).copy()
  order = rng.random((batch, side * side)).argsort(axis=1)
  target, left = rng.integers(givens[0], givens[1] + 1, size=batch), np.full(batch, side * side)
  for step in range(side * side):
    rows = np.flatnonzero(left > target)
    if not len(rows):
      break
    cell = order[rows, step]
    digit = puzzles[rows, cell]
    puzzles[rows, cell] = 0
    masks = masks_of(puzzles[rows].reshape(-1, side, side))
    others = ~(np.uint16(1) << (digit - 1).astype(np.uint16))
    masks.reshape(side * side, -1)[cell, np.arange(len(rows))] &= others
    needed = completions(masks, box, limit=1)[0] > 0
    puzzles[rows[needed], cell[needed]] = digit[needed]
    left[rows[~needed]] -= 1
  return puzzles.reshape(batch, side, side)
