"""reproduce: runs, skips, goes on after a failure, publishes, reports."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import launch, papers, reproduce
from sakanajax.core.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def house(fake, monkeypatch):
  """A root with the fake paper as the only one, and that folder as the current one."""
  monkeypatch.setattr(papers, "ROOT", fake.folder)
  monkeypatch.setattr(papers, "PAPERS", {"fakepaper": papers.Paper("fakepaper", "configs/fakepaper.py", ("a", "b"))})
  monkeypatch.setenv("PYTHONPATH", fake.env["PYTHONPATH"])
  monkeypatch.chdir(fake.folder)
  return fake


def _ran(house):
  return sum(len(path.read_text().splitlines()) for path in pathlib.Path("runs").rglob("ran.txt"))


def test_smoke_runs_everything_reports_and_then_skips(house, capsys):
  assert reproduce.main(["--scale=smoke"]) == launch.OK
  said = capsys.readouterr()
  assert "1/2 fakepaper a smoke" in said.err and "2/2 fakepaper b smoke" in said.err and "report.html" in said.out
  assert "done" not in said.out and re.search(r"fakepaper +b +smoke +[\d.]+ +ran", said.out)
  result = json.loads(pathlib.Path("runs/fakepaper/b.smoke/result.json").read_text())
  assert result["task"] == "b" and pathlib.Path("report.md").is_file()
  count = _ran(house)
  assert reproduce.main(["--scale=smoke", "--out=again", "--jobs=2"]) == launch.OK
  assert _ran(house) == count and capsys.readouterr().out.count("done before") == 2
  assert pathlib.Path("again/report.html").is_file()


def test_failure_of_one_task_does_not_stop_the_next(house, monkeypatch, capsys):
  text = house.config.read_text().replace('config.sleep, config.trouble = 0.0, ""',
                                          'config.sleep, config.trouble = 0.0, "user" if task == "a" else ""')
  house.config.write_text(text)
  assert reproduce.main([]) == launch.BAD_INPUT
  out = capsys.readouterr().out
  assert "failed (code 2)" in out and "ran" in out and pathlib.Path("runs/fakepaper/b.smoke/result.json").is_file()
  assert "failed (code 2)" in pathlib.Path("report.html").read_text()
  house.config.write_text(text.replace('"user" if task', '"defect" if task'))
  monkeypatch.setitem(papers.PAPERS, "fakepaper", papers.PAPERS["fakepaper"]._replace(tasks=("a",)))
  assert reproduce.main(["--workdir=more"]) == launch.DEFECT


def test_missed_bars_and_publishing(house, capsys):
  house.config.write_text(house.config.read_text().replace("(0.85, None)", "(0.85 if task == 'a' else 0.95, None)"))
  place = house.folder / "results" / "fakepaper"
  place.mkdir(parents=True)
  (place / "a.cpu.old.png").write_bytes(b"old")
  (place / "a.gpu.old.png").write_bytes(b"of another scale")
  assert reproduce.main(["--scale=cpu", "--publish"]) == launch.MISSED
  assert "ran, bar missed: acc" in capsys.readouterr().out
  assert sorted(path.name for path in place.iterdir()) == [
      "a.cpu.acc.png", "a.cpu.json", "a.gpu.old.png", "b.cpu.acc.png", "b.cpu.json"]
  made = pathlib.Path("runs/fakepaper/a.cpu/result.json").read_text()
  assert json.loads((place / "a.cpu.json").read_text()) == json.loads(made)
  assert reproduce.main(["--scale=cpu"]) == launch.MISSED
  assert "done before, bar missed: acc" in capsys.readouterr().out


def test_result_of_another_config_is_not_taken_for_done(house, monkeypatch, capsys):
  monkeypatch.setitem(papers.PAPERS, "fakepaper", papers.PAPERS["fakepaper"]._replace(tasks=("a",)))
  assert reproduce.main([]) == launch.OK
  house.config.write_text(house.config.read_text().replace("(0, 1, 2)", "(0, 1, 2, 3)"))
  count = _ran(house)
  assert reproduce.main([]) == launch.OK
  assert _ran(house) == count + 2  # one more seed of two arms
  house.config.write_text(house.config.read_text().replace("steps=10", "steps=11"))
  capsys.readouterr()
  assert reproduce.main([]) == launch.BAD_INPUT
  assert _ran(house) == count + 2


def test_list(house, capsys):
  assert reproduce.main(["--list"]) == launch.OK
  out = capsys.readouterr().out
  assert re.search(r"fakepaper +b +smoke, cpu, gpu, paper +python -m fakepaper --config=configs/fakepaper.py:b,SCALE", out)
  assert not pathlib.Path("runs").exists()


@pytest.mark.parametrize("flags, part", [
    (["--scale=huge"], "invalid choice: 'huge'"),
    (["--only=fake"], "no paper 'fake'; papers: fakepaper"),
    (["--jobs=0"], "--jobs=0"),
    (["--jobs=x"], "invalid int value: 'x'"),
    (["--publish"], "a smoke run measures nothing"),
    (["--scal=cpu"], "unrecognized arguments: --scal=cpu"),
    (["cpu"], "unrecognized arguments: cpu"),
])
def test_bad_flags(house, flags, part, capsys):
  assert reproduce.main(flags) == launch.BAD_INPUT
  err = capsys.readouterr().err
  assert part in err and err.count("\n") == 1


def test_papers_that_are_broken_are_failures_of_their_tasks(house, monkeypatch, capsys):
  monkeypatch.setitem(papers.PAPERS, "gone", papers.Paper("no_such_module", "configs/fakepaper.py", ("x",)))
  monkeypatch.setitem(papers.PAPERS, "bare", papers.Paper("fakepaper", "configs/nowhere.py", ("x",)))
  assert reproduce.main(["--only=gone,bare"]) == launch.DEFECT
  out = capsys.readouterr().out
  assert "no_such_module or its config is broken (ModuleNotFoundError" in out and "there is no config file configs/nowhere.py" in out


def test_publish_refuses_what_is_not_a_result(tmp_path):
  (tmp_path / "result.json").write_text("{}")
  with pytest.raises(UserError, match="not a result"):
    reproduce.publish(tmp_path, tmp_path / "results", "a", "cpu")
  with pytest.raises(UserError, match="measures nothing"):
    reproduce.publish(tmp_path, tmp_path / "results", "a", "smoke")
  assert not (tmp_path / "results").exists()


def test_every_paper_of_the_house_has_its_tasks():
  """Config files name every task and scale that the registry promises, and every claim names a task."""
  for paper in papers.PAPERS.values():
    for task in paper.tasks:
      for scale in papers.SCALES:
        if task in papers.tasks(paper, scale):
          cfg = papers.config(paper, task, scale)
          assert cfg.scale == scale and cfg.seeds and cfg.arms
    assert {claim.task for claim in papers.experiment(paper).claims} <= set(paper.tasks)


def test_binary(house):
  command = [sys.executable, "-m", "experiments.reproduce", "--scale=nope"]
  done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
  assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
