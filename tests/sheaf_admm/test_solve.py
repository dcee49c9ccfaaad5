"""`solve`: closed forms, independent solvers and optimality conditions for every coupling; recovery; bad input.

The first three tests are the examples of the package: plain consensus, network lasso, sheaf coordination.
"""

import dataclasses

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
import qpax

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm.maps import RestrictionMaps
from sakanajax.sheaf_admm.solve import Hard, Huber, Lasso, Soft, solve
from sakanajax.sheaf_admm.x_update import Diagonal, Quadratic, lasso, simple

RNG = np.random.default_rng(0)
TRIANGLES = [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5)]


def random_problem(seed, agents=7, edges=11, d_v=4, d_e=2):
  rng = np.random.default_rng(seed)
  pairs = np.array([rng.choice(agents, 2, replace=False) for _ in range(edges)])
  maps = rng.normal(size=(edges, 2, d_e, d_v)).astype(np.float32)
  return pairs, maps, rng.normal(size=(agents, d_v)).astype(np.float32)


def matrix_of(pairs, maps, agents):
  """The coboundary written out block by block."""
  d_e, d_v = maps.shape[2:]
  out = np.zeros((len(pairs) * d_e, agents * d_v))
  for e, (u, v) in enumerate(pairs):
    out[e * d_e : (e + 1) * d_e, u * d_v : (u + 1) * d_v] += maps[e, 0]
    out[e * d_e : (e + 1) * d_e, v * d_v : (v + 1) * d_v] -= maps[e, 1]
  return out


def identities(pairs, d_v):
  return np.broadcast_to(np.eye(d_v, dtype=np.float32), (len(pairs), 2, d_v, d_v))


# --- the examples --------------------------------------------------------------------------------------------------


def test_example_plain_consensus():
  """Agents who each know one number agree on the average; each component of the graph on its own."""
  network = networkx.Graph([("ann", "bo"), ("bo", "cy"), ("dee", "eve")])
  known = jnp.array([[1.0], [2.0], [6.0], [10.0], [20.0]])
  solution = solve(network, None, simple(known), jnp.zeros((5, 1)))
  assert solution.converged
  np.testing.assert_allclose(solution.x[:, 0], [3.0, 3.0, 3.0, 15.0, 15.0], atol=2e-3)
  np.testing.assert_allclose(solution.disagreement, 0.0, atol=1e-5)


def test_example_network_lasso_finds_the_clusters():
  """Noisy readings of three groups, tied inside the groups and by a few wrong edges; agents of a group merge."""
  rng = np.random.default_rng(1)
  group = np.repeat([0, 1, 2], 8)
  level = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
  readings = level[group] + 0.3 * rng.normal(size=(24, 2))
  pairs = [(i, j) for i in range(24) for j in range(i) if group[i] == group[j] and rng.random() < 0.6]
  pairs += [(0, 8), (9, 16), (1, 23)]
  weight = 0.6
  solution = solve(pairs, None, simple(jnp.asarray(readings)), readings, coupling=Lasso(weight))
  assert solution.converged
  merged = np.linalg.norm(solution.disagreement, axis=1) < 1e-4
  found = networkx.Graph([pair for pair, same in zip(pairs, merged) if same])
  assert sorted(sorted(c) for c in networkx.connected_components(found)) == [list(range(i, i + 8)) for i in (0, 8, 16)]
  # With the groups merged, each value is the mean reading, pulled along its few edges to the other groups.
  value = np.stack([np.asarray(solution.x)[group == g].mean(0) for g in range(3)])
  pull = np.zeros((3, 2))
  for a, b in ((0, 1), (1, 2), (0, 2)):
    towards = (value[b] - value[a]) / np.linalg.norm(value[b] - value[a])
    pull[a], pull[b] = pull[a] + weight * towards, pull[b] - weight * towards
  mean = np.stack([readings[group == g].mean(0) for g in range(3)])
  np.testing.assert_allclose(value, mean + pull / 8, atol=1e-3)


