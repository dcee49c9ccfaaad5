"""LoRA: nothing at first, W + s A B by hand, stacks, ranks, gradients, errors that name what there is."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.core import trees
from sakanajax.nn import lora
from sakanajax.nn.attention import attention
from sakanajax.nn.ffn import glu
from sakanajax.nn.layer import Ctx, stack
from sakanajax.nn.transformer import block, lm, nll
from tests.nn.helpers import filled
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

N, D, V, R = 3, 8, 11, 2
MATCH = r"mixer/layer/(q|v)$"
PATHS = ["body/mixer/layer/q", "body/mixer/layer/v"]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 5)), jnp.int32)


@functools.cache
def model():
  layer = lm(V, D, stack(block(D, attention(D, 4, kv_heads=2), glu(D, 12)), N))
  return layer, filled(layer)


@functools.cache
def adapter():
  """One whose both halves are of order one."""
  _, params = model()
  first = jax.eval_shape(lambda: lora.init(jax.random.key(1), params, R, MATCH))
  rng = np.random.default_rng(2)
  return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), first)


@functools.cache
def loss():
  layer, _ = model()
  return jax.jit(lambda params: nll(layer.apply(params, TOKENS[:, :-1], (), Ctx())[0], TOKENS[:, 1:]))


def test_names_and_shapes():
  _, params = model()
  shapes = jax.tree.map(jnp.shape, jax.eval_shape(lambda: lora.init(jax.random.key(1), params, R, MATCH)))
  assert shapes == {
      PATHS[0]: {"a": (N, D, R), "b": (N, R, D)},
      PATHS[1]: {"a": (N, D, R), "b": (N, R, D // 2)},
  }


def test_nothing_changes_at_first():
  _, params = model()
  first = lora.init(jax.random.key(1), params, R, MATCH)
  chex.assert_trees_all_equal(lora.apply(params, first, 7.0), params)
  assert all(float(jnp.std(pair["a"])) == pytest.approx(D**-0.5, rel=0.5) for pair in first.values())
  assert not np.allclose(first[PATHS[0]]["a"], first[PATHS[1]]["a"])


@pytest.mark.parametrize("change", [lora.apply, lora.merge])
def test_every_layer_of_a_stack_gets_its_own_product(change):
  _, params = model()
  changed = lora.paths(change(params, adapter(), 0.5))
  for path, leaf in lora.paths(params).items():
    if path not in PATHS:
      assert changed[path] is leaf
      continue
    for i in range(N):
      want = np.asarray(leaf[i]) + 0.5 * np.asarray(adapter()[path]["a"][i]) @ np.asarray(adapter()[path]["b"][i])
      np.testing.assert_allclose(changed[path][i], want, atol=1e-5)
      assert np.linalg.matrix_rank(np.asarray(changed[path][i] - leaf[i]), tol=1e-4) == R


def test_the_changed_model_is_the_model_with_a_side_path():
  """x (W + s A B) = x W + s (x A) B, through attention's own apply."""
  mixer = attention(D, 4)
  params = filled(mixer)
  first = lora.init(jax.random.key(1), params, R, "^v$")
  pair = {"a": first["v"]["a"], "b": jnp.ones_like(first["v"]["b"])}
  x = jax.random.normal(jax.random.key(2), (1, 1, D))  # one token: y = x V O
  y = jax.jit(mixer.apply)(lora.apply(params, {"v": pair}, 0.3), x, (), Ctx())[0]
  want = (x @ params["v"] + 0.3 * (x @ pair["a"]) @ pair["b"]) @ params["o"]
  np.testing.assert_allclose(y, want, atol=1e-6)


def test_the_first_gradient_reaches_only_b_and_a_step_lowers_the_loss():
  _, params = model()
  first = lora.init(jax.random.key(1), params, R, MATCH)
  slope = jax.jit(jax.value_and_grad(lambda adapter: loss()(lora.apply(params, adapter))))
  before, gradient = slope(first)
  for path in PATHS:
    assert not gradient[path]["a"].any() and gradient[path]["b"].any()
  after, _ = slope(jax.tree.map(lambda p, g: p - 0.1 * g, first, gradient))
  assert float(after) < float(before)


def test_a_batch_of_adapters():
  _, params = model()
  several = jax.tree.map(lambda leaf: jnp.stack([leaf, 0 * leaf, -leaf]), adapter())
  losses = jax.vmap(lambda adapter: loss()(lora.apply(params, adapter, 0.1)))(several)
  one = [loss()(lora.apply(params, jax.tree.map(lambda leaf: leaf[i], several), 0.1)) for i in range(3)]
  np.testing.assert_allclose(losses, one, rtol=1e-5)
  assert float(one[1]) == pytest.approx(float(loss()(params)), rel=1e-6)


def test_half_precision_weights_stay_half_and_are_summed_in_float32():
  _, params = model()
  half = trees.cast(params, jnp.bfloat16)
  changed = lora.apply(half, adapter(), 0.5)
  chex.assert_trees_all_equal_shapes_and_dtypes(changed, half)
  path = PATHS[0]
  exact = lora.paths(half)[path].astype(jnp.float32) + 0.5 * adapter()[path]["a"] @ adapter()[path]["b"]
  np.testing.assert_array_equal(lora.paths(changed)[path], exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("match,rank,message", [
    ("nothing", 2, "no weight matches 'nothing'; there are body/ffn/layer/down, .*embed, norm/scale"),
    ("^norm", 2, "'\\^norm' matches norm/scale, which are no matrices"),
    ("q$", 0, "rank must be at least 1, got 0"),
])
def test_bad_adapters_are_refused(match, rank, message):
  with pytest.raises(ValueError, match=message):
    lora.init(jax.random.key(0), model()[1], rank, match)


def test_an_adapter_of_another_model_is_refused():
  with pytest.raises(ValueError, match="no weight at head; there are body/ffn/layer/down"):
    lora.apply(model()[1], {"head": adapter()[PATHS[0]]})
