"""What an experiment is: the types that every `experiments/<paper>.py` fills in and the launcher runs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# Config keys that do not change what a single unit computes: with another list of seeds, arms, learning rates or bars, on
# another mesh, or logged more often, finished units stay valid.
NEUTRAL = ("arms", "seeds", "expect", "mesh", "tune", "train.log_every", "train.checkpoint_every", "train.keep")


OK, MISSED, BAD_INPUT, DEFECT, INTERRUPTED = 0, 1, 2, 70, 130  # exit codes of every binary


class Unit(NamedTuple):
  """One model trained and evaluated once."""

  arm: str
  seed: int
  lr: float | None  # None: the arm is not tuned, the config's own learning rate holds
  fraction: float  # below 1: a learning-rate trial on this part of the steps

  def __str__(self) -> str:
    rate = "" if self.lr is None else f" lr {self.lr:g}"
    return f"{self.arm}{rate}" + (" (trial)" if self.fraction < 1 else f" seed {self.seed}")


class Context(NamedTuple):
  """What a unit is told about its surroundings."""

  workdir: pathlib.Path  # the unit's own folder, which exists
  desc: str  # a few words for the progress bar
  tensorboard: bool = False
  fingerprint: str = ""  # of config and unit, for the checkpoints


class Claim(NamedTuple):
  """A sentence of the paper, and the key of result.json that speaks to it (see `experiments.report.verdict`)."""

  task: str
  statement: str
  published: str  # the paper's number, in words
  setting: str  # the paper's setting, in words
  metric: str
  bar: tuple[float | None, float | None] | None = None  # None: the bar in the result's `expect`
  baseline_metric: str = ""  # the key that `metric` must beat for "direction only"
  direction: Literal["higher", "lower"] = "higher"
  scaled: str = ""  # our setting at scale cpu, in words, where it is not the paper's


class ModeFlags(NamedTuple):
  """The flags that a mode other than `train` may use; empty where not given."""

  checkpoint: str = ""
  input: str = ""
  out: str = ""
  workdir: str = ""


class Experiment(NamedTuple):
  """A paper's experiment. `config_cls` has at least the fields task, scale, seeds, arms and expect.

  Fields:
    run: (cfg, unit, ctx) -> scalars, among them `tune_score` (of the validation split, higher is better) when tuned.
      It resumes by itself from what it left in ctx.workdir.
    summarize: (cfg, {arm: {seed: scalars}}, workdir) -> (metrics, baselines, plots); the scalars carry `_lr`,
      `_wall_s` and `_peak_rss_mb` beside what `run` returned.
    dry_run: (cfg) -> one row (a dict) per arm: parameters, FLOPs, memory, expected time.
    seeds: (cfg, arm) -> seeds of the arm; by default cfg.seeds, and the first of them for arms in cfg.once.
    lrs: (cfg, arm) -> learning rates to try, () to leave the arm untuned; by default those of cfg.tune.
    modes: further values of --mode.
    arm_config: (cfg, arm) -> whatever decides the numbers of that arm, so that a change to one arm leaves the finished
      units of the others valid; the whole config when None.
    neutral: dotted keys of it that do not count.
  """

  name: str
  config_cls: type
  run: Callable[[Any, Unit, Context], Mapping[str, float]]
  summarize: Callable[[Any, dict, pathlib.Path], tuple[dict, dict, list]]
  dry_run: Callable[[Any], list[dict]]
  seeds: Callable[[Any, str], Sequence[int]] = lambda cfg, arm: cfg.seeds[:1] if arm in cfg.once else cfg.seeds
  lrs: Callable[[Any, str], Sequence[float]] = lambda cfg, arm: cfg.tune.lrs.get(arm, ())
  modes: Mapping[str, Callable[[Any, ModeFlags], None]] = {}
  claims: tuple[Claim, ...] = ()
  paper: str = ""  # title, venue and arXiv number, for the report
  neutral: tuple[str, ...] = NEUTRAL
  arm_config: Callable[[Any, str], Any] | None = None
