"""The feed-forward layers: what they report against NumPy, the two forms against each other, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn import ffn as nn_ffn
from sakanajax.nn.layer import Ctx
from sakanajax.twell import ffn
from tests.twell.helpers import params_of, quick_compilation  # noqa: F401 (the latter a fixture for all tests here)

D, N, SHAPE = 6, 20, (2, 5)
MASK = np.array([[1, 1, 1, 0, 1], [1, 1, 0, 0, 0]], bool)
ROOMY = ffn.Room(ell=8, tail=1.0)
KINDS = {"gated": (ffn.reglu, nn_ffn.glu), "plain": (ffn.relu_mlp, nn_ffn.mlp)}


def inputs(seed=1):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(*SHAPE, D)), jnp.float32)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("form", ffn.FORMS)
def test_output_and_report_against_numpy(kind, form):
  layer = KINDS[kind][0](D, N, form, ROOMY)
  params, x = params_of(layer), inputs()
  y, state, aux = jax.jit(layer.apply)(params, x, (), Ctx(mask=jnp.asarray(MASK)))
  w = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
  kept = np.asarray(x, np.float64)[MASK]  # rows that are tokens
  gate = np.maximum(kept @ w["gate" if kind == "gated" else "up"], 0)
  h = gate * (kept @ w["up"]) if kind == "gated" else gate
  np.testing.assert_allclose(np.asarray(y)[MASK], h @ w["down"], atol=1e-5)
  assert not np.asarray(y)[~MASK].any() and state == ()
  np.testing.assert_allclose(aux["l1"], np.abs(h).sum(1).mean(), rtol=1e-5)  # of the product, not of the gate
  np.testing.assert_allclose(aux["nnz"], (gate > 0).sum(1).mean(), rtol=1e-6)
  np.testing.assert_array_equal(aux["fired"], (gate > 0).sum(0))
  np.testing.assert_array_equal(np.asarray(aux["active"])[MASK], (gate > 0).sum(1))
  assert not np.asarray(aux["active"])[~MASK].any() and aux["overflow"] == 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_forms_have_the_same_gradients_penalty_and_long_rows_included(kind):
  x, target = inputs(), inputs(2)
  long_rows = x.at[0, 1].set(0)  # and a row that fires nowhere
  ctx = Ctx(mask=jnp.asarray(MASK))

  def gradients(form, room):
    layer = KINDS[kind][0](D, N, form, room)

    def loss(params, x):
      y, _, aux = layer.apply(params, x, (), ctx)
      return jnp.sum((y - target) ** 2) + 0.3 * aux["l1"]

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(params_of(layer), long_rows)

  want = gradients("dense", ffn.Room())
  for room in (ROOMY, ffn.Room(ell=N, tail=0.0)):  # about half of the rows in the tail; none
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients("hybrid", room), want)
  assert not np.asarray(want[1][1])[~MASK].any(), "padding has no gradient"


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_a_trained_model_can_be_read_either_way(kind, activation):
  ours, theirs = KINDS[kind][0](D, N, activation=activation), KINDS[kind][1](D, N, activation)
  shapes = [jax.eval_shape(layer.init, jax.random.key(3)) for layer in (ours, theirs)]
  assert shapes[0] == shapes[1]
  params, x = params_of(theirs), inputs()
  both = jax.jit(lambda p, x: [layer.apply(p, x, (), Ctx())[0] for layer in (ours, theirs)])(params, x)
  np.testing.assert_allclose(*both, rtol=1e-6)


def test_the_penalty_is_on_the_product_and_reaches_the_up_projection():
  layer = ffn.reglu(D, N)
  grads = jax.jit(jax.grad(lambda p: layer.apply(p, inputs(), (), Ctx())[2]["l1"]))(params_of(layer))
  assert np.abs(grads["up"]).max() > 0 and np.abs(grads["gate"]).max() > 0 and not np.asarray(grads["down"]).any()


def test_overflow_is_counted():
  layer = ffn.reglu(D, N, "hybrid", ffn.Room(ell=1, tail=0.0))
  params, x = params_of(layer), inputs()
  _, _, aux = jax.jit(layer.apply)(params, x, (), Ctx())
  assert aux["overflow"] == np.sum(np.asarray(aux["active"]) > 1) > 0


@pytest.mark.parametrize("form", ffn.FORMS)
def test_a_nan_is_active_and_padding_hides_one(form):
  layer = ffn.reglu(D, N, form, ROOMY)
  params, x = params_of(layer), inputs().at[0, 3].set(jnp.nan)
  apply = jax.jit(layer.apply)
  y, _, aux = apply(params, x, (), Ctx())
  assert np.isnan(y[0, 3]).all() and aux["active"][0, 3] == N and np.isfinite(np.asarray(y)[1]).all()
  y, _, aux = apply(params, x, (), Ctx(mask=jnp.asarray(MASK)))
  assert np.isfinite(y).all() and np.isfinite(aux["l1"])


def test_bad_arguments_are_refused():
  with pytest.raises(ValueError, match="form must be"):
    ffn.reglu(D, N, "sparse")
  with pytest.raises(ValueError, match="silu"):
    ffn.reglu(D, N, "hybrid", activation="silu")
  with pytest.raises(ValueError, match="ell"):
    ffn.Room(ell=0)
