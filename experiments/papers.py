"""Which papers are in the house: the one registry that `reproduce` and the report read."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
from typing import Any, NamedTuple

from experiments.protocol import Experiment
from sakanajax.core import config as config_lib
from sakanajax.core.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCALES = ("smoke", "cpu", "gpu", "paper")


class Paper(NamedTuple):
  """Where a paper's experiment lives. Imported only when asked for."""

  module: str  # has EXPERIMENT
  config: str  # has get_config("task,scale")
  tasks: tuple[str, ...]
  without: tuple[tuple[str, str], ...] = ()  # (task, scale) pairs that are left out
  bench: str = ""  # the task that times, see `experiments.bench`


PAPERS: dict[str, Paper] = {
    "sheaf_admm": Paper(
        "experiments.sheaf_admm", "configs/sheaf_admm.py", ("maze", "sudoku", "sudoku9", "mnist", "speed"),
        without=(("sudoku9", "smoke"), ("sudoku", "gpu"), ("sudoku", "paper"), ("speed", "paper")),
        bench="speed"),
    "twell": Paper("experiments.twell", "configs/twell.py", ("sweep", "ffn", "lm"), bench="ffn"),
}


def tasks(paper: Paper, scale: str) -> tuple[str, ...]:
  """Returns the tasks of a paper that exist at a scale."""
  return tuple(task for task in paper.tasks if (task, scale) not in paper.without)


def select(only: str) -> dict[str, Paper]:
  """Returns the papers named in a comma-separated list, all for ''; raises UserError for an unknown name."""
  names = [name.strip() for name in only.split(",") if name.strip()] or list(PAPERS)
  for name in names:
    if name not in PAPERS:
      raise UserError(f"--only: there is no paper {name!r}; papers: {', '.join(PAPERS)}")
  return {name: PAPERS[name] for name in PAPERS if name in names}


def experiment(paper: Paper) -> Experiment:
  """Imports the paper's binary and returns its EXPERIMENT."""
  return importlib.import_module(paper.module).EXPERIMENT


def config_path(paper: Paper) -> str:
  """Returns the config file relative to the current folder where that is shorter."""
  path = str(ROOT / paper.config)
  return min(path, os.path.relpath(path), key=len)


def config(paper: Paper, task: str, scale: str) -> Any:
  """Returns the config dataclass of (task, scale) without overrides."""
  spec = importlib.util.spec_from_file_location(f"config_{pathlib.Path(paper.config).stem}", ROOT / paper.config)
  if spec is None or not (ROOT / paper.config).is_file():
    raise UserError(f"there is no config file {paper.config}")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return config_lib.from_config(experiment(paper).config_cls, module.get_config(f"{task},{scale}"))
