"""Data of the three tasks: mazes, Sudokus, digits. Described by a frozen config, kept as array_record files, used as numpy arrays.

`load(config)` prepares what is missing on disk and returns {split: {"inputs": ..., "labels": ...}}. Only numpy is imported here.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data import digits, maze, sudoku


@dataclasses.dataclass(frozen=True)
class MazeData:
  """Mazes: one entry per split; splits of one size never share a maze up to symmetry (earlier entries choose first)."""

  splits: dict[str, maze.Split] = dataclasses.field(default_factory=lambda: dict(maze.SPLITS["cpu"]))

  def __post_init__(self):
    _check_names(self.splits)


@dataclasses.dataclass(frozen=True)
class SudokuData:
  """Sudokus with boxes of `box` = (rows, columns): one entry per split; splits of different `part` never share a class."""

  box: tuple[int, int] = (2, 3)
  splits: dict[str, sudoku.Split] = dataclasses.field(default_factory=lambda: dict(sudoku.SPLITS["6x6"]))

  def __post_init__(self):
    _check_names(self.splits)


@dataclasses.dataclass(frozen=True)
class DigitsData:
  """Digit images from `source` ('mnist', 'fashion_mnist', 'synthetic' or a path).

  Training takes the first `train` images of the training set, validation the last `val` of it, the test the first `test` of the test
  set; 0 means all (for training: all that validation leaves).
  """

  source: str = "mnist"
  train: int = 20_000
  val: int = 5_000
  test: int = 10_000
  seed: int = 0  # of 'synthetic', and of the cut of a file that holds a single set

  def __post_init__(self):
    for name in ("train", "val", "test"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} {getattr(self, name)} must not be negative (0 = all)")


def _check_names(splits) -> None:
  for name in splits:
    if not name.isidentifier() and not name.replace("_", "").isalnum():
      raise ValueError(f"split name {name!r} may hold letters, digits and '_' only")


def load(config: MazeData | SudokuData | DigitsData, data_dir: str | os.PathLike | None = None) -> dict[str, dict[str, np.ndarray]]:
  """All splits of a data set in memory: {split: {"inputs": uint8 `[n, h, w]`, "labels": uint8 `[n, h, w]` or int32 `[n]` (digits)}}.

  Prepares the files under `data_dir` (default: the user's cache) when they are missing. Raises UserError for impossible requests.
  """
  from sakanajax.sheaf_admm.data import builders

  if isinstance(config, MazeData):
    return builders.load_maze(config.splits, data_dir)
  if isinstance(config, SudokuData):
    return builders.load_sudoku(config.box, config.splits, data_dir)
  if isinstance(config, DigitsData):
    return builders.load_digits(config, data_dir)
  raise UserError(f"data: expected MazeData, SudokuData or DigitsData, got {type(config).__name__}")
