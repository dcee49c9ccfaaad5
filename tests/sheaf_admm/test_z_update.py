"""z-updates: conjugate gradients against dense solves, the exact Sudoku in closed form, and what the shortcuts keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import maps as maps_lib
from sakanajax.sheaf_admm import sheaf, z_update
from sakanajax.sheaf_admm.maps import RestrictionMaps
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)


def setting(graph, maps, seed=0, dtype=np.float32):
  """(jitted Laplacian, F by hand, two random states)"""
  f = problems.coboundary_by_hand(graph, maps_lib.dense(maps, graph.num_agents, graph.num_slots))
  rng = np.random.default_rng(seed)
  states = (rng.normal(size=(graph.num_agents, maps.base.shape[-1])).astype(dtype) for _ in range(2))
  return jax.jit(functools.partial(sheaf.laplacian, graph, maps)), f, *states


def direct(f, w, rho, gamma):
  """The minimiser of gamma/2 ‖F z‖² + ½ Σ rho ‖z - w‖², in numpy."""
  weight = np.broadcast_to(rho, w.shape).ravel().astype(np.float64)
  return np.linalg.solve(gamma * f.T @ f + np.diag(weight), weight * w.ravel()).reshape(w.shape)


def kernel(f, w):
  """The nearest point of ker F."""
  return w - np.linalg.lstsq(f, f @ w.ravel(), rcond=1e-9)[0].reshape(w.shape)  # pinv's own cutoff can be too low


def sudoku(init="soft_slice", box=(3, 3), width=2):
  graph, size = graph_lib.sudoku_graph(box), box[0] * box[1]
  if init == "exact":
    return graph, RestrictionMaps(maps_lib.selectors(size, width, size * width))
  return graph, RestrictionMaps(maps_lib.init_base(jax.random.key(0), size, width, size * width, init))


def test_thirty_steps_solve_the_sudoku():
  laplacian, f, w, z = setting(*sudoku())
  z = z_update.prox_cg(laplacian, w, z, np.float32(0.25), gamma=2.0, steps=30)
  np.testing.assert_allclose(z, direct(f, w, 0.25, 2.0), atol=1e-4)


def test_two_hundred_steps_solve_the_maze_and_five_do_not():
  with jax.enable_x64(True):
    graph = graph_lib.grid_graph(11, 11)
    maps = RestrictionMaps(maps_lib.init_base(jax.random.key(0), 8, 5, 10, "orthonormal").astype(np.float64))
    laplacian, f, w, z = setting(graph, maps, dtype=np.float64)
    operator = jax.jit(lambda z: 5.0 * laplacian(z) + 0.25 * z)
    want = direct(f, w, 0.25, 5.0)
    error = lambda steps: np.abs(z_update.conjugate_gradient(operator, 0.25 * w, w, steps) - want).max()
    assert error(200) < 1e-4
    assert 1e-2 < error(5) < np.abs(w - want).max()  # the shipped T = 5 is loose by design, and better than nothing


@pytest.mark.parametrize("rho", [0.25, 1.7])
def test_the_exact_sudoku_in_closed_form(rho):
  """z = P w + rho / (rho + 3 gamma) (I - P) w, in two steps, P the mean over the three agents of a cell."""
  gamma, (graph, maps) = 2.0, sudoku("exact")
  laplacian, _, w, z = setting(graph, maps)
  cells = graph_lib.sudoku_cells((3, 3))
  per_cell = w.reshape(27, 9, 2)
  mean = np.stack([per_cell[cells == cell].mean(0) for cell in range(81)])[cells]
  want = (mean + rho / (rho + 3 * gamma) * (per_cell - mean)).reshape(w.shape)
  two = jax.jit(lambda w, z, rho: z_update.prox_cg(laplacian, w, z, rho, gamma=gamma, steps=2))
  np.testing.assert_allclose(two(w, z, rho), want, atol=1e-5)


@pytest.mark.parametrize("rho", [2.0, np.linspace(1, 3, 5, dtype=np.float32)[:, None]], ids=["one", "each"])
@pytest.mark.parametrize("kind", ["slot", "factored"])
def test_every_solver_finds_the_minimiser(kind, rho):
  """To 1e-4, no better: the guard of the denominators stops the steps once the residual is below about 1e-4."""
  graph = problems.graphs()["random"]
  maps = problems.random_maps(kind, graph)
  laplacian, f, w, z = setting(graph, maps)
  want = direct(f, w, rho, 0.5)

  for solved in (
      z_update.prox_cg(laplacian, w, z, rho, gamma=0.5, steps=40),
      z_update.prox_cg(laplacian, w, z, rho, gamma=0.5, steps=40, warm=True),
      z_update.prox_exact(jnp.asarray(f, jnp.float32), w, rho, 0.5),
  ):
    np.testing.assert_allclose(solved, want, atol=1e-4)


def test_gradient_descent_converges_to_the_same_minimiser():
  graph, maps = sudoku("exact", box=(2, 2))  # spectrum {0, 3}: momentum 0.9 needs some hundred steps
  laplacian, f, w, z = setting(graph, maps)
  descend = lambda steps: z_update.prox_gd(laplacian, w, z, 0.4, gamma=0.5, steps=steps, rate=0.3)
  want = direct(f, w, 0.4, 0.5)
  errors = [np.abs(descend(steps) - want).max() for steps in (1, 10, 200)]
  assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-5
  assert not np.allclose(z_update.prox_gd(laplacian, w, z, 0.4, gamma=0.5, steps=2, rate=0.3, momentum=0.0), descend(2))


def test_warm_start_has_the_same_fixed_point_and_no_gradient():
  laplacian, f, w, z = setting(*sudoku(box=(2, 2)))
  best = direct(f, w, 0.5, 2.0).astype(np.float32)
  one = jax.jit(lambda w, z: z_update.prox_cg(laplacian, w, z, 0.5, gamma=2.0, steps=1, warm=True))
  np.testing.assert_allclose(one(w, best), best, atol=1e-5)
  assert np.abs(one(w, z) - best).max() > 1e-2
  slope = jax.jit(jax.grad(lambda z: jnp.sum(one(w, z) ** 2)))(z)
  np.testing.assert_array_equal(slope, 0.0)


def test_exact_projection_from_zero():
  """Started from c = 0 (z_prev = w) with many steps it is the projector; twice is once."""
  graph = problems.graphs()["random"]
  laplacian, f, w, _ = setting(graph, problems.random_maps("slot", graph))
  project = lambda w: z_update.project_cg(laplacian, w, w, 1.0, epsilon=1e-7, steps=40)
  want = kernel(f, w)
  z = project(w)
  np.testing.assert_allclose(z, want, atol=1e-3)
  np.testing.assert_allclose(project(z), z, atol=1e-3)
  np.testing.assert_allclose(z_update.project_exact(f.astype(np.float32), w), want, atol=1e-4)


def test_shipped_projection_keeps_the_kernel_part_of_the_start():
  """From c = w - z_prev the part of z_prev in ker F stays: consistent, but no projection of w."""
  graph, maps = sudoku("exact", box=(2, 2))
  laplacian, f, w, z_prev = setting(graph, maps)
  z = jax.jit(lambda w, z: z_update.project_cg(laplacian, w, z, 1.0, epsilon=1e-5, steps=5))(w, z_prev)
  np.testing.assert_allclose(f @ np.ravel(z), 0.0, atol=1e-3)
  np.testing.assert_allclose(z, kernel(f, z_prev), atol=1e-3)
  assert np.abs(z - kernel(f, w)).max() > 0.1


def test_projection_refuses_a_penalty_per_agent():
  """Its fixed point would not be that of ADMM: the nearest point needs the weights too."""
  laplacian, _, w, z = setting(*sudoku(box=(2, 2)))
  with pytest.raises(ValueError, match="one rho"):
    z_update.project_cg(laplacian, w, z, jnp.ones((12, 1)), epsilon=1e-5, steps=1)


@pytest.mark.parametrize("update", ["prox", "project", "gd"])
def test_gradients_are_finite_at_perfect_agreement(update):
  """Everybody agrees, residuals are exactly zero: neither the value nor any gradient divides 0 by 0."""
  graph = graph_lib.grid_graph(5, 5)

  def total(base, w, z_prev, rho):
    laplacian = functools.partial(sheaf.laplacian, graph, RestrictionMaps(base))
    if update == "prox":
      z = z_update.prox_cg(laplacian, w, z_prev, rho, gamma=2.0, steps=3)
    elif update == "project":
      z = z_update.project_cg(laplacian, w, z_prev, rho, epsilon=1e-5, steps=3)
    else:
      z = z_update.prox_gd(laplacian, w, z_prev, rho, gamma=2.0, steps=3, rate=0.1)
    return jnp.sum(jnp.sin(z)), z

  slopes = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
  constant, base = np.full((4, 2), 3.0, np.float32), np.eye(2, dtype=np.float32)[None]
  with jax.debug_nans(True):
    for w in (constant, 0 * constant):  # in the kernel of L
      gradients, z = slopes(base, w, w, np.float32(0.7))
      assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
      np.testing.assert_allclose(z, w, atol=1e-6)


def test_agents_without_edges_do_not_meet_the_others():
  """Soft consensus from w: one that was cut out keeps its own w, and the others' steps do not see it."""
  graph, maps = sudoku(box=(2, 2))
  gone = np.arange(12) % 5 == 1
  laplacian = functools.partial(sheaf.laplacian, graph_lib.drop_agents(graph, jnp.asarray(gone)), maps)
  w = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
  solve = lambda w: z_update.prox_cg(laplacian, w, w, 0.5, gamma=2.0, steps=3)
  z, slope = jax.jit(lambda w: (solve(w), jax.grad(lambda w: jnp.sum(jnp.sin(solve(w))[~gone]))(w)))(w)
  np.testing.assert_allclose(np.asarray(z)[gone], w[gone], atol=1e-6)
  assert not np.asarray(slope)[gone].any() and np.asarray(slope)[~gone].any()


def test_examples_of_a_batch_do_not_meet():
  """Inner products run over agents and stalk, never over the batch."""
  laplacian, _, w, z = setting(*sudoku(box=(2, 2)))
  solve = lambda w: z_update.prox_cg(laplacian, w, w, 0.5, gamma=2.0, steps=3)
  batch = jax.jit(jax.vmap(solve))(np.stack([w, 100.0 * z]))
  np.testing.assert_allclose(batch[0], jax.jit(solve)(w), atol=1e-5)
