"""The launcher: flow, tuning, resuming, exit codes, parallel units, and every kind of bad command line."""

import importlib
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time

import pytest
from absl import flags as absl_flags

from experiments import command_line, jobs, launch, units
from sakanajax.core.errors import UserError


def _parse(fake, *flags, spec="a,cpu"):
  experiment = importlib.import_module("fakepaper").EXPERIMENT
  argv, values = fake.argv(*flags, spec=spec), absl_flags.FlagValues()
  command_line.define(experiment, values, argv)
  return experiment, *command_line.parse(experiment, values, argv)


def _run(fake, *flags, spec="a,cpu"):
  return launch.main(*_parse(fake, *flags, spec=spec))


def _times(fake):
  """Returns {unit folder: how often it ran}."""
  return {str(path.parent.relative_to(fake.folder / "work" / "units")): len(path.read_text().splitlines())
          for path in (fake.folder / "work").rglob("ran.txt")}


def _result(fake):
  return json.loads((fake.folder / "work" / "result.json").read_text())


def test_flow_tunes_trains_and_measures(fake, capsys):
  assert _run(fake) == launch.OK
  assert _times(fake) == {f"net/lr_{lr}": 1 for lr in (0.1, 0.01, 0.001)} | {
      f"{arm}/seed_{seed}": 1 for arm in ("net", "base") for seed in (0, 1, 2)}
  result = _result(fake)
  assert result["metrics"]["acc"] == [0.9, 0.91, 0.92] and result["baselines"]["acc_base"] == [0.6, 0.61, 0.62]
  assert result["metrics"]["lr_net"] == [0.01]  # the best of the three
  assert result["passed"] is True and result["seeds"] == [0, 1, 2] and result["scale"] == "cpu"
  assert result["peak_rss_mb"] > 10 and result["wall_s"] >= 0
  out = capsys.readouterr().out
  assert "0.91 ± 0.01" in out and ">= 0.85" in out and "result.json" in out and "acc.png" in out


def test_finished_workdir_says_so_and_reruns_nothing(fake, capsys):
  _run(fake)
  before = _result(fake)
  capsys.readouterr()
  assert _run(fake) == launch.OK
  assert "finished already: 9 units" in capsys.readouterr().out
  assert set(_times(fake).values()) == {1} and _result(fake) == before


def test_more_seeds_or_arms_or_other_bars_do_not_rerun_the_rest(fake):
  assert _run(fake, "--arms=net", "--seeds=0,1") == launch.OK
  assert _run(fake, "--seeds=0,1,2", "--config.expect.acc=(0.99, None)") == launch.MISSED
  assert set(_times(fake).values()) == {1} and len(_times(fake)) == 9


def test_another_config_in_the_same_workdir_is_refused_by_key(fake, capsys):
  _run(fake)
  before = _times(fake)
  assert _run(fake, "--config.train.steps=11") == launch.BAD_INPUT
  err = capsys.readouterr().err
  assert "train.steps: 10 there, 11 here" in err and "choose another --workdir or delete" in err
  assert _times(fake) == before


def test_an_unfinished_unit_of_another_config_is_refused_too(fake, capsys):
  _run(fake)
  (fake.folder / "work/units/base/seed_0/outcome.json").unlink()
  assert _run(fake, "--config.train.lr=0.5") == launch.BAD_INPUT
  assert "train.lr: 0.001 there, 0.5 here" in capsys.readouterr().err


def test_seed_trained_at_another_rate_is_refused(fake, capsys):
  _run(fake, "--config.tune.lrs.net=(0.1,)")
  assert _run(fake) == launch.BAD_INPUT
  assert "net/seed_0 holds another run (unit.lr: 0.1 there, 0.01 here)" in capsys.readouterr().err


def test_a_change_to_one_arm_leaves_the_others_valid(fake):
  experiment, cfg, options = _parse(fake)
  experiment = experiment._replace(arm_config=lambda cfg, arm: {"steps": cfg.train.steps if arm == "net" else 0})
  assert launch.main(experiment, cfg, options) == launch.OK
  _, other, _ = _parse(fake, "--config.train.steps=11", "--arms=net")
  assert launch.main(experiment, other, options) == launch.BAD_INPUT
  shutil.rmtree(fake.folder / "work/units/net")
  _, other, _ = _parse(fake, "--config.train.steps=11")
  assert launch.main(experiment, other, options) == launch.OK
  assert set(_times(fake).values()) == {1}


