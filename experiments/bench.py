"""Timings on this machine: runs the `speed` task of every paper that has one and prints the numbers.

  python -m experiments.bench [--out=bench.json]

Times move with the machine; the ratios within one run are what to look at.
"""

from __future__ import annotations

import pathlib
import tempfile

from absl import app, flags

from experiments import launch, papers
from sakanajax.core import files

_OUT = flags.DEFINE_string("out", "", "Also write the numbers to this JSON file.")


def measure(name: str) -> dict[str, float]:
  """The scalars of one paper's `speed` task at scale cpu."""
  paper = papers.PAPERS[name]
  cfg = papers.config(paper, "speed", "cpu")
  with tempfile.TemporaryDirectory() as folder:
    context = launch.Context(pathlib.Path(folder), f"{name} speed")
    return dict(papers.experiment(paper).run(cfg, launch.Unit("sheaf", 0, None, 1.0), context))


def main(argv: list[str]) -> None:
  del argv
  numbers = {name: measure(name) for name, paper in papers.PAPERS.items() if "speed" in paper.tasks}
  for name, values in numbers.items():
    print(launch.table([{"paper": name, "key": key, "value": f"{value:.4g}"} for key, value in values.items()]))
  if _OUT.value:
    print(files.write_json(_OUT.value, numbers))


if __name__ == "__main__":
  app.run(main)
