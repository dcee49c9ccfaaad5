"""ADMM on a sheaf: one iteration, and loops over it (section 3, algorithm 1).

    x = prox_f(z - u),   x~ = alpha x + (1 - alpha) z,   z = z_update(x~ + u),   u = u + x~ - z

`step` is one iteration of one example; batch it with `jax.vmap`. Networks iterate it with `loop.iterate`, where
the number of iterations is a run-time value; `history` keeps everything for inspection; `solve.py` stops by residual.

Legend: N agents, d_v vertex stalk.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """Where the negotiation stands."""

  x: jax.Array  # [N, d_v] what each agent wants
  z: jax.Array  # [N, d_v] what the agents agree on
  u: jax.Array  # [N, d_v] scaled dual: the disagreement remembered
  rho: jax.Array  # [] or [N, 1] penalty


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
  """How far from a solution: both vanish at the optimum."""

  primal: jax.Array  # [N] ‖x~ - z‖ of each agent
  dual: jax.Array  # [N] rho ‖z - z_prev‖ of each agent


Prox = Callable[[jax.Array, jax.Array], jax.Array]  # (v, rho) -> x
ZUpdate = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (w, z_prev, rho) -> z


def init(h: jax.Array, rho: jax.Array) -> State:
  """x = z = h, u = 0 (the released setting; the paper's algorithm starts z at 0)."""
  return State(x=h, z=h, u=jnp.zeros_like(h), rho=rho)


def step(state: State, prox: Prox, z_update: ZUpdate, relaxation: float = 1.0) -> tuple[State, Residuals]:
  """One ADMM iteration; `relaxation` alpha in (0, 2), 1 is plain, 1.5 to 1.8 over-relaxed."""
  x = prox(state.z - state.u, state.rho)
  relaxed = x if relaxation == 1.0 else relaxation * x + (1.0 - relaxation) * state.z
  z = z_update(relaxed + state.u, state.z, state.rho)
  u = state.u + relaxed - z
  return State(x, z, u, state.rho), Residuals(_norms(relaxed - z), _norms(z - state.z) * jnp.ravel(state.rho))


def _norms(difference: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.sum(jnp.square(jax.lax.stop_gradient(difference)), axis=-1))


def balance(state: State, residuals: Residuals, tau: float = 2.0, mu: float = 10.0) -> State:
  """Residual balancing: rho grows by `tau` when primal > mu · dual, shrinks when dual > mu · primal.

  The scaled dual is rescaled with rho_old / rho_new, so that the unscaled one is unchanged.
  """
  primal, dual = jnp.linalg.norm(residuals.primal), jnp.linalg.norm(residuals.dual)
  factor = jnp.where(primal > mu * dual, tau, jnp.where(dual > mu * primal, 1.0 / tau, 1.0))
  return dataclasses.replace(state, rho=state.rho * factor, u=state.u / factor)


def history(one_step: Callable[[State], tuple[State, Residuals]], state: State, iterations: int):
  """Runs a fixed number of iterations and returns every (State, Residuals), stacked along axis 0."""

  def body(state, _):
    state, residuals = one_step(state)
    return state, (state, residuals)

  return jax.lax.scan(body, state, None, length=iterations)[1]
