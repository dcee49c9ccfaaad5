"""ADMM for people's own problems: agents with convex objectives, tied along the edges of a graph.

    minimise  Σ_i f_i(x_i) + g(F x)      g from `coupling`: Hard, Soft, Lasso (network lasso) or Huber

  targets = jnp.array([[1.0], [2.0], [6.0]])
  solution = solve([(0, 1), (1, 2)], None, simple(targets), jnp.zeros((3, 1)))
  solution.x                                   # consensus: all three at the average, 3.0

It stops by the residuals of Boyd et al. 2011, section 3.3. With -rho·u - s in ∂f(x), rho·u in ∂g(z) and r = x - z, a
vanishing r (primal) and s = rho·(z - z_prev + (1 - alpha)(x - z_prev)) (dual, of the over-relaxed iteration) is
optimality itself:

    ‖r‖ <= tol (√n + max(‖x‖, ‖z‖))      ‖s‖ <= tol (√n + ‖rho u‖)      n numbers in x

Unlike the networks of this package it neither unrolls nor has a reverse-mode gradient; `loop.iterate` has.

Legend: N agents, E edges, S slots, d_v vertex stalk, d_e edge stalk, M rows: N, or one per edge end under Lasso and Huber.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import admm, coupling as coupling_lib, problem
from sakanajax.sheaf_admm.coupling import Coupling, Hard, Huber, Lasso, Sheaf, Soft
from sakanajax.sheaf_admm.x_update import Prox

__all__ = ["solve", "Solution", "Hard", "Soft", "Lasso", "Huber"]

BALANCE_EVERY = 10  # iterations between two looks at the residuals; in the second half of the iterations rho rests
BALANCE_RATIO = 2.0  # of the residuals in units of their bounds, beyond which rho moves


class Solution(NamedTuple):
  """Where the agents ended."""

  x: jax.Array  # [N, d_v] what each agent wants, given the others
  z: jax.Array  # [N, d_v] what they agree on; [E, 2, d_v] the ends' copies under Lasso and Huber
  u: jax.Array  # as z: scaled dual; rho · u are the prices of disagreement
  rho: jax.Array  # [] penalty at the end
  primal: jax.Array  # [] ‖r‖
  dual: jax.Array  # [] ‖s‖
  iterations: jax.Array  # [] int32
  converged: jax.Array  # [] bool: both residuals are within tol
  disagreement: jax.Array  # [E, d_e] F z
  history: jax.Array | None  # [max_iterations, 2] primal and dual of each iteration, NaN after the last; None if not kept


class _Settings(NamedTuple):
  relaxation: float
  balance: bool
  max_iterations: int
  history: bool


class _Gap(NamedTuple):
  primal: jax.Array
  dual: jax.Array
  closed: jax.Array  # both within their bounds


def solve(
    graph: Any, maps: Any, objectives: Prox, x0: Any, tol: float = 1e-5, *, coupling: Coupling = Hard(),
    rho: float = 1.0, relaxation: float = 1.6, balance: bool = True, max_iterations: int = 2000, history: bool = False,
) -> Solution:
  """Minimises Σ f_i(x_i) + g(F x) by ADMM; compiled once per shape, and `jax.vmap` batches it over anything but the graph.

  Args:
    graph: `[E, 2]` pairs of agents 0 .. N-1, an undirected networkx graph (agents are its nodes in their order), or a
      `graph.Graph`. It need not be connected.
    maps: restriction maps. None: the identity, so agents compare whole states. `[d_e, d_v]`: one for all.
      `[S, d_e, d_v]`: by slot of a `Graph`. `[E, 2, d_e, d_v]`: one per edge end (0 at u, 1 at v), in the order of the
      edges. Or `maps.RestrictionMaps`.
    objectives: the proximal map (v `[N, d_v]`, rho) -> x `[N, d_v]` of all agents, where rho is `[]` or `[N, 1]`:
      `x_update.Diagonal`, `Quadratic`, `simple`, ..., or a pure function (traced once: what it closes over is frozen).
    x0: `[N, d_v]` where to start.
    tol: absolute and relative tolerance. In float32 about 1e-6 is the least that can be reached.
    coupling: Hard(), Soft(gamma), Lasso(weight) or Huber(weight, delta). The last two need F_u F_uᵀ + F_v F_vᵀ = c I on
      every edge, as the identity and maps with orthonormal rows have.
    rho: initial penalty.
    relaxation: over-relaxation alpha in (0, 2); 1 is the plain iteration.
    balance: let rho follow the ratio of the residuals, each in units of its bound above (cf. Boyd et al., section 3.4.1),
      in the first half of the iterations.
    max_iterations: when to give up: `converged` is False then.
    history: keep the residuals of every iteration.

  Raises:
    UserError: shapes that do not fit, no edges, numbers that are not finite, objectives or couplings that are not
      convex, and objectives that return NaN.
  """
  x0 = problem.start_of(x0)
  settings = _check_settings(tol, rho, relaxation, balance, max_iterations, history)
  sheaf = problem.sheaf_of(graph, maps, x0)
  coupling = problem.coupling_of(coupling, sheaf, x0.dtype)
  rho = jnp.asarray(rho, x0.dtype)
  per_edge = isinstance(coupling, coupling_lib.EDGE_POTENTIALS)
  problem.check_objectives(objectives, x0, jnp.full((x0.shape[0], 1), rho) if per_edge else rho)
  arrays, function = _split(objectives)
  rows = _rows(sheaf, x0.shape[0]) if per_edge else None
  solution = _run(sheaf, coupling, arrays, x0, rho, jnp.asarray(tol, x0.dtype), rows, function, settings)
  gaps = problem.known(solution.primal + solution.dual)
  if gaps is not None and not np.isfinite(gaps).all():
    raise UserError(f"the iterates are not finite any more after {int(solution.iterations)} iterations: the objectives are "
                    "unbounded from below or return no number, no point fulfils all constraints, or the numbers are too "
                    "large for their type; check these, or scale the problem")
  return solution


def _check_settings(tol, rho, relaxation, balance, max_iterations, history) -> _Settings:
  for name, value in (("tol", tol), ("rho", rho)):
    there = problem.known(value)
    if there is not None and not (there.ndim == 0 and np.isfinite(there) and there > 0):
      raise UserError(f"{name} is {value}; give one positive number")
  if not 0 < relaxation < 2:
    raise UserError(f"relaxation is {relaxation}; give a number in (0, 2), 1 for none")
  if int(max_iterations) != max_iterations or max_iterations < 1:
    raise UserError(f"max_iterations is {max_iterations}; give a whole number of at least 1")
  return _Settings(float(relaxation), bool(balance), int(max_iterations), bool(history))


def _split(prox: Prox) -> tuple[Any, Callable | None]:
  """Pytrees of arrays are arguments of the compiled program; any other callable is part of it."""
  leaves = jax.tree.leaves(prox)
  if leaves and all(isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int)) for leaf in leaves):
    return prox, None
  try:
    hash(prox)
  except TypeError:
    return None, lambda v, rho: prox(v, rho)
  return None, prox


class _Rows(NamedTuple):
  """The rows of a state on edge copies: the 2E ends of the edges, then the agents that have none."""

  owner: np.ndarray  # [M] the agent of each row
  first: np.ndarray  # [N] a row of each agent
  count: np.ndarray  # [N, 1] how many rows it has


def _rows(sheaf: Sheaf, agents: int) -> _Rows:
  ends = np.asarray(sheaf.edges).reshape(-1)
  owner = np.concatenate([ends, np.setdiff1d(np.arange(agents), ends)]).astype(np.int32)
  _, first, count = np.unique(owner, return_index=True, return_counts=True)
  return _Rows(owner, first.astype(np.int32), count[:, None].astype(np.float32))


@functools.partial(jax.jit, static_argnames=("function", "settings"))
def _run(sheaf, coupling, arrays, x0, rho, tol, rows, function, settings) -> Solution:
  prox = arrays if function is None else function
  if rows is None:
    state, update = admm.init(x0, rho), coupling.z_update(sheaf)
  else:
    state, update, prox = admm.init(x0[rows.owner], rho), coupling_lib.edge_update(coupling, sheaf), _on_rows(prox, rows)
  step = lambda state: admm.step(state, prox, update, settings.relaxation)[0]
  state, gap, iterations, history = _iterate(step, state, tol, settings)
  x, z, u = state.x, state.z, state.u
  if rows is None:
    apart = coupling_lib.coboundary(sheaf, z)
  else:
    x = x[rows.first]
    z, u = (rows_[: sheaf.edges.size].reshape(*sheaf.edges.shape, -1) for rows_ in (z, u))
    apart = coupling_lib.difference(sheaf, z)
  return Solution(x, z, u, state.rho, gap.primal, gap.dual, iterations, gap.closed, apart, history)


def _on_rows(prox: Prox, rows: _Rows) -> Prox:
  """The proximal map of Σ f_i on copies that are equal: each agent's copies pull at it with their mean."""

  def lifted(v, rho):
    count = jnp.asarray(rows.count, v.dtype)
    mean = jnp.zeros((rows.first.shape[0], v.shape[1]), v.dtype).at[rows.owner].add(v) / count
    return prox(mean, rho * count)[rows.owner]

  return lifted


