"""Units of work: which there are, what each left behind, and how the learning rate is picked.

A unit lives in WORKDIR/units/<arm>/{lr_<value>,seed_<k>}/. `unit.json` is written at its start and says what decides its
numbers, `outcome.json` at its end and says what they are. What was interrupted is found again, what is finished does not
run again, and what belongs to another config is refused by the name of the key that differs.
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
  wall_s: float  # of the stretch that finished it: what an interruption had cost before is not known
  peak_rss_mb: float
  note: str = ""  # why a trial has no scalars


Runner = Callable[[list[Unit]], dict[Unit, Outcome]]


def folder(workdir: pathlib.Path, unit: Unit) -> pathlib.Path:
  """Returns the unit's own folder."""
  leaf = f"lr_{unit.lr!r}" if unit.fraction < 1 else f"seed_{unit.seed}"
  return workdir / "units" / unit.arm / leaf


def essence(experiment: Experiment, cfg: Any, unit: Unit) -> dict[str, Any]:
  """Returns, as plain JSON, everything that decides a unit's numbers: itself and its arm's config without neutral keys."""
  decisive = experiment.arm_config(cfg, unit.arm) if experiment.arm_config else cfg
  plain = config_lib.to_dict(decisive)
  for path in experiment.neutral:
    *sections, key = path.split(".")
    holder = plain
    for section in sections:
      holder = holder.get(section, {}) if isinstance(holder, dict) else {}
    if isinstance(holder, dict):
      holder.pop(key, None)
  return {"experiment": experiment.name, "unit": unit._asdict(), "config": plain}


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
  place = folder(workdir, unit)
  if not (place / "unit.json").exists():
    return None
  there = files.read_json(place / "unit.json")
  if not isinstance(there, dict):
    raise UserError(f"{place / 'unit.json'} does not describe a unit; delete {place} and run again")
  difference = _first_difference(there, essence(experiment, cfg, unit))
  if difference:
    raise UserError(f"{place} holds another run ({difference.removeprefix('config.')}); "
                    f"choose another --workdir or delete {place}")
  path = place / "outcome.json"
  if not path.exists():
    return None
  stored = files.read_json(path)
  try:
    scalars = {key: math.nan if value is None else float(value) for key, value in stored["scalars"].items()}
    if not scalars and not stored["note"]:
      raise ValueError("it measured nothing")
    return Outcome(scalars, float(stored["wall_s"]), float(stored["peak_rss_mb"]), str(stored["note"]))
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise UserError(f"{path} is not an outcome; delete {place} and run again") from error


def run_one(
    experiment: Experiment, cfg: Any, workdir: pathlib.Path, unit: Unit, *, tensorboard: bool = False, write: bool = True
) -> Outcome:
  """Runs one unit in this process and writes its outcome.

  A trial that diverges is an outcome without scalars; a full unit that diverges raises.
  """
  place, what = folder(workdir, unit), essence(experiment, cfg, unit)
  _make_folder(place)
  if write:
    files.write_json(place / "unit.json", what)
  start, scalars, note = time.monotonic(), {}, ""
  try:
    context = Context(place, f"{experiment.name} {cfg.task}: {unit}", tensorboard, files.digest(what))
    scalars = {key: float(value) for key, value in experiment.run(cfg, unit, context).items()}
  except Diverged as error:
    if unit.fraction >= 1:
      raise
    note = str(error)
  except UserError:
    if write:
      _forget(place)
    raise
  outcome = Outcome(scalars, round(time.monotonic() - start, 3), round(result.peak_rss(), 1), note)
  if write:
    plain = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
    files.write_json(place / "outcome.json", outcome._asdict() | {"scalars": plain})
  return outcome


def by_arm(outcomes: Mapping[Unit, Outcome]) -> dict[str, dict[int, dict[str, Any]]]:
  """Returns {arm: {seed: scalars}} of the full units, with the reserved keys _lr, _wall_s and _peak_rss_mb."""
  table: dict[str, dict[int, dict[str, Any]]] = {}
  for unit, outcome in outcomes.items():
    if unit.fraction >= 1:
      cost = {"_lr": unit.lr, "_wall_s": outcome.wall_s, "_peak_rss_mb": outcome.peak_rss_mb}
      table.setdefault(unit.arm, {})[unit.seed] = outcome.scalars | cost
  return table


def _forget(place: pathlib.Path) -> None:
  """Removes a unit that was refused before it had trained, so that the corrected config may take its place."""
  if not any(path.name != "unit.json" for path in place.iterdir()):
    (place / "unit.json").unlink(missing_ok=True)
    place.rmdir()


def _make_folder(place: pathlib.Path) -> None:
  try:
    place.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f"cannot make the folder {place}: {error.strerror}; choose another --workdir") from error


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
