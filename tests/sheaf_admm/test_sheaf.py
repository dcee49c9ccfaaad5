"""The sheaf Laplacian: slots against FᵀF built by hand, against the scatter form, and the geometry of the slots."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import maps as maps_lib
from sakanajax.sheaf_admm import sheaf
from sakanajax.sheaf_admm.maps import RestrictionMaps
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

CASES = [("grid", kind) for kind in problems.KINDS] + [
    ("sudoku", "slot"), ("sudoku", "factored"), ("alone", "factored_global"), ("random", "agent")]


@jax.jit
def forms(graph, maps, z):
  """Everything that sheaf.py computes from one z, and all maps multiplied out."""
  return {
      "maps": maps_lib.dense(maps, graph.num_agents, graph.num_slots),
      "dense": sheaf.dense_coboundary(graph, maps),
      "coboundary": sheaf.coboundary(graph, maps, z),
      "laplacian": sheaf.laplacian(graph, maps, z),
      "scatter": sheaf.laplacian_scatter(graph, sheaf.edge_maps(graph, maps), z),
      "energy": sheaf.energy(graph, maps, z),
  }


def check_laplacian(graph, maps, seed):
  """All forms of F and L agree with numpy on a random z; returns F."""
  z = np.random.default_rng(seed).normal(size=(graph.num_agents, maps.base.shape[-1]))
  got = jax.device_get(forms(graph, maps, z.astype(np.float32)))
  f = problems.coboundary_by_hand(graph, got["maps"])
  residual, want = f @ z.ravel(), (f.T @ (f @ z.ravel())).reshape(z.shape)
  scale = 1e-5 * (1 + np.abs(want).max())
  np.testing.assert_allclose(got["dense"], f, atol=1e-5)
  np.testing.assert_allclose(got["coboundary"].ravel(), residual, atol=scale)
  np.testing.assert_allclose(got["laplacian"], want, atol=scale)
  np.testing.assert_allclose(got["scatter"], want, atol=scale)
  assert got["energy"] == pytest.approx(0.5 * residual @ residual, rel=1e-4)
  return f


@pytest.mark.parametrize("name,kind", CASES)
def test_laplacian_is_coboundary_transposed_times_coboundary(name, kind):
  graph = problems.graphs()[name]
  maps = problems.random_maps(kind, graph)
  check_laplacian(graph, maps, seed=3)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(problems.KINDS), edges=st.sampled_from((0, 9)))
def test_laplacian_of_any_multigraph(seed, kind, edges):
  graph = problems.random_multigraph(seed, agents=5, slots=3, edges=edges)
  check_laplacian(graph, problems.random_maps(kind, graph, seed=seed), seed)


@pytest.mark.parametrize("kind", ["slot", "agent", "factored_global"])
def test_coboundary_and_its_adjoint(kind):
  """<F z, r> = <z, Fᵀ r>, Fᵀ by transposing the program, and Fᵀ F is the Laplacian."""
  graph = problems.graphs()["random"]
  maps = problems.random_maps(kind, graph)
  rng = np.random.default_rng(4)
  z, r = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 5), (graph.num_edges, 2)))

  @jax.jit
  def both(z, r):
    forward = lambda z: sheaf.coboundary(graph, maps, z)
    transpose = jax.linear_transpose(forward, z)
    return forward(z), *transpose(r), *transpose(forward(z))

  there, back, again = both(z, r)
  assert np.vdot(there, r) == pytest.approx(np.vdot(z, back), rel=1e-4)
  got = forms(graph, maps, z)
  f = problems.coboundary_by_hand(graph, got["maps"])
  np.testing.assert_allclose(np.ravel(back), f.T @ r.ravel(), atol=1e-4)
  np.testing.assert_allclose(again, got["laplacian"], rtol=1e-4, atol=1e-4)


def test_the_far_end_speaks_through_the_opposite_map():
  """An edge to the south uses R_S at its north end and R_N at its south end."""
  graph = graph_lib.grid_graph(5, 3)  # two agents, one above the other
  rng = np.random.default_rng(5)
  base, states = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 2, 4), (2, 4)))
  residual = lambda base: sheaf.coboundary(graph, RestrictionMaps(base), states)[0]
  value, jacobian = jax.jit(lambda base: (residual(base), jax.jacobian(residual)(base)))(base)
  n, s = graph_lib.COMPASS.index((-1, 0)), graph_lib.COMPASS.index((1, 0))
  np.testing.assert_allclose(value, base[s] @ states[0] - base[n] @ states[1], atol=1e-5)
  assert set(np.flatnonzero(np.abs(jacobian).sum((0, 2, 3)))) == {n, s}  # who matters at all


@pytest.mark.parametrize("kind", ["slot", "factored"])
def test_dropped_agents_take_no_part(kind):
  graph = problems.random_multigraph(1, agents=6, edges=14)
  maps = problems.random_maps(kind, graph)
  gone = np.array([0, 1, 0, 0, 1, 0], bool)
  z = np.random.default_rng(6).normal(size=(6, 5)).astype(np.float32)
  without = jax.jit(lambda gone, z: sheaf.laplacian(graph_lib.drop_agents(graph, gone), maps, z))
  f = problems.coboundary_by_hand(graph, forms(graph, maps, z)["maps"])
  kept = ~gone[np.asarray(graph.edges)].any(1)
  f = f.reshape(graph.num_edges, -1)[kept].reshape(-1, f.shape[1])
  out = without(gone, z)
  np.testing.assert_allclose(np.ravel(out), f.T @ (f @ z.ravel()), atol=1e-3)
  np.testing.assert_array_equal(np.asarray(out)[gone], 0.0)
  np.testing.assert_allclose(without(np.zeros(6, bool), z), forms(graph, maps, z)["laplacian"], atol=1e-4)


@pytest.mark.parametrize("box", [(2, 2), (2, 3)])
def test_spectrum_of_the_exact_sudoku(box):
  """With exact selectors L = 3 (I - P): P averages each cell over its three agents, eigenvalues 0 and 3."""
  graph, cells, width = graph_lib.sudoku_graph(box), graph_lib.sudoku_cells(box), 2
  size = cells.shape[1]
  maps = RestrictionMaps(maps_lib.selectors(size, width, size * width))
  f = check_laplacian(graph, maps, seed=0)
  same = (cells.ravel()[:, None] == cells.ravel()[None]).astype(float)
  p = np.kron(same / 3, np.eye(width))
  np.testing.assert_allclose(f.T @ f, 3 * (np.eye(len(p)) - p), atol=1e-6)
  eigenvalues = np.linalg.eigvalsh(f.T @ f)
  np.testing.assert_allclose(np.unique(eigenvalues.round(6) + 0.0), [0, 3])
  assert np.isclose(eigenvalues, 0).sum() == size * size * width  # one consensus per cell and channel


def test_global_sections_of_the_constant_sheaf_are_constants():
  graph = graph_lib.grid_graph(7, 5)
  z = np.tile(np.array([1.0, -2.0, 3.0], np.float32), (graph.num_agents, 1))
  got = forms(graph, RestrictionMaps(np.eye(3, dtype=np.float32)[None]), z)
  np.testing.assert_array_equal(got["laplacian"], 0.0)
  assert np.linalg.matrix_rank(np.asarray(got["dense"])) == 3 * (graph.num_agents - 1)


def test_consistency_and_its_gradient_at_agreement():
  graph = graph_lib.grid_graph(7, 5)
  maps = problems.random_maps("slot", graph)
  z = np.random.default_rng(7).normal(size=(graph.num_agents, 5)).astype(np.float32)
  rms = jax.jit(jax.value_and_grad(lambda z: sheaf.consistency_rms(graph, maps, z)))
  residual = np.asarray(forms(graph, maps, z)["coboundary"])
  assert float(rms(z)[0]) == pytest.approx(np.sqrt((residual**2).mean() + 1e-6), rel=1e-5)
  with jax.debug_nans(True):
    value, gradient = rms(np.zeros_like(z))
  assert float(value) == pytest.approx(1e-3) and not np.any(gradient)
