"""Units of work: which there are, what each left behind, and how the learning rate is picked.

An outcome is one JSON file, WORKDIR/units/<arm>/{lr_<value>,seed_<k>}/outcome.json, written when the unit is finished:
whatever is interrupted is found again, and a unit that is there with the same fingerprint does not run again.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from experiments.protocol import Context, Experiment, Unit
from sakanajax.core import config as config_lib
from sakanajax.core import files, result
from sakanajax.core.errors import Diverged, UserError


class Outcome(NamedTuple):
  """What one unit measured and what it cost."""

  scalars: dict[str, float]
  wall_s: float
  peak_rss_mb: float
  note: str = ""  # why a trial has no scalars


Runner = Callable[[list[Unit]], dict[Unit, Outcome]]


def folder(workdir: pathlib.Path, unit: Unit) -> pathlib.Path:
  """Returns the unit's own folder."""
  leaf = f"lr_{unit.lr!r}" if unit.fraction < 1 else f"seed_{unit.seed}"
  return workdir / "units" / unit.arm / leaf


def fingerprint(experiment: Experiment, cfg: Any, unit: Unit | None = None) -> str:
  """Returns the digest of what decides a unit's numbers: the config without its neutral keys, and the unit."""
  return files.digest([experiment.name, _essence(experiment, config_lib.to_dict(cfg)), unit])


def claim_workdir(workdir: pathlib.Path, experiment: Experiment, cfg: Any) -> None:
  """Writes config.json into the workdir; raises UserError when a run of another config lives there."""
  path = workdir / "config.json"
  here = config_lib.to_dict(cfg)
  if path.exists():
    there = files.read_json(path)
    if not isinstance(there, dict):
      raise UserError(f"{path} holds no config; choose another --workdir or delete it")
    difference = _first_difference(_essence(experiment, there), _essence(experiment, here))
    if difference:
      raise UserError(f"{workdir} holds a run of another config ({difference}); choose another --workdir or delete it")
    if there == here:
      return
  files.write_json(path, here)


def trials(experiment: Experiment, cfg: Any) -> list[Unit]:
  """Returns the learning-rate trials: the arm's first seed at a fraction of the steps, for arms with several rates."""
  fraction = getattr(getattr(cfg, "tune", None), "fraction", 0.25)
  return [
      Unit(arm, int(experiment.seeds(cfg, arm)[0]), float(lr), float(fraction))
      for arm in cfg.arms
      if len(experiment.lrs(cfg, arm)) > 1
      for lr in experiment.lrs(cfg, arm)
  ]


def finals(experiment: Experiment, cfg: Any, arm: str, lr: float | None) -> list[Unit]:
  """Returns the full units of one arm, one per seed."""
  return [Unit(arm, int(seed), lr, 1.0) for seed in experiment.seeds(cfg, arm)]


def run_all(experiment: Experiment, cfg: Any, run: Runner) -> dict[Unit, Outcome]:
  """Runs trials, picks each arm's learning rate, runs the full units; returns every outcome.

  Arms without a choice of rates start beside the trials, so that workers are not idle.
  """
  tried = trials(experiment, cfg)
  tuned = {unit.arm for unit in tried}
  fixed = {arm: next(iter(experiment.lrs(cfg, arm)), None) for arm in cfg.arms if arm not in tuned}
  first = [unit for arm, lr in fixed.items() for unit in finals(experiment, cfg, arm, lr)]
  outcomes = run(tried + first)
  best = {arm: best_lr({u.lr: outcomes[u] for u in tried if u.arm == arm}, arm) for arm in cfg.arms if arm in tuned}
  return outcomes | run([unit for arm, lr in best.items() for unit in finals(experiment, cfg, arm, lr)])


