"""Imposed sparsity against NumPy's sort and quantiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.layer import Ctx
from sakanajax.twell import comparisons, ffn
from tests.twell.helpers import params_of, quick_compilation  # noqa: F401

H = np.random.default_rng(0).normal(size=(7, 40)).astype(np.float32)


@pytest.mark.parametrize("k", [0, 1, 13, 40])
def test_top_k_keeps_the_k_largest(k):
  got = np.asarray(comparisons.top_k(jnp.asarray(H), k))
  for row, out in zip(H, got):
    kept = set(np.argsort(-np.abs(row))[:k])
    np.testing.assert_array_equal(out, [value if i in kept else 0 for i, value in enumerate(row)])


def test_top_k_of_equals_and_of_nan():
  assert np.asarray(comparisons.top_k(jnp.ones((1, 5)), 2)).tolist() == [[1, 1, 0, 0, 0]]
  assert np.isnan(comparisons.top_k(jnp.array([[1.0, jnp.nan, 3.0]]), 1))[0].tolist() == [False, True, False]
  with pytest.raises(ValueError, match="between 0 and 3"):
    comparisons.top_k(jnp.ones((1, 3)), 4)


@pytest.mark.parametrize("nnz", [0, 1, 8.5, 39])
def test_a_calibrated_threshold_keeps_the_share_asked_for(nnz):
  t = comparisons.calibrate(jnp.asarray(H), nnz)
  kept = np.asarray(comparisons.threshold(jnp.asarray(H), t)) != 0
  assert abs(kept.sum(1).mean() - nnz) <= 1 / 7 + 1e-6
  np.testing.assert_array_equal(kept, np.abs(H) > np.asarray(t))


@pytest.mark.parametrize("gated", [True, False])
def test_a_selection_of_everything_is_the_layer_itself(gated):
  layer = (ffn.reglu if gated else ffn.relu_mlp)(6, 40, activation="silu")
  params, x = params_of(layer), jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 6)), jnp.float32)
  run = lambda layer: jax.jit(layer.apply)(params, x, (), Ctx())
  whole = run(layer)[0]
  same, _, aux = run(comparisons.selected(lambda h: comparisons.top_k(h, 40), "silu", gated))
  np.testing.assert_allclose(same, whole, rtol=1e-5, atol=1e-6)
  fewer, _, few = run(comparisons.selected(lambda h: comparisons.top_k(h, 4), "silu", gated))
  assert aux["nnz"] == 40 and few["nnz"] == 4 and not np.allclose(fewer, whole)
