"""Data of the three tasks: a frozen config describes it, array_record files keep it, numpy arrays are what is used.

`load(config)` prepares what is missing on disk and returns {split: {"inputs": ..., "labels": ...}}. Importing this
package imports numpy only.
"""

from __future__ import annotations

import dataclasses
import os
import re

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data import digits, maze, sudoku


@dataclasses.dataclass(frozen=True)
class MazeData:
  """Mazes: one entry per split. Splits of one size never share a maze up to symmetry (lower seeds choose first)."""

  splits: dict[str, maze.Split] = dataclasses.field(default_factory=lambda: dict(maze.SPLITS["cpu"]))

  def __post_init__(self):
    _check_names(self.splits)


@dataclasses.dataclass(frozen=True)
class SudokuData:
  """Sudokus with boxes of `box` = (rows, columns). Splits of different `part` never share a class of grids."""

  box: tuple[int, int] = (2, 3)
  splits: dict[str, sudoku.Split] = dataclasses.field(default_factory=lambda: dict(sudoku.SPLITS["6x6"]))

  def __post_init__(self):
    _check_names(self.splits)


@dataclasses.dataclass(frozen=True)
class DigitsData:
  """Digit images from `source` ('mnist', 'fashion_mnist', 'synthetic' or a path).

  Training takes the first `train` images of the training set, validation the last `val` of it, the test the first
  `test` of the test set. 0 means all for `train` (that validation leaves) and `test`, no validation for `val`.
  """

  source: str = "mnist"
  train: int = 20_000
  val: int = 5_000
  test: int = 10_000
  seed: int = 0  # of 'synthetic', and of the cut of a file that holds a single set
  size: tuple[int, int] = (28, 28)  # height and width of the source's images

  def __post_init__(self):
    for name in ("train", "val", "test", "seed"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} {getattr(self, name)} must not be negative")
    if min(self.size) < 3:
      raise ValueError(f"size {self.size} is smaller than the 3x3 patch of an agent; give larger images")
    if self.source == "synthetic" and (self.size != (28, 28) or self.train + self.val + self.test > 1_000_000):
      raise ValueError("source 'synthetic' draws up to 1,000,000 images of 28x28; lower train, val and test")


def _check_names(splits) -> None:
  for name in splits:
    if not re.fullmatch(r"\w+", name, re.ASCII):
      raise ValueError(f"split name {name!r} may hold letters, digits and '_' only")


def load(
    config: MazeData | SudokuData | DigitsData, data_dir: str | os.PathLike | None = None
) -> dict[str, dict[str, np.ndarray]]:
  """All splits in memory: {split: {"inputs": uint8 `[n, h, w]`, "labels": uint8 `[n, h, w]`, of digits int32 `[n]`}}.

  Prepares the files under `data_dir` (default: the user's cache) when they are missing. Raises UserError for impossible
  requests, missing assets and a full disk.
  """
  from sakanajax.sheaf_admm.data import builders

  if isinstance(config, MazeData):
    return builders.load_maze(config.splits, data_dir)
  if isinstance(config, SudokuData):
    return builders.load_sudoku(config.box, config.splits, data_dir)
  if isinstance(config, DigitsData):
    return builders.load_digits(config, data_dir)
  raise UserError(f"data: expected MazeData, SudokuData or DigitsData, got {type(config).__name__}")
