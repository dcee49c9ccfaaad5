"""Revival: who is dead is read from gradients, what happens to them in closed form; the counters against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sakanajax.core import train
from sakanajax.nn.layer import Ctx
from sakanajax.twell import ffn, revive as revival
from tests.twell.helpers import params_of, quick_compilation  # noqa: F401

RNG = np.random.default_rng(0)


def tree(dead=((0, 1), (1, 3))):
  """Stacked [2, 4, 5] and plain params, gradients with dead columns in "gate"."""
  leaf = lambda *shape: RNG.normal(size=shape).astype(np.float32)
  params = {"ffn": {"gate": leaf(2, 4, 5), "up": leaf(2, 4, 5)}, "other": {"gate": leaf(4, 5)}}
  grads = jax.tree.map(lambda p: leaf(*p.shape), params)
  for layer, column in dead:
    grads["ffn"]["gate"][layer, :, column] = 0
  grads["ffn"]["up"][0, :, 0] = 0  # not a gate: nobody is revived by it
  return params, grads


def test_only_dead_columns_change_and_as_the_formula_says():
  params, grads = tree()
  inner, rate, scale = optax.sgd(0.1), 0.25, 3.0
  tx = revival.revive(inner, seed=7, rate=rate, scale=scale)
  updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
  plain, _ = inner.update(grads, inner.init(params), params)
  changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b), axis=-2), updates, plain)
  assert set(zip(*np.nonzero(changed["ffn"]["gate"]))) == {(0, 1), (1, 3)} and state.step == 1
  assert not changed["ffn"]["up"].any() and not changed["other"]["gate"].any()
  new = np.asarray(optax.apply_updates(params, updates)["ffn"]["gate"])
  without = np.asarray(optax.apply_updates(params, plain)["ffn"]["gate"])
  noise = (new - (1 - rate) * without) / rate  # W' = (1 - rate) W + rate * noise, solved for the noise
  dead = np.stack([noise[0, :, 1], noise[1, :, 3]])
  assert 0.3 * scale < dead.std() < 3 * scale and not np.allclose(dead[0], dead[1])


def test_noise_has_the_scale_asked_for_and_depends_on_seed_and_step_only():
  params = {"gate": np.zeros((300, 300), np.float32)}
  def new(seed, steps):
    tx = revival.revive(optax.sgd(1.0), seed, rate=1.0, scale=0.02)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
      updates, state = update(params, state, params)
    return np.asarray(updates["gate"])
  first = new(0, 1)
  assert first.std() == pytest.approx(0.02, rel=0.02) and abs(first.mean()) < 1e-3
  np.testing.assert_array_equal(first, new(0, 1))
  assert not np.array_equal(first, new(0, 2)) and not np.array_equal(first, new(1, 1))


def test_a_neuron_without_a_token_has_exactly_no_gradient_and_the_others_have_one():
  layer = ffn.reglu(6, 12)
  params, x = params_of(layer), jnp.abs(jnp.asarray(RNG.normal(size=(2, 4, 6)), jnp.float32))
  params["gate"] = params["gate"].at[:, [2, 5]].set(-1.0)  # negative for every positive x

  def loss(p):
    y, _, aux = layer.apply(p, x, (), Ctx())
    return jnp.sum(y**2) + aux["l1"], aux["fired"]

  grads, fired = jax.jit(jax.grad(loss, has_aux=True))(params)
  np.testing.assert_array_equal(np.all(np.asarray(grads["gate"]) == 0, axis=0), np.asarray(fired) == 0)
  assert {2, 5} <= set(np.nonzero(np.asarray(fired) == 0)[0])
  tx = revival.revive(optax.sgd(0.0), 0)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  np.testing.assert_array_equal(np.any(np.asarray(updates["gate"]) != 0, axis=0), np.asarray(fired) == 0)


def test_nothing_is_revived_by_a_gradient_that_is_not_finite():
  params, grads = tree()
  grads["ffn"]["gate"][0, 0, 0] = np.nan
  tx = revival.revive(optax.set_to_zero(), 0)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  assert not np.asarray(updates["ffn"]["gate"]).any()


def test_it_wraps_the_optimizer_of_the_training_loop(tmp_path):
  params = {"gate": np.ones((3, 4), np.float32), "w": np.ones(3, np.float32)}
  loss = lambda p, batch, key: (jnp.sum((batch @ p["gate"][:, :2] - 1) ** 2) + jnp.sum(p["w"] ** 2), {})
  cfg = train.TrainConfig(steps=3, batch_size=2, lr=0.01, log_every=3, checkpoint_every=2)
  run = lambda name, **more: train.fit(
      loss, params, lambda step: np.ones((2, 3), np.float32), cfg, seed=0, workdir=tmp_path / name, **more)
  plain, revived = run("plain"), run("revived", wrap=lambda tx: revival.revive(tx, 1, scale=5.0))
  np.testing.assert_array_equal(plain.params["gate"][:, :2], revived.params["gate"][:, :2])
  assert (np.asarray(plain.params["gate"])[:, 2:] == 1).all() and (np.asarray(revived.params["gate"])[:, 2:] != 1).all()
  assert int(revived.opt_state.step) == 3


def test_bad_arguments_and_a_missing_argument_are_refused():
  with pytest.raises(ValueError, match="rate"):
    revival.revive(optax.sgd(1.0), 0, rate=1.5)
  tx = revival.revive(optax.sgd(1.0), 0)
  params, grads = tree()
  with pytest.raises(ValueError, match="params"):
    tx.update(grads, tx.init(params))


def test_counters_against_a_loop():
  fired = RNG.integers(0, 2, size=(9, 2, 5))  # [batches, L, N]
  tokens = RNG.integers(1, 100, size=9)
  idle, want = jnp.zeros((2, 5), jnp.int32), np.zeros((2, 5), int)
  update = jax.jit(revival.idle_since)
  for batch, count in zip(fired, tokens):
    idle = update(idle, jnp.asarray(batch), int(count))
    for place in np.ndindex(want.shape):
      want[place] = 0 if batch[place] else want[place] + count
    np.testing.assert_array_equal(idle, want)
  window = int(np.median(want[want > 0]))
  np.testing.assert_allclose(revival.alive(idle, window), (want < window).mean(1))
  full = revival.idle_since(jnp.full(3, (1 << 30) - 1, jnp.int32), jnp.zeros(3, jnp.int32), 10**6)
  assert (np.asarray(full) == 1 << 30).all()  # never beyond the end of int32