def test_example_sheaf_coordination_aligns_rotated_frames():
  """Each agent sees one hidden vector in its own rotated frame, some very badly; only frames relate the agents.

  Between two agents only F_u x_u = F_v x_v is compared. The optimum is the precision-weighted mean in the common frame.
  """
  rng = np.random.default_rng(2)
  agents, d = 12, 3
  frames = np.linalg.qr(rng.normal(size=(agents, d, d)))[0]  # frame i: own coordinates -> common ones
  hidden = rng.normal(size=d)
  noise = rng.choice([0.01, 3.0], size=(agents, 1))
  seen = np.einsum("nij,i->nj", frames, hidden) + noise * rng.normal(size=(agents, d))
  pairs = np.array([(i, (i + 1) % agents) for i in range(agents)])
  precision = 1.0 / noise**2
  precision = np.broadcast_to(precision / precision.mean(), seen.shape)
  solution = solve(pairs, frames[pairs], Diagonal(jnp.asarray(precision), jnp.asarray(-precision * seen)), seen)
  assert solution.converged
  common = np.einsum("nij,nj->ni", frames, solution.x)
  best = (precision * np.einsum("nij,nj->ni", frames, seen)).sum(0) / precision.sum(0)
  np.testing.assert_allclose(common, np.tile(best, (agents, 1)), atol=2e-3)
  np.testing.assert_allclose(common[0], hidden, atol=0.03)
  assert np.abs(seen - np.einsum("nij,i->nj", frames, hidden)).max() > 1.0, "nobody could have known it alone"


def test_sensors_that_overlap_recover_a_field():
  """Each sensor estimates four of nine places and shares two with the next: the sheaf of overlaps, against least squares."""
  rng = np.random.default_rng(3)
  windows = [np.arange(k, k + 4) for k in (0, 2, 4, 5)]
  field = rng.normal(size=9)
  seen = np.stack([field[w] + 0.1 * rng.normal(size=4) for w in windows])
  pairs, ends = [], []
  for i in range(3):
    shared = np.intersect1d(windows[i], windows[i + 1])[:2]
    select = lambda k: np.eye(4)[[list(windows[k]).index(place) for place in shared]]
    pairs.append((i, i + 1))
    ends.append([select(i), select(i + 1)])
  solution = solve(pairs, np.array(ends), simple(jnp.asarray(seen)), seen)
  assert solution.converged
  f = matrix_of(np.array(pairs), np.array(ends), 4)
  projected = seen.ravel() - np.linalg.pinv(f) @ (f @ seen.ravel())
  np.testing.assert_allclose(np.ravel(solution.x), projected, atol=1e-3)


# --- against closed forms and other solvers ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_hard_coupling_is_the_projection(seed):
  pairs, maps, target = random_problem(seed)
  solution = solve(pairs, maps, simple(jnp.asarray(target)), np.zeros_like(target), tol=1e-6)
  f = matrix_of(pairs, maps, len(target))
  np.testing.assert_allclose(
      np.ravel(solution.x), target.ravel() - np.linalg.pinv(f) @ (f @ target.ravel()), atol=1e-4)


@pytest.mark.parametrize("gamma", [0.5, 20.0])
def test_soft_coupling_solves_the_linear_system(gamma):
  pairs, maps, target = random_problem(3)
  solution = solve(pairs, maps, simple(jnp.asarray(target)), target, tol=1e-6, coupling=Soft(gamma))
  f = matrix_of(pairs, maps, len(target))
  exact = np.linalg.solve(np.eye(target.size) + gamma * f.T @ f, target.ravel())
  np.testing.assert_allclose(np.ravel(solution.x), exact, atol=1e-4)


@pytest.mark.parametrize("coupling", [Hard(), Soft(2.0)])
def test_l1_and_box_agree_with_an_interior_point_solver(coupling):
  pairs, maps, centre = random_problem(4, edges=6)
  rng = np.random.default_rng(5)
  curvature = rng.uniform(0.2, 2.0, centre.shape).astype(np.float32)
  q = (-3.0 * curvature * centre).astype(np.float32)
  objective = Diagonal(jnp.asarray(curvature), jnp.asarray(q), 0.4, -0.5, 1.0)
  solution = solve(pairs, maps, objective, np.zeros_like(centre), tol=1e-6, coupling=coupling, max_iterations=5000)
  assert solution.converged
  n, f = centre.size, matrix_of(pairs, maps, len(centre))
  # Variables x and t >= |x|.
  quadratic = np.diag(np.concatenate([curvature.ravel(), np.zeros(n)]))
  if isinstance(coupling, Soft):
    quadratic[:n, :n] += coupling.gamma * f.T @ f
    f = f[:0]
  eye, none = np.eye(n), np.zeros((n, n))
  below = np.block([[eye, -eye], [-eye, -eye], [eye, none], [-eye, none]])
  bound = np.concatenate([np.zeros(2 * n), np.ones(n), 0.5 * np.ones(n)])
  linear = np.concatenate([q.ravel(), 0.4 * np.ones(n)])
  with jax.enable_x64(True):
    answer = qpax.solve_qp(*map(jnp.asarray, (
        quadratic, linear, np.hstack([f, np.zeros_like(f)]), np.zeros(len(f)), below, bound)), solver_tol=1e-8)
  np.testing.assert_allclose(np.ravel(solution.x), np.asarray(answer[0])[:n], atol=2e-3)