def test_neutral_keys_may_be_nested(fake):
  experiment, cfg, _ = _parse(fake)
  experiment = experiment._replace(neutral=("train.lr", "train.nothing", "task.nothing", "no.such.key"))
  unit = units.Unit("net", 0, None, 1.0)
  plain = units.essence(experiment, cfg, unit)["config"]
  assert plain["train"] == {"steps": 10} and plain["seeds"] == [0, 1, 2]


@pytest.mark.parametrize("content", [
    "", "[]", "{}", '{"scalars": 3}', '{"scalars": {}, "wall_s": 1, "peak_rss_mb": 1, "note": ""}'])
@pytest.mark.parametrize("name", ["outcome.json", "unit.json"])
def test_damaged_outcome_is_named(fake, content, name, capsys):
  _run(fake)
  (fake.folder / "work/units/base/seed_0" / name).write_text(content)
  assert _run(fake) == launch.BAD_INPUT
  assert "base/seed_0" in capsys.readouterr().err


def test_missed_and_unmeasured_bars_are_listed(fake, capsys):
  assert _run(fake, "--config.expect={'acc': (None, 0.5), 'nothing': (0.0, None), 'acc_base': (0.5, 0.7)}") == launch.MISSED
  said = capsys.readouterr()
  assert "missed: acc, nothing" in said.err and "not measured" in said.out
  assert _result(fake)["passed"] is False


def test_smoke_has_no_bars_and_is_ok(fake):
  assert _run(fake, spec="a,smoke") == launch.OK
  assert _result(fake)["passed"] is False


def test_tie_takes_the_smaller_rate(fake):
  _run(fake, "--config.trouble=tie")
  assert _result(fake)["metrics"]["lr_net"] == [0.001]


def test_diverged_trial_loses_and_is_remembered(fake):
  assert _run(fake, "--config.trouble=diverge") == launch.OK
  assert _result(fake)["metrics"]["lr_net"] == [0.001]
  outcome = json.loads((fake.folder / "work/units/net/lr_0.1/outcome.json").read_text())
  assert "nan at lr 0.1" in outcome["note"]
  _run(fake, "--config.trouble=diverge")
  assert set(_times(fake).values()) == {1}


def test_all_trials_diverged(fake, capsys):
  assert _run(fake, "--config.trouble=diverge all", "--arms=net") == launch.BAD_INPUT
  assert "no learning rate of arm net trained" in capsys.readouterr().err


def test_best_lr_ignores_nan_and_missing_scores():
  outcome = lambda score: units.Outcome({} if score is None else {"tune_score": score}, 0.0, 0.0)
  assert units.best_lr({0.1: outcome(float("nan")), 0.3: outcome(None), 0.2: outcome(-5.0)}, "x") == 0.2


@pytest.mark.parametrize("trouble, code", [("user", launch.BAD_INPUT), ("defect", launch.DEFECT)])
def test_trouble_in_a_unit(fake, trouble, code, capsys):
  assert _run(fake, f"--config.trouble={trouble}", "--arms=base") == code
  err = capsys.readouterr().err
  assert ("error: the data file is empty" in err) == (trouble == "user")
  assert ("Traceback" in err) == (trouble == "defect")
  assert not (fake.folder / "work/result.json").exists()


@pytest.mark.parametrize("trained", [False, True])
def test_a_unit_refused_before_it_trained_leaves_no_trace(fake, trained):
  experiment, cfg, _ = _parse(fake)

  def refuse(cfg, unit, context):
    if trained:
      (context.workdir / "metrics.jsonl").write_text("{}")
    raise UserError("the data file is empty")

  unit = units.Unit("base", 0, None, 1.0)
  with pytest.raises(UserError, match="empty"):
    units.run_one(experiment._replace(run=refuse), cfg, fake.folder / "work", unit)
  assert units.folder(fake.folder / "work", unit).exists() == trained


def test_dry_run_and_modes_touch_no_workdir(fake, capsys):
  assert _run(fake, "--dry_run") == launch.OK
  assert "12,345" in capsys.readouterr().out
  assert _run(fake, "--mode=inspect", "--input=maze.txt", "--out=seen") == launch.OK
  assert "inspecting maze.txt seen" in capsys.readouterr().out
  assert not (fake.folder / "work").exists()


