"""Units in N subprocesses at once, each on its own share of the cores.

The child is the same binary with `--unit=...`: `python -m experiments.jobs CORES PARENT MODULE ARGS...` first pins itself
and ties its life to the parent's, only then imports the experiment (and with it jax), so that XLA sees its share only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.protocol import Unit
from sakanajax.core.errors import UserError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0


class UnitFailed(Exception):
  """A child stopped for a reason that is not the user's: its last words are in the message."""


class Child(NamedTuple):
  """A running unit."""

  unit: Unit
  process: subprocess.Popen
  log: pathlib.Path
  slot: int
  start: float


def run(
    units: Sequence[Unit],
    command: Callable[[Unit], list[str]],
    log: Callable[[Unit], pathlib.Path],
    jobs: int,
    progress: Callable[[Unit, float, list[Unit]], None],
) -> None:
  """Runs every unit in a child, `jobs` at once; returns when all have ended well.

  Args:
    command: unit -> arguments after the interpreter's `-m experiments.jobs CORES PARENT`.
    log: unit -> file that receives the child's output.
    progress: called at every end with (unit, seconds, units still running).

  Raises UserError when a child ends with exit code 2 and UnitFailed when it ends otherwise; in both cases, and when
  interrupted, the other children are ended first. What they had checkpointed stays.
  """
  waiting, running, shares = list(units), [], _shares(jobs)
  try:
    while waiting or running:
      while waiting and len(running) < jobs:
        slot = min(set(range(jobs)) - {child.slot for child in running})
        running.append(_start(waiting.pop(0), command, log, slot, shares[slot]))
      time.sleep(0.05)
      for child in [child for child in running if child.process.poll() is not None]:
        running.remove(child)
        _check(child)
        progress(child.unit, time.monotonic() - child.start, [other.unit for other in running])
  finally:
    _end(running)


def module_of_main() -> str:
  """Returns how the running program was started: a module name, or the path of a script."""
  main = sys.modules["__main__"]
  spec = getattr(main, "__spec__", None)
  if spec is None:
    return os.path.abspath(sys.argv[0])
  return spec.parent if spec.name.endswith(".__main__") else spec.name


def last_line(log: pathlib.Path) -> str:
  """Returns the last line with text of a log (progress bars end in carriage returns), or a remark."""
  try:
    size = log.stat().st_size
    with log.open("rb") as file:
      file.seek(max(0, size - 8192))
      text = file.read().decode("utf-8", "replace")
  except OSError:
    return "no output"
  lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
  return lines[-1] if lines else "no output"


def _shares(jobs: int) -> list[list[int]]:
  """Returns the cores of each slot: equal shares, or one shared core when there are more jobs than cores."""
  if not hasattr(os, "sched_getaffinity"):
    return [[] for _ in range(jobs)]
  cores = sorted(os.sched_getaffinity(0))
  size = len(cores) // jobs
  return [cores[i * size:(i + 1) * size] if size else [cores[i % len(cores)]] for i in range(jobs)]


def _start(unit: Unit, command: Callable, log: Callable, slot: int, cores: Sequence[int]) -> Child:
  path = log(unit)
  arguments = [sys.executable, "-m", "experiments.jobs", json.dumps(cores), str(os.getpid()), *command(unit)]
  surroundings = {"TQDM_MININTERVAL": "5", "PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as output:
      process = subprocess.Popen(
          arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
          env=surroundings | dict(os.environ), start_new_session=True,
      )
  except OSError as error:
    raise UserError(f"cannot start '{unit}' with its log {path}: {error.strerror or error}") from error
  return Child(unit, process, path, slot, time.monotonic())


def _check(child: Child) -> None:
  code = child.process.returncode
  if code == 0:
    return
  words = last_line(child.log)
  if code == 2:
    raise UserError(f"'{child.unit}': {re.sub('^error: ', '', words)} (log: {child.log})")
  how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
  raise UnitFailed(f"'{child.unit}' {how}: {words} (log: {child.log})")


def _end(running: Sequence[Child]) -> None:
  for child in running:
    with contextlib.suppress(ProcessLookupError):
      child.process.terminate()
  deadline = time.monotonic() + _GRACE_S
  for child in running:
    try:
      child.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      child.process.kill()
      child.process.wait()


def _tie_to(parent: int) -> None:
  """Asks the kernel to end this process when its parent dies, where there is such a kernel."""
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
  if os.getppid() != parent:  # it died before we asked
    sys.exit(1)


def _child(cores: str, parent: str, module: str, *arguments: str) -> None:
  _tie_to(int(parent))
  if json.loads(cores):
    os.sched_setaffinity(0, json.loads(cores))
  sys.argv = [module, *arguments]
  if module.endswith(".py"):
    sys.path[0] = os.path.dirname(module)
    runpy.run_path(module, run_name="__main__")
  else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  _child(*sys.argv[1:])
