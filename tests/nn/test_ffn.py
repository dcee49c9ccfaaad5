"""Feed-forward layers against NumPy, with and without biases."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn import ffn
from sakanajax.nn.layer import Ctx
from tests.nn.helpers import filled
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

X = np.random.default_rng(0).normal(size=(2, 3, 8))
ERF = np.vectorize(math.erf)
ACTIVATIONS = {  # name -> (function, tolerance: gelu is computed by its tanh form)
    "silu": (lambda x: x / (1 + np.exp(-x)), 1e-5),
    "relu": (lambda x: np.maximum(x, 0), 1e-5),
    "gelu": (lambda x: x * 0.5 * (1 + ERF(x / math.sqrt(2))), 3e-3),
}


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["glu", "mlp"])
def test_against_numpy(kind, activation, bias):
  layer = getattr(ffn, kind)(8, 12, activation, bias=bias)
  params = filled(layer, 1 / 3)
  assert any("bias" in name for name in params) == bias
  act, tolerance = ACTIVATIONS[activation]
  w = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
  part = lambda name, x: x @ w[name] + w.get(f"{name}_bias", 0)
  up = part("up", X)
  want = part("down", act(part("gate", X)) * up if kind == "glu" else act(up))
  y, state, aux = jax.jit(layer.apply)(params, jnp.asarray(X, jnp.float32), (), Ctx())
  np.testing.assert_allclose(y, want, atol=tolerance)
  assert state == () and aux == {}


def test_names_shapes_and_spread_of_the_first_kernels():
  params = ffn.glu(64, 256, bias=True).init(jax.random.key(0))
  biases = [params.pop(f"{name}_bias") for name in ("gate", "up", "down")]
  assert [bias.shape for bias in biases] == [(256,), (256,), (64,)] and not any(map(np.any, biases))
  assert {n: p.shape for n, p in params.items()} == {"gate": (64, 256), "up": (64, 256), "down": (256, 64)}
  for leaf in params.values():
    assert float(jnp.std(leaf)) == pytest.approx(0.02, rel=0.05) and abs(float(jnp.mean(leaf))) < 1e-3
  assert not np.allclose(params["gate"], params["up"])
  assert float(jnp.std(ffn.mlp(64, 256, init_scale=0.1).init(jax.random.key(0))["up"])) == pytest.approx(0.1, rel=0.05)


def test_the_input_decides_the_dtype():
  layer = ffn.glu(8, 12, bias=True)
  params = filled(layer, 1 / 3)
  y = layer.apply(params, jnp.asarray(X, jnp.bfloat16), (), Ctx())[0]
  assert y.dtype == jnp.bfloat16
  want = layer.apply(params, jnp.asarray(X, jnp.float32), (), Ctx())[0]
  np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=5e-2)


def test_an_unknown_activation_is_named():
  with pytest.raises(ValueError, match="silu, gelu, relu, got 'swish'"):
    ffn.glu(8, 12, "swish")
