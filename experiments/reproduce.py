"""Runs every paper at one scale and writes the report.

  python -m experiments.reproduce --scale=smoke|cpu|gpu|paper [--only=sheaf_admm] [--jobs=2] [--workdir=runs] [--out=.]
  python -m experiments.reproduce --list
  python -m experiments.reproduce --scale=cpu --publish

Each task is one subprocess of its binary, in WORKDIR/<paper>/<task>.<scale>. What is done is skipped, what was interrupted
resumes, and a failure does not stop the rest. At the end OUT/report.md and OUT/report.html compare what was measured with
what the papers claim. `--publish` also copies results and plots of a cpu, gpu or paper run to results/<paper>/.

Exit codes: 0 everything ran and met its bars (smoke has none); 1 a bar was missed; 2 bad input, here or in a task;
70 a task broke; 130 interrupted.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import launch, papers
from experiments.papers import PAPERS, Paper
from sakanajax.core import config as config_lib
from sakanajax.core import files
from sakanajax.core import result as result_lib
from sakanajax.core.errors import UserError

__all__ = ["PAPERS", "Status", "main", "publish"]

PUBLISHED_SCALES = ("cpu", "gpu", "paper")


class Status(NamedTuple):
  """How one task ended."""

  paper: str
  task: str
  scale: str
  code: int  # the exit code of its binary
  seconds: float
  words: str  # "done before", "ran", "bar missed: ...", "failed (code 70)"


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` (without the program's name); returns the exit code."""
  try:
    options = _parse(argv)
    chosen = papers.select(options.only)
    if options.list:
      print(launch.table(listing(chosen)))
      return launch.OK
    return _reproduce(options, chosen)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return launch.BAD_INPUT
  except KeyboardInterrupt:
    print("\ninterrupted; the same command resumes", file=sys.stderr)
    return launch.INTERRUPTED


def listing(chosen: dict[str, Paper]) -> list[dict[str, str]]:
  """Returns one row per task: paper, task, scales and how to run it alone."""
  return [
      {
          "paper": name,
          "task": task,
          "scales": ", ".join(scale for scale in papers.SCALES if task in papers.tasks(paper, scale)),
          "command": f"python -m {paper.module} --config={paper.config}:{task},SCALE",
      }
      for name, paper in chosen.items()
      for task in paper.tasks
  ]


def publish(workdir: pathlib.Path, place: pathlib.Path, task: str, scale: str) -> list[pathlib.Path]:
  """Copies result.json and the plots of a finished workdir to `place`/<task>.<scale>.*; returns what it wrote.

  Plots of an earlier result of the same task and scale that are no longer made are removed.
  """
  if scale not in PUBLISHED_SCALES:
    raise UserError(f"--publish: a {scale} run measures nothing; publish one of {', '.join(PUBLISHED_SCALES)}")
  result = result_lib.load(workdir / "result.json")
  stem = f"{task}.{scale}"
  written = [result_lib.write(place / f"{stem}.json", result)]
  for plot in sorted(workdir.glob("*.png")):
    written.append(files.write_bytes(place / f"{stem}.{plot.name}", plot.read_bytes()))
  for old in set(place.glob(f"{stem}.*.png")) - set(written):
    old.unlink()
  return written


def _parse(argv: Sequence[str]) -> Any:
  import argparse

  class Parser(argparse.ArgumentParser):
    def error(self, message: str):
      raise UserError(message)

  parser = Parser(prog="python -m experiments.reproduce", description=__doc__.split("\n", 1)[0], allow_abbrev=False)
  parser.add_argument("--scale", default="smoke", choices=papers.SCALES)
  parser.add_argument("--only", default="", help="comma-separated papers; default all")
  parser.add_argument("--list", action="store_true", help="print papers, tasks and scales, run nothing")
  parser.add_argument("--out", default=".", help="folder of report.md and report.html")
  parser.add_argument("--workdir", default="runs", help="folder of the runs")
  parser.add_argument("--jobs", type=int, default=1, help="units at once within a task")
  parser.add_argument("--publish", action="store_true", help="copy results and plots to results/")
  options = parser.parse_args(list(argv))
  if options.jobs < 1:
    raise UserError(f"--jobs={options.jobs}: at least one")
  if options.publish and options.scale not in PUBLISHED_SCALES:
    raise UserError(f"--publish: a {options.scale} run measures nothing; use --scale={'|'.join(PUBLISHED_SCALES)}")
  return options


