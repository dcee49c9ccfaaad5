"""Timings on this machine: runs the timing task of every paper that has one and prints the numbers.

  python -m experiments.bench [--only=sheaf_admm] [--out=bench.json]

Times move with the machine; the ratios within one run are what to look at.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from experiments import launch, papers
from sakanajax.core import files
from sakanajax.core.errors import UserError


def measure(name: str) -> dict[str, float]:
  """The scalars of all arms of one paper's timing task, at scale cpu and the first seed."""
  paper, numbers = papers.PAPERS[name], {}
  cfg, run = papers.config(paper, paper.bench, "cpu"), papers.experiment(paper).run
  with tempfile.TemporaryDirectory() as folder:
    for arm in cfg.arms:
      context = launch.Context(pathlib.Path(folder), f"{name} {paper.bench} {arm}")
      numbers |= run(cfg, launch.Unit(arm, cfg.seeds[0], None, 1.0), context)
  return numbers


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` (without the program's name); returns the exit code."""
  parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__.split("\n", 1)[0])
  parser.add_argument("--only", default="", help="comma-separated papers; default all")
  parser.add_argument("--out", default="", help="also write the numbers to this JSON file")
  options = parser.parse_args(list(argv))
  try:
    numbers = {name: measure(name) for name, paper in papers.select(options.only).items() if paper.bench}
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return launch.BAD_INPUT
  for name, values in numbers.items():
    print(launch.table([{"paper": name, "key": key, "value": f"{value:.4g}"} for key, value in values.items()]))
  if options.out:
    print(files.write_json(options.out, numbers))
  return launch.OK


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
