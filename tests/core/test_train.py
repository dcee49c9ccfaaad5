import dataclasses
import signal
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sakanajax.core import checkpoint, metrics, train
from sakanajax.core.errors import UserError
from tests.core import multihost_worker as toy


def config(**changes):
  return train.TrainConfig(**{"steps": 10, "batch_size": 4, "lr": 0.1, **changes})


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def without_rate(records):
  return [{k: v for k, v in record.items() if k != "samples_per_s"} for record in records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run of 10 steps: (state, its metrics)."""
  folder = tmp_path_factory.mktemp("whole")
  return toy.run(folder, 10), metrics.read_jsonl(folder / "metrics.jsonl")


# --- the pure parts


@pytest.mark.parametrize(
    "changes",
    [{"steps": -1}, {"batch_size": 0}, {"lr": float("nan")}, {"lr": -1.0}, {"clip": float("inf")},
     {"ema_decay": 1.0}, {"b2": -0.1}, {"schedule": "linear"}, {"log_every": 0}, {"keep": 0},
     {"schedule": "cosine", "warmup": 10}],
)  # fmt: skip
def test_bad_configs_name_the_key(changes):
  with pytest.raises(ValueError, match=list(changes)[-1]):
    config(**changes)


def test_schedules_in_closed_form():
  constant = train.make_schedule(config(warmup=4))
  assert [float(constant(s)) for s in (0, 1, 2, 4, 9)] == pytest.approx([0, 0.025, 0.05, 0.1, 0.1])
  cosine = train.make_schedule(config(warmup=2, schedule="cosine"))
  expected = [0.0, 0.05, 0.1] + [0.05 * (1 + np.cos(np.pi * t / 8)) for t in range(1, 9)]
  np.testing.assert_allclose([float(cosine(s)) for s in range(11)], expected, atol=1e-8)


def test_the_optimizer_is_clipped_adamw_with_decay_on_all():
  cfg = config(lr=0.1, clip=1.0, weight_decay=0.5, b1=0.8, b2=0.9)
  tx = train.make_optimizer(cfg)
  params = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([0.5])}
  state = tx.init(params)
  rng = np.random.default_rng(0)
  p = {k: np.array(v, np.float64) for k, v in params.items()}
  m = {k: np.zeros_like(v) for k, v in p.items()}
  v = {k: np.zeros_like(x) for k, x in p.items()}
  for t in range(1, 5):
    grads = {k: rng.normal(size=x.shape) * 3 for k, x in p.items()}
    updates, state = tx.update(jax.tree.map(jnp.float32, grads), state, params)
    params = optax.apply_updates(params, updates)
    scale = min(1.0, 1.0 / np.sqrt(sum((g**2).sum() for g in grads.values())))
    for k in p:
      g = grads[k] * scale
      m[k], v[k] = 0.8 * m[k] + 0.2 * g, 0.9 * v[k] + 0.1 * g * g
      adam = m[k] / (1 - 0.8**t) / (np.sqrt(v[k] / (1 - 0.9**t)) + 1e-8)
      p[k] -= 0.1 * (adam + 0.5 * p[k])
  for k in p:
    np.testing.assert_allclose(params[k], p[k], rtol=1e-5)


def test_clip_zero_switches_clipping_off():
  grads = {"w": jnp.array([30.0, 40.0])}
  for clip, expected in ((0.0, 50.0), (1.0, 1.0)):
    tx = train.make_optimizer(config(clip=clip))
    updates, _ = tx.update(grads, tx.init(grads), grads)
    (_, state) = tx.update(grads, tx.init(grads), grads)
    mu = optax.tree.get(state, "mu")["w"]
    np.testing.assert_allclose(jnp.linalg.norm(mu) / 0.1, expected, rtol=1e-5)
    assert jnp.isfinite(updates["w"]).all()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 0.99999])
def test_the_average_is_debiased(decay):
  cfg = config(ema_decay=decay)
  tx = train.make_optimizer(cfg)
  params = {"w": jnp.array([1.0, -3.0])}
  state = train.init_state(params, tx)
  assert_equal(train.ema_params(state, decay), params)  # step 0
  step = jax.jit(train.train_step(lambda p, b, k: (jnp.sum(p["w"] ** 2), {}), tx, cfg))
  seen = []
  for _ in range(7):
    state, _ = step(state, (), jax.random.key(0))
    seen.append(np.array(state.params["w"], np.float64))
  weights = decay ** np.arange(6, -1, -1.0)
  expected = (weights[:, None] * np.array(seen)).sum(0) / weights.sum()
  np.testing.assert_allclose(train.ema_params(state, decay)["w"], expected, rtol=1e-5)
  assert_equal(train.ema_params(state._replace(step=state.step * 0), decay), state.params)


def test_low_precision_weights_are_averaged_in_float32():
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  state = train.init_state(params, train.make_optimizer(config()))
  assert state.ema["w"].dtype == jnp.float32
  assert train.ema_params(state, 0.999)["w"].dtype == jnp.bfloat16


def test_step_measures_what_it_does():
  cfg = config(clip=0.5, warmup=2, lr=1.0)
  tx = train.make_optimizer(cfg)
  state = train.init_state({"w": jnp.array([3.0, 4.0])}, tx)
  state = state._replace(step=jnp.int32(1))
  loss_fn = lambda p, b, k: (jnp.sum(p["w"] ** 2) / 2, {"norm": jnp.linalg.norm(p["w"])})
  new, measured = train.train_step(loss_fn, tx, cfg)(state, (), jax.random.key(0))
  assert set(measured) == {"loss", "lr", "grad_norm", "update_norm", "param_norm", "norm"}
  np.testing.assert_allclose(measured["loss"], 12.5)
  np.testing.assert_allclose(measured["grad_norm"], 5.0)
  np.testing.assert_allclose(measured["lr"], 0.5)
  np.testing.assert_allclose(
      measured["update_norm"], jnp.linalg.norm(new.params["w"] - state.params["w"]), rtol=1e-5)
  np.testing.assert_allclose(measured["param_norm"], jnp.linalg.norm(new.params["w"]), rtol=1e-6)
  assert int(new.step) == 2


def test_loss_fn_may_not_take_our_names():
  tx = train.make_optimizer(config())
  step = train.train_step(lambda p, b, k: (jnp.sum(p), {"grad_norm": 0.0}), tx, config())
  with pytest.raises(ValueError, match="grad_norm"):
    step(train.init_state(jnp.ones(2), tx), (), jax.random.key(0))


# --- fit


def test_fit_is_the_plain_loop(tmp_path, whole):
  cfg = toy.config(10)
  tx = train.make_optimizer(cfg)
  step = jax.jit(train.train_step(toy.loss_fn, tx, cfg))
  state, losses = train.init_state(toy.init_params(), tx), []
  for s in range(10):
    key = jax.random.fold_in(jax.random.key(1), s)
    state, measured = step(state, toy.batch_fn(s), key)
    losses.append(float(measured["loss"]))
  chex.assert_trees_all_close(whole[0], state, rtol=1e-5, atol=1e-7)
  records = whole[1]
  assert [r["step"] for r in records] == [3, 4, 6, 8, 9, 10]  # every 3rd, checkpoints, the end
  means = [np.mean(losses[a:b]) for a, b in ((0, 3), (3, 4), (4, 6), (6, 8), (8, 9), (9, 10))]
  np.testing.assert_allclose([r["loss"] for r in records], means, rtol=1e-5)
  assert all(r["samples_per_s"] > 0 and r["mae"] > 0 for r in records)


def test_fit_learns(tmp_path):
  toy.run(tmp_path, 300, log_every=100, checkpoint_every=300)
  losses = [r["loss"] for r in metrics.read_jsonl(tmp_path / "metrics.jsonl")]
  assert losses[-1] < 0.5 * losses[0]


def test_fit_traces_once_syncs_once_an_interval_and_keeps_the_callers_arrays(tmp_path, monkeypatch):
  traces, syncs, device_get = [], [], jax.device_get
  monkeypatch.setattr(jax, "device_get", lambda x: syncs.append(1) or device_get(x))
  params = jax.tree.map(jnp.asarray, toy.init_params())

  def loss_fn(*args):
    traces.append(1)
    return toy.loss_fn(*args)

  cfg = toy.config(9, log_every=4, checkpoint_every=8)
  train.fit(loss_fn, params, toy.batch_fn, cfg, seed=0, workdir=tmp_path)
  assert len(traces) == 1
  assert len(syncs) == 3  # at 4, 8 and 9
  assert_equal(params, toy.init_params())  # not donated


def test_the_state_is_donated(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "save", lambda *_: None)  # which may hold on to what it wrote
  lent = []
  train.fit(toy.loss_fn, toy.init_params(), toy.batch_fn, toy.config(5), seed=0, workdir=tmp_path,
            on_checkpoint=lambda step, state: lent.append(state))
  at_4, at_5 = lent
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves((at_4.params, at_4.ema)))
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(at_5))


def test_the_seed_matters_and_is_all_that_is_random(tmp_path, whole):
  fit = lambda seed, name: train.fit(
      toy.loss_fn, toy.init_params(), toy.batch_fn, toy.config(10), seed=seed, workdir=tmp_path / name)
  assert_equal(fit(1, "a"), whole[0])
  assert not np.array_equal(fit(2, "b").params["w"], whole[0].params["w"])


def test_a_longer_run_continues_a_shorter_one_exactly(tmp_path, whole):
  toy.run(tmp_path, 6)
  seen = []
  state = toy.run(tmp_path, 10, lambda step: seen.append(step) or toy.batch_fn(step))
  assert_equal(state, whole[0])
  assert seen == [6, 7, 8, 9]
  assert without_rate(metrics.read_jsonl(tmp_path / "metrics.jsonl")) == without_rate(whole[1])


def test_a_finished_run_returns_at_once(tmp_path):
  first = toy.run(tmp_path, 4)
  before = (tmp_path / "metrics.jsonl").read_bytes()
  again = toy.run(tmp_path, 4, batches=lambda step: pytest.fail("asked for a batch"))
  assert_equal(again, first)
  assert (tmp_path / "metrics.jsonl").read_bytes() == before
  assert int(toy.run(tmp_path / "none", 0, batches=None).step) == 0


def test_a_run_is_not_cut_short_after_the_fact(tmp_path):
  toy.run(tmp_path, 4)
  with pytest.raises(UserError, match="is at step 4 already, beyond the 2 asked"):
    toy.run(tmp_path, 2)


def worker(folder, *flags):
  command = [sys.executable, toy.__file__, str(folder), "--steps=10", *flags]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("flag, stands", [("--kill_at=7", 4), ("--kill_in_save=8", 4)])
def test_kill_9_loses_nothing(tmp_path, whole, flag, stands):
  assert worker(tmp_path, flag).returncode == -signal.SIGKILL
  assert checkpoint.latest(tmp_path / "checkpoints") == stands
  assert metrics.read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] > stands  # to be dropped
  assert_equal(toy.run(tmp_path, 10), whole[0])
  assert without_rate(metrics.read_jsonl(tmp_path / "metrics.jsonl")) == without_rate(whole[1])
  assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "8"]


@pytest.mark.slow
def test_kill_9_again_and_again_in_other_processes(tmp_path):
  folder = tmp_path / "killed"
  for flag in ("--kill_at=3", "--kill_in_save=4", "--kill_at=6", "--kill_in_save=8", "--kill_at=9"):
    assert worker(folder, flag).returncode == -signal.SIGKILL
  for name in ("killed", "whole"):
    assert worker(tmp_path / name).returncode == 0
  killed, once = (np.load(tmp_path / name / "final.npz") for name in ("killed", "whole"))
  assert_equal(dict(killed), dict(once))
  lines = [metrics.read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("killed", "whole")]
  assert without_rate(lines[0]) == without_rate(lines[1])


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
  fit = lambda cfg, params=None: train.fit(
      toy.loss_fn, params or toy.init_params(), toy.batch_fn, cfg, seed=0, workdir=tmp_path)
  fit(toy.config(2))
  with pytest.raises(UserError, match="another configuration"):
    fit(toy.config(2, lr=0.5))
  with pytest.raises(UserError, match="another model"):
    fit(toy.config(2), {"w": np.ones((8, 4), np.float32), "v": np.ones(4, np.float32)})


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_numbers_that_are_not_finite_stop_the_run(tmp_path, whole, poison):
  def batches(step):
    batch = toy.batch_fn(step)
    return batch | {"y": batch["y"] * poison} if step == 6 else batch

  with pytest.raises(UserError, match="(loss|grad_norm) is (nan|inf) at step 7 of .*lower") as info:
    toy.run(tmp_path, 10, batches)
  assert "\n" not in str(info.value)
  assert checkpoint.latest(tmp_path / "checkpoints") == 4
  assert_equal(toy.run(tmp_path, 10), whole[0])


def test_full_disk_stops_the_run_and_freeing_some_resumes_it(tmp_path):
  done = worker(tmp_path, "--fsize=9000")
  assert done.returncode == 2
  (line,) = done.stdout.splitlines()
  assert line.startswith(f"cannot write checkpoint {tmp_path}/checkpoints/4: File too large; free")
  assert "Traceback" not in done.stderr
  assert checkpoint.latest(tmp_path / "checkpoints") is None
  assert int(toy.run(tmp_path, 10).step) == 10


def test_on_checkpoint_joins_the_metrics(tmp_path):
  calls = []

  def evaluate(step, state):
    calls.append(step)
    return {"accuracy": step / 10} if step > 4 else None

  cfg = toy.config(10)
  train.fit(toy.loss_fn, toy.init_params(), toy.batch_fn, cfg, seed=0, workdir=tmp_path,
            on_checkpoint=evaluate)
  assert calls == [4, 8, 10]
  records = metrics.read_jsonl(tmp_path / "metrics.jsonl")
  assert {r["step"]: r["accuracy"] for r in records if "accuracy" in r} == {8: 0.8, 10: 1.0}


def test_batches_must_keep_their_shape_and_their_errors_surface(tmp_path):
  def ragged(step):
    batch = toy.batch_fn(step)
    return jax.tree.map(lambda x: x[:-1], batch) if step == 2 else batch

  def broken(step):
    raise UserError("no such file")

  with pytest.raises(TypeError):
    toy.run(tmp_path / "a", 4, ragged)
  with pytest.raises(UserError, match="no such file"):
    toy.run(tmp_path / "b", 4, broken)


def test_tensorboard_and_progress(tmp_path, capsys):
  pytest.importorskip("tensorboardX")
  train.fit(toy.loss_fn, toy.init_params(), toy.batch_fn, toy.config(4), seed=0, workdir=tmp_path,
            tensorboard=True, desc="maze")
  assert list((tmp_path / "tensorboard").iterdir())
  shown = capsys.readouterr().err
  assert "maze" in shown and "4/4" in shown and "samples/s" in shown


def test_a_healthy_run_makes_no_nan_anywhere(tmp_path):
  with jax.debug_nans(True):
    state = toy.run(tmp_path, 4)
    train.ema_params(train.init_state(toy.init_params(), train.make_optimizer(toy.config(4))), 0.9)
    train.ema_params(state, 0.0)


def test_the_config_survives_replace():
  cfg = toy.config(10)
  assert dataclasses.replace(cfg, steps=3).steps == 3
  assert hash(cfg) == hash(toy.config(10))


def test_steps_without_a_finite_gradient_are_left_out():
  def loss(params, batch, key):
    del key
    return jnp.sum(params["w"] * batch["x"]) / batch["ok"], {}

  cfg = train.TrainConfig(steps=4, batch_size=1, lr=0.1, skip=2)
  tx = train.make_optimizer(cfg)
  state = train.init_state({"w": jnp.ones(2)}, tx)
  step = jax.jit(train.train_step(loss, tx, cfg))
  batch = lambda ok: {"x": jnp.ones(2), "ok": jnp.float32(ok)}
  key = jax.random.key(0)
  after, measured = step(state, batch(0.0), key)
  assert measured["skipped"] and measured["grad_norm"] == 0
  np.testing.assert_array_equal(after.params["w"], state.params["w"])
  moved, measured = step(after, batch(1.0), key)
  assert not measured["skipped"] and np.all(moved.params["w"] < 1)
  for _ in range(3):  # one more than allowed in a row
    after, _ = step(after, batch(0.0), key)
  assert not np.all(np.isfinite(after.params["w"]))
