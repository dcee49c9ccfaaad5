"""bench: every arm of the timing task, and one line for bad input."""

import json

from experiments import bench, launch, papers


def test_measures_all_arms_of_papers_with_a_timing_task(fake, monkeypatch, tmp_path, capsys):
  own = papers.Paper("fakepaper", "configs/fakepaper.py", ("a", "b"), bench="b")
  monkeypatch.setattr(papers, "ROOT", fake.folder)
  monkeypatch.setattr(papers, "PAPERS", {"fakepaper": own, "other": own._replace(bench="")})
  monkeypatch.chdir(fake.folder)
  monkeypatch.syspath_prepend(str(fake.folder))
  assert bench.main([f"--out={tmp_path / 'bench.json'}"]) == launch.OK
  numbers = json.loads((tmp_path / "bench.json").read_text())
  assert list(numbers) == ["fakepaper"] and set(numbers["fakepaper"]) == {"tune_score", "acc"}
  assert "fakepaper" in capsys.readouterr().out


def test_unknown_paper_is_one_line(capsys):
  assert bench.main(["--only=fish"]) == launch.BAD_INPUT
  assert "fish" in capsys.readouterr().err
