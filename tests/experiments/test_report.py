"""The report: the verdict's rule, what each format says, and that README.md tells what results/ holds."""

import html.parser
import pathlib
import re
import sys

import pytest

from experiments import launch, papers, plots, report, report_html
from experiments.reproduce import Status
from sakanajax.core import result as result_lib
from sakanajax.core.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _result(task="a", scale="cpu", acc=(0.9, 0.92), base=(0.5, 0.6), expect=None, seeds=(0, 1)):
  return result_lib.build(
      "fakepaper", task, scale, {"task": task}, seeds, {"acc": acc} if acc else {}, {"acc_base": base} if base else {},
      {"acc": (0.85, None)} if expect is None else expect, wall_s=100.0, peak_rss_mb=321.0,
  )


def _entry(**changes):
  return report.Entry(_result(**changes), (), "committed")


CLAIM = launch.Claim("a", "it works", "99 %", "19x19", "acc", baseline_metric="acc_base")


@pytest.mark.parametrize("changes, claim, word", [
    ({}, {}, report.REPRODUCED),
    ({"expect": {"acc": (0.95, None)}}, {}, report.DIRECTION),  # below its bar, above the baseline
    ({"expect": {}}, {}, report.DIRECTION),  # no bar at all
    ({"expect": {}}, {"bar": (0.8, 0.95)}, report.REPRODUCED),  # the claim's own bar
    ({}, {"bar": (0.95, None)}, report.DIRECTION),  # which goes before the result's
    ({"expect": {"acc": (0.95, None)}, "base": (0.99, 0.99)}, {}, report.NOT),
    ({"expect": {"acc": (0.95, None)}}, {"baseline_metric": ""}, report.NOT),
    ({"expect": {"acc": (0.95, None)}, "base": ()}, {}, report.NOT),
    ({"expect": {"acc": (None, 0.1)}, "base": (0.99, 0.99)}, {"direction": "lower"}, report.DIRECTION),
    ({"expect": {"acc": (None, 0.1)}}, {"direction": "lower"}, report.NOT),
    ({"acc": (0.9, float("nan"))}, {}, report.NOT),
    ({"acc": ()}, {}, report.UNMEASURED),
    ({"task": "b"}, {}, report.UNMEASURED),
    ({"scale": "smoke"}, {}, report.UNMEASURED),
])
def test_verdict(changes, claim, word):
  assert report.verdict(CLAIM._replace(**claim), [_entry(**changes)]).verdict == word


def test_no_result_is_unmeasured_and_the_larger_scale_decides():
  assert report.verdict(CLAIM, []).verdict == report.UNMEASURED
  small, large = _entry(), _entry(scale="gpu", expect={"acc": (0.99, None)})
  row = report.verdict(CLAIM, [small, large])
  assert row.entry is large and row.verdict == report.DIRECTION
  assert report.verdict(CLAIM, [small, _entry(scale="gpu", acc=())]).entry is small
  mine = report.Entry(_result(acc=(0.1, 0.1)), (), "this run")
  assert report.verdict(CLAIM, [mine, small]).entry is mine  # this run before what is committed


def test_a_row_tells_seeds_scale_and_bar():
  row = report.verdict(CLAIM, [_entry()])
  assert row.ours == "0.91 ± 0.014 (2 seeds, cpu, bar >= 0.85)" and row.baseline == "0.55 ± 0.071 (acc_base)"
  row = report.verdict(CLAIM, [_entry(acc=(0.9,), base=(), expect={}, seeds=(0,))])
  assert row.ours == "0.9 (1 seed, cpu)" and row.baseline == "not measured (acc_base)"
  assert report.verdict(CLAIM, []).ours == "-"


