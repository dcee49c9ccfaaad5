"""The binary of TwELL: every config builds, the paper's lowers, the smoke runs measure, bad input is one line."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import launch, twell, units
from experiments.protocol import Context, ModeFlags, Unit
from pallas_kernels.twell import cpu
from sakanajax.core import config as config_lib
from sakanajax.core import train
from sakanajax.core.errors import UserError
from sakanajax.twell import config as configs
from sakanajax.twell import fitting, timing
from tests.nn import tiny_llama

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("config_twell", ROOT / "configs/twell.py")
MODULE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODULE)


def config(arg, **changes):
  return dataclasses.replace(config_lib.from_config(configs.Config, MODULE.get_config(arg)), **changes)


def traced(cfg):
  """The metrics of one training step, abstractly."""
  size = jax.ShapeDtypeStruct((cfg.train.batch_size, cfg.data.length), jnp.int32)
  batch = {name: size for name in ("tokens", "labels", "segment_ids", "positions")}
  batch |= {"mask": jax.ShapeDtypeStruct(size.shape, bool), "step": jax.ShapeDtypeStruct(size.shape[:1], jnp.int32)}
  tx = fitting.wrap_of(cfg, 0)(train.make_optimizer(cfg.train))
  state = jax.eval_shape(lambda key: train.init_state(fitting.model_of(cfg).init(key), tx), jax.random.key(0))
  return train.train_step(fitting.loss_fn(cfg), tx, cfg.train), state, batch


@pytest.mark.parametrize("arg", ["sweep,cpu", "sweep,gpu", "lm,cpu"])
def test_every_arm_of_every_config_traces_to_a_scalar_loss(arg):
  cfg = config(arg)
  for arm in cfg.arms if arg == "sweep,cpu" else cfg.arms[:1]:
    step, state, batch = traced(configs.of_arm(cfg, arm))
    _, measured = jax.eval_shape(step, state, batch, jax.random.key(0))
    assert measured["loss"].shape == () and {"ce", "l1", "nnz", "alive"} <= set(measured)


@pytest.mark.slow
def test_the_papers_own_sizes_build_and_lower():
  cfg = config("sweep,paper")
  assert (cfg.model.dim, cfg.model.hidden, cfg.model.layers) == (2048, 5632, 28)
  step, state, batch = traced(configs.of_arm(cfg, "revive"))
  assert 1.4e9 < sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.params)) < 1.9e9
  text = jax.jit(step).lower(state, batch, jax.eval_shape(lambda: jax.random.key(0))).as_text()
  assert "while" in text


def test_configs_name_what_they_do_not_know():
  with pytest.raises(ValueError, match="sweeep"):
    MODULE.get_config("sweeep,cpu")
  cfg = config("sweep,cpu")
  assert list(configs.coefficients(cfg)) == ["c0", "c3e-4", "c1e-3", "c2e-3", "c3e-3", "c4e-3", "c1e-2"]
  assert not set(cfg.once) & {"c0", cfg.choice.arm, "revive"} and len(cfg.seeds) == 3
  for section, words in (({"model": {"depth": 3}}, "depth"), ({"data": {}}, "data")):
    with pytest.raises(UserError, match=f"config.variants.x.*{words}"):
      configs.of_arm(dataclasses.replace(cfg, variants=dict(cfg.variants) | {"x": section}), "x")
  for choice, words in (("nobody", "nobody"), ("c4e-3", "take it out of once"), ("c0", "one penalty")):
    with pytest.raises(ValueError, match=words):
      dataclasses.replace(cfg, choice=configs.Choice(choice))
  with pytest.raises(ValueError, match="imposed"):
    dataclasses.replace(cfg, evaluation=configs.Evaluation(imposed=(2000,)))
  with pytest.raises(ValueError, match="even width"):
    dataclasses.replace(cfg.model, head_dim=3)
  with pytest.raises(ValueError, match="65536 neurons"):
    dataclasses.replace(cfg.model, hidden=70_000, form="hybrid")


def test_the_choice_does_not_touch_finished_arms():
  cfg = config("sweep,cpu")
  variants = dict(cfg.variants) | {"revive": cfg.variants["revive"] | {"penalty": cfg.variants["c4e-3"]["penalty"]}}
  other = dataclasses.replace(cfg, choice=configs.Choice("c4e-3"), once=(), variants=variants)
  unit = Unit("c2e-3", 0, None, 1.0)
  assert units.essence(twell.EXPERIMENT, cfg, unit) == units.essence(twell.EXPERIMENT, other, unit)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
  """A smoke sweep: its config, its folder and the outcomes of all arms."""
  folder = tmp_path_factory.mktemp("sweep")
  cfg = config("sweep,smoke")
  cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=4))
  outcomes = {}
  for arm in cfg.arms:
    place = folder / "units" / arm / "seed_0"
    place.mkdir(parents=True)
    unit = Unit(arm, 0, None, 1.0)
    outcome = units.run_one(twell.EXPERIMENT, cfg, folder, unit)
    outcomes[unit] = outcome
  return cfg, folder, units.by_arm(outcomes)


def test_a_sweep_measures_every_key_of_its_bars(sweep):
  cfg, folder, outcomes = sweep
  metrics, baselines, drawings = twell.summarize(cfg, outcomes, folder)
  assert set(config("sweep,cpu").expect) <= set(metrics)
  assert {"ce_c0", "nnz_silu", "ce_topk_c0@4", "ce_threshold_c0@4", "ce_topk_silu@4"} <= set(baselines)
  assert baselines["sparsity_silu"] == [0.0] and 0 < metrics["sparsity"][0] < 1
  assert all(path.is_file() for path in drawings) and len(drawings) == 3
  kept = outcomes["c0"][0]
  assert 0 < kept["nnz_threshold@4"] < 8 and kept["ce_topk@4"] > 0


def test_a_finished_unit_is_inspected_and_packed(sweep, tmp_path, capsys):
  cfg, folder, _ = sweep
  unit = str(folder / "units" / "revive" / "seed_0")
  trained, params = fitting.load_unit(unit)
  assert trained.revival.rate == 0.1 and params["embed"].shape == (257, 16)
  (tmp_path / "mine.txt").write_text("le chat dort. les chats dorment. " * 40)
  twell.EXPERIMENT.modes["inspect"](cfg, ModeFlags(unit, str(tmp_path / "mine.txt"), str(tmp_path / "seen")))
  report = json.loads((tmp_path / "seen" / "sparsity.json").read_text())
  assert len(report["nnz_layer"]) == 2 and report["tokens"] > 100
  if cpu.unavailable() is None:
    twell.EXPERIMENT.modes["sparsify"](cfg, ModeFlags(unit, "", str(tmp_path / "packed")))
    content = json.loads((tmp_path / "packed" / "sparsity.json").read_text())
    assert content["prediction"]["speedup"] > 0 and len(content["prediction"]["layers"]) == 2
    assert (tmp_path / "packed" / "model.safetensors").is_file() and "speed-up" in capsys.readouterr().out


def test_what_is_not_a_unit_or_not_relu_is_refused(sweep, tmp_path):
  cfg, folder, _ = sweep
  with pytest.raises(UserError, match="not a trained unit"):
    fitting.load_unit(tmp_path)
  with pytest.raises(UserError, match="--checkpoint"):
    twell.EXPERIMENT.modes["inspect"](cfg, ModeFlags())
  with pytest.raises(UserError, match="silu"):
    silu = str(folder / "units" / "silu" / "seed_0")
    twell.EXPERIMENT.modes["sparsify"](cfg, ModeFlags(silu, "", str(tmp_path / "no")))
  assert not (tmp_path / "no").exists()


@pytest.mark.skipif(cpu.unavailable() is not None, reason="no C++ compiler")
def test_the_models_of_others_whose_config_says_silu_are_packed_on_demand(tmp_path):
  folder = tiny_llama.write_folder(tmp_path / "model", tiny_llama.tensors())
  (tmp_path / "mine.txt").write_text("hello hello world. " * 40)
  flags = ModeFlags(str(folder), str(tmp_path / "mine.txt"), str(tmp_path / "packed"))
  with pytest.raises(UserError, match="config.hidden_act=relu"):
    twell.EXPERIMENT.modes["sparsify"](config("sweep,smoke"), flags)
  twell.EXPERIMENT.modes["sparsify"](config("sweep,smoke", hidden_act="relu"), flags)
  content = json.loads((tmp_path / "packed" / "sparsity.json").read_text())
  assert len(content["prediction"]["layers"]) == tiny_llama.CONFIG["num_hidden_layers"]


@pytest.mark.slow
def test_the_hybrid_form_trains_to_the_same_numbers_and_repeats_steps_with_more_room(tmp_path, caplog):
  cfg = config("sweep,smoke")
  settings = dataclasses.replace(cfg.train, steps=3, checkpoint_every=1, ema_decay=0.0)
  arm = dataclasses.replace(configs.of_arm(cfg, "c2e-3"), train=settings)
  cramped = dataclasses.replace(arm, model=dataclasses.replace(
      arm.model, form="hybrid", room=dataclasses.replace(arm.model.room, ell=20, tail=0.5)))
  logs = {}
  for name, each in (("dense", arm), ("hybrid", cramped)):
    fitting.fit(each, seed=0, workdir=tmp_path / name)
    logs[name] = train.metrics.read_jsonl(tmp_path / name / "metrics.jsonl")
  assert "with a tail for" in caplog.text and [row["step"] for row in logs["hybrid"]] == [1, 2, 3]
  for key in ("loss", "l1", "nnz", "grad_norm"):
    np.testing.assert_allclose([row[key] for row in logs["hybrid"]], [row[key] for row in logs["dense"]], rtol=1e-3)


@pytest.mark.skipif(cpu.unavailable() is not None, reason="no C++ compiler")
def test_timing_tasks_report_every_key_of_their_bars(sweep, tmp_path):
  smoke, wanted = config("ffn,smoke"), config("ffn,cpu")
  small = dataclasses.replace(smoke, speed=dataclasses.replace(
      smoke.speed, dim=16, hidden=300, rows=(9, 1), densities=(0.005, 0.05, 0.3), reps=1))
  outcomes = {arm: {0: twell.run(small, Unit(arm, 0, None, 1.0), None)} for arm in small.arms}
  metrics, baselines, drawings = twell.summarize(small, outcomes, tmp_path)
  assert set(wanted.expect) <= set(metrics) and drawings[0].is_file()
  assert {"speedup_gated_d05_ell", "speedup_plain_d05_bcsr", "speedup_gated_d05_packed", "speedup_gated_d05_topk",
          "speedup_gated_d05_threshold"} <= set(baselines)
  assert metrics["switched_gated_d3"] == [1.0] and max(metrics["error_gated_d3"] + metrics["error_plain_m1_d05"]) < 1e-4
  _, folder, _ = sweep
  lm = config("lm,smoke", checkpoint=str(folder / "units" / "c0" / "seed_0"))
  got = timing.whole_model(lm, 0, Context(tmp_path, ""))
  assert set(config("lm,cpu").expect) <= set(got) and got["logits_error"] < 1e-3 and got["predicted_ffn_speedup"] > 0


def test_names_of_densities():
  assert [timing.name_of(d) for d in (0.001, 0.005, 0.05, 0.3, 0.0051)] == ["d001", "d005", "d05", "d3", "d0051"]


def test_memory_at_the_published_capacity():
  cfg = config("ffn,cpu")
  assert timing.memory(cfg)["backward_bytes_ratio"] >= 5


def test_dry_runs_have_a_row_for_every_arm():
  for arg in ("sweep,cpu", "sweep,paper", "ffn,cpu", "lm,cpu"):
    cfg = config(arg)
    rows = twell.dry_run(cfg)
    assert [row["arm"] for row in rows] == list(cfg.arms) and launch.table(rows)


@pytest.mark.parametrize("change,named", [
    ("--config.penalty.coefficient=-1", "coefficient"), ("--config.data.source=nowhere", "nowhere"),
    ("--config.data.source=ONE", "split 'valid'")])
def test_bad_input_is_one_line_and_code_2(tmp_path, change, named):
  (tmp_path / "one.txt").write_text("a single document of two lines\nfalls into the split train " * 9)
  change = change.replace("ONE", str(tmp_path / "one.txt"))
  command = [sys.executable, "-m", "experiments.twell", "--config=configs/twell.py:sweep,smoke",
             f"--workdir={tmp_path / 'run'}", "--arms=c0", change]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
  lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
  assert done.returncode == 2 and len(lines) == 1 and named in lines[0], done.stderr
  assert not list((tmp_path / "run").rglob("metrics.jsonl"))
