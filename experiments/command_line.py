"""The command line of every binary: flags and config overrides in, a checked config and `Options` out.

Whatever is wrong with a command line is one UserError that names the flag or the config key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.protocol import Experiment, ModeFlags, Unit
from sakanajax.core import config as config_lib
from sakanajax.core.errors import UserError


class Options(NamedTuple):
  """The flags beside --config, checked."""

  workdir: pathlib.Path
  jobs: int
  dry_run: bool
  mode: str
  tensorboard: bool
  unit: Unit | None  # set in a child of --jobs
  mode_flags: ModeFlags
  coordinator_address: str
  num_processes: int
  process_id: int
  arguments: tuple[str, ...]  # as typed, for the children

  @property
  def writes(self) -> bool:
    return not self.coordinator_address or self.process_id == 0


def define(experiment: Experiment, values: Any, argv: Sequence[str]) -> None:
  """Defines the launcher's flags on the absl FlagValues `values`; `argv` is where the config's overrides stand."""
  from absl import flags
  from ml_collections import config_flags

  config_flags.DEFINE_config_file(
      "config", None, f"configs/{experiment.name}.py:task,scale", values, lock_config=True, sys_argv=list(argv)
  )
  text = {
      "workdir": "folder of the run; default runs/<experiment>/<task>.<scale>",
      "seeds": "comma-separated seeds instead of the config's",
      "arms": "comma-separated arms, a part of the config's",
      "mode": f"one of {', '.join(_modes(experiment))}",
      "checkpoint": "for modes: a folder of checkpoints",
      "input": "for modes: a file or a string",
      "out": "for modes: an output folder",
      "coordinator_address": "many hosts: host:port of process 0",
      "unit": "set by --jobs in its children",
  }
  for name, meaning in text.items():
    flags.DEFINE_string(name, "train" if name == "mode" else "", meaning, flag_values=values)
  flags.DEFINE_integer("jobs", 1, "units in this many subprocesses at once, each on its share of cores", flag_values=values)
  flags.DEFINE_integer("num_processes", 1, "many hosts: how many processes", flag_values=values)
  flags.DEFINE_integer("process_id", 0, "many hosts: which of them this is", flag_values=values)
  flags.DEFINE_boolean("dry_run", False, "print sizes and expected time, run nothing", flag_values=values)
  flags.DEFINE_boolean("tensorboard", False, "write tensorboard files too", flag_values=values)


def asks_help(argv: Sequence[str]) -> bool:
  """Returns whether the command line asks for help."""
  return any(re.match(r"--?(help|helpshort|h)$", arg) for arg in argv[1:])


def parse(experiment: Experiment, values: Any, argv: Sequence[str]) -> tuple[Any, Options]:
  """Returns (config dataclass, options) of a command line; raises UserError for whatever is wrong with it."""
  _check_config_file(argv)
  try:
    rest = values(list(argv))
  except UserError:
    raise
  except Exception as error:  # of absl, of ml_collections, or of the config file itself
    raise UserError(_gist(error, argv)) from error
  if len(rest) > 1:
    raise UserError(f"{rest[1]!r} is not a flag; flags are written --name=value")
  cfg = config_lib.from_config(experiment.config_cls, values.config)
  if values.mode not in _modes(experiment):
    raise UserError(f"--mode={values.mode}: there is no such mode; modes: {', '.join(_modes(experiment))}")
  cfg = _override(cfg, _seeds(values.seeds), tuple(filter(None, values.arms.split(","))))
  return cfg, _options(experiment, cfg, values, argv)


def _options(experiment: Experiment, cfg: Any, values: Any, argv: Sequence[str]) -> Options:
  workdir = values.workdir or os.path.join("runs", experiment.name, f"{cfg.task}.{cfg.scale}")
  if values.jobs < 1:
    raise UserError(f"--jobs={values.jobs}: at least one")
  if values.jobs > 1 and values.coordinator_address:
    raise UserError("--jobs and --coordinator_address exclude each other; leave one out")
  if not 0 <= values.process_id < values.num_processes:
    raise UserError(f"--process_id={values.process_id} must be in 0 .. {values.num_processes - 1} (--num_processes - 1)")
  return Options(
      workdir=pathlib.Path(workdir),
      jobs=values.jobs,
      dry_run=values.dry_run,
      mode=values.mode,
      tensorboard=values.tensorboard,
      unit=_unit(values.unit),
      mode_flags=ModeFlags(values.checkpoint, values.input, values.out, workdir),
      coordinator_address=values.coordinator_address,
      num_processes=values.num_processes,
      process_id=values.process_id,
      arguments=tuple(argv[1:]),
  )


def _unit(text: str) -> Unit | None:
  try:
    return Unit(*json.loads(text)) if text else None
  except (ValueError, TypeError) as error:
    raise UserError(f"--unit={text}: not for typing; it is set by --jobs") from error


def _override(cfg: Any, seeds: tuple[int, ...], arms: tuple[str, ...]) -> Any:
  unknown = [arm for arm in arms if arm not in cfg.arms]
  if unknown:
    raise UserError(f"--arms: there is no arm {unknown[0]!r} in this config; arms: {', '.join(cfg.arms)}")
  change = ({"seeds": seeds} if seeds else {}) | ({"arms": arms} if arms else {})
  try:
    cfg = dataclasses.replace(cfg, **change)
  except ValueError as error:
    raise UserError(f"config: {error}") from error
  if not cfg.seeds or not cfg.arms:
    raise UserError("config: at least one seed and one arm are needed")
  return cfg


def _seeds(text: str) -> tuple[int, ...]:
  if not text:
    return ()
  seeds = text.split(",")
  if not all(re.fullmatch(r"\d{1,9}", seed.strip()) for seed in seeds) or len(set(map(int, seeds))) < len(seeds):
    raise UserError(f"--seeds={text}: expected different whole numbers such as 0,1,2")
  return tuple(map(int, seeds))


def _check_config_file(argv: Sequence[str]) -> None:
  """Raises UserError when no config is named or the file is not there (ml_collections would tell only on use)."""
  named = [arg for arg in argv[1:] if re.match(r"--?config(=|$)", arg)]
  if not named:
    raise UserError("no config; give --config=configs/NAME.py:task,scale")
  if named and "=" in named[-1]:
    path = named[-1].split("=", 1)[1].split(":", 1)[0]
    if not os.path.isfile(path):
      raise UserError(f"--config: there is no file {path!r}; run from the folder that holds configs/")


def _modes(experiment: Experiment) -> tuple[str, ...]:
  return ("train", *experiment.modes)


def _gist(error: Exception, argv: Sequence[str]) -> str:
  """Returns what went wrong while flags were parsed, in one line that names the flag."""
  from absl import flags

  text = str(error)
  if "Traceback (most recent call last)" in text:  # ml_collections quotes the traceback of a config file
    head, last = text.split("\n", 1)[0], text.strip().rsplit("\n", 1)[-1]
    text = f"{head.removesuffix('Error whilst parsing config file:')}{re.sub('^[A-Za-z]+Error: ', '', last)}"
  elif isinstance(error, (AttributeError, KeyError)) and (found := _unknown_key(text, argv)):
    text = found
  elif "get_config" in text or not isinstance(error, (flags.Error, AttributeError, TypeError, ValueError)):
    text = f"{_config_argument(argv)}: {type(error).__name__}: {text}"
  return re.sub(r"\s+", " ", text).strip()


def _unknown_key(text: str, argv: Sequence[str]) -> str | None:
  """Returns the line for an override of a key that the config does not have, from the library's words about it."""
  words = re.findall(r"[\w.]+", text.replace("\\n", " "))
  for arg in argv[1:]:
    name = arg.split("=", 1)[0]
    if re.match(r"--?(no)?config\.", name) and words and words[0] in name.split("."):
      guess = re.search(r"Did you mean \W*(\w+)", text)
      return f"{name}: unknown key {words[0]}" + (f"; did you mean {guess[1]}?" if guess else "")
  return None


def _config_argument(argv: Sequence[str]) -> str:
  return next((arg for arg in argv[1:] if re.match(r"--?config(=|$)", arg)), "--config")