def best_lr(outcomes: Mapping[float, Outcome], arm: str) -> float:
  """Returns the rate with the highest `tune_score`, the smaller one on a tie; a trial that diverged never wins.

  Raises UserError when all trials diverged.
  """
  scores = {lr: outcome.scalars.get("tune_score", math.nan) for lr, outcome in outcomes.items()}
  finite = [lr for lr in sorted(scores) if math.isfinite(scores[lr])]
  if not finite:
    notes = "; ".join(f"lr {lr:g}: {outcome.note or 'no finite tune_score'}" for lr, outcome in outcomes.items())
    raise UserError(f"no learning rate of arm {arm} trained ({notes}); try smaller ones in --config.tune.lrs")
  return max(finite, key=lambda lr: scores[lr])


def load(experiment: Experiment, cfg: Any, workdir: pathlib.Path, unit: Unit) -> Outcome | None:
  """Returns the unit's outcome when it is finished, None when it is not; raises UserError when it is another's."""
  path = folder(workdir, unit) / "outcome.json"
  if not path.exists():
    return None
  stored = files.read_json(path)
  try:
    same = stored["fingerprint"] == fingerprint(experiment, cfg, unit)
    scalars = {key: math.nan if value is None else float(value) for key, value in stored["scalars"].items()}
    outcome = Outcome(scalars, float(stored["wall_s"]), float(stored["peak_rss_mb"]), str(stored["note"]))
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise UserError(f"{path} is not an outcome; delete it and run again") from error
  if not same:
    raise UserError(f"{path} is of another config or learning rate than '{unit}' now; "
                    f"delete {path.parent} or choose another --workdir")
  return outcome


def run_one(
    experiment: Experiment, cfg: Any, workdir: pathlib.Path, unit: Unit, *, tensorboard: bool = False, write: bool = True
) -> Outcome:
  """Runs one unit in this process and writes its outcome, unless the outcome is there already.

  A trial that diverges is an outcome without scalars; a full unit that diverges raises.
  """
  found = load(experiment, cfg, workdir, unit)
  if found is not None:
    return found
  place = folder(workdir, unit)
  _make_folder(place)
  stamp = fingerprint(experiment, cfg, unit)
  start, scalars, note = time.monotonic(), {}, ""
  try:
    context = Context(place, f"{experiment.name} {cfg.task}: {unit}", tensorboard, stamp)
    scalars = {key: float(value) for key, value in experiment.run(cfg, unit, context).items()}
  except Diverged as error:
    if unit.fraction >= 1:
      raise
    note = str(error)
  outcome = Outcome(scalars, round(time.monotonic() - start, 3), round(result.peak_rss(), 1), note)
  if write:
    plain = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
    stored = {"fingerprint": stamp, "unit": unit._asdict()} | outcome._asdict() | {"scalars": plain}
    files.write_json(place / "outcome.json", stored)
  return outcome


def by_arm(outcomes: Mapping[Unit, Outcome]) -> dict[str, dict[int, dict[str, Any]]]:
  """Returns {arm: {seed: scalars}} of the full units, with the reserved keys _lr, _wall_s and _peak_rss_mb."""
  table: dict[str, dict[int, dict[str, Any]]] = {}
  for unit, outcome in outcomes.items():
    if unit.fraction >= 1:
      cost = {"_lr": unit.lr, "_wall_s": outcome.wall_s, "_peak_rss_mb": outcome.peak_rss_mb}
      table.setdefault(unit.arm, {})[unit.seed] = outcome.scalars | cost
  return table


def _make_folder(place: pathlib.Path) -> None:
  try:
    place.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f"cannot make the folder {place}: {error.strerror}; choose another --workdir") from error


def _essence(experiment: Experiment, plain: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in plain.items() if key not in experiment.neutral}


def _first_difference(there: Any, here: Any, path: str = "") -> str:
  """Returns 'key: old there, new here' of the first difference between two JSON values, '' when they are equal."""
  if isinstance(there, dict) and isinstance(here, dict):
    keys: Iterable[str] = list(here) + [key for key in there if key not in here]
    for key in keys:
      missing = "(absent)"
      difference = _first_difference(there.get(key, missing), here.get(key, missing), f"{path}.{key}" if path else key)
      if difference:
        return difference
    return ""
  return "" if there == here else f"{path}: {there} there, {here} here"
