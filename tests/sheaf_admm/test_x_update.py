"""Proximal maps: closed forms against brute force in one dimension, the dense quadratic against a direct solve."""

import jax
import numpy as np
import pytest

from sakanajax.sheaf_admm import x_update

SHAPE = (25, 20)


def brute_force(f, lower, upper):
  """Minimises 500 one-dimensional convex functions on [lower, upper] by ternary search, in float64."""
  low, high = (np.broadcast_to(np.clip(end, -60, 60), SHAPE).astype(np.float64) for end in (lower, upper))
  for _ in range(120):
    a, b = low + (high - low) / 3, high - (high - low) / 3
    left = f(a) <= f(b)
    low, high = np.where(left, low, a), np.where(left, b, high)
  return (low + high) / 2


def terms(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda low, high: rng.uniform(low, high, SHAPE).astype(np.float32)
  return {"q_diag": draw(0, 2), "q": draw(-4, 4), "l1": draw(0, 2), "upper": draw(0.1, 2), "v": draw(-3, 3)}


def objective(name, t):
  """(prox, q_diag, q, l1, lower, upper)"""
  if name == "l1box_diag":
    return x_update.Diagonal(t["q_diag"], t["q"], t["l1"], 0.0, t["upper"]), t["q_diag"], t["q"], t["l1"], 0, t["upper"]
  if name == "both_signs":
    lower = -0.5 * t["upper"]
    prox = x_update.Diagonal(t["q_diag"], t["q"], t["l1"], lower, t["upper"])
    return prox, t["q_diag"], t["q"], t["l1"], lower, t["upper"]
  if name == "lasso":
    return x_update.lasso(t["q_diag"], t["q"], 0.7), t["q_diag"], t["q"], 0.7, -np.inf, np.inf
  if name == "non_negative":
    return x_update.non_negative(t["q_diag"], t["q"]), t["q_diag"], t["q"], 0, 0, np.inf
  if name == "linear":  # no curvature at all
    return x_update.lasso(0 * t["q_diag"], t["q"], 0.3), 0, t["q"], 0.3, -np.inf, np.inf
  return x_update.simple(t["q"], 1.5), 1.5, -1.5 * t["q"], 0, -np.inf, np.inf


@pytest.mark.parametrize("rho", ["one", "each"])
@pytest.mark.parametrize("name", ["l1box_diag", "both_signs", "lasso", "non_negative", "linear", "simple"])
def test_closed_form_is_the_minimum(name, rho):
  t = terms()
  rho = np.float32(0.8) if rho == "one" else np.linspace(0.2, 3, SHAPE[0], dtype=np.float32)[:, None]
  prox, q_diag, q, l1, lower, upper = objective(name, t)
  energy = lambda x: q_diag * x**2 / 2 + q * x + l1 * np.abs(x) + rho / 2 * (x - t["v"]) ** 2
  x = np.asarray(jax.jit(lambda prox, v, rho: prox(v, rho))(prox, t["v"], rho), np.float64)
  best = brute_force(energy, lower, upper)
  assert ((x >= lower) & (x <= upper)).all()
  np.testing.assert_allclose(x, best, atol=2e-5)
  assert (energy(x) <= energy(best) + 1e-6).all()
  if name in ("l1box_diag", "both_signs", "lasso", "linear"):
    assert (x == 0).mean() > 0.02, "the soft threshold puts some numbers at zero exactly"


@pytest.mark.parametrize("rho", ["one", "each"])
def test_dense_quadratic_solves_its_system(rho):
  rng = np.random.default_rng(1)
  root, q, v = rng.normal(size=(6, 4, 2)), rng.normal(size=(6, 4)), rng.normal(size=(6, 4))
  matrix = root @ np.swapaxes(root, 1, 2)  # of rank 2
  rho = np.float32(0.8) if rho == "one" else np.linspace(0.2, 3, 6, dtype=np.float32)[:, None]
  prox = x_update.Quadratic(matrix.astype(np.float32), q.astype(np.float32))
  x = jax.jit(lambda prox, v, rho: prox(v, rho))(prox, v.astype(np.float32), rho)
  for n in range(6):
    r = np.broadcast_to(rho, (6, 1))[n]
    np.testing.assert_allclose(x[n], np.linalg.solve(matrix[n] + r * np.eye(4), r * v[n] - q[n]), atol=1e-4)


def test_dense_and_diagonal_agree():
  t = {name: value[:6, :4] for name, value in terms().items()}
  dense = x_update.Quadratic(np.stack([np.diag(row) for row in t["q_diag"]]), t["q"])
  both = jax.jit(lambda v: (dense(v, 0.5), x_update.Diagonal(t["q_diag"], t["q"])(v, 0.5)))
  np.testing.assert_allclose(*both(t["v"]), atol=1e-5)


def test_gradients_are_finite_on_every_kink():
  """In the dead zone, on its border, on the box: v is 0, l1 / rho, and beyond the box."""
  with jax.debug_nans(True):
    prox = lambda v, l1: x_update.Diagonal(np.zeros(4, np.float32), np.zeros(4, np.float32), l1, 0.0, 1.0)(v, 1.0)
    slope = jax.jit(jax.jacobian(prox, (0, 1)))(np.array([0.0, 0.5, 1.0, 9.0], np.float32), np.float32(0.5))
  assert all(np.isfinite(s).all() for s in slope)
  np.testing.assert_array_equal(np.diag(slope[0])[[0, 2, 3]], [0, 1, 0])
