"""The report as one HTML file: style inline, plots as base64, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import html
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from experiments import launch, report
from experiments.report import Entry, Row, Section
from sakanajax.core import result as result_lib

_CLASS = {report.REPRODUCED: "yes", report.DIRECTION: "part", report.NOT: "no", report.UNMEASURED: "none"}
_MARK = {report.REPRODUCED: "✓", report.DIRECTION: "↗", report.NOT: "✕", report.UNMEASURED: "○"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8; --paper: #fbfbfa; --card: #fff;
  --accent: #c2410c; --yes: #15803d; --part: #a16207; --no: #b91c1c; --none: #64748b; --track: #eceff2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4af; --line: #31373f; --paper: #14171b;
  --card: #1b1f25; --accent: #fb923c; --yes: #4ade80; --part: #facc15; --no: #f87171; --none: #94a3b8; --track: #2a3038; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 48px 24px 80px; }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .4rem; }
h2 { font-size: 1.4rem; letter-spacing: -.01em; margin: 3.2rem 0 .8rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } small, .small { font-size: .85rem; }
nav { margin: 1.2rem 0 0; display: flex; gap: .4rem 1.2rem; flex-wrap: wrap; } a { color: var(--accent); }
.tally { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 1.8rem 0 0; }
.tally div { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.tally b { font-size: 1.7rem; line-height: 1.2; display: block; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px; margin: .6rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .78rem; white-space: nowrap; }
th, td { padding: .6rem .9rem; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
td.num { font-variant-numeric: tabular-nums; min-width: 11rem; } td.num small { white-space: nowrap; }
code { font: .84em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.pill { display: inline-block; white-space: nowrap; border-radius: 99px; padding: .1rem .65rem; font-size: .82rem;
  font-weight: 600; border: 1px solid currentColor; }
.yes { color: var(--yes); } .part { color: var(--part); } .no { color: var(--no); } .none { color: var(--none); }
svg.bars { display: block; width: 150px; margin-top: .35rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 16px; margin: 1rem 0; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
figure img { display: block; width: 100%; height: auto; }
figcaption { background: var(--card); color: var(--soft); font-size: .82rem; padding: .5rem .8rem;
  border-top: 1px solid var(--line); }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; } summary span { font-weight: 400; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; font-size: .9rem; } dd { margin: 0; }
@media print { .wide, figure { break-inside: avoid; } body { background: #fff; } }
"""


def page(sections: Sequence[Section], scale: str, statuses: Sequence[Any]) -> str:
  """Returns the whole document; everything that is not ours is escaped."""
  body = [_head(sections), _rule()]
  if statuses:
    body.append(_run_table(statuses, scale))
  body += [_section(section) for section in sections]
  return (
      '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
      '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
      f"<title>sakanajax: claims and measurements</title>\n<style>{_STYLE}</style>\n</head>\n"
      f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
  )


def _head(sections: Sequence[Section]) -> str:
  rows = [row for section in sections for row in section.rows]
  tally = "".join(
      f'<div class="{_CLASS[word]}"><b>{sum(row.verdict == word for row in rows)}</b>{_MARK[word]} {word}</div>'
      for word in report.VERDICTS
  )
  links = "".join(f'<a href="#{html.escape(s.name, True)}">{html.escape(s.title)}</a>' for s in sections)
  return (
      f'<h1>Claims and measurements</h1>\n<p class="soft">sakanajax. {html.escape(report.summary(sections))}</p>\n'
      f'<nav>{links}</nav>\n<div class="tally">{tally}</div>\n'
  )


def _rule() -> str:
  words = "".join(f"<dt>{_pill(word)}</dt><dd>{html.escape(rule)}</dd>" for word, rule in report.RULE.items())
  return (
      "<details><summary>How a verdict is reached</summary>\n"
      '<p class="small soft">Always from the largest scale with a result (paper, then gpu, then cpu), always from the mean '
      "over seeds. A smoke run shows that everything works; no verdict rests on it.</p>\n"
      f"<dl>{words}</dl></details>\n"
  )


def _run_table(statuses: Sequence[Any], scale: str) -> str:
  rows = [
      (html.escape(s.paper), html.escape(s.task), report.duration(s.seconds) if s.seconds else "",
       f'<span class="{"yes" if s.code == launch.OK else "no"}">{html.escape(s.words)}</span>')
      for s in statuses
  ]
  return f"<h2>This run ({html.escape(scale)})</h2>\n" + _table(("paper", "task", "time", "how it ended"), rows)


