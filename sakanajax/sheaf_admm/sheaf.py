"""The coboundary and the Laplacian of a cellular sheaf, as matrix-vector products (section 2 of the paper).

For an edge e = (u, v) the coboundary is (F z)_e = F_{u,e} z_u - F_{v,e} z_v, and L = FᵀF. `laplacian` first
maps every agent's state to all of its slots (one GEMM when agents share the maps), lets each slot compare
itself with its far ends by a gather, and maps back. It equals the edge-by-edge `laplacian_scatter`, which is
the specification and the slower form. All functions take one example; use `jax.vmap` for a batch.

Legend: N agents, E edges, S slots, d_v vertex stalk, d_e edge stalk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sakanajax.sheaf_admm import maps as maps_lib
from sakanajax.sheaf_admm.graph import Graph
from sakanajax.sheaf_admm.maps import RestrictionMaps


def coboundary(graph: Graph, maps: RestrictionMaps, z: jax.Array) -> jax.Array:
  """Disagreement on every edge: z `[N, d_v]` -> `[E, d_e]`."""
  y = maps_lib.apply(maps, z, graph.num_slots)
  u, v = graph.edges[:, 0], graph.edges[:, 1]
  return y[u, graph.slots[:, 0]] - y[v, graph.slots[:, 1]]


def laplacian(graph: Graph, maps: RestrictionMaps, z: jax.Array) -> jax.Array:
  """L z: `[N, d_v]` -> `[N, d_v]`, by slots."""
  y = maps_lib.apply(maps, z, graph.num_slots)
  flat = y.reshape(-1, y.shape[-1])
  disagreement = sum(y - flat[graph.neighbours[:, :, d]] for d in range(graph.neighbours.shape[-1]))
  return maps_lib.adjoint(maps, disagreement)


def edge_maps(graph: Graph, maps: RestrictionMaps) -> jax.Array:
  """The two maps of each edge, `[E, 2, d_e, d_v]` (0 at u, 1 at v)."""
  return maps_lib.dense(maps, graph.num_agents, graph.num_slots)[graph.edges, graph.slots]


def laplacian_scatter(graph: Graph, ends: jax.Array, z: jax.Array) -> jax.Array:
  """L z edge by edge from `ends` = `edge_maps`: residuals, then a scatter-add (the specification)."""
  u, v = graph.edges[:, 0], graph.edges[:, 1]
  residual = jnp.einsum("efd,ed->ef", ends[:, 0], z[u]) - jnp.einsum("efd,ed->ef", ends[:, 1], z[v])
  out = jnp.zeros_like(z).at[u].add(jnp.einsum("efd,ef->ed", ends[:, 0], residual))
  return out.at[v].add(-jnp.einsum("efd,ef->ed", ends[:, 1], residual))


def dense_coboundary(graph: Graph, maps: RestrictionMaps) -> jax.Array:
  """F as a matrix `[E · d_e, N · d_v]`, for oracles only."""
  ends = edge_maps(graph, maps)
  edges, _, d_e, d_v = ends.shape
  block = jnp.zeros((edges, d_e, graph.num_agents, d_v))
  rows = jnp.arange(edges)
  block = block.at[rows, :, graph.edges[:, 0]].add(ends[:, 0])
  block = block.at[rows, :, graph.edges[:, 1]].add(-ends[:, 1])
  return block.reshape(edges * d_e, graph.num_agents * d_v)


def energy(graph: Graph, maps: RestrictionMaps, z: jax.Array) -> jax.Array:
  """Dirichlet energy ½ ‖F z‖²."""
  return 0.5 * jnp.sum(jnp.square(coboundary(graph, maps, z)))


def consistency_rms(graph: Graph, maps: RestrictionMaps, z: jax.Array) -> jax.Array:
  """sqrt(mean r² + 1e-6) over edges and edge stalk; the constant keeps the gradient finite at agreement."""
  residual = coboundary(graph, maps, z)
  return jnp.sqrt(jnp.sum(jnp.square(residual)) / max(1, residual.size) + 1e-6)
