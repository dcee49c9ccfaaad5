"""The launcher of every binary: `launch.run(EXPERIMENT)` is all that `experiments/<paper>.py` calls.

  python -m experiments.<paper> --config=configs/<paper>.py:task,scale --workdir=DIR [--config.train.lr=1e-3]
      [--seeds=0,1,2] [--arms=a,b] [--jobs=2] [--dry_run] [--tensorboard]

trains and evaluates every arm (method, baselines, ablations) on every seed, after a learning-rate sweep for the arms that
have one, and ends with WORKDIR/result.json. The same command resumes whatever was interrupted, and a finished workdir says
so. Exit codes: 0 ok; 1 a bar was missed; 2 bad input, in one line; 70 a defect of ours, with a traceback; 130 interrupted.

Many hosts: start the same command on each with --coordinator_address, --num_processes and --process_id, and a workdir that
all of them share; process 0 writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from experiments import command_line
from experiments import jobs as jobs_lib
from experiments import units as units_lib
from experiments.protocol import (
    BAD_INPUT, DEFECT, INTERRUPTED, MISSED, OK, Claim, Context, Experiment, ModeFlags, Unit
)
from sakanajax.core import config as config_lib
from sakanajax.core import files
from sakanajax.core import result as result_lib
from sakanajax.core.errors import UserError

__all__ = ["Claim", "Context", "Experiment", "ModeFlags", "Unit", "run", "main"]


def run(experiment: Experiment) -> None:
  """Runs the binary: parses the command line, does the work, exits with the code of the module's docstring."""
  from absl import app, flags, logging

  logging.set_verbosity(logging.WARNING)  # orbax reports every file it writes
  command_line.define(experiment, flags.FLAGS, sys.argv)
  parsed = []

  def parse(argv: Sequence[str]) -> list[str]:
    if command_line.asks_help(argv):
      print(f"{sys.modules['__main__'].__doc__ or ''}\n{__doc__}\n{flags.FLAGS.module_help(command_line.__name__)}")
      sys.exit(OK)
    try:
      parsed.append(command_line.parse(experiment, flags.FLAGS, argv))
    except UserError as error:
      sys.exit(_complain(error))
    return list(argv[:1])

  app.run(lambda unused_argv: main(experiment, *parsed[0]), flags_parser=parse)


def main(experiment: Experiment, cfg: Any, options: command_line.Options) -> int:
  """Does what the options ask for and returns the exit code; the only place where exceptions become codes."""
  try:
    return _dispatch(experiment, cfg, options)
  except UserError as error:
    return _complain(error)
  except jobs_lib.UnitFailed as error:
    print(f"failed: {error}", file=sys.stderr)
    return DEFECT
  except KeyboardInterrupt:
    print("\ninterrupted; the same command resumes", file=sys.stderr)
    return INTERRUPTED
  except Exception:  # pylint: disable=broad-except
    traceback.print_exc()
    return DEFECT


def _dispatch(experiment: Experiment, cfg: Any, options: command_line.Options) -> int:
  if options.dry_run:
    print(table(experiment.dry_run(cfg)))
    return OK
  if options.coordinator_address:
    import jax

    from sakanajax.core import mesh

    mesh.init_distributed(options.coordinator_address, options.num_processes, options.process_id)
    jax.devices()  # all processes together: this waits for the others
  if options.mode != "train":
    experiment.modes[options.mode](cfg, options.mode_flags)
    return OK
  if options.unit is not None:
    units_lib.run_one(experiment, cfg, options.workdir, options.unit, tensorboard=options.tensorboard)
    return OK
  if not options.writes:
    units_lib.run_all(experiment, cfg, _in_process(experiment, cfg, options))
    return OK
  with _lock(options.workdir):
    return _train(experiment, cfg, options)


def _train(experiment: Experiment, cfg: Any, options: command_line.Options) -> int:
  """Runs what is missing in the workdir, writes result.json and tells the story; returns OK or MISSED."""
  files.write_json(options.workdir / "config.json", config_lib.to_dict(cfg))
  fresh: list[Unit] = []
  runner = _in_children if options.jobs > 1 else _in_process
  outcomes = units_lib.run_all(experiment, cfg, runner(experiment, cfg, options, fresh))
  metrics, baselines, plots = experiment.summarize(cfg, units_lib.by_arm(outcomes), options.workdir)
  result = result_lib.build(
      experiment.name, cfg.task, cfg.scale, config_lib.to_dict(cfg), cfg.seeds, metrics, baselines, cfg.expect,
      wall_s=sum(outcome.wall_s for outcome in outcomes.values()),
      peak_rss_mb=max((outcome.peak_rss_mb for outcome in outcomes.values()), default=None),
  )
  path = result_lib.write(options.workdir / "result.json", result)
  if not fresh:
    print(f"{options.workdir} was finished already: {len(outcomes)} units, nothing left to train")
  print(table(result_rows(result)))
  print(f"result: {path}" + "".join(f"\nplot:   {plot}" for plot in plots))
  missed = result_lib.missed(result)
  if missed:
    print(f"missed: {', '.join(missed)}", file=sys.stderr)
  return MISSED if missed else OK


