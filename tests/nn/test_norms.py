"""Norms: closed forms, invariances, and numbers that overflow when squared in half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn import norms
from sakanajax.nn.layer import Ctx
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, 8))
PARAMS = {"scale": RNG.normal(size=8), "bias": RNG.normal(size=8)}


def run(layer, params, x, dtype=jnp.float32):
  cast = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
  return layer.apply(cast({name: params[name] for name in layer.init(jax.random.key(0))}), cast(x), (), Ctx())[0]


def closed_form(name, x):
  if name == "rms_norm":
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * PARAMS["scale"]
  centred = x - x.mean(-1, keepdims=True)
  return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * PARAMS["scale"] + PARAMS["bias"]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype,tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_closed_form(name, dtype, tolerance):
  y = run(getattr(norms, name)(8, eps=1e-3), PARAMS, X, dtype)
  assert y.dtype == dtype
  np.testing.assert_allclose(np.asarray(y, np.float64), closed_form(name, X), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_scale_does_not_matter_and_a_shift_only_to_rms(name):
  layer = getattr(norms, name)(8, eps=1e-12)
  y = run(layer, PARAMS, X)
  np.testing.assert_allclose(run(layer, PARAMS, 7 * X), y, atol=1e-4)
  assert np.allclose(run(layer, PARAMS, X + 3), y, atol=1e-4) == (name == "layer_norm")


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_starts_as_a_plain_normalisation(name):
  layer = getattr(norms, name)(8)
  y = layer.apply(layer.init(jax.random.key(0)), jnp.asarray(X, jnp.float32), (), Ctx())[0]
  np.testing.assert_allclose(np.square(y).mean(-1), 1, atol=1e-4)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_zeros_and_large_numbers_are_finite(name):
  layer = getattr(norms, name)(8)
  slope = jax.grad(lambda x: jnp.sum(run(layer, PARAMS, x) ** 2))(jnp.zeros((1, 8)))
  assert np.isfinite(slope).all()
  large = run(layer, PARAMS, 3e4 * np.sign(X), jnp.float16)  # its square overflows float16
  assert np.isfinite(large).all() and np.abs(large).max() > 0.1