def test_dense_quadratics_with_consensus_agree_with_the_sum():
  rng = np.random.default_rng(6)
  root = rng.normal(size=(5, 3, 3))
  matrix = (root @ root.swapaxes(1, 2) + 0.1 * np.eye(3)).astype(np.float32)
  q = rng.normal(size=(5, 3)).astype(np.float32)
  solution = solve([(0, 1), (1, 2), (2, 3), (3, 4)], None, Quadratic(jnp.asarray(matrix), jnp.asarray(q)), q, tol=1e-6)
  exact = np.linalg.solve(matrix.sum(0), -q.sum(0))
  np.testing.assert_allclose(solution.x, np.tile(exact, (5, 1)), atol=1e-3)


def test_total_variation_on_a_path_agrees_with_an_interior_point_solver():
  rng = np.random.default_rng(7)
  agents, weight = 12, 0.7
  signal = np.repeat([0.0, 3.0, 1.0], 4)[:, None] + 0.2 * rng.normal(size=(agents, 1))
  pairs = np.stack([np.arange(agents - 1), np.arange(1, agents)], 1)
  solution = solve(pairs, None, simple(jnp.asarray(signal)), signal, tol=1e-6, coupling=Lasso(weight))
  f = matrix_of(pairs, identities(pairs, 1), agents)
  edges = len(pairs)
  quadratic = np.diag(np.concatenate([np.ones(agents), np.zeros(edges)]))
  linear = np.concatenate([-signal.ravel(), weight * np.ones(edges)])
  below = np.block([[f, -np.eye(edges)], [-f, -np.eye(edges)]])
  with jax.enable_x64(True):
    answer = qpax.solve_qp(*map(jnp.asarray, (
        quadratic, linear, np.zeros((0, agents + edges)), np.zeros(0), below, np.zeros(2 * edges))), solver_tol=1e-8)
  np.testing.assert_allclose(np.ravel(solution.x), np.asarray(answer[0])[:agents], atol=1e-3)


@pytest.mark.parametrize("kind,coupling", [
    ("identity", Lasso(1.1)), ("orthonormal", Lasso(1.1)), ("shared", Lasso(0.8)),
    ("identity", Huber(1.5, 0.3)), ("orthonormal", Huber(1.5, 0.3)), ("shared", Huber(1.5, 0.3)),
])
def test_edge_potentials_satisfy_the_optimality_conditions(kind, coupling):
  """x - target + Fᵀ y = 0 with y_e in the subdifferential of the potential at (F x)_e."""
  pairs, _, target = random_problem(8, agents=9, edges=12)
  rng = np.random.default_rng(9)
  if kind == "identity":
    maps, ends = None, identities(pairs, 4)
  elif kind == "orthonormal":
    maps = ends = np.linalg.qr(rng.normal(size=(len(pairs), 2, 4, 2)))[0].swapaxes(2, 3)
  else:
    maps = np.linalg.qr(rng.normal(size=(4, 2)))[0].T
    ends = np.broadcast_to(maps, (len(pairs), 2, 2, 4))
  solution = solve(pairs, maps, simple(jnp.asarray(target)), target, tol=1e-6, coupling=coupling)
  assert solution.converged and solution.z.shape == (12, 2, 4)
  f = matrix_of(pairs, np.asarray(ends), 9)
  apart = (f @ np.ravel(solution.x)).reshape(12, -1)
  length = np.linalg.norm(apart, axis=1, keepdims=True)
  pull = (target - solution.x).ravel()  # = Fᵀ y
  if isinstance(coupling, Huber):
    y = coupling.weight * apart * np.minimum(1.0, coupling.delta / length)
    np.testing.assert_allclose(f.T @ y.ravel(), pull, atol=3e-3)
    return
  free = length[:, 0] > 1e-2
  assert free.any() and (~free).any()
  y = np.where(free[:, None], coupling.weight * apart / np.maximum(length, 1e-9), 0.0)
  # The rest must come from merged edges, with y of at most `weight` each: rho·u carries it.
  priced = float(solution.rho) * np.asarray(solution.u)
  at_u = np.einsum("edv,ev->ed", np.asarray(ends)[:, 0], priced[:, 0])
  scale = np.einsum("edv,efv->edf", np.asarray(ends)[:, 0], np.asarray(ends)[:, 0])
  dual = np.linalg.solve(scale, at_u[..., None])[..., 0]
  np.testing.assert_allclose(dual[free], y[free], atol=3e-3)
  assert (np.linalg.norm(dual[~free], axis=1) <= coupling.weight + 1e-3).all()
  np.testing.assert_allclose(f.T @ dual.ravel(), pull, atol=3e-3)


