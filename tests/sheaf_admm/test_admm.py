"""ADMM converges to what it should: closed forms, and an independent QP solver on random convex problems."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qpax

from sakanajax.sheaf_admm import admm
from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import maps as maps_lib
from sakanajax.sheaf_admm import sheaf, x_update, z_update
from sakanajax.sheaf_admm.maps import RestrictionMaps
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

GRAPH = problems.random_multigraph(3, agents=4, slots=2, edges=4)
GAMMA = 0.7
EACH = np.linspace(0.5, 2.0, 4)[:, None]  # a penalty per agent
# coupling, penalty, relaxation, residual balancing
WAYS = [("soft", 1.0, 1.0, False), ("soft", 40.0, 1.0, True), ("soft", EACH, 1.6, False),
        ("hard", 1.0, 1.0, False), ("hard", 1.0, 1.6, True)]


@pytest.fixture(autouse=True)
def double_precision():
  with jax.enable_x64(True):
    yield


@functools.cache
def random_problem():
  """Four agents of three numbers each: curvature, slope, l1, box; and maps."""
  rng = np.random.default_rng(11)
  with jax.enable_x64(True):
    maps = RestrictionMaps(jnp.asarray(rng.normal(size=(2, 1, 3))))
  terms = dict(q_diag=rng.uniform(0.3, 2, (4, 3)), q=rng.normal(size=(4, 3)) * 2, l1=rng.uniform(0, 0.5, (4, 3)),
               lower=-rng.uniform(0.2, 1, (4, 3)), upper=rng.uniform(0.2, 1, (4, 3)))
  return maps, terms


@functools.cache
def coboundary():
  return problems.coboundary_by_hand(GRAPH, maps_lib.dense(random_problem()[0], 4, 2))


@functools.cache
def quadratic_program(coupling):
  """The same problem for an interior-point solver: |x| <= t, and F x = 0 with independent rows if hard."""
  f, (_, terms) = coboundary(), random_problem()
  q_diag, q, l1, lower, upper = (terms[k].ravel() for k in ("q_diag", "q", "l1", "lower", "upper"))
  n, eye, zero = 12, np.eye(12), np.zeros((12, 12))
  quadratic = np.diag(q_diag) + (GAMMA * f.T @ f if coupling == "soft" else 0)
  matrix = np.block([[quadratic, zero], [zero, zero]])
  above = np.block([[eye, -eye], [-eye, -eye], [eye, zero], [-eye, zero]])
  bounds = np.concatenate([np.zeros(2 * n), upper, -lower])
  _, values, rows = np.linalg.svd(f)
  equal = rows[: (values > 1e-9).sum()] if coupling == "hard" else np.zeros((0, n))
  equal = np.concatenate([equal, np.zeros_like(equal)], 1)
  x, *_, converged, _ = qpax.solve_qp(
      *map(jnp.asarray, (matrix, np.concatenate([q, l1]), equal, np.zeros(len(equal)), above, bounds)))
  assert converged
  return np.asarray(x)[:n].reshape(4, 3)


@functools.cache
def negotiation(coupling, relaxation):
  """(rho, balance, iterations) -> the last state and residuals, with conjugate gradients as the z-update."""
  maps, terms = random_problem()
  laplacian = functools.partial(sheaf.laplacian, GRAPH, maps)
  prox = x_update.Diagonal(**terms)
  if coupling == "soft":
    update = lambda w, z, rho: z_update.prox_cg(laplacian, w, z, rho, gamma=GAMMA, steps=12)
  else:  # from c = 0
    update = lambda w, z, rho: z_update.project_cg(laplacian, w, w, rho, epsilon=1e-9, steps=12)

  @jax.jit
  def negotiate(rho, balance, iterations):
    def body(k, carry):
      state, residuals = admm.step(carry[0], prox, update, relaxation)
      balanced = admm.balance(state, residuals)
      early = balance & (k < iterations // 2) & (k % 10 == 9)  # rho must settle for ADMM to converge
      return jax.tree.map(lambda b, s: jnp.where(early, b, s), balanced, state), residuals

    start = admm.init(jnp.zeros((4, 3)), rho), admm.Residuals(jnp.zeros(4), jnp.zeros(4))
    return jax.lax.fori_loop(0, iterations, body, start)

  return negotiate


def run(coupling, rho, relaxation, balance, iterations=600):
  return jax.device_get(negotiation(coupling, relaxation)(jnp.asarray(rho), balance, iterations))


@pytest.mark.parametrize("coupling,rho,relaxation,balance", WAYS)
def test_converged_admm_satisfies_the_optimality_conditions(coupling, rho, relaxation, balance):
  """0 ∈ ∂f(x) + y with y = rho u; soft: y = gamma L x; hard: F x = 0 and y in the range of Fᵀ. And the QP agrees."""
  state, residuals = run(coupling, rho, relaxation, balance)
  _, terms = random_problem()
  f, y = coboundary(), np.asarray(state.rho * state.u)
  tolerance = 2e-4
  stationary = np.asarray(x_update.Diagonal(**terms)(state.x - y, 1.0))
  np.testing.assert_allclose(stationary, state.x, atol=tolerance)
  np.testing.assert_allclose(state.x, state.z, atol=tolerance)
  if coupling == "soft":
    np.testing.assert_allclose(y.ravel(), GAMMA * f.T @ (f @ state.x.ravel()), atol=tolerance)
  else:
    np.testing.assert_allclose(f @ state.x.ravel(), 0.0, atol=tolerance)
    np.testing.assert_allclose(np.linalg.pinv(f) @ (f @ y.ravel()), y.ravel(), atol=tolerance)
  assert residuals.primal.max() < tolerance and residuals.dual.max() < tolerance
  solution = quadratic_program(coupling)
  np.testing.assert_allclose(state.x, solution, atol=tolerance)
  at_bound = np.isclose(solution, terms["lower"], atol=1e-4) | np.isclose(solution, terms["upper"], atol=1e-4)
  assert at_bound.any() and not at_bound.all() and (np.abs(f @ solution.ravel()).max() > 0.1) == (coupling == "soft")


def test_balancing_moves_the_penalty():
  state, _ = run("soft", 40.0, 1.0, True, iterations=40)
  assert float(state.rho) < 40.0


@pytest.mark.parametrize("coupling", ["soft", "hard"])
def test_two_agents_meet_where_the_closed_form_says(coupling):
  """½ beta ‖x - h‖² each, F = I. Hard: the weighted mean. Soft: each moves by its share of the difference."""
  graph = graph_lib.make_graph([(0, 1)], None, 2)
  laplacian = functools.partial(sheaf.laplacian, graph, RestrictionMaps(jnp.eye(3)[None]))
  h = np.random.default_rng(0).normal(size=(2, 3))
  beta, gamma = np.array([[1.0], [3.0]]), 2.0
  if coupling == "soft":
    update = lambda w, z, rho: z_update.prox_cg(laplacian, w, z, rho, gamma=gamma, steps=6)
    pull = (h[0] - h[1]) / (1 / gamma + 1 / beta[0] + 1 / beta[1])  # gamma (x_0 - x_1), what the edge bears
    want = h - np.stack([pull, -pull]) / beta
  else:
    update = lambda w, z, rho: z_update.project_cg(laplacian, w, w, rho, epsilon=1e-9, steps=6)
    want = np.tile((beta * h).sum(0) / beta.sum(), (2, 1))
  one = jax.jit(lambda state: admm.step(state, x_update.simple(h, beta), update))
  state = admm.init(jnp.asarray(h), jnp.asarray(1.0))
  for _ in range(150):
    state, _ = one(state)
  np.testing.assert_allclose(state.x, want, atol=1e-4)
  np.testing.assert_allclose(state.z, want, atol=1e-4)


def by_hand(h, rho, alpha):
  """Two iterations written out, with a z-update that halves."""
  x, z, u, out = h, h, 0 * h, []
  for _ in range(2):
    x, old = (rho * (z - u) + h) / (1 + rho), z
    blend = alpha * x + (1 - alpha) * z
    z = 0.5 * (blend + u)
    u = u + blend - z
    out.append((x, z, u, np.linalg.norm(blend - z, axis=1), np.linalg.norm(z - old, axis=1) * np.ravel(rho)))
  return [np.stack(part) for part in zip(*out)]


@pytest.mark.parametrize("alpha", [1.0, 1.6])
@pytest.mark.parametrize("rho", [0.5, EACH], ids=["one", "each"])
def test_history_is_the_algorithm(alpha, rho):
  h = np.random.default_rng(1).normal(size=(4, 3))
  one = lambda state: admm.step(state, x_update.simple(h), lambda w, z, rho: 0.5 * w, alpha)
  states, residuals = jax.jit(lambda state: admm.history(one, state, 2))(admm.init(jnp.asarray(h), jnp.asarray(rho)))
  for got, want in zip((states.x, states.z, states.u, residuals.primal, residuals.dual), by_hand(h, rho, alpha)):
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("primal,dual,factor", [(25.0, 1.0, 2.0), (1.0, 25.0, 0.5), (5.0, 1.0, 1.0), (0.0, 0.0, 1.0)])
def test_balance_leaves_the_unscaled_dual_alone(primal, dual, factor):
  u = np.random.default_rng(2).normal(size=(4, 3))
  state = admm.State(u, u, u, EACH)
  residuals = admm.Residuals(np.array([primal, 0, 0, 0]), np.array([0, dual, 0, 0]))
  after = jax.jit(admm.balance)(state, residuals)
  np.testing.assert_allclose(after.rho, factor * EACH)
  np.testing.assert_allclose(after.rho * after.u, EACH * u)
