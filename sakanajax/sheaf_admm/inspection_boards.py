"""The board that a user wants to see negotiated, and what to say of the outcome.

Legend: K iterations, H x W board, N agents, C classes.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.config import Config, data_of
from sakanajax.sheaf_admm.data import digits, digits_io, maze_text, sudoku_text

LONGEST = 1_000_000  # bytes of a text file
_EMPTY = {
    "maze": "give a maze's text file or the text itself",
    "sudoku": "give a Sudoku's string or its file",
    "mnist": "give a picture's file",
}


class Given(NamedTuple):
  """What the user gave."""

  board: np.ndarray  # [H, W] as the network reads it
  truth: np.ndarray | None  # [H, W] a solution; None of digits
  unique: bool = True  # it is the only one


class Report(NamedTuple):
  """The outcome in words, and how wrong each iteration was."""

  title: str  # one line
  text: str  # the title and the final prediction
  wrong: np.ndarray | None  # [K+1] how many cells were wrong; None of digits


def read(cfg: Config, text: str) -> Given:
  """The board in a file or a string, validated. UserErrors name the flag, the place and the remedy."""
  if not text.strip():
    raise UserError(f"--input is empty; {_EMPTY[cfg.kind]}")
  if cfg.kind == "maze":
    board = maze_text.parse_maze(_text(text, "\n" in text, _EMPTY["maze"]))
    return Given(board, maze_text.solve(board))
  if cfg.kind == "sudoku":
    box = tuple(data_of(cfg).box)
    symbols = "".join(text.split())
    literal = set(symbols) <= set(".0123456789") or len(symbols) == (box[0] * box[1]) ** 2
    puzzle = sudoku_text.parse_puzzle(_text(text, literal, _EMPTY["sudoku"]), box)
    return Given(puzzle.inputs, puzzle.labels, puzzle.unique)
  return Given(digits.to_float(digits_io.read_image(text, 3)), None)


def _text(text: str, literal: bool, remedy: str) -> str:
  """The content of the file that `text` names, or `text` itself when it can be one."""
  if not os.path.isfile(text):
    if literal:
      return text
    raise UserError(f"--input: there is no file {text[:80]!r}; {remedy}")
  try:
    with open(text, "rb") as file:
      content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
      raise UserError(f"--input: {text} is longer than {LONGEST:,} bytes; {remedy}")
    return content.decode("utf-8")
  except OSError as error:
    raise UserError(f"--input: cannot read {text}: {error.strerror}; {remedy}") from error
  except UnicodeDecodeError as error:
    raise UserError(f"--input: {pathlib.Path(text).name} is not a text file; {remedy}") from error


def report(negotiation: Any, given: Given) -> Report:
  """What came out, whether it is right, and since when."""
  return {"maze": _maze, "sudoku": _sudoku, "mnist": _digit}[negotiation.kind](negotiation, given)


def _maze(negotiation, given: Given) -> Report:
  marked = path_of(negotiation.prediction, given.board)
  right = np.array([is_shortest_path(given.board, path) for path in marked])
  missing = ((given.truth == maze_text.PATH) & ~marked).sum((1, 2))
  extra = ((given.truth != maze_text.PATH) & marked).sum((1, 2))
  if right[-1]:
    title = f"solved: a shortest path of {maze_text.path_length(given.board)} steps{_since(right)}"
  else:
    title = f"not solved: {missing[-1]} cells of the path are missing, {extra[-1]} cells are marked wrongly"
  drawn = np.where(marked[-1], maze_text.PATH, given.board)
  return Report(title, f"{maze_text.render(drawn)}\n{title}", np.where(right, 0, missing + extra))


def path_of(prediction: np.ndarray, board: np.ndarray) -> np.ndarray:
  """`[..., H, W]` bool: marked as path; start and goal are ends anyway."""
  return (prediction == maze_text.PATH) & (board != maze_text.START) & (board != maze_text.GOAL)


def is_shortest_path(board: np.ndarray, path: np.ndarray) -> bool:
  """Whether the cells of `path` `[H, W]`, and nothing else, lead from start to goal in the fewest steps."""
  if path.sum() != maze_text.path_length(board) - 1:
    return False
  ends = (board == maze_text.START) | (board == maze_text.GOAL)
  corridor = np.where((path & (board != maze_text.WALL)) | ends, board, maze_text.WALL).astype(np.uint8)
  try:
    return maze_text.path_length(corridor) == maze_text.path_length(board)
  except UserError:  # the goal is not reached
    return False


def _sudoku(negotiation, given: Given) -> Report:
  filled = np.where(given.board > 0, given.board, negotiation.prediction)
  kept = ((negotiation.prediction == given.board) | (given.board == 0)).all((1, 2))
  right = np.array([obeys_rules(grid, negotiation.box) for grid in filled]) & kept
  wrong = ((filled != given.truth) & (given.board == 0)).sum((1, 2))
  empty = int((given.board == 0).sum())
  if right[-1]:
    title = f"solved: all {empty} empty cells{_since(right)}"
  elif not given.unique:
    title = "not solved: the filled grid breaks the rules"
  elif not wrong[-1]:
    title = "not solved: the network overwrites a given"
  else:
    title = f"not solved: {wrong[-1]} of {empty} empty cells are wrong"
  title += "" if given.unique else " (the puzzle has several solutions)"
  text = f"{_boxed(filled[-1], negotiation.box)}\n{sudoku_text.render(filled[-1])}\n{title}"
  return Report(title, text, np.where(right, 0, wrong))


def obeys_rules(grid: np.ndarray, box: tuple[int, int]) -> bool:
  """Whether every row, column and box holds every digit once."""
  height, width = box
  side = height * width
  boxes = grid.reshape(width, height, height, width).transpose(0, 2, 1, 3).reshape(side, side)
  return all((np.sort(lines, axis=1) == np.arange(1, side + 1)).all() for lines in (grid, grid.T, boxes))


def _boxed(grid: np.ndarray, box: tuple[int, int]) -> str:
  height, width = box
  line = lambda row: " | ".join(" ".join("." if v == 0 else str(v) for v in part) for part in np.split(row, len(row) // width))
  rows = [line(row) for row in grid]
  rule = "-+-".join(["-" * (2 * width - 1)] * (len(grid) // width))
  return f"\n{rule}\n".join("\n".join(rows[i : i + height]) for i in range(0, len(rows), height))


def _digit(negotiation, given: Given) -> Report:
  del given
  votes = negotiation.belief[-1].mean(0)
  first, second = np.argsort(-votes)[:2]
  agree = int((negotiation.belief[-1].argmax(-1) == first).sum())
  title = f"{first}, confidence {votes[first]:.1%} (next: {second} with {votes[second]:.1%})"
  return Report(title, f"{title}\n{agree} of {negotiation.belief.shape[1]} agents say {first}", None)


def _since(right: np.ndarray) -> str:
  """When it became right for good."""
  start = len(right) - int(np.argmin(right[::-1])) if not right.all() else 0
  return f", right since iteration {start} of {len(right) - 1}"
