"""tfds builders of the three data sets (array_record files, no TensorFlow), and their reading back.

One builder config per set of splits of one board size; its name holds what a person looks for and a digest of
everything that determines the content, so equal requests share files and different ones never meet. Importing this
module imports tfds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import pathlib
import re
from collections.abc import Callable

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from sakanajax.core import data as core_data
from sakanajax.core import files
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data import digits, maze, sudoku

Arrays = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass
class Recipe(tfds.core.BuilderConfig):
  """How to make one data set."""

  shape: tuple[int, int] = (0, 0)  # of a board or an image
  make: Callable[..., Arrays] | None = dataclasses.field(default=None, repr=False)  # (report) -> all splits
  count: int | None = None  # examples of all splits, for the progress bar


class _Boards(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Writes the splits of a `Recipe` in their own order."""

  VERSION = tfds.core.Version("1.0.0")  # raise it whenever a generator changes its output
  code_path = None  # nothing to look for beside this file; tfds would need importlib_resources to find that out

  def _labels(self):
    return _grid(self.builder_config.shape)

  def _info(self):
    features = tfds.features.FeaturesDict({"inputs": _grid(self.builder_config.shape), "labels": self._labels()})
    return tfds.core.DatasetInfo(builder=self, description=self.__doc__, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    with _bar(f"making {self.name}/{self.builder_config.name}", self.builder_config.count) as bar:
      arrays = self.builder_config.make(bar.update)
    return {name: self._generate_examples(name, split) for name, split in arrays.items()}

  def _generate_examples(self, name, split):
    with _bar(f"writing {self.name}/{self.builder_config.name} {name}", len(split["labels"])) as bar:
      for i, (inputs, labels) in enumerate(zip(split["inputs"], split["labels"])):
        yield i, {"inputs": inputs, "labels": labels if labels.ndim else int(labels)}
        bar.update()


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
    name = _name(f"{size[0]}x{size[1]}", _plain(table))
    recipe = Recipe(name=name, shape=size, make=functools.partial(maze.splits, table), count=_count(table))
    out.update(_read(MazeBuilder, recipe, table, data_dir))
  return {name: out[name] for name in splits}


def load_sudoku(box: tuple[int, int], splits: dict[str, sudoku.Split], data_dir=None) -> Arrays:
  """Sudokus of a table of splits."""
  side = box[0] * box[1]
  name = _name(f"{side}x{side}", [list(box), _plain(splits)])
  make = functools.partial(sudoku.splits, box, splits)
  recipe = Recipe(name=name, shape=(side, side), make=make, count=_count(splits))
  return _read(SudokuBuilder, recipe, splits, data_dir)


def load_digits(config, data_dir=None) -> Arrays:
  """Digits of a `DigitsData`, in a fixed random order: the source is prepared once, any subset is read from it."""
  builder = _prepare(DigitsBuilder, _digits_recipe(config), data_dir)
  there = tuple(builder.info.features["inputs"].shape)
  if there != tuple(config.size):
    raise UserError(f"digits: the images of {config.source} are {there[0]}x{there[1]}, config.data.size says "
                    f"{config.size[0]}x{config.size[1]}; set it to ({there[0]}, {there[1]})")
  held, test = (builder.info.splits[name].num_examples for name in ("train", "test"))
  if config.train + config.val > held or config.val >= held:
    raise UserError(
        f"digits: {config.source} has {held} training images, train {config.train} and val {config.val} ask for more; "
        "lower them"
    )
  if config.test > test:
    raise UserError(f"digits: {config.source} has {test} test images, test {config.test} asks for more; lower it")
  first, second = (_shuffled(core_data.to_arrays(builder, name)) for name in ("train", "test"))
  cut = held - config.val
  wanted = {"train": (first, slice(config.train or cut)), "val": (first, slice(cut, held)),
            "test": (second, slice(config.test or test))}
  return {name: {key: array[rows] for key, array in arrays.items()} for name, (arrays, rows) in wanted.items()
          if name != "val" or config.val}


def _shuffled(arrays: Arrays) -> Arrays:
  """The same examples in a fixed random order, so that the first few stand for all (MNIST's test set is two sets)."""
  order = np.random.default_rng(0).permutation(len(arrays["labels"]))
  return {"inputs": arrays["inputs"][order], "labels": arrays["labels"][order].astype(np.int32)}


def _digits_recipe(config) -> Recipe:
  """Named by the asset, by the request ('synthetic') or by the content of the user's files."""
  source = config.source
  if source in digits.ASSETS:
    return Recipe(name=source, shape=(28, 28), make=lambda report: digits.load(source))
  if source == "synthetic":
    counts = (config.train + config.val or 2000, config.test or 500)
    name = _name("synthetic", [*counts, config.seed])
    return Recipe(name=name, shape=(28, 28), make=lambda report: digits.load(source, *counts, config.seed))
  arrays = digits.load(source, seed=config.seed)
  content = hashlib.sha256()
  for part in arrays.values():
    for key in ("inputs", "labels"):
      content.update(np.ascontiguousarray(part[key]).tobytes())
  shape = arrays["train"]["inputs"].shape[1:]
  stem = re.sub("[^a-z0-9]+", "_", pathlib.Path(source).stem.lower()).strip("_")[:20] or "own"
  name = _name(f"{stem}-{shape[0]}x{shape[1]}", content.hexdigest())
  return Recipe(name=name, shape=shape, make=lambda report: arrays)


def _name(prefix, content) -> str:
  return f"{prefix}-{files.digest(content)[:12]}"


def _plain(splits):
  """JSON form of a table."""
  return {name: dataclasses.asdict(s) for name, s in splits.items()}


def _read(builder_cls, recipe, names, data_dir) -> Arrays:
  builder = _prepare(builder_cls, recipe, data_dir)
  return {name: core_data.to_arrays(builder, name) for name in names}


def _prepare(builder_cls, recipe, data_dir):
  """`core.data.prepare` without what tfds prints (it speaks of downloads); its progress bars give way to ours."""
  level = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  tfds.disable_progress_bar()
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      return core_data.prepare(builder_cls, data_dir, config=recipe)
  finally:
    tfds.enable_progress_bar()
    logging.set_verbosity(level)


def _bar(desc, total):
  from tqdm import tqdm

  return tqdm(total=total, desc=desc, leave=False, mininterval=0.5, disable=None)


def _count(splits) -> int:
  return sum(s.n for s in splits.values())
