"""x-updates: every agent minimises its own convex objective near the consensus (section 3.1).

An objective enters ADMM only through its proximal map `(v, rho) -> argmin_x f(x) + rho/2 ‖x - v‖²`; any
function of that signature will do. Two families are solved in closed form:

  diagonal   f(x) = Σ ½ Q x² + q x + l1 |x|  on the box [lower, upper]
  quadratic  f(x) = ½ xᵀ Q x + qᵀ x          with a dense positive semidefinite Q

The paper's names are settings of the first: `l1box_diag` (all terms), `lasso` (no box), `non_negative`
(lower = 0, no l1, no upper), `simple` (½ beta ‖x - h‖²). The paper's appendix speaks of fifty accelerated
proximal-gradient steps for the same problem; the closed form below is their limit.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp


class Prox(Protocol):
  """The proximal map of all agents: v `[N, d_v]`, rho `[]` or `[N, 1]` -> x `[N, d_v]`."""

  def __call__(self, v: jax.Array, rho: jax.Array) -> jax.Array: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diagonal:
  """Separable objective; every field broadcasts to `[N, d_v]`."""

  q_diag: jax.Array  # curvature, >= 0
  q: jax.Array  # linear term
  l1: jax.Array | float = 0.0  # weight of |x|, >= 0
  lower: jax.Array | float = -jnp.inf
  upper: jax.Array | float = jnp.inf

  def __call__(self, v: jax.Array, rho: jax.Array) -> jax.Array:
    curvature = self.q_diag + rho
    t = (rho * v - self.q) / curvature
    shrunk = jnp.sign(t) * jnp.maximum(jnp.abs(t) - self.l1 / curvature, 0.0)
    return jnp.clip(shrunk, self.lower, self.upper)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quadratic:
  """Dense quadratic: `matrix` `[N, d_v, d_v]` positive semidefinite, `q` `[N, d_v]`."""

  matrix: jax.Array
  q: jax.Array

  def __call__(self, v: jax.Array, rho: jax.Array) -> jax.Array:
    rho = jnp.broadcast_to(jnp.asarray(rho), (v.shape[0], 1))
    system = self.matrix + rho[:, :, None] * jnp.eye(v.shape[-1])
    solve = lambda matrix, right: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), right)
    return jax.vmap(solve)(system, rho * v - self.q)


def simple(target: jax.Array, beta: jax.Array | float = 1.0) -> Diagonal:
  """½ beta ‖x - target‖²."""
  beta = jnp.asarray(beta) * jnp.ones_like(target)
  return Diagonal(beta, -beta * target)


def lasso(q_diag: jax.Array, q: jax.Array, l1: jax.Array | float) -> Diagonal:
  """½ Q x² + q x + l1 |x|, no box."""
  return Diagonal(q_diag, q, l1)


def non_negative(q_diag: jax.Array, q: jax.Array) -> Diagonal:
  """½ Q x² + q x on x >= 0."""
  return Diagonal(q_diag, q, lower=0.0)
