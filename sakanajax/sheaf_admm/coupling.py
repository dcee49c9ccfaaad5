"""How the agents of `solve` are tied together along the edges of a sheaf.

  Hard            F z = 0: all edges agree                          exact projection
  Soft(gamma)     Σ_e gamma/2 ‖(F z)_e‖²                            one linear system
  Lasso(weight)   Σ_e weight ‖(F z)_e‖₂: edges agree or pay         closed form per edge
  Huber(weight, delta)   quadratic up to delta, linear beyond it    closed form per edge

The first two are the paper's z-updates, solved to rounding instead of by a few unrolled steps. The last two are
the network lasso's (Hallac, Leskovec & Boyd 2015): each edge keeps its own copies z_u, z_v of its two agents,
and with M = [F_u, -F_v] and M Mᵀ = c I the copies are moved by Mᵀ (prox_{c/rho}(M w) - M w) / c.

Legend: N agents, E edges, d_v vertex stalk, d_e edge stalk.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.sheaf_admm.admm import ZUpdate

SMALLEST = 1e-30  # keeps 0/0 of an edge in full agreement finite
LOST = 1e4  # growth of ‖F z‖² over its lowest that rounding alone explains
_EITHER = np.array([[[1.0], [0.0]], [[0.0], [1.0]]], np.float32)  # masks of one end of every edge


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sheaf:
  """Edges and the restriction maps at their ends, edge by edge: degrees and slots do not matter here."""

  edges: jax.Array  # [E, 2] int32
  ends: jax.Array | None = None  # [E, 2, d_e, d_v], or [d_e, d_v] shared by all ends, or None: the identity


def difference(sheaf: Sheaf, pairs: jax.Array) -> jax.Array:
  """F_u a - F_v b of the two states of every edge: pairs `[E, 2, d_v]` -> `[E, d_e]`."""
  if sheaf.ends is None:
    return pairs[:, 0] - pairs[:, 1]
  if sheaf.ends.ndim == 2:
    return (pairs[:, 0] - pairs[:, 1]) @ sheaf.ends.T
  left, right = sheaf.ends[:, 0], sheaf.ends[:, 1]
  return jnp.einsum("efd,ed->ef", left, pairs[:, 0]) - jnp.einsum("efd,ed->ef", right, pairs[:, 1])


def coboundary(sheaf: Sheaf, z: jax.Array) -> jax.Array:
  """F z: `[N, d_v]` -> `[E, d_e]`."""
  return difference(sheaf, z[sheaf.edges])


def laplacian(sheaf: Sheaf, z: jax.Array, weight: jax.Array | float = 1.0) -> jax.Array:
  """Fᵀ W F z: `[N, d_v]` -> `[N, d_v]`; `weight` `[]` or `[E]`."""
  disagreement, adjoint = coboundary(sheaf, z), jax.linear_transpose(lambda z: coboundary(sheaf, z), z)
  return adjoint(_per_edge(weight) * disagreement)[0]


def project(sheaf: Sheaf, w: jax.Array) -> jax.Array:
  """The nearest z with F z = 0, by conjugate gradients on L (w - z) = L w from w - z = 0.

  In this form (CGLS) the steps see F and Fᵀ only, so the answer suffers from the condition of F, not of L = FᵀF. They end
  when the edges agree to rounding, or so well in relation to their disagreement at w; past the best that rounding
  allows the disagreement would grow again, so the best z is kept.
  """
  adjoint = jax.linear_transpose(lambda z: coboundary(sheaf, z), w)
  spoken = sum(_energy(difference(sheaf, w[sheaf.edges] * mask)) for mask in _EITHER)  # ‖F_u w_u‖² + ‖F_v w_v‖²
  apart = coboundary(sheaf, w)
  enough = (4.0 * float(jnp.finfo(w.dtype).eps)) ** 2 * jnp.maximum(spoken, _energy(apart))
  most = 2 * w.size + 100

  def step(carry):
    count, z, direction, energy, best, lowest = carry
    (move,) = adjoint(direction)
    z = z - energy / _energy(move) * move
    apart = coboundary(sheaf, z)
    lower = _energy(apart)
    best = jnp.where(lower < lowest, z, best)
    return count + 1, z, apart + lower / energy * direction, lower, best, jnp.minimum(lower, lowest)

  def unfinished(carry):
    count, _, _, energy, _, lowest = carry
    return (lowest > enough) & (energy < LOST * lowest) & (count < most)

  start = (jnp.int32(0), w, apart, _energy(apart), w, _energy(apart))
  return jax.lax.while_loop(unfinished, step, start)[4]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hard:
  """All edges agree."""

  def z_update(self, sheaf: Sheaf) -> ZUpdate:
    """The nearest z with F z = 0."""
    return lambda w, z_prev, rho: project(sheaf, w)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Soft:
  """Disagreement costs gamma/2 ‖(F z)_e‖²."""

  gamma: jax.Array | float = 1.0  # [] or [E], >= 0

  def z_update(self, sheaf: Sheaf) -> ZUpdate:
    """Solves (Fᵀ gamma F + rho) z = rho w, starting from the last z."""

    def update(w, z_prev, rho):
      operator = lambda z: laplacian(sheaf, z, self.gamma) + rho * z
      tolerance = 10.0 * float(jnp.finfo(w.dtype).eps)
      return jax.scipy.sparse.linalg.cg(operator, rho * w, z_prev, tol=tolerance, maxiter=2 * w.size + 100)[0]

    return update


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lasso:
  """Disagreement costs weight ‖(F z)_e‖₂, which makes agents of a cluster agree exactly."""

  weight: jax.Array | float = 1.0  # [] or [E], >= 0

  def shrink(self, d: jax.Array, step: jax.Array) -> jax.Array:
    """argmin_y weight ‖y‖ + ‖y - d‖² / (2 step) of every edge: d `[E, d_e]`, step `[E, 1]`."""
    length = jnp.linalg.norm(d, axis=-1, keepdims=True)
    return d * jnp.maximum(1.0 - step * _per_edge(self.weight) / jnp.maximum(length, SMALLEST), 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Huber:
  """Disagreement r = ‖(F z)_e‖₂ costs weight · (½ r² up to delta, then delta (r - ½ delta)): outliers may differ."""

  weight: jax.Array | float = 1.0  # [] or [E], >= 0
  delta: jax.Array | float = 1.0  # [] or [E], > 0

  def shrink(self, d: jax.Array, step: jax.Array) -> jax.Array:
    """As `Lasso.shrink`."""
    step, delta = step * _per_edge(self.weight), _per_edge(self.delta)
    length = jnp.linalg.norm(d, axis=-1, keepdims=True)
    far = 1.0 - step * delta / jnp.maximum(length, SMALLEST)
    return d * jnp.where(length <= delta * (1.0 + step), 1.0 / (1.0 + step), far)


Coupling = Hard | Soft | Lasso | Huber
EDGE_POTENTIALS = (Lasso, Huber)


def squared_scale(sheaf: Sheaf) -> jax.Array | float:
  """The c of M Mᵀ = c I, `[]` or `[E]`: 2 for the identity. Right only where M Mᵀ is a multiple of I."""
  if sheaf.ends is None:
    return 2.0
  squares = jnp.sum(jnp.square(sheaf.ends), axis=(-1, -2)) / sheaf.ends.shape[-2]
  return 2.0 * squares if sheaf.ends.ndim == 2 else squares.sum(-1)


def edge_update(potential: Lasso | Huber, sheaf: Sheaf) -> ZUpdate:
  """z-update on edge copies: rows 0 .. 2E-1 are the ends of the edges, further rows are free."""
  edges, scale = sheaf.edges.shape[0], _per_edge(squared_scale(sheaf))

  def update(w, z_prev, rho):
    del z_prev
    pairs = w[: 2 * edges].reshape(edges, 2, -1)
    apart, adjoint = difference(sheaf, pairs), jax.linear_transpose(lambda pairs: difference(sheaf, pairs), pairs)
    pairs = pairs + adjoint((potential.shrink(apart, scale / rho) - apart) / scale)[0]
    return jnp.concatenate([pairs.reshape(2 * edges, -1), w[2 * edges :]])

  return update


def _per_edge(weight):
  weight = jnp.asarray(weight)
  return weight[:, None] if weight.ndim else weight


def _energy(y):
  return jnp.sum(jnp.square(y))
