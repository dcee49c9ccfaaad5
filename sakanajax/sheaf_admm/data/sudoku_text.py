"""Sudoku puzzles as text: parse with clear errors, solve, render."""

from typing import NamedTuple

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data.sudoku_solver import SearchLimit, completions, masks_of, to_boxes

_BUDGET = 100_000  # boards to look at before giving up on a user's puzzle; ordinary hard ones need some hundreds


class Puzzle(NamedTuple):
  """A parsed puzzle of side S."""

  inputs: np.ndarray  # [S, S] uint8, 0 = empty
  labels: np.ndarray  # [S, S] uint8, a solution
  unique: bool  # False: `labels` is only one of several solutions


def parse_puzzle(text: str, box: tuple[int, int] = (3, 3)) -> Puzzle:
  """S*S characters ('1'..'S', '0' or '.' for empty; white space is ignored) -> checked and solved puzzle.

  Raises UserError (one line) for a wrong length, wrong characters, digits above S, contradictory givens and no
  solution. Several solutions are not an error: `unique` is False then.
  """
  side = box[0] * box[1]
  symbols = "".join(text.split())
  if len(symbols) != side * side:
    raise UserError(
        f"sudoku: got {len(symbols)} characters, a {side}x{side} puzzle has {side * side}; write '0' or '.' for each "
        "empty cell"
    )
  puzzle = np.zeros((side, side), np.uint8)
  for i, symbol in enumerate(symbols):
    where = f"row {i // side + 1}, column {i % side + 1}"
    if symbol not in ".0123456789":
      raise UserError(f"sudoku: {where} holds {symbol!r}; use the digits 1..{side} and '0' or '.' for empty")
    if symbol != "." and int(symbol) > side:
      raise UserError(f"sudoku: {where} holds {symbol}, but a {side}x{side} puzzle has the digits 1..{side}")
    puzzle[i // side, i % side] = 0 if symbol == "." else int(symbol)
  return solve(puzzle, box)


def solve(puzzle: np.ndarray, box: tuple[int, int] = (3, 3)) -> Puzzle:
  """Checks and solves `[S, S]` integers (0 = empty); UserErrors as in `parse_puzzle`, and for a wrong shape."""
  puzzle, side = np.asarray(puzzle), box[0] * box[1]
  if puzzle.shape != (side, side) or puzzle.dtype.kind not in "iu":
    raise UserError(f"sudoku: expected {side}x{side} integers, got shape {puzzle.shape} and dtype {puzzle.dtype}")
  bad = np.argwhere((puzzle < 0) | (puzzle > side))
  if len(bad):
    r, c = bad[0]
    raise UserError(
        f"sudoku: row {r + 1}, column {c + 1} holds {puzzle[r, c]}, but a {side}x{side} puzzle has the digits "
        f"1..{side} (0 = empty)"
    )
  _check_givens(puzzle, box)
  puzzle = puzzle.astype(np.uint8)
  givens = int((puzzle > 0).sum())
  try:
    count, first = completions(masks_of(puzzle[None]), box, limit=2, budget=_BUDGET)
  except SearchLimit as error:
    raise UserError(
        f"sudoku: {_BUDGET} boards tried and the {givens} givens neither completed nor refuted; check the puzzle for a "
        "wrong digit or add givens"
    ) from error
  if not count[0]:
    raise UserError(
        f"sudoku: the {givens} givens do not clash directly, but no grid completes them (no solution); check the "
        "puzzle for a wrong digit"
    )
  return Puzzle(puzzle, first[0], bool(count[0] == 1))


def _check_givens(puzzle, box) -> None:
  """UserError naming the first two equal givens of a row, column or box."""
  cells = np.arange(puzzle.size).reshape(puzzle.shape)
  for name, values, where in (
    ("row", puzzle, cells),
    ("column", puzzle.T, cells.T),
    ("box", to_boxes(puzzle, box), to_boxes(cells, box)),
  ):
    for k, (unit, at) in enumerate(zip(values, where), 1):
      for digit in range(1, len(unit) + 1):
        twice = at[unit == digit]
        if len(twice) > 1:
          (r1, c1), (r2, c2) = (divmod(int(i), len(unit)) for i in twice[:2])
          raise UserError(
              f"sudoku: contradictory givens, {name} {k} holds {digit} twice: row {r1 + 1}, column {c1 + 1} and "
              f"row {r2 + 1}, column {c2 + 1}; remove or correct one"
          )


def render(puzzle: np.ndarray) -> str:
  """Grid `[S, S]` -> one string of S*S characters, '.' for empty; `parse_puzzle` reads it back."""
  return "".join("." if v == 0 else str(v) for v in np.asarray(puzzle).ravel().tolist())
