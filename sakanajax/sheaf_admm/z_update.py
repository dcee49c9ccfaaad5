"""z-updates: agents negotiate a consensus z near w = x + u (section 3.2 of the paper).

  prox     argmin_z  gamma/2 ‖F z‖² + ½ Σ rho ‖z - w‖²      soft consensus
  project  the nearest point of {z : F z = 0}               hard consensus, deliberately inexact

Both are linear systems in the sheaf Laplacian, solved by a fixed number of unrolled conjugate-gradient steps
so that gradients are those of what was really computed. `gd` is the Nesterov ablation; `exact` the oracle.

`project_cg` starts from c = w - z_prev, as shipped with the paper: what of that start lies in the kernel of L
stays, so it is no projector even with many steps. Start from c = 0 (`z_prev = w`) for the exact projection.
"""

from __future__ import annotations

from typing import Callable

import jax
import jax.numpy as jnp

LinearOperator = Callable[[jax.Array], jax.Array]
TINY = 1e-8  # keeps 0/0 at agreement finite; 1e-12 underflows in the gradient


def conjugate_gradient(operator: LinearOperator, right: jax.Array, start: jax.Array, steps: int) -> jax.Array:
  """`steps` conjugate-gradient steps on operator(z) = right, unrolled, without early stop."""
  z = start
  residual = right - operator(z)
  direction = residual
  energy = jnp.vdot(residual, residual)
  for _ in range(steps):
    image = operator(direction)
    length = energy / (jnp.vdot(direction, image) + TINY)
    z = z + length * direction
    residual = residual - length * image
    next_energy = jnp.vdot(residual, residual)
    direction = residual + (next_energy / (energy + TINY)) * direction
    energy = next_energy
  return z


def prox_cg(
    laplacian: LinearOperator, w: jax.Array, z_prev: jax.Array, rho: jax.Array, *, gamma: float, steps: int,
    warm: bool = False,
) -> jax.Array:
  """Solves (gamma L + rho) z = rho w from z = w, or from stop_gradient(z_prev) when `warm`."""
  start = jax.lax.stop_gradient(z_prev) if warm else w
  return conjugate_gradient(lambda z: gamma * laplacian(z) + rho * z, rho * w, start, steps)


def project_cg(
    laplacian: LinearOperator, w: jax.Array, z_prev: jax.Array, rho: jax.Array, *, epsilon: float, steps: int
) -> jax.Array:
  """Solves (L + epsilon) c = L w from c = w - z_prev and returns w - c; rho cancels, so it must be one number.

  Raises:
    ValueError: for a penalty per agent, under which the nearest point is a weighted one.
  """
  if jnp.size(rho) != 1:
    raise ValueError(f"the projection needs one rho for all agents, got an array of shape {jnp.shape(rho)}")
  c = conjugate_gradient(lambda c: laplacian(c) + epsilon * c, laplacian(w), w - z_prev, steps)
  return w - c


def prox_gd(
    laplacian: LinearOperator, w: jax.Array, z_prev: jax.Array, rho: jax.Array, *, gamma: float, steps: int,
    rate: jax.Array, momentum: float = 0.9,
) -> jax.Array:
  """`steps` Nesterov steps of size `rate` on the energy of `prox_cg`, from z = w."""
  del z_prev
  z, look = w, w
  for _ in range(steps):
    gradient = gamma * laplacian(look) + rho * (look - w)
    following = look - rate * gradient
    z, look = following, following + momentum * (following - z)
  return z


def prox_exact(coboundary: jax.Array, w: jax.Array, rho: jax.Array, gamma: float) -> jax.Array:
  """The minimiser of `prox_cg`'s energy by a dense solve; `coboundary` is `sheaf.dense_coboundary`."""
  weight = jnp.broadcast_to(rho, w.shape).ravel()
  system = gamma * coboundary.T @ coboundary + jnp.diag(weight)
  return jnp.linalg.solve(system, weight * w.ravel()).reshape(w.shape)


def project_exact(coboundary: jax.Array, w: jax.Array) -> jax.Array:
  """The nearest z with F z = 0, by pseudo-inverse."""
  return w - (jnp.linalg.pinv(coboundary) @ (coboundary @ w.ravel())).reshape(w.shape)
