"""Restriction maps: what an agent says of its state on each of its slots.

The map of slot s at agent n is F[n, s] = R[s] + scale · A[n, s] B[n, s]ᵀ: a base map that all agents share
and, optionally, a low-rank correction that the encoder writes from the agent's own view (section 3.3 of the
paper, "context" modulation). With a small stalk the corrected map is cheaper to keep than its factors, and
`modulate` then multiplies it out once per forward pass; otherwise F is never formed.

Legend: N agents, S slots, d_v vertex stalk, d_e edge stalk, r rank.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RestrictionMaps:
  """Maps of all agents; `a` and `b` are None when there is no factored correction."""

  base: jax.Array  # [S, d_e, d_v] shared by all agents ([1, d_e, d_v]: by all slots too), or [N, S, d_e, d_v].
  a: jax.Array | None = None  # [N, S, d_e, r], already scaled.
  b: jax.Array | None = None  # [N, S, d_v, r]


def modulate(base: jax.Array, a: jax.Array, b: jax.Array, scale: float | None = None) -> RestrictionMaps:
  """Returns R + scale · A Bᵀ in the cheaper of the two forms; `scale` defaults to 1 / r."""
  d_e, d_v, rank = base.shape[-2], base.shape[-1], a.shape[-1]
  a = a * (1.0 / rank if scale is None else scale)
  if d_e * d_v <= rank * (d_e + d_v):
    return RestrictionMaps(base + jnp.einsum("...er,...dr->...ed", a, b))
  return RestrictionMaps(base, a, b)


def apply(maps: RestrictionMaps, z: jax.Array, num_slots: int) -> jax.Array:
  """F z on every slot: z `[N, d_v]` -> `[N, S, d_e]`."""
  slots, d_e, d_v = maps.base.shape[-3:]
  if maps.base.ndim == 3:
    y = z @ maps.base.reshape(slots * d_e, d_v).T
  else:
    y = jnp.einsum("nfd,nd->nf", maps.base.reshape(-1, slots * d_e, d_v), z)
  y = jnp.broadcast_to(y.reshape(-1, slots, d_e), (z.shape[0], num_slots, d_e))
  if maps.a is not None:
    y = y + jnp.einsum("nser,nsr->nse", maps.a, jnp.einsum("nsdr,nd->nsr", maps.b, z))
  return y


def adjoint(maps: RestrictionMaps, y: jax.Array) -> jax.Array:
  """Sum over slots of Fᵀ y: y `[N, S, d_e]` -> `[N, d_v]`; the adjoint of `apply`."""
  slots, d_e, d_v = maps.base.shape[-3:]
  flat = (y.sum(1) if slots == 1 else y).reshape(-1, slots * d_e)
  if maps.base.ndim == 3:
    z = flat @ maps.base.reshape(slots * d_e, d_v)
  else:
    z = jnp.einsum("nfd,nf->nd", maps.base.reshape(-1, slots * d_e, d_v), flat)
  if maps.a is not None:
    z = z + jnp.einsum("nsdr,nsr->nd", maps.b, jnp.einsum("nser,nse->nsr", maps.a, y))
  return z


def dense(maps: RestrictionMaps, num_agents: int, num_slots: int) -> jax.Array:
  """All maps multiplied out, `[N, S, d_e, d_v]` (for tests, inspection and the exact solver)."""
  full = jnp.broadcast_to(maps.base, (num_agents, num_slots, *maps.base.shape[-2:]))
  if maps.a is not None:
    full = full + jnp.einsum("nser,nsdr->nsed", maps.a, maps.b)
  return full


def init_base(
    key: jax.Array, slots: int, d_e: int, d_v: int, kind: Literal["orthonormal", "soft_slice", "identity"]
) -> jax.Array:
  """Initial base maps `[slots, d_e, d_v]`.

  orthonormal: rows orthonormal. soft_slice: 0.01 · N(0, 1) plus the selector of stalk block
  [s · d_e, (s + 1) · d_e). identity: the constant map F = I (plain consensus).

  Raises:
    ValueError: when the stalk is too narrow for the kind.
  """
  if kind == "orthonormal":
    if d_e > d_v:
      raise ValueError(f"orthonormal rows need d_e <= d_v, got d_e = {d_e} and d_v = {d_v}")
    init = jax.nn.initializers.orthogonal()
    return jax.vmap(lambda k: init(k, (d_e, d_v)))(jax.random.split(key, slots))
  if kind == "soft_slice":
    if slots * d_e > d_v:
      raise ValueError(f"soft_slice needs slots · d_e <= d_v, got {slots} · {d_e} > {d_v}")
    return selectors(slots, d_e, d_v) + 0.01 * jax.random.normal(key, (slots, d_e, d_v))
  if kind == "identity":
    if d_e != d_v:
      raise ValueError(f"identity maps need d_e = d_v, got d_e = {d_e} and d_v = {d_v}")
    return jnp.broadcast_to(jnp.eye(d_v), (slots, d_v, d_v))
  raise ValueError(f"unknown map init {kind!r}: orthonormal, soft_slice or identity")


def selectors(slots: int, d_e: int, d_v: int) -> jax.Array:
  """Maps `[slots, d_e, d_v]` that read stalk block s on slot s."""
  return jnp.eye(d_v)[: slots * d_e].reshape(slots, d_e, d_v)