def test_weights_per_edge_and_agents_without_edges():
  target = np.array([[0.0], [1.0], [5.0], [9.0]])
  soft = solve([(0, 1), (1, 2)], None, simple(jnp.asarray(target)), target, tol=1e-6, coupling=Soft(jnp.array([3.0, 0.0])))
  np.testing.assert_allclose(np.ravel(soft.x), [3 / 7, 4 / 7, 5.0, 9.0], atol=1e-4)
  tied = solve([(0, 1), (1, 2)], None, simple(jnp.asarray(target)), 0 * target, tol=1e-6, coupling=Lasso([10.0, 0.5]))
  np.testing.assert_allclose(np.ravel(tied.x), [0.75, 0.75, 4.5, 9.0], atol=1e-3)  # agent 3 has no edge at all


# --- how it runs ---------------------------------------------------------------------------------------------------


def test_every_form_of_graph_and_maps_means_the_same():
  rng = np.random.default_rng(10)
  board = graph_lib.grid_graph(7, 7, 3, 2)
  agents, d_v, d_e = board.num_agents, 3, 2
  target = jnp.asarray(rng.normal(size=(agents, d_v)), jnp.float32)
  by_slot = rng.normal(size=(8, d_e, d_v)).astype(np.float32)
  edges, slots = np.asarray(board.edges), np.asarray(board.slots)
  runs = [
      solve(board, by_slot, simple(target), target, coupling=Soft(1.0)),
      solve(board, RestrictionMaps(jnp.asarray(by_slot)), simple(target), target, coupling=Soft(1.0)),
      solve(edges.tolist(), by_slot[slots], simple(target), target, coupling=Soft(1.0)),
  ]
  for run in runs[1:]:
    np.testing.assert_allclose(run.x, runs[0].x, atol=1e-5)
  network = networkx.Graph([tuple(edge) for edge in edges.tolist()])
  order = np.array(network.nodes)
  shared = rng.normal(size=(d_e, d_v)).astype(np.float32)
  plain = solve(edges, shared, simple(target), target, tol=1e-6)
  named = solve(network, shared, simple(target[order]), target[order], tol=1e-6)
  np.testing.assert_allclose(named.x, plain.x[order], atol=1e-4)
  np.testing.assert_allclose(solve(edges, shared[None], simple(target), target, tol=1e-6).x, plain.x, atol=1e-6)


def test_a_function_is_as_good_as_the_family_it_computes():
  pairs, maps, target = random_problem(11)
  threshold = lambda v, rho: jnp.sign(v) * jnp.maximum(jnp.abs(v) - 0.3 / rho, 0.0)
  family = lasso(jnp.zeros_like(target), jnp.zeros_like(target), 0.3)
  for coupling in (Soft(1.0), Lasso(0.2)):
    ends = None if isinstance(coupling, Lasso) else maps
    one, other = (solve(pairs, ends, prox, target, coupling=coupling) for prox in (threshold, family))
    np.testing.assert_allclose(one.x, other.x, atol=1e-6)
    assert one.iterations == other.iterations


def test_stops_early_and_says_when_it_did_not():
  pairs, maps, target = random_problem(12)
  run = lambda **kw: solve(pairs, maps, simple(jnp.asarray(target), 0.1), 0 * target, history=True, **kw)
  loose, tight, short = run(tol=1e-3), run(tol=1e-6), run(tol=1e-6, max_iterations=5)
  assert loose.converged and tight.converged and loose.iterations < tight.iterations < 2000
  assert not short.converged and short.iterations == 5 and short.history.shape == (5, 2)
  kept = np.asarray(tight.history)
  assert np.isfinite(kept[: int(tight.iterations)]).all() and np.isnan(kept[int(tight.iterations) :]).all()
  np.testing.assert_allclose(kept[int(tight.iterations) - 1], [tight.primal, tight.dual])
  assert run(tol=1e-3, relaxation=1.0, balance=False).converged