BAD = {
    ("--config.train.stepz=3",): ("--config.train.stepz", "unknown key stepz; did you mean steps?"),
    ("--config.trian.steps=3",): ("unknown key trian; did you mean train?",),
    ("--config.zzz",): ("--config.zzz: unknown key zzz",),
    ("--config.train.steps=many",): ("--config.train.steps=many",),
    ("--config.train.steps=2.5",): ("--config.train.steps=2.5",),
    ("--config.train=3",): ("--config.train=3",),
    ("--config.train.lr=nan",): ("config.train.lr", "finite"),
    ("--config.sleep=-1",): ("config: sleep must not be negative, got -1.0",),
    ("--config.tune.lrs.net=(0.1,'x')",): ("config.tune.lrs.net[1]: expected float, got 'x'",),
    ("--config.expect.acc=5",): ("config.expect.acc",),
    ("--seeds=0,x",): ("--seeds=0,x",),
    ("--seeds=1,1",): ("--seeds=1,1",),
    ("--seeds=-1",): ("--seeds=-1",),
    ("--seeds=,",): ("--seeds=,",),
    ("--arms=nett",): ("no arm 'nett'", "net, base"),
    ("--mode=watch",): ("--mode=watch", "train, inspect"),
    ("--jobs=0",): ("--jobs=0",),
    ("--jobs=x",): ("--jobs=x",),
    ("--jobs=2", "--coordinator_address=localhost:1"): ("exclude each other",),
    ("--coordinator_address=localhost:1", "--process_id=1"): ("--process_id=1",),
    ("--unit={",): ("--unit={",),
    ("--wrokdir=x",): ("wrokdir", "workdir"),
    ("train",): ("'train' is not a flag",),
}


@pytest.mark.parametrize("flags", BAD, ids=" ".join)
def test_bad_flags_are_one_clear_error(fake, flags):
  with pytest.raises(UserError) as error:
    _parse(fake, *flags)
  for part in BAD[flags]:
    assert part in str(error.value)
  assert "\n" not in str(error.value) and not (fake.folder / "work").exists()


@pytest.mark.parametrize("spec, parts", [
    ("c,cpu", ("there is no task 'c'; tasks: a, b",)),
    ("a,huge", ("a,huge", "there is no scale 'huge'; scales: smoke, cpu")),
    ("a", ("not enough values",)),
])
def test_bad_config_string(fake, spec, parts):
  with pytest.raises(UserError) as error:
    _parse(fake, spec=spec)
  assert all(part in str(error.value) for part in parts) and "Traceback" not in str(error.value)


@pytest.mark.parametrize("source, part", [
    ("def get_config(x)\n", "SyntaxError"), ("1/0", "ZeroDivisionError"), ("x = 1", "get_config"),
    ("def get_config(x): return {'task': 'a'}", "config.scale: missing"),
    ("def get_config(x): return 3", "expected a section"),
])
def test_broken_config_file(fake, source, part):
  fake.config.write_text(source)
  sys.modules.pop("config_config", None)  # ml_collections loads every config under this name
  with pytest.raises(UserError, match=part):
    _parse(fake)


def test_no_config_and_no_such_config(fake):
  with pytest.raises(UserError, match="no config; give --config="):
    command_line._check_config_file(["x", "--seeds=1"])
  with pytest.raises(UserError, match="there is no file 'configs/nope.py'"):
    command_line._check_config_file(["x", "--config=configs/nope.py:a,cpu"])


def test_unusable_workdir(fake, capsys):
  (fake.folder / "work").write_text("a file")
  assert _run(fake) == launch.BAD_INPUT
  assert "cannot use --workdir=" in capsys.readouterr().err


def test_binary_exit_codes_and_single_line(fake):
  done = fake.run("--config.train.stepz=3")
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: --config.train.stepz: unknown key")
  done = fake.run("--help")
  assert done.returncode == 0 and "A fake paper." in done.stdout and "--workdir" in done.stdout
  done = fake.run("--arms=net", "--seeds=0", "--config.expect.acc=(0.95, None)")
  assert done.returncode == 1 and "missed: acc" in done.stderr


