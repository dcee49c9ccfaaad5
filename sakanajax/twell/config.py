"""The config of a TwELL experiment, and what an arm changes of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sakanajax.core import arms as arms_lib
from sakanajax.core.arms import Tune
from sakanajax.core.mesh import MeshConfig
from sakanajax.core.train import TrainConfig
from sakanajax.twell.loss import Penalty
from sakanajax.twell.model import ModelConfig
from sakanajax.twell.texts import Data

SECTIONS = ("model", "train", "penalty", "revival")


@dataclasses.dataclass(frozen=True)
class Revival:
  """Re-initialisation of dead neurons, see `revive`; rate 0 switches it off."""

  rate: float = 0.0
  scale: float = 0.02

  def __post_init__(self):
    if not 0 <= self.rate <= 1 or self.scale < 0:
      raise ValueError(f"rate must be in [0, 1] and scale not negative, got {self.rate} and {self.scale}")


@dataclasses.dataclass(frozen=True)
class Choice:
  """How a coefficient is chosen, on the validation split.

  Attributes:
    arm: the arm that the config runs on all seeds as the chosen one.
    ce_increase: the most that it may cost, relative to the arm without a penalty.
  """

  arm: str = ""
  ce_increase: float = 0.03


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What is measured after training.

  Attributes:
    batch: rows at once.
    rows: of each split; 0 for all.
    window: tokens of silence from which a neuron is dead; 0: all that were evaluated.
    imposed: non-zeros per token at which top-k and threshold are applied to the arms without a penalty.
  """

  batch: int = 16
  rows: int = 512
  window: int = 0
  imposed: tuple[int, ...] = ()

  def __post_init__(self):
    if self.batch < 1 or self.rows < 0 or self.window < 0 or any(k < 1 for k in self.imposed):
      raise ValueError(f"batch must be at least 1, rows and window not negative, imposed positive, got {self}")


@dataclasses.dataclass(frozen=True)
class Speed:
  """Sizes of the timing tasks.

  Attributes:
    dim: K = L, width of the model.
    hidden: N of the gated form; the plain one uses it, too.
    rows: M; the first carries the claims.
    densities: shares of active neurons.
    reps: pairs of calls.
    dense_above: density of the automatic switch, shown at the last density.
    other_densities: at which ELL, BCSR, top-k and threshold are timed.
    dtype: of everything.
  """

  dim: int = 2048
  hidden: int = 5632
  rows: tuple[int, ...] = (256, 1, 16)
  densities: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
  reps: int = 15
  dense_above: float = 0.2
  other_densities: tuple[float, ...] = (0.005,)
  dtype: Literal["float32", "bfloat16"] = "float32"

  def __post_init__(self):
    if min(self.dim, self.hidden, self.reps, *self.rows) < 1 or len(self.densities) < 2:
      raise ValueError(f"sizes and reps must be at least 1, with two densities or more, got {self}")
    if not all(0 < density < 1 for density in (*self.densities, *self.other_densities)):
      raise ValueError(f"densities must lie between 0 and 1, got {self.densities}, {self.other_densities}")


@dataclasses.dataclass(frozen=True)
class Config:
  """One experiment.

  Attributes:
    once: arms that run on the first seed only.
    variants: arm -> {section: {key: value}}.
    checkpoint: task lm: a unit's folder of a sweep whose model is timed; "": one is trained for it.
    hidden_act: modes: what a folder of safetensors was trained with, where its config.json says something else.
  """

  task: Literal["sweep", "ffn", "lm"]
  scale: Literal["smoke", "cpu", "gpu", "paper"]
  seeds: tuple[int, ...]
  arms: tuple[str, ...]
  once: tuple[str, ...] = ()
  variants: dict[str, dict] = dataclasses.field(default_factory=dict)
  checkpoint: str = ""
  hidden_act: Literal["", "relu"] = ""
  data: Data = Data()
  model: ModelConfig = ModelConfig()
  train: TrainConfig = TrainConfig(steps=1000, batch_size=16, lr=2e-3)
  penalty: Penalty = Penalty()
  revival: Revival = Revival()
  choice: Choice = Choice()
  evaluation: Evaluation = Evaluation()
  speed: Speed = Speed()
  tune: Tune = Tune()
  mesh: MeshConfig = MeshConfig()
  expect: dict[str, tuple] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    arms_lib.check(self.arms, tuple(self.variants), self.seeds)
    if self.choice.arm and self.choice.arm not in self.variants:
      raise ValueError(f"choice.arm {self.choice.arm!r} is not among the variants {sorted(self.variants)}")
    if self.choice.arm in self.once:
      raise ValueError(f"choice.arm {self.choice.arm!r} must run on all seeds; take it out of once")
    chosen = self.variants.get(self.choice.arm)
    for arm, sections in self.variants.items():
      if chosen is not None and sections.get("revival") and sections.get("penalty") != chosen.get("penalty"):
        raise ValueError(f"variants.{arm} and choice.arm {self.choice.arm!r} must have one penalty, they are compared; "
                         "set CHOSEN in configs/twell.py")
    if any(k > self.model.hidden for k in self.evaluation.imposed):
      raise ValueError(f"evaluation.imposed {self.evaluation.imposed} must not exceed model.hidden {self.model.hidden}")


def of_arm(cfg: Config, arm: str) -> Config:
  """The config of one arm, see `core.arms.of_arm`."""
  return arms_lib.of_arm(cfg, arm, SECTIONS)


def alone(cfg: Config, arm: str) -> Config:
  """What decides the numbers of one arm: its own config without the others and without the choice among them."""
  own = of_arm(cfg, arm)
  return dataclasses.replace(own, arms=(), once=(), variants={}, choice=Choice())


def coefficients(cfg: Config) -> dict[str, float]:
  """The arms that differ from the base in the penalty's coefficient (and the form) alone, by coefficient, rising."""
  changed = lambda arm: {f"{name}.{key}" for name, values in cfg.variants[arm].items() for key in values}
  found = {
      arm: float(cfg.variants[arm]["penalty"]["coefficient"])
      for arm in cfg.arms
      if changed(arm) - {"model.form"} == {"penalty.coefficient"}
  }
  return dict(sorted(found.items(), key=lambda item: item[1]))
