"""The report: what each paper claims, what we measured, and an honest verdict.

  python -m experiments.report [--scale=smoke] [--workdir=runs] [--out=.]   rebuilds report.md and report.html
  python -m experiments.report --readme                                     renews the results table of README.md

A verdict follows one rule (`verdict`), from the result of the largest scale at hand (paper, gpu, cpu; a smoke run measures
nothing). The claim's bar is its own or, without one, the `expect` of the result:
  reproduced           the mean over seeds of the claim's metric lies within its bar
  direction only       the bar is missed or there is none, but the metric beats the baseline measured beside it
  not reproduced       neither
  not measurable here  there is no result that holds the metric
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import launch, papers
from experiments.papers import Paper
from experiments.protocol import Claim
from sakanajax.core import files
from sakanajax.core import result as result_lib
from sakanajax.core.errors import UserError

REPRODUCED, DIRECTION, NOT, UNMEASURED = "reproduced", "direction only", "not reproduced", "not measurable here"
VERDICTS = (REPRODUCED, DIRECTION, NOT, UNMEASURED)
RULE = {
    REPRODUCED: "the mean over seeds of the claim's metric meets the bar set for our scale",
    DIRECTION: "the bar is missed or there is none, but the metric beats the baseline measured beside it",
    NOT: "measured, and neither of the two",
    UNMEASURED: "no cpu, gpu or paper result holds this metric",
}
SCALES = ("paper", "gpu", "cpu")  # nearest to the paper first
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


class Entry(NamedTuple):
  """A result and where it came from."""

  result: dict[str, Any]
  plots: tuple[pathlib.Path, ...]
  origin: str  # "this run" or "committed"


class Row(NamedTuple):
  """One claim, judged."""

  claim: Claim
  verdict: str
  entry: Entry | None  # the evidence
  bar: tuple[float | None, float | None] | None

  @property
  def number(self) -> str:
    """Ours: '0.98 ± 0.01'."""
    return "-" if self.entry is None else result_lib.show_mean(self.entry.result, self.claim.metric)

  @property
  def note(self) -> str:
    """What the number rests on: '3 seeds, cpu, bar >= 0.97'."""
    if self.entry is None:
      return ""
    seeds = len(result_lib.values(self.entry.result, self.claim.metric))
    bar = f", bar {result_lib.show_bar(self.bar)}" if self.bar else ""
    scale = self.entry.result["scale"]
    where = f"; {self.claim.scaled}" if self.claim.scaled and scale == "cpu" else ""
    return f"{seeds} seed{'s' if seeds != 1 else ''}, {scale}{bar}{where}"

  @property
  def ours(self) -> str:
    return f"{self.number} ({self.note})" if self.note else self.number

  @property
  def baseline(self) -> str:
    key = self.claim.baseline_metric
    if self.entry is None or not key:
      return "-"
    return f"{result_lib.show_mean(self.entry.result, key)} ({key})"


class Section(NamedTuple):
  """Everything the report says about one paper."""

  name: str
  title: str
  rows: list[Row]
  entries: list[Entry]  # this run's first
  problem: str = ""


def verdict(claim: Claim, entries: Sequence[Entry]) -> Row:
  """Judges a claim by the rule of the module's docstring."""
  for scale in SCALES:
    for entry in entries:
      result = entry.result
      if result["task"] == claim.task and result["scale"] == scale and result_lib.values(result, claim.metric):
        bar = claim.bar or result["expect"].get(claim.metric)
        bar = tuple(bar) if bar else None
        return Row(claim, _judge(claim, result, bar), entry, bar)
  return Row(claim, UNMEASURED, None, claim.bar)