def _reproduce(options: Any, chosen: dict[str, Paper]) -> int:
  from experiments import report

  todo = [(name, paper, task) for name, paper in chosen.items() for task in papers.tasks(paper, options.scale)]
  statuses = []
  for i, (name, paper, task) in enumerate(todo):
    print(f"== {i + 1}/{len(todo)} {name} {task} {options.scale}", file=sys.stderr, flush=True)
    statuses.append(_run(options, name, paper, task))
    print(f"== {name} {task} {options.scale}: {statuses[-1].words}", file=sys.stderr, flush=True)
    if options.publish and statuses[-1].code in (launch.OK, launch.MISSED):
      publish(_folder(options, name, task), papers.ROOT / "results" / name, task, options.scale)
  written = report.write(pathlib.Path(options.out), pathlib.Path(options.workdir), options.scale, chosen, statuses)
  keys = ("paper", "task", "scale", "seconds", "words")
  print(launch.table([{key: getattr(status, key) for key in keys} for status in statuses]))
  print("".join(f"report: {path}\n" for path in written), end="")
  return _exit_code([status.code for status in statuses])


def _run(options: Any, name: str, paper: Paper, task: str) -> Status:
  """Runs one task in its own process, unless its result is there for the config as it is now."""
  workdir, start = _folder(options, name, task), time.monotonic()
  try:
    done = _finished(workdir, papers.config(paper, task, options.scale))
  except UserError as error:
    return Status(name, task, options.scale, launch.BAD_INPUT, 0.0, f"failed: {error}")
  except Exception as error:  # a paper that is broken must not stop the others
    words = f"failed: {paper.module} or its config is broken ({type(error).__name__}: {error})"
    return Status(name, task, options.scale, launch.DEFECT, 0.0, words)
  if done is not None:
    code = launch.MISSED if result_lib.missed(done) else launch.OK
    return Status(name, task, options.scale, code, 0.0, _words(code, done, "done before"))
  arguments = [f"--config={papers.config_path(paper)}:{task},{options.scale}", f"--workdir={workdir}"]
  code = subprocess.run(
      [sys.executable, "-m", "experiments.jobs", "[]", str(os.getpid()), paper.module, *arguments,
       f"--jobs={options.jobs}"], check=False,
  ).returncode
  if code == launch.INTERRUPTED:
    raise KeyboardInterrupt
  done = result_lib.load(workdir / "result.json") if code in (launch.OK, launch.MISSED) else None
  return Status(name, task, options.scale, code, round(time.monotonic() - start, 1), _words(code, done, "ran"))


def _folder(options: Any, name: str, task: str) -> pathlib.Path:
  return pathlib.Path(options.workdir) / name / f"{task}.{options.scale}"


def _finished(workdir: pathlib.Path, cfg: Any) -> dict[str, Any] | None:
  """Returns the result in a workdir when it is whole and of exactly this config, else None."""
  if not (workdir / "result.json").exists():
    return None
  result = result_lib.load(workdir / "result.json")
  return result if result["config"] == config_lib.to_dict(cfg) else None


def _words(code: int, result: dict[str, Any] | None, fine: str) -> str:
  if result is None:
    return f"failed (code {code}); see above"
  missed = result_lib.missed(result)
  return f"{fine}, bar missed: {', '.join(missed)}" if missed else fine


def _exit_code(codes: Sequence[int]) -> int:
  if any(code not in (launch.OK, launch.MISSED, launch.BAD_INPUT) for code in codes):
    return launch.DEFECT
  return max(codes, default=launch.OK)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
