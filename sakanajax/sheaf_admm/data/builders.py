"""tfds builders of the three data sets (array_record files, no TensorFlow), and their reading back.

One builder config per set of splits of one board size; its name holds what a person looks for and a digest of everything that
determines the content, so equal requests share files and different ones never meet. Importing this module imports tfds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable

import numpy as np
import tensorflow_datasets as tfds

from sakanajax.core import data as core_data
from sakanajax.core import files
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data import digits, maze, sudoku

Arrays = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass
class Recipe(tfds.core.BuilderConfig):
  """How to make one data set."""

  shape: tuple[int, int] = (0, 0)  # of a board or an image
  make: Callable[[], Arrays] | None = None  # all splits


class _Boards(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Writes the splits of a `Recipe` in their own order."""

  VERSION = tfds.core.Version("1.0.0")  # raise it whenever a generator changes its output

  def _labels(self):
    return _grid(self.builder_config.shape)

  def _info(self):
    features = tfds.features.FeaturesDict({"inputs": _grid(self.builder_config.shape), "labels": self._labels()})
    return tfds.core.DatasetInfo(builder=self, description=self.__doc__, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples(split) for name, split in self.builder_config.make().items()}

  def _generate_examples(self, split):
    for i, (inputs, labels) in enumerate(zip(split["inputs"], split["labels"])):
      yield i, {"inputs": inputs, "labels": labels if labels.ndim else int(labels)}


class MazeBuilder(_Boards, skip_registration=True):
  """Perfect mazes with their path: 1 wall, 2 empty, 3 start, 4 goal, 5 path."""

  name = "sheaf_maze"


class SudokuBuilder(_Boards, skip_registration=True):
  """Sudoku puzzles (0 = empty) with their unique solution."""

  name = "sheaf_sudoku"


class DigitsBuilder(_Boards, skip_registration=True):
  """Grey digit images with their class."""

  name = "sheaf_digits"

  def _labels(self):
    return tfds.features.ClassLabel(num_classes=10)


def _grid(shape):
  return tfds.features.Tensor(shape=shape, dtype=np.uint8, encoding="bytes")


def load_maze(splits: dict[str, maze.Split], data_dir=None) -> Arrays:
  """Mazes of a table of splits, one builder config per size."""
  out = {}
  for size in dict.fromkeys(tuple(s.size) for s in splits.values()):
    table = {name: s for name, s in splits.items() if tuple(s.size) == size}
    recipe = Recipe(name=_name(f"{size[0]}x{size[1]}", _plain(table)), shape=size, make=lambda table=table: maze.splits(table))
    out.update(_read(MazeBuilder, recipe, {name: name for name in table}, data_dir))
  return {name: out[name] for name in splits}


def load_sudoku(box: tuple[int, int], splits: dict[str, sudoku.Split], data_dir=None) -> Arrays:
  """Sudokus of a table of splits."""
  side = box[0] * box[1]
  recipe = Recipe(
      name=_name(f"{side}x{side}", [list(box), _plain(splits)]), shape=(side, side), make=lambda: sudoku.splits(box, splits)
  )
  return _read(SudokuBuilder, recipe, {name: name for name in splits}, data_dir)


def load_digits(config, data_dir=None) -> Arrays:
  """Digits of a `DigitsData`: the whole source is prepared once, any subset is read from it."""
  builder = core_data.prepare(DigitsBuilder, data_dir, config=_digits_recipe(config))
  held, test = (builder.info.splits[name].num_examples for name in ("train", "test"))
  if config.train + config.val > held or config.val >= held:
    raise UserError(f"digits: {config.source} has {held} training images, but train {config.train} and val {config.val} are asked for; lower them")
  if config.test > test:
    raise UserError(f"digits: {config.source} has {test} test images, but {config.test} are asked for; lower test")
  wanted = {
      "train": f"train[:{config.train or held - config.val}]",
      "val": f"train[{held - config.val}:]" if config.val else "",
      "test": f"test[:{config.test or test}]",
  }
  out = {name: core_data.to_arrays(builder, split) for name, split in wanted.items() if split}
  return {name: {"inputs": a["inputs"], "labels": a["labels"].astype(np.int32)} for name, a in out.items()}


def _digits_recipe(config) -> Recipe:
  """Named by the asset, by the request ('synthetic') or by the content of the user's files."""
  source = config.source
  if source in digits.ASSETS:
    return Recipe(name=source, shape=(28, 28), make=lambda: digits.load(source))
  if source == "synthetic":
    counts = (config.train + config.val or 2000, config.test or 500)
    return Recipe(
        name=_name("synthetic", [*counts, config.seed]), shape=(28, 28), make=lambda: digits.load(source, *counts, config.seed)
    )
  arrays = digits.load(source, seed=config.seed)
  content = hashlib.sha256()
  for part in arrays.values():
    for key in ("inputs", "labels"):
      content.update(np.ascontiguousarray(part[key]).tobytes())
  shape = arrays["train"]["inputs"].shape[1:]
  stem = re.sub("[^a-z0-9]+", "_", pathlib.Path(source).stem.lower()).strip("_")[:20] or "own"
  return Recipe(name=_name(f"{stem}-{shape[0]}x{shape[1]}", content.hexdigest()), shape=shape, make=lambda: arrays)


def _name(prefix, content) -> str:
  return f"{prefix}-{files.digest(content)[:12]}"


def _plain(splits):
  """JSON form of a table; the order of the splits matters, hence a list."""
  return [[name, dataclasses.asdict(s)] for name, s in splits.items()]


def _read(builder_cls, recipe, names, data_dir) -> Arrays:
  builder = core_data.prepare(builder_cls, data_dir, config=recipe)
  return {name: core_data.to_arrays(builder, split) for name, split in names.items()}
