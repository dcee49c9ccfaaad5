"""The config of a Sheaf-ADMM experiment, and the task and data that it names."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from sakanajax.core import arms as arms_lib
from sakanajax.core import config as config_lib
from sakanajax.core.arms import Tune
from sakanajax.core.mesh import MeshConfig
from sakanajax.core.train import TrainConfig
from sakanajax.sheaf_admm import data as data_lib
from sakanajax.sheaf_admm import tasks
from sakanajax.sheaf_admm.model import ModelConfig

DATA = {"maze": data_lib.MazeData, "sudoku": data_lib.SudokuData, "mnist": data_lib.DigitsData}


@dataclasses.dataclass(frozen=True)
class Iterations:
  """How often agents negotiate."""

  train: tuple[int, int] = (8, 20)  # K of a training step is uniform in this range, both ends included
  grad: int = 0  # truncated unrolling: only the last so many carry gradient; 0 for all
  eval: int = 40  # K at evaluation
  far: int = 100  # K on boards larger than those of training

  def __post_init__(self):
    low, high = self.train
    if not 0 <= low <= high:
      raise ValueError(f"train {low, high} must be a rising pair of numbers >= 0")
    for name in ("grad", "eval", "far"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} {getattr(self, name)} must not be negative")


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What is measured after training."""

  batch: int = 100
  examples: int = 1000  # of each split or corruption; 0 for all
  far_examples: int = 0  # of those on boards larger than in training, which cost more; 0: the same number
  pads: tuple[int, ...] = ()  # digits: zero columns and rows on every side
  noises: tuple[float, ...] = ()  # digits: standard deviation of the noise
  drops: tuple[float, ...] = ()  # digits: share of the agents that see nothing

  def __post_init__(self):
    if self.batch < 1:
      raise ValueError(f"batch {self.batch} must be at least 1")
    if min(self.examples, self.far_examples, *self.pads, *self.noises) < 0:
      raise ValueError("examples, far_examples, pads and noises must not be negative")
    if not all(0 <= share <= 1 for share in self.drops):
      raise ValueError(f"drops {self.drops} must be shares between 0 and 1")


@dataclasses.dataclass(frozen=True)
class Config:
  """One experiment: a base network, and what each arm changes of it."""

  task: Literal["maze", "sudoku", "sudoku9", "mnist", "speed"]
  scale: Literal["smoke", "cpu", "gpu", "paper"]
  seeds: tuple[int, ...]
  arms: tuple[str, ...]
  once: tuple[str, ...] = ()  # arms that run on the first seed only: ablations, which carry no claim
  variants: dict[str, dict] = dataclasses.field(default_factory=dict)  # arm -> {section: {key: value}}
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  augment: Literal["none", "dihedral", "full", "shift"] = "none"  # shift: digits, by up to 2 pixels
  model: ModelConfig = ModelConfig()
  train: TrainConfig = TrainConfig(steps=1000, batch_size=64, lr=1e-3)
  iterations: Iterations = Iterations()
  evaluation: Evaluation = Evaluation()
  tune: Tune = Tune()
  mesh: MeshConfig = MeshConfig()
  expect: dict[str, tuple] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    arms_lib.check(self.arms, ("sheaf", *self.variants), self.seeds)

  @property
  def kind(self) -> str:
    """Which of the three tasks: maze, sudoku or mnist."""
    return "sudoku" if self.task in ("sudoku9", "speed") else self.task


def of_arm(cfg: Config, arm: str) -> Config:
  """The config of one arm, see `core.arms.of_arm`."""
  return arms_lib.of_arm(cfg, arm, ("model", "train", "iterations"))


def data_of(cfg: Config):
  """The typed data section. Raises UserError naming a key that is wrong."""
  return config_lib.from_config(DATA[cfg.kind], cfg.data, "config.data")


def task_of(cfg: Config) -> tasks.Task:
  """The task on the boards that the config trains on."""
  data = data_of(cfg)
  if cfg.kind == "maze":
    return tasks.maze(tuple(data.splits["train"].size))
  if cfg.kind == "sudoku":
    return tasks.sudoku(tuple(data.box))
  return tasks.digits(tuple(data.size))