def test_balancing_repairs_a_bad_penalty():
  pairs, maps, target = random_problem(13)
  for rho in (1e-3, 1e3):
    run = lambda balance: solve(pairs, maps, simple(jnp.asarray(target)), 0 * target, rho=rho, balance=balance)
    helped, plain = run(True), run(False)
    assert helped.converged and helped.iterations < 200 and plain.iterations > 2 * helped.iterations


def test_a_long_path_still_meets():
  """500 agents in a row: the Laplacian's condition number is beyond float32, that of the coboundary is not."""
  pairs = np.stack([np.arange(499), np.arange(1, 500)], 1)
  known = np.random.default_rng(14).normal(size=(500, 1)).astype(np.float32)
  solution = solve(pairs, None, simple(jnp.asarray(known)), 0 * known)
  assert solution.converged and solution.iterations < 50
  np.testing.assert_allclose(solution.x, known.mean(), atol=1e-3)


@pytest.mark.parametrize("coupling", [Hard(), Soft(3.0), Lasso(0.5), Huber(1.0, 0.5)])
def test_vmap_equals_one_by_one(coupling):
  pairs = np.array(TRIANGLES + [(2, 3)])
  targets = jnp.asarray(np.random.default_rng(15).normal(size=(4, 6, 2)), jnp.float32)
  one = lambda target: solve(pairs, None, simple(target), target, coupling=coupling)
  batch = jax.vmap(one)(targets)
  for k, target in enumerate(targets):
    alone = one(target)
    assert batch.iterations[k] == alone.iterations and batch.converged[k]
    np.testing.assert_allclose(batch.x[k], alone.x, atol=1e-5)


def test_vmap_over_a_weight_is_a_regularisation_path():
  target = jnp.array([[0.0], [1.0], [5.0]])
  path = jax.vmap(lambda w: solve([(0, 1), (1, 2)], None, simple(target), target, coupling=Lasso(w)).x)(
      jnp.array([0.0, 0.25, 100.0]))
  np.testing.assert_allclose(path[:, :, 0], [[0, 1, 5], [0.25, 1, 4.75], [2, 2, 2]], atol=1e-3)


def test_compiles_once_per_shape():
  traces = []

  def prox(v, rho):
    traces.append(v.shape)
    return (rho * v + 1.0) / (rho + 1.0)

  for start in (0.0, 1.0, 2.0):
    solve(TRIANGLES, None, prox, start * np.ones((6, 2)), rho=1.0 + start, tol=1e-4 * (1 + start))
  assert len(traces) == 2  # once for the check of its shape, once for the program
  solve(TRIANGLES, None, prox, np.ones((6, 5)))
  assert len(traces) == 4


def test_works_inside_jit_and_in_double_precision():
  target = np.random.default_rng(16).normal(size=(6, 2))
  inside = jax.jit(lambda t: solve(TRIANGLES, None, simple(t), t))(jnp.asarray(target))
  assert inside.converged
  with jax.enable_x64(True):
    double = solve(TRIANGLES, None, simple(jnp.asarray(target)), target, tol=1e-12)
    assert double.converged and double.x.dtype == jnp.float64
    exact = np.repeat(target.reshape(2, 3, 2).mean(1), 3, axis=0)
    np.testing.assert_allclose(double.x, exact, atol=1e-10)
  np.testing.assert_allclose(inside.x, exact, atol=1e-3)


# --- bad input -----------------------------------------------------------------------------------------------------