def _iterate(step: Callable[[admm.State], admm.State], state: admm.State, tol: jax.Array, settings: _Settings):
  """Iterates until the gap is closed, is no number, or the iterations are used up."""
  infinite = jnp.asarray(jnp.inf, state.x.dtype)
  history = jnp.full((settings.max_iterations, 2), jnp.nan, state.x.dtype) if settings.history else None

  def unfinished(carry):
    k, _, gap, _ = carry
    open_ = ~gap.closed & jnp.isfinite(gap.primal + gap.dual)
    return (k == 0) | (open_ & (k < settings.max_iterations))

  def body(carry):
    k, before, _, history = carry
    after = step(before)
    gap, residuals = _gap(before, after, tol, settings.relaxation)
    if history is not None:
      history = history.at[k].set(jnp.stack([gap.primal, gap.dual]))
    if settings.balance:
      due = ((k + 1) % BALANCE_EVERY == 0) & (2 * k < settings.max_iterations)
      after = jax.tree.map(functools.partial(jnp.where, due), admm.balance(after, residuals, mu=BALANCE_RATIO), after)
    return k + 1, after, gap, history

  start = (jnp.int32(0), state, _Gap(infinite, infinite, jnp.bool_(False)), history)
  iterations, state, gap, history = jax.lax.while_loop(unfinished, body, start)
  return state, gap, iterations, history


def _gap(before: admm.State, after: admm.State, tol, relaxation: float) -> tuple[_Gap, admm.Residuals]:
  """The residuals, and both in units of their bounds, which is what is worth balancing."""
  norm = lambda a: jnp.sqrt(jnp.sum(jnp.square(a)))
  r = norm(after.x - after.z)
  s = norm(after.rho * (after.z - before.z + (1.0 - relaxation) * (after.x - before.z)))
  root = after.x.size**0.5
  r_bound = tol * (root + jnp.maximum(norm(after.x), norm(after.z)))
  s_bound = tol * (root + norm(after.rho * after.u))
  return _Gap(r, s, (r <= r_bound) & (s <= s_bound)), admm.Residuals((r / r_bound)[None], (s / s_bound)[None])
