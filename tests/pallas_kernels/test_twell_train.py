"""The training form against formulas in float64 and against dense autodiff: results, all gradients, what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.twell import train
from pallas_kernels.twell.hybrid import Capacity
from tests.pallas_kernels import twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

M, K, N, L = 24, 33, 300, 17  # K odd, N not a multiple of 256
MIXED = Capacity(150, 20)  # about every other row is longer than 150
FORMS = pytest.mark.parametrize("gated", [True, False])


def arrays(gated: bool, dtype=np.float32):
  """Returns (x, w_gate, w_up or None, w_down) as models keep them, and a cotangent of y."""
  x, w_gate, w_up, w_down = problems.layer(M, K, N, L)
  x[0], x[1] = 0.0, np.abs(x[1])  # a row whose gates are all 0: off
  w_gate[:, 7] = -np.abs(w_gate[:, 7])
  out = np.random.default_rng(1).normal(size=(M, L)).astype(np.float32)
  return [None if a is None else jnp.asarray(a, dtype) for a in (x, w_gate, w_up.T if gated else None, w_down)], out


@functools.partial(jax.jit, static_argnames=("capacity", "kind"))
def values_and_gradients(args, out, rate, capacity=None, kind="sparse"):
  """Returns ((y, l1, counts or None), gradients) of sum(y * out) + rate * l1."""

  def loss(*args):
    if kind == "sparse":
      y, l1, counts = train.sparse_ffn(*args, capacity=capacity)
    else:
      (y, l1), counts = train.dense_ffn(*args), None
    return jnp.sum(y.astype(jnp.float32) * out) + rate * l1, (y, l1, counts)

  with problems.exact():
    wanted = [i for i, a in enumerate(args) if a is not None]
    grads, result = jax.grad(loss, wanted, has_aux=True)(*args)
  return result, grads


def by_hand(args, out, rate):
  """The formulas of section 3.4 in float64, dense."""
  x, g, u, d = (None if a is None else np.asarray(a, np.float64) for a in args)
  on = x @ g > 0
  p, r = np.where(on, x @ g, 0), 1.0 if u is None else x @ u
  t = p * r
  dt = out @ d.T + rate / len(x) * np.sign(r)
  du = np.where(on, dt * r, 0)
  gradients = [du @ g.T, x.T @ du, t.T @ out]
  if u is not None:
    gradients = [gradients[0] + (dt * p) @ u.T, gradients[1], x.T @ (dt * p), gradients[2]]
  return (t @ d, np.abs(t).sum() / len(x)), gradients


@FORMS
@pytest.mark.parametrize("capacity", [MIXED, Capacity(N, 0), Capacity(1, M)], ids=["mixed", "ell", "tail"])
def test_results_and_gradients_are_those_of_the_formulas(gated, capacity):
  args, out = arrays(gated)
  (y, l1, counts), grads = values_and_gradients(args, out, 0.7, capacity)
  (y_hand, l1_hand), hand = by_hand(args, out, 0.7)
  assert int(counts.overflow) == 0
  assert problems.relative_error(y, y_hand) < 1e-5
  np.testing.assert_allclose(l1, l1_hand, rtol=1e-5)
  for got, expected in zip(grads, hand, strict=True):
    assert problems.relative_error(got, expected) < 1e-5


@FORMS
def test_gradients_are_those_of_dense_autodiff_in_both_types(gated):
  for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
    args, out = arrays(gated, dtype)
    (y, l1, counts), grads = values_and_gradients(args, out, 0.7, MIXED)
    (y_dense, l1_dense, _), dense = values_and_gradients(args, out, 0.7, kind="dense")
    long_rows = int((np.asarray(counts.nnz) > MIXED.ell).sum())
    assert 2 < long_rows < MIXED.tail and int(counts.overflow) == 0
    assert y.dtype == dtype and l1.dtype == jnp.float32
    assert problems.relative_error(y, y_dense) < tolerance and abs(l1 / l1_dense - 1) < tolerance
    for got, expected in zip(grads, dense, strict=True):
      assert got.dtype == dtype and problems.relative_error(got, expected) < tolerance


def test_l1_is_of_the_product_not_of_the_gate_and_sums_over_neurons():
  x, w_gate, w_up, w_down = np.ones((4, 1)), np.ones((1, 256)), np.full((1, 256), -3.0), np.ones((256, 1))
  args = [jnp.asarray(a, jnp.float32) for a in (x, w_gate, w_up, w_down)]
  (_, l1, _), grads = values_and_gradients(args, np.zeros((4, 1), np.float32), 1.0, Capacity(256, 0))
  assert float(l1) == 256 * 3  # |1 * -3|, not 1; summed over 256 neurons, mean over 4 rows
  np.testing.assert_allclose(grads[1], np.full((1, 256), 3.0))  # d|pr| = |r| dp
  np.testing.assert_allclose(grads[2], np.full((1, 256), -1.0))  # and sign(r) p dr


def test_counts_say_which_neurons_fired():
  args, out = arrays(True)
  (_, _, counts), _ = values_and_gradients(args, out, 0.7, MIXED)
  on = np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64) > 0
  np.testing.assert_array_equal(counts.nnz, on.sum(1))
  np.testing.assert_array_equal(counts.fired, on.sum(0))
  assert counts.nnz[0] == 0 and counts.fired[7] == (on[:, 7].sum())


def test_rows_beyond_the_tail_are_counted_and_a_grown_capacity_holds_them():
  args, out = arrays(True)
  small = Capacity(MIXED.ell, 2)
  (y, _, counts), grads = values_and_gradients(args, out, 0.7, small)
  long_rows = np.flatnonzero(np.asarray(counts.nnz) > small.ell)
  assert int(counts.overflow) == long_rows.size - 2 > 0
  assert not np.asarray(y)[long_rows[2:]].any() and not np.asarray(grads[0])[long_rows[2:]].any()
  grown = train.grown(small, counts)
  assert grown == Capacity(MIXED.ell, min(M, 2 * long_rows.size)) and train.grown(grown, counts) == grown
  (y, _, counts), _ = values_and_gradients(args, out, 0.7, grown)
  assert int(counts.overflow) == 0
  assert problems.relative_error(y, by_hand(args, out, 0.7)[0][0]) < 1e-5


def test_a_zero_of_the_up_projection_has_no_sign():
  args = [jnp.asarray(a, jnp.float32) for a in (np.ones((2, 1)), np.ones((1, 3)), np.zeros((1, 3)), np.ones((3, 1)))]
  _, grads = values_and_gradients(args, np.zeros((2, 1), np.float32), 1.0, Capacity(3, 0))
  assert not any(np.asarray(g).any() for g in grads)


def test_a_nan_reaches_the_loss():
  args, out = arrays(True)
  args[0] = args[0].at[3, 2].set(np.nan)
  (y, l1, counts), _ = values_and_gradients(args, out, 0.7, MIXED)
  assert np.isnan(y[3]).all() and np.isnan(l1) and np.isfinite(np.delete(y, 3, 0)).all()
  assert int(counts.nnz[3]) == N


@FORMS
def test_what_is_kept_for_the_backward_pass(gated):
  m, k, n = 4096, 2048, 5632
  leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  args = [leaf(m, k), leaf(k, n), *([leaf(k, n)] if gated else []), leaf(n, k)]
  weights = lambda a: (a[0], a[1], a[2] if gated else None, a[-1])
  sparse = lambda *a: train.sparse_ffn(*weights(a), capacity=Capacity(128, m // 8))[:2]
  kept = train.backward_bytes(sparse, *args)
  values = 2 if gated else 1  # P and R, or P
  pattern = 2 * 128 * m + 2 * 4 * m + (m // 8) * (4 + n // 8)
  assert kept - 2 * values * (128 * m + m // 8 * n) - pattern in range(0, 4 * m + 1)
  dense = train.backward_bytes(lambda *a: train.dense_ffn(*weights(a))[0], *args)
  assert dense >= 6 * m * n / (1 if gated else 2)
  assert dense / kept >= 5 and 2 * values * m * n / kept >= 5  # even of P and R alone, dense


def test_bytes_are_counted_once_and_without_arguments():
  x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
  assert train.backward_bytes(lambda x: x * x, x) == 0
  assert train.backward_bytes(lambda x: jnp.sin(x) * 2.0, x) == 8 * 4 * 4  # cos(x)


def test_a_step_is_traced_once():
  traced = []
  args, out = arrays(True)

  @jax.jit
  def step(args):
    traced.append(1)
    return train.sparse_ffn(*args, capacity=Capacity(MIXED.ell, MIXED.tail))

  step(args), step([a * 0.5 for a in args])
  assert len(traced) == 1


def test_shapes_that_do_not_belong_together_are_refused():
  args, _ = arrays(True)
  with pytest.raises(ValueError, match="do not belong together"):
    train.sparse_ffn(args[0], args[1], args[2].T, args[3], capacity=MIXED)
  with pytest.raises(ValueError, match="do not belong together"):
    train.sparse_ffn(args[0][0], *args[1:], capacity=MIXED)