@pytest.fixture
def house(fake, monkeypatch):
  """A root with one paper, one committed cpu result, one smoke run, and a README."""
  monkeypatch.setattr(papers, "ROOT", fake.folder)
  monkeypatch.setattr(papers, "PAPERS", {"fakepaper": papers.Paper("fakepaper", "configs/fakepaper.py", ("a", "b"))})
  result_lib.write(fake.folder / "results/fakepaper/a.cpu.json", _result())
  plots.lines(fake.folder / "results/fakepaper/a.cpu.curve.png", {"net": ([1, 2], [[0.1, 0.2]])})
  smoke = fake.folder / "runs/fakepaper/a.smoke/result.json"
  result_lib.write(smoke, _result(scale="smoke", acc=(0.123, 0.123), expect={}))
  plots.lines(fake.folder / "runs/fakepaper/a.smoke/tiny.png", {"net": ([1, 2], [[0.1, 0.2]])})
  (fake.folder / "README.md").write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nThe end.\n")
  return fake.folder


class _Checker(html.parser.HTMLParser):
  """Collects what an HTML page refers to, and whether its tags are balanced."""

  VOID = {"meta", "img", "br", "rect", "line"}

  def __init__(self):
    super().__init__()
    self.references, self.open, self.faults = [], [], []

  def handle_starttag(self, tag, attrs):
    self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "poster")]
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    pass

  def handle_endtag(self, tag):
    if not self.open or self.open.pop() != tag:
      self.faults.append(tag)


def _write(house):
  statuses = [Status("fakepaper", "a", "smoke", 0, 1.5, "ran"), Status("fakepaper", "b", "smoke", 70, 2.5, "failed (code 70)")]
  return report.write(house, house / "runs", "smoke", papers.PAPERS, statuses)


def test_html_is_whole_and_self_contained(house):
  text = _write(house)[1].read_text()
  checker = _Checker()
  checker.feed(text)
  assert checker.faults == [] and checker.open == []
  assert all(ref.startswith(("data:image/png;base64,", "#")) for ref in checker.references)
  assert sum(ref.startswith("data:") for ref in checker.references) == 2
  assert not re.search(r"https?://|@import|url\(|<script", text)
  assert "the other task &lt;works&gt;" in text and "<works>" not in text
  assert "prefers-color-scheme: dark" in text and "A Fake Paper" in text
  for word in report.VERDICTS:
    assert word in text
  assert str(house) not in text


def test_claims_rest_on_committed_results_when_the_run_is_smoke(house):
  for path in _write(house):
    text = path.read_text()
    assert "0.91 ± 0.014" in text and "2 seeds, cpu, bar" in text and "0.123" in text and "99.0 %" in text
    assert "a, cpu scale, committed" in text and "a, smoke scale, this run (smoke: shows that everything runs" in text
    assert "2 claims of 1 paper: 1 reproduced, 1 not measurable here." in text
    assert "failed (code 70)" in text


def test_markdown_tables_are_rectangular_and_plots_exist(house):
  path = _write(house)[0]
  text = path.read_text()
  block = []
  for line in text.splitlines() + [""]:
    if line.startswith("|"):
      block.append(len(re.findall(r"(?<!\\)\|", line)))
    else:
      assert len(set(block)) <= 1, line
      block = []
  links = re.findall(r"!\[.*?\]\((.*?)\)", text)
  assert len(links) == 2 and all((house / link).is_file() for link in links)


def test_a_paper_that_cannot_be_read_is_told_and_does_not_stop_the_rest(house, monkeypatch):
  (house / "results/fakepaper/b.cpu.json").write_text("{")
  monkeypatch.setitem(papers.PAPERS, "gone", papers.Paper("no_such_module", "configs/gone.py", ("x",)))
  text = _write(house)[0].read_text()
  assert "b.cpu.json is not valid JSON" in text and "No module named 'no_such_module'" in text
  with pytest.raises(UserError, match="b.cpu.json is not valid JSON"):
    report.readme_table(house)