X0 = np.zeros((3, 2))
GOOD = dict(graph=[(0, 1), (1, 2)], maps=None, objectives=simple(jnp.ones((3, 2))), x0=X0)
NAN = np.array([[np.nan, 0.0]] * 3)
BAD = {
    "no edges": (dict(graph=[]), "no edges"),
    "no agents": (dict(x0=np.zeros((0, 2))), "x0 has shape"),
    "flat x0": (dict(x0=np.zeros(3)), "x0 has shape"),
    "x0 of words": (dict(x0="abc"), "x0 must be an array"),
    "x0 NaN": (dict(x0=NAN), "x0 holds a number that is not finite"),
    "edge out of range": (dict(graph=[(0, 3)]), "names agent 3"),
    "negative agent": (dict(graph=[(0, -1)]), "names agent -1"),
    "loop": (dict(graph=[(0, 1), (2, 2)]), "agent 2 has an edge to itself"),
    "triples": (dict(graph=[(0, 1, 2)]), "pairs"),
    "ragged": (dict(graph=[(0, 1), (1,)]), "list of pairs"),
    "words": (dict(graph=[("a", "b")]), "networkx graph where agents have names"),
    "fractions": (dict(graph=[(0.5, 1.0)]), "whole-number"),
    "empty networkx": (dict(graph=networkx.empty_graph(3)), "no edges"),
    "other networkx": (dict(graph=networkx.path_graph(4)), "4 agents but x0 has 3 rows"),
    "directed": (dict(graph=networkx.DiGraph([(0, 1), (1, 2)])), "directed"),
    "other Graph": (dict(graph=graph_lib.grid_graph(5, 5)), "4 agents but x0 has 3 rows"),
    "narrow maps": (dict(maps=np.ones((1, 3))), "last axis of the maps must be 2"),
    "maps of other edges": (dict(maps=np.ones((3, 2, 1, 2))), r"need \[2, 2, d_e, d_v\]"),
    "maps of slots": (dict(maps=np.ones((8, 1, 2))), "1 slots"),
    "flat maps": (dict(maps=np.ones(2)), "maps have shape"),
    "maps NaN": (dict(maps=np.full((1, 2), np.nan)), "maps holds a number"),
    "gamma < 0": (dict(coupling=Soft(-1.0)), "Soft.gamma is -1"),
    "gamma NaN": (dict(coupling=Soft(np.nan)), "Soft.gamma holds a number"),
    "weights of other edges": (dict(coupling=Lasso(np.ones(5))), "Lasso.weight has shape"),
    "delta 0": (dict(coupling=Huber(1.0, 0.0)), "Huber.delta must be positive"),
    "no coupling": (dict(coupling=3.0), "coupling must be"),
    "maps for lasso": (dict(maps=np.array([[1.0, 0.0], [0.0, 2.0]]), coupling=Lasso(1.0)), "orthonormal rows"),
    "objective shape": (dict(objectives=simple(jnp.ones((4, 2)))), "objectives"),
    "objective no function": (dict(objectives=3), "objectives must be callable"),
    "objective breaks": (dict(objectives=lambda v, rho: v @ v), "objectives do not fit"),
    "objective NaN": (dict(objectives=simple(jnp.asarray(NAN))), "objectives.q holds a number"),
    "concave": (dict(objectives=Diagonal(-jnp.ones((3, 2)), jnp.ones((3, 2)))), "q_diag is -1"),
    "box crossed": (dict(objectives=Diagonal(jnp.ones((3, 2)), jnp.ones((3, 2)), 0.0, 2.0, 1.0)), "lower exceeds"),
    "saddle": (dict(objectives=Quadratic(jnp.diag(jnp.array([1.0, -1.0]))[None].repeat(3, 0), jnp.ones((3, 2)))),
               "eigenvalue -1"),
    "skew": (dict(objectives=Quadratic(jnp.array([[[1.0, 1.0], [0.0, 1.0]]]).repeat(3, 0), jnp.ones((3, 2)))),
             "not symmetric"),
    "function NaN": (dict(objectives=lambda v, rho: v * jnp.nan), "not finite any more after 1 iterations"),
    "tol": (dict(tol=0.0), "tol is 0.0"),
    "rho": (dict(rho=-1.0), "rho is -1.0"),
    "relaxation": (dict(relaxation=2.0), "relaxation is 2.0"),
    "max_iterations": (dict(max_iterations=0), "max_iterations is 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name):
  change, message = BAD[name]
  with pytest.raises(UserError, match=message) as error:
    solve(**(GOOD | change))
  assert "\n" not in str(error.value)


def test_nan_inside_vmap_does_not_count_as_converged():
  targets = jnp.stack([jnp.ones((3, 2)), jnp.full((3, 2), jnp.nan)])
  batch = jax.vmap(lambda t: solve([(0, 1)], None, simple(t), X0))(targets)
  assert batch.converged.tolist() == [True, False]
  np.testing.assert_allclose(batch.x[0], 1.0, atol=1e-3)


def test_the_given_problem_is_good():
  solution = solve(**GOOD)
  assert solution.converged and solution.history is None
  assert dataclasses.is_dataclass(Hard())