def _in_process(
    experiment: Experiment, cfg: Any, options: command_line.Options, fresh: list[Unit] | None = None
) -> units_lib.Runner:
  """Returns a runner that does the units one after the other here; units that were not there yet join `fresh`."""

  def runner(todo: list[Unit]) -> dict[Unit, units_lib.Outcome]:
    outcomes = {unit: units_lib.load(experiment, cfg, options.workdir, unit) for unit in todo}
    missing = _agreed([unit for unit in todo if outcomes[unit] is None], todo, options)
    for i, unit in enumerate(missing):
      print(f"[{i + 1}/{len(missing)}] {unit}", file=sys.stderr, flush=True)
      outcomes[unit] = units_lib.run_one(
          experiment, cfg, options.workdir, unit, tensorboard=options.tensorboard, write=options.writes
      )
    if fresh is not None:
      fresh.extend(missing)
    return outcomes

  return runner


def _agreed(missing: list[Unit], todo: list[Unit], options: command_line.Options) -> list[Unit]:
  """Returns the units that process 0 misses: of many hosts, a late one must not skip what an early one has written."""
  if not options.coordinator_address or not todo:
    return missing
  import numpy as np
  from jax.experimental import multihost_utils

  mask = multihost_utils.broadcast_one_to_all(np.array([unit in missing for unit in todo], np.int32))
  return [unit for unit, is_missing in zip(todo, np.asarray(mask)) if is_missing]


def _in_children(experiment: Experiment, cfg: Any, options: command_line.Options, fresh: list[Unit]) -> units_lib.Runner:
  """Returns a runner that gives the missing units to `--jobs` subprocesses."""

  def command(unit: Unit) -> list[str]:
    own = [f"--workdir={options.workdir}", "--jobs=1", f"--unit={json.dumps(unit)}"]
    return [jobs_lib.module_of_main(), *options.arguments, *own]

  def runner(todo: list[Unit]) -> dict[Unit, units_lib.Outcome]:
    missing = [unit for unit in todo if units_lib.load(experiment, cfg, options.workdir, unit) is None]
    with _progress(len(missing), f"{experiment.name} {cfg.task}") as progress:
      jobs_lib.run(
          missing, command, lambda unit: units_lib.folder(options.workdir, unit) / "log.txt", options.jobs, progress
      )
    fresh.extend(missing)
    return {unit: units_lib.load(experiment, cfg, options.workdir, unit) for unit in todo}

  return runner


@contextlib.contextmanager
def _progress(total: int, desc: str):
  """Yields the callback of `jobs.run`: one bar on a terminal, one line per finished unit elsewhere."""
  if not total:
    yield lambda *unused: None
    return
  if not sys.stderr.isatty():
    count = iter(range(1, total + 1))
    yield lambda unit, seconds, running: print(
        f"[{next(count)}/{total}] {unit}: {seconds:.1f} s", file=sys.stderr, flush=True
    )
    return
  import tqdm

  with tqdm.tqdm(total=total, desc=desc, unit="unit", dynamic_ncols=True) as bar:

    def advance(unit: Unit, seconds: float, running: list[Unit]) -> None:
      bar.set_postfix_str(", ".join(map(str, running)), refresh=False)
      bar.update()

    bar.refresh()
    yield advance


@contextlib.contextmanager
def _lock(workdir: pathlib.Path):
  """Holds the workdir for this launcher; the kernel lets go when the process ends, however it ends."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(workdir / ".lock", "a+", encoding="utf-8")
  except OSError as error:
    raise UserError(f"cannot use --workdir={workdir}: {error.strerror}; choose another folder") from error
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      file.seek(0)
      raise UserError(f"another launcher is at work in {workdir} (process {file.read().strip() or 'unknown'}); "
                      "wait for it or choose another --workdir") from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    yield


def result_rows(result: dict[str, Any]) -> list[dict[str, str]]:
  """Returns the rows key, mean, bar, ok of a result, bars without a measurement included."""
  expect = result["expect"]
  keys = [*result["metrics"], *result["baselines"], *(key for key in expect if not result_lib.values(result, key))]
  missed = result_lib.missed(result)
  return [
      {
          "key": key,
          "mean ± sd": result_lib.show_mean(result, key),
          "bar": result_lib.show_bar(expect.get(key)),
          "ok": "" if key not in expect else "MISSED" if key in missed else "ok",
      }
      for key in dict.fromkeys(keys)
  ]


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns rows (dicts) as an aligned text table; numbers get thousands separators or three digits."""
  if not rows:
    return "nothing to show"
  heads = list(dict.fromkeys(key for row in rows for key in row))
  cells = [heads] + [[_cell(row.get(head, "")) for head in heads] for row in rows]
  widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
  return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
  return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _complain(error: UserError) -> int:
  print("error: " + re.sub(r"\s+", " ", str(error)).strip(), file=sys.stderr)
  return BAD_INPUT