def test_readme_is_renewed_between_its_markers(house, capsys):
  assert report.main(["--readme"]) == launch.OK
  text = (house / "README.md").read_text()
  assert text.startswith("# Title\n") and text.endswith("\nThe end.\n") and "old" not in text
  assert "| fakepaper | the net is accurate | 99.0 % (19x19) | 0.91 ± 0.014 (2 seeds, cpu, bar >= 0.85; 9x9) |" in text
  assert "[reproduced](results/fakepaper/a.cpu.json)" in text and "0.123" not in text
  assert report.main(["--readme"]) == launch.OK and "was up to date" in capsys.readouterr().out
  assert (house / "README.md").read_text() == text


@pytest.mark.parametrize("text", ["", report.BEGIN, f"{report.END} {report.BEGIN}", f"{report.BEGIN}{report.END}" * 2])
def test_readme_without_its_markers(house, text, capsys):
  (house / "README.md").write_text(text)
  assert report.main(["--readme"]) == launch.BAD_INPUT
  assert "must hold the markers" in capsys.readouterr().err
  assert (house / "README.md").read_text() == text


def test_command_line(house, monkeypatch, capsys):
  monkeypatch.chdir(house)
  assert report.main(["--out=out"]) == launch.OK and (house / "out/report.html").is_file()
  assert report.main(["--only=nothing"]) == launch.BAD_INPUT
  assert report.main(["--scale=huge"]) == launch.BAD_INPUT
  err = capsys.readouterr().err
  assert "no paper 'nothing'; papers: fakepaper" in err and "invalid choice: 'huge'" in err


@pytest.mark.parametrize("seconds, words", [(1.26, "1.3 s"), (119.0, "119.0 s"), (600, "10.0 min"), (7200, "2.0 h")])
def test_durations(seconds, words):
  assert report.duration(seconds) == words


def test_bars_need_two_numbers():
  claim = CLAIM._replace(baseline_metric="")
  alone = report.verdict(claim, [_entry(expect={})])
  assert report_html._bars(alone) == "" and "<svg" in report_html._bars(report.verdict(CLAIM, [_entry()]))
  negative = report.verdict(CLAIM, [_entry(acc=(-1.0, -1.0))])
  assert report_html._bars(negative) == ""


def test_plots_are_png_and_atomic(tmp_path):
  paths = [
      plots.lines(tmp_path / "l.png", {"a": ([1, 2, 3], [[1, 2, 3], [2, 3, 4]]), "b": ([1], [[2]])},
                  bars={"paper": 2.0}, logx=True),
      plots.bars(tmp_path / "b.png", {"x": {"a": [1.0, 2.0], "b": [3.0]}, "y": {"a": [float("nan")]}}),
      plots.training(tmp_path / "t.png", {"a": [tmp_path / "missing.jsonl"]}),
  ]
  assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
  with pytest.raises(RuntimeError), plots.figure(tmp_path / "never.png"):
    raise RuntimeError
  assert sorted(path.name for path in tmp_path.iterdir()) == ["b.png", "l.png", "t.png"]
  assert "matplotlib.pyplot" not in sys.modules


def test_training_curves_use_shared_steps(tmp_path, monkeypatch):
  for name, steps in (("a", (1, 2, 3)), ("b", (2, 3, 4))):
    (tmp_path / name).write_text("".join(f'{{"step": {step}, "loss": {step}}}\n' for step in steps))
  seen = {}
  monkeypatch.setattr(plots, "lines", lambda path, series, **unused: seen.update(series))
  plots.training(tmp_path / "t.png", {"net": [tmp_path / "a", tmp_path / "b"]})
  assert seen == {"net": ([2, 3], [[2, 3], [2, 3]])}


def test_readme_of_this_house_is_up_to_date():
  if not list((ROOT / "results").glob("*/*.json")):
    pytest.skip("no results yet")
  before, after = report.readme(ROOT)
  assert before == after, "run: python -m experiments.report --readme"
