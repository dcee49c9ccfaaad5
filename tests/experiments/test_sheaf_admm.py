"""The binary of Sheaf-ADMM: every config builds, the smoke run measures, and kill -9 changes nothing."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments import papers, sheaf_admm
from experiments.launch import Context, Unit
from experiments.papers import PAPERS
from sakanajax.core import train
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import fitting
from sakanajax.sheaf_admm.config import of_arm

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = PAPERS["sheaf_admm"]
TRAINED = [(task, scale) for scale in ("cpu", "paper") for task in papers.tasks(PAPER, scale) if task != "speed"]


@pytest.mark.parametrize("task,scale", TRAINED, ids=[f"{task}-{scale}" for task, scale in TRAINED])
def test_every_arm_of_every_config_traces_to_a_scalar_loss(task, scale):
  cfg = papers.config(PAPER, task, scale)
  for arm in cfg.arms:
    own = of_arm(cfg, arm)
    board, network = fitting.network_of(own)
    params = jax.eval_shape(network.init, jax.random.key(0))
    size = own.train.batch_size
    inputs = jax.ShapeDtypeStruct((size, *board.board), np.float32 if own.kind == "mnist" else np.uint8)
    labels = jax.ShapeDtypeStruct((size,) if own.kind == "mnist" else inputs.shape, np.int32)
    step = train.train_step(fitting.loss_fn(own, board, network), train.make_optimizer(own.train), own.train)
    state = jax.eval_shape(lambda p, own=own: train.init_state(p, train.make_optimizer(own.train)), params)
    _, measured = jax.eval_shape(step, state, {"inputs": inputs, "labels": labels}, jax.random.key(0))
    assert measured["loss"].shape == ()


def test_an_arm_that_changes_an_unknown_key_is_refused():
  cfg = papers.config(PAPER, "maze", "smoke")
  wrong = dataclasses.replace(cfg, variants=dict(cfg.variants) | {"mpnn": {"model": {"depth": 3}}})
  with pytest.raises(UserError, match="config.variants.mpnn.model.depth"):
    of_arm(wrong, "mpnn")


def test_summary_computes_differences_and_ratios_per_seed(tmp_path):
  cfg = papers.config(PAPER, "sudoku", "smoke")
  scores = lambda solved: {"solved_test": solved, "empty_acc_test": solved, "_lr": None, "_wall_s": 1.0, "_peak_rss_mb": 1.0}
  outcomes = {
      "sheaf": {0: scores(0.5), 1: scores(0.4)}, "mpnn": {0: scores(0.1), 1: scores(0.0)},
      "slot": {0: scores(0.2), 1: scores(0.01)},
  }
  metrics, baselines, _ = sheaf_admm.summarize(cfg, outcomes, tmp_path)
  assert metrics["solved"] == [0.5, 0.4] and baselines["solved_slot"] == [0.2, 0.01]
  np.testing.assert_allclose(metrics["solved_ratio"], [2.5, 20.0])
  np.testing.assert_allclose(metrics["empty_acc_gain"], [0.3, 0.39])


def test_a_unit_scores_average_weights_beside_the_last_ones_and_tunes_by_the_loss(tmp_path, monkeypatch):
  cfg = papers.config(PAPER, "maze", "smoke")
  state = train.TrainState(np.int32(1), {"w": np.ones(2, np.float32)}, (), {"w": np.full(2, 0.5, np.float32)})  # average 1
  asked = []

  def measure(arm, params, splits, evaluator):
    asked.append((sorted(splits), float(params["w"][0])))
    return {"loss_val": 10 + float(params["w"][0]), "solved_2x": float(params["w"][0])}

  monkeypatch.setattr(fitting, "fit", lambda *args, **kwargs: state._replace(params={"w": np.full(2, 3, np.float32)}))
  monkeypatch.setattr(fitting, "measure", measure)
  context = Context(tmp_path, "", False, "")
  scores = sheaf_admm.run(cfg, Unit("sheaf", 0, None, 1.0), context)
  assert scores == {"loss_val": 11.0, "solved_2x": 1.0, "loss_val_raw": 13.0, "solved_2x_raw": 3.0, "params": 2}
  assert sheaf_admm.run(cfg, Unit("sheaf", 0, 1e-3, 0.25), context) == {"tune_score": -11.0}
  assert asked == [(["2x", "test", "train", "val"], 1.0), (["2x", "test", "train", "val"], 3.0), (["train", "val"], 1.0)]


def _command(workdir, *more):
  return [sys.executable, "-m", "experiments.sheaf_admm", "--config=configs/sheaf_admm.py:maze,smoke",
          f"--workdir={workdir}", "--arms=sheaf", "--config.train.steps=12", "--config.train.checkpoint_every=2", *more]


def _environment(tmp_path):
  return os.environ | {"JAX_PLATFORMS": "cpu", "SAKANAJAX_DATA": str(tmp_path / "data")}


@pytest.mark.slow
def test_kill_9_and_the_same_command_give_the_numbers_of_an_undisturbed_run(tmp_path):
  settings = dict(cwd=ROOT, env=_environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  assert subprocess.run(_command(tmp_path / "whole"), timeout=600, **settings).returncode == 0
  killed = tmp_path / "killed"
  process = subprocess.Popen(_command(killed), **settings)
  saved = killed / "units" / "sheaf" / "seed_0" / "checkpoints"
  deadline = time.monotonic() + 600
  while not (saved.is_dir() and any(path.name.isdigit() and int(path.name) >= 4 for path in saved.iterdir())):
    assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert not (killed / "result.json").exists()
  assert subprocess.run(_command(killed), timeout=600, **settings).returncode == 0
  whole, resumed = (json.loads((place / "result.json").read_text()) for place in (tmp_path / "whole", killed))
  clock = {"train_s"}
  assert {k: v for k, v in whole["metrics"].items() if k not in clock} == {
      k: v for k, v in resumed["metrics"].items() if k not in clock}


@pytest.mark.parametrize("change,named", [
    ("--config.train.lrr=1", "lrr"),
    ("--config.model.d_v=0", "d_v"),
    ("--config.model.kind=tree", "kind"),
    ("--seeds=a", "seeds"),
])
def test_bad_input_is_one_line_and_code_2(tmp_path, change, named):
  done = subprocess.run(_command(tmp_path / "run", change), cwd=ROOT, env=_environment(tmp_path), capture_output=True, text=True, timeout=120)
  lines = [line for line in done.stderr.splitlines() if line.strip()]
  assert done.returncode == 2 and len(lines) == 1 and named in lines[0], done.stderr