def collect(chosen: Mapping[str, Paper], workdir: pathlib.Path | None, scale: str, committed: pathlib.Path) -> list[Section]:
  """Returns one section per paper from the runs of `scale` in `workdir` (None: none) and the committed results."""
  sections = []
  for name, paper in chosen.items():
    entries, problem, title, claims = [], "", name, ()
    try:
      if workdir is not None:
        folders = [workdir / name / f"{task}.{scale}" for task in papers.tasks(paper, scale)]
        entries += [_entry(folder / "result.json", folder.glob("*.png"), "this run") for folder in folders
                    if (folder / "result.json").exists()]
      entries += [_entry(path, path.parent.glob(f"{path.stem}.*.png"), "committed")
                  for path in sorted((committed / name).glob("*.json"))]
      loaded = papers.experiment(paper)
      title, claims = loaded.paper or name, loaded.claims
    except (ImportError, UserError) as error:
      problem = f"{type(error).__name__}: {error}"
    sections.append(Section(name, title, [verdict(claim, entries) for claim in claims], entries, problem))
  return sections


def write(
    out: pathlib.Path, workdir: pathlib.Path, scale: str, chosen: Mapping[str, Paper], statuses: Sequence[Any] = ()
) -> list[pathlib.Path]:
  """Writes report.md and the self-contained report.html into `out`; returns their paths.

  `statuses` (`reproduce.Status`) tells how the tasks of this run ended.
  """
  from experiments import report_html

  sections = collect(chosen, workdir, scale, papers.ROOT / "results")
  return [
      files.write_text(out / "report.md", markdown(sections, scale, statuses, out)),
      files.write_text(out / "report.html", report_html.page(sections, scale, statuses)),
  ]


def markdown(sections: Sequence[Section], scale: str, statuses: Sequence[Any], out: pathlib.Path) -> str:
  """Returns the report as Markdown; plots are linked relative to the folder `out`."""
  lines = ["# sakanajax: claims and measurements", "", summary(sections), ""]
  lines += [f"- **{word}**: {rule}" for word, rule in RULE.items()]
  if statuses:
    heads = ("paper", "task", "scale", "seconds", "how it ended")
    rows = [(s.paper, s.task, s.scale, f"{s.seconds:.1f}", s.words) for s in statuses]
    lines += ["", f"## This run ({scale})", "", *_pipe(heads, rows)]
  for section in sections:
    lines += ["", f"## {section.title}", ""]
    lines += [f"Could not be read whole: {section.problem}", ""] if section.problem else []
    lines += _pipe(("claim", "published", "setting", "ours (mean ± sd)", "baseline", "verdict"), claim_cells(section))
    for entry in section.entries:
      result = entry.result
      lines += ["", f"### {caption(entry)}", "", environment_line(result), ""]
      lines += _pipe(("key", "mean ± sd", "bar", "ok"), [row.values() for row in launch.result_rows(result)])
      lines += [f"\n![{plot.stem}]({pathlib.PurePath(os.path.relpath(plot, out)).as_posix()})" for plot in entry.plots]
  return "\n".join(lines) + "\n"


def claim_cells(section: Section) -> list[tuple[str, ...]]:
  """Returns the six cells of every claim of a section."""
  return [(row.claim.statement, row.claim.published, row.claim.setting, row.ours, row.baseline, row.verdict)
          for row in section.rows]


def summary(sections: Sequence[Section]) -> str:
  """Returns one sentence that counts the verdicts."""
  rows = [row for section in sections for row in section.rows]
  counts = [(sum(row.verdict == word for row in rows), word) for word in VERDICTS]
  told = ", ".join(f"{count} {word}" for count, word in counts if count)
  return f"{len(rows)} claims of {len(sections)} paper{'s' if len(sections) != 1 else ''}: {told or 'none judged'}."


def caption(entry: Entry) -> str:
  """Returns 'maze, cpu scale, committed'."""
  note = " (smoke: shows that everything runs, measures nothing)" if entry.result["scale"] == "smoke" else ""
  return f"{entry.result['task']}, {entry.result['scale']} scale, {entry.origin}{note}"


def environment_line(result: Mapping[str, Any]) -> str:
  """Returns where and how long a result took, in one line."""
  env = result["environment"]
  versions = env.get("versions", {})
  parts = [
      f"{env.get('devices', 1)} × {env.get('device', 'unknown device')}", f"{env.get('cpus', '?')} cpus",
      f"python {env.get('python', '?')}", f"jax {versions.get('jax', '?')}",
      f"{duration(result['wall_s'])} in all units", f"peak {result['peak_rss_mb']:,.0f} MiB",
      f"seeds {', '.join(map(str, result['seeds']))}",
  ]
  return ", ".join(parts) + (f", commit {env['commit']}" if env.get("commit") else "")