def _section(section: Section) -> str:
  parts = [f'<h2 id="{html.escape(section.name, True)}">{html.escape(section.title)}</h2>\n']
  if section.problem:
    parts.append(f'<p class="no">Could not be read whole: {html.escape(section.problem)}</p>\n')
  heads = ("claim", "published", "setting of the paper", "ours (mean ± sd)", "baseline", "verdict")
  parts.append(_table(heads, [_claim(row) for row in section.rows]))
  shown = {id(row.entry) for row in section.rows}
  evidence = [entry for entry in section.entries if id(entry) in shown]
  others = [entry for entry in section.entries if id(entry) not in shown]
  parts += [_plots(entry) for entry in evidence + others if entry.plots]
  parts += [_numbers(entry) for entry in evidence + others]
  return "".join(parts)


def _claim(row: Row) -> tuple[str, ...]:
  claim = row.claim
  note = html.escape(row.note.replace(">=", "≥").replace("<=", "≤"))
  ours = f"<b>{html.escape(row.number)}</b><br>" + (f'<small class="soft">{note}</small><br>' if note else "")
  ours += f"<code>{html.escape(claim.metric)}</code>{_bars(row)}"
  texts = [html.escape(text) for text in (claim.statement, claim.published, claim.setting)]
  return (*texts, ours, html.escape(row.baseline), _pill(row.verdict))


def _bars(row: Row) -> str:
  """Returns a small drawing: ours above, the baseline below, the bar as a line; '' when one number stands alone."""
  if row.entry is None:
    return ""
  ours = result_lib.mean(row.entry.result, row.claim.metric)
  theirs = result_lib.mean(row.entry.result, row.claim.baseline_metric) if row.claim.baseline_metric else math.nan
  ends = [end for end in row.bar or () if end is not None]
  known = [value for value in (ours, theirs, *ends) if math.isfinite(value)]
  if len(known) < 2 or min(known) < 0 or max(known) <= 0:
    return ""
  top = 1.0 if max(known) <= 1 else max(known) * 1.05
  rows = [(value, colour) for value, colour in ((ours, "var(--accent)"), (theirs, "var(--none)")) if math.isfinite(value)]
  height = 11 * len(rows)
  drawn = "".join(
      f'<rect width="150" height="9" y="{11 * i + 1}" fill="var(--track)"/>'
      f'<rect width="{150 * value / top:.1f}" height="9" y="{11 * i + 1}" fill="{colour}"/>'
      for i, (value, colour) in enumerate(rows)
  )
  drawn += "".join(
      f'<line x1="{150 * end / top:.1f}" x2="{150 * end / top:.1f}" y1="0" y2="{height}" stroke="var(--ink)" '
      'stroke-width="1.5"/>' for end in ends
  )
  return (
      f'<svg class="bars" viewBox="0 0 150 {height}" style="height:{height}px" role="img" '
      f'aria-label="ours above, baseline below, bar as a line">{drawn}</svg>'
  )


def _plots(entry: Entry) -> str:
  figures = "".join(_figure(plot, report.caption(entry)) for plot in entry.plots)
  return f'<div class="plots">{figures}</div>\n' if figures else ""


def _figure(plot: pathlib.Path, caption: str) -> str:
  content = base64.b64encode(plot.read_bytes()).decode("ascii")
  name = plot.stem.split(".")[-1].replace("_", " ")
  text = html.escape(f"{name}: {caption}")
  return f'<figure><img alt="{text}" src="data:image/png;base64,{content}"><figcaption>{text}</figcaption></figure>\n'


def _numbers(entry: Entry) -> str:
  rows = [[html.escape(str(cell)) for cell in row.values()] for row in launch.result_rows(entry.result)]
  return (
      f"<details><summary>All numbers: <span>{html.escape(report.caption(entry))}</span></summary>\n"
      f'<p class="small soft">{html.escape(report.environment_line(entry.result))}</p>\n'
      f"{_table(('key', 'mean ± sd', 'bar', 'ok'), rows)}</details>\n"
  )


def _pill(word: str) -> str:
  return f'<span class="pill {_CLASS[word]}">{_MARK[word]} {word}</span>'


def _table(heads: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table of cells that are HTML already."""
  if not rows:
    return '<p class="soft">Nothing yet.</p>\n'
  top = "".join(f"<th>{head}</th>" for head in heads)
  lines = "".join("<tr>" + "".join(f'<td class="num">{cell}</td>' if i == 3 else f"<td>{cell}</td>"
                                   for i, cell in enumerate(row)) + "</tr>\n" for row in rows)
  return f'<div class="wide"><table><thead><tr>{top}</tr></thead>\n<tbody>{lines}</tbody></table></div>\n'