def test_jobs_give_the_same_numbers_on_their_own_cores(fake):
  done = fake.run("--jobs=2")
  assert done.returncode == 0, done.stderr
  assert "[6/6]" in done.stderr and "[3/3]" in done.stderr
  assert _result(fake)["metrics"]["acc"] == [0.9, 0.91, 0.92] and _result(fake)["metrics"]["lr_net"] == [0.01]
  share = max(1, len(os.sched_getaffinity(0)) // 2)
  logs = list((fake.folder / "work").rglob("log.txt"))
  assert len(logs) == 9 and all(f"cores {share}" in log.read_text() for log in logs)
  assert set(_times(fake).values()) == {1}


def test_failing_child_is_told_by_its_last_words(fake):
  done = fake.run("--jobs=2", "--config.trouble=user", "--arms=base")
  assert done.returncode == 2
  last = done.stderr.strip().splitlines()[-1]
  assert last.startswith("error: 'base seed 1': the data file is empty; give another (log: ") and "log.txt" in last
  shutil.rmtree(fake.folder / "work")
  done = fake.run("--jobs=2", "--config.trouble=defect", "--arms=base")
  assert done.returncode == launch.DEFECT
  assert "failed: 'base seed 1' ended with code 70: RuntimeError: a defect" in done.stderr


def _alive(pid):
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
  except OSError:
    return False


def _wait(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.02)


def _pids(fake):
  return [int(path.read_text().split()[0]) for path in (fake.folder / "work").rglob("ran.txt") if path.read_text()]


@pytest.mark.parametrize("sign, code", [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, launch.INTERRUPTED)])
def test_stopped_parent_takes_its_children_along_and_resumes(fake, sign, code):
  with fake.start("--jobs=2", "--seeds=0", "--config.sleep=30") as process:
    _wait(lambda: len(_pids(fake)) == 2)
    children = _pids(fake)
    assert all(map(_alive, children))
    process.send_signal(sign)
    _, err = process.communicate(timeout=20)
  assert process.returncode == code
  assert ("the same command resumes" in err) == (sign == signal.SIGINT)
  _wait(lambda: not any(map(_alive, children)))
  for path in (fake.folder / "work").rglob("unit.json"):  # so that the rest of the test is quick
    path.write_text(path.read_text().replace('"sleep": 30.0', '"sleep": 0.0'))
  assert _run(fake, "--seeds=0") == launch.OK
  assert _result(fake)["metrics"]["acc"] == [0.9]


def test_second_launcher_on_a_workdir_is_told(fake):
  with fake.start("--seeds=0", "--arms=base", "--config.sleep=30") as process:
    _wait(lambda: _pids(fake))
    done = fake.run("--seeds=0", "--arms=base", "--config.sleep=30")
    process.kill()
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert f"another launcher is at work in {fake.folder / 'work'} (process {process.pid})" in done.stderr


def test_shares_of_cores(monkeypatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda unused: {0, 1, 2, 3, 4})
  assert jobs._shares(2) == [[0, 1], [2, 3]] and jobs._shares(1) == [[0, 1, 2, 3, 4]]
  assert jobs._shares(7) == [[0], [1], [2], [3], [4], [0], [1]]


def test_last_line_reads_progress_bars(tmp_path):
  log = tmp_path / "log.txt"
  assert jobs.last_line(log) == "no output"
  log.write_text("a\n 10%|#\r 20%|##\r\n\n")
  assert jobs.last_line(log) == "20%|##"


def test_table():
  assert launch.table([]) == "nothing to show"
  assert launch.table([{"a": 1234567, "b": 0.12345}, {"a": 1, "c": 2e9}]).splitlines() == [
      "a          b      c", "1,234,567  0.123", "1                 2,000,000,000"]


@pytest.mark.slow
def test_two_processes_share_the_work(fake):
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  many = [f"--coordinator_address=localhost:{port}", "--num_processes=2", "--arms=net", "--config.tune.lrs.net=(0.1,)"]
  for times, words in ((2, "result.json"), (2, "finished already")):  # both work on every unit; again, and nobody does
    with fake.start(*many, "--process_id=1") as other:
      try:
        done = fake.run(*many, "--process_id=0")
        out, err = other.communicate(timeout=60)
      finally:
        other.kill()
    assert done.returncode == 0, done.stderr
    assert other.returncode == 0, err
    assert words in done.stdout and "result.json" not in out
    assert set(_times(fake).values()) == {times}