def duration(seconds: float) -> str:
  """Returns seconds as '48.2 s', '12.5 min' or '3.1 h'."""
  if seconds < 120:
    return f"{seconds:.1f} s"
  return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def readme_table(root: pathlib.Path) -> str:
  """Returns the results table of README.md, from the committed results under `root` alone."""
  lines = []
  for section in collect(papers.PAPERS, None, "", root / "results"):
    if section.problem:
      raise UserError(f"results of {section.name}: {section.problem}")
    for row in section.rows:
      link = row.verdict
      if row.entry is not None:
        result = row.entry.result
        link = f"[{row.verdict}](results/{section.name}/{result['task']}.{result['scale']}.json)"
      claim = row.claim
      lines.append((section.name, claim.statement, f"{claim.published} ({claim.setting})", row.ours, row.baseline, link))
  return "\n".join(_pipe(("paper", "claim", "published", "ours (mean ± sd)", "baseline", "verdict"), lines))


def readme(root: pathlib.Path) -> tuple[str, str]:
  """Returns README.md under `root` as it is and as it should be; raises UserError without the two markers."""
  path = root / "README.md"
  try:
    text = path.read_text(encoding="utf-8")
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}") from error
  pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
  if len(pattern.findall(text)) != 1:
    raise UserError(f"{path} must hold the markers {BEGIN} and {END} once")
  table = readme_table(root)
  return text, pattern.sub(lambda unused: f"{BEGIN}\n{table}\n{END}", text)


def main(argv: Sequence[str]) -> int:
  """Runs the command line; returns the exit code (0 or 2)."""
  import argparse

  class Parser(argparse.ArgumentParser):
    def error(self, message: str):
      raise UserError(message)

  parser = Parser(prog="python -m experiments.report", description=__doc__.split("\n", 1)[0], allow_abbrev=False)
  parser.add_argument("--readme", action="store_true", help="renew the results table of README.md and stop")
  parser.add_argument("--scale", default="smoke", choices=papers.SCALES, help="which runs count as 'this run'")
  parser.add_argument("--only", default="", help="comma-separated papers; default all")
  parser.add_argument("--workdir", default="runs")
  parser.add_argument("--out", default=".")
  try:
    options = parser.parse_args(list(argv))
    if options.readme:
      before, after = readme(papers.ROOT)
      if before != after:
        files.write_text(papers.ROOT / "README.md", after)
      print("README.md " + ("was up to date" if before == after else "renewed"))
    else:
      chosen = papers.select(options.only)
      for path in write(pathlib.Path(options.out), pathlib.Path(options.workdir), options.scale, chosen):
        print(f"report: {path}")
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return launch.BAD_INPUT
  return launch.OK


def _judge(claim: Claim, result: Mapping[str, Any], bar: Sequence[float | None] | None) -> str:
  ours = result_lib.mean(result, claim.metric)
  if bar is not None and result_lib.within(ours, bar):
    return REPRODUCED
  theirs = result_lib.mean(result, claim.baseline_metric) if claim.baseline_metric else math.nan
  better = ours > theirs if claim.direction == "higher" else ours < theirs  # False when either is NaN
  return DIRECTION if better else NOT


def _entry(path: pathlib.Path, plots: Any, origin: str) -> Entry:
  return Entry(result_lib.load(path), tuple(sorted(plots)), origin)


def _pipe(heads: Sequence[str], rows: Any) -> list[str]:
  """Returns a Markdown table; text cannot break out of its cell."""
  clean = [[re.sub(r"\s+", " ", str(cell)).replace("|", "\\|") for cell in row] for row in rows]
  if not clean:
    return ["Nothing yet."]
  lines = [list(heads), ["---"] * len(heads), *clean]
  return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
