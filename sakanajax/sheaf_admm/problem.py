"""What people hand to `solve`, checked and brought into one form.

Everything that is wrong with it becomes one UserError. Values can be checked only where they are known: inside
`jax.jit` or `jax.vmap` shapes are checked and the rest is left to the solution's `converged`.

Legend: N agents, E edges, S slots, d_v vertex stalk, d_e edge stalk.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core.errors import UserError, first_line
from sakanajax.sheaf_admm import coupling as coupling_lib
from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import maps as maps_lib
from sakanajax.sheaf_admm.coupling import Coupling, Sheaf
from sakanajax.sheaf_admm.graph import Graph
from sakanajax.sheaf_admm.maps import RestrictionMaps
from sakanajax.sheaf_admm.x_update import Diagonal, Prox, Quadratic


def known(values: Any) -> np.ndarray | None:
  """The values as numpy, or None where jax is tracing."""
  try:
    return np.asarray(values)
  except jax.errors.TracerArrayConversionError:
    return None


def start_of(x0: Any) -> jax.Array:
  """x0 as a floating-point `[N, d_v]`."""
  try:
    x0 = jnp.asarray(x0)
  except (TypeError, ValueError) as error:
    raise UserError(f"x0 must be an array [agents, d_v] of numbers ({error})") from error
  if x0.ndim != 2 or 0 in x0.shape:
    raise UserError(f"x0 has shape {x0.shape}; give [agents, d_v] with at least one agent and one number each")
  if jnp.issubdtype(x0.dtype, jnp.complexfloating):
    raise UserError("x0 is complex; give real and imaginary parts as separate numbers")
  _finite("x0", x0)
  return x0 if jnp.issubdtype(x0.dtype, jnp.floating) else x0.astype(jnp.result_type(float))


def sheaf_of(graph: Any, maps: Any, x0: jax.Array) -> Sheaf:
  """Edges with the maps at their ends.

  Args:
    graph: `[E, 2]` pairs of agents, a networkx graph (agents are its nodes in their order), or a `Graph`.
    maps: None (identity), `[d_e, d_v]` shared, `[S, d_e, d_v]` by slot, `[E, 2, d_e, d_v]` by edge end in the order
      of the edges, or `RestrictionMaps`.
    x0: `[N, d_v]`.
  """
  edges, slots, num_slots = _edges(graph, x0.shape[0])
  if maps is None:
    return Sheaf(edges)
  if not isinstance(maps, RestrictionMaps):
    maps = jnp.asarray(maps)
    if maps.ndim not in (2, 3, 4):
      raise UserError(f"maps have shape {maps.shape}; give [d_e, d_v], [slots, d_e, d_v] or [edges, 2, d_e, d_v]")
    if maps.ndim == 4:
      if maps.shape[:2] != edges.shape:
        raise UserError(f"maps of edge ends have shape {maps.shape}; {len(edges)} edges need [{len(edges)}, 2, d_e, d_v]")
      return Sheaf(edges, _checked(maps, x0))
    maps = RestrictionMaps(maps[None] if maps.ndim == 2 else maps)
  base = _checked(maps.base, x0)
  if base.ndim == 3 and base.shape[0] == 1 and maps.a is None:
    return Sheaf(edges, base[0])
  if base.shape[-3] not in (1, num_slots) or (base.ndim == 4 and base.shape[0] != x0.shape[0]):
    raise UserError(f"maps have shape {base.shape}, but the graph has {x0.shape[0]} agents with {num_slots} slots; "
                    "give [slots, d_e, d_v], or one map per edge end: [edges, 2, d_e, d_v]")
  return Sheaf(edges, maps_lib.dense(maps, x0.shape[0], num_slots)[edges, slots])


def _edges(graph: Any, agents: int) -> tuple[jax.Array, jax.Array, int]:
  if isinstance(graph, Graph):
    if graph.num_agents != agents:
      raise UserError(f"the graph has {graph.num_agents} agents but x0 has {agents} rows; give one row per agent")
    if not graph.num_edges:
      raise UserError("the graph has no edges; add pairs of agents that are to agree")
    return graph.edges, graph.slots, graph.num_slots
  if hasattr(graph, "nodes") and hasattr(graph, "is_directed"):  # networkx, which need not be installed otherwise
    graph = _numbered(graph, agents)
  try:
    edges = np.asarray(graph)
  except (TypeError, ValueError) as error:
    raise UserError("graph must be a list of pairs of agents, a networkx graph or a Graph") from error
  if edges.size == 0:
    raise UserError("the graph has no edges; add pairs of agents that are to agree")
  if edges.ndim != 2 or edges.shape[1] != 2 or edges.dtype.kind not in "iu":
    raise UserError(f"graph has shape {edges.shape} and dtype {edges.dtype}; give whole-number pairs [edges, 2] of agents "
                    "0, 1, ..., or a networkx graph where agents have names")
  if edges.min() < 0 or edges.max() >= agents:
    wrong = edges.min() if edges.min() < 0 else edges.max()
    raise UserError(f"the graph names agent {wrong}, but x0 has rows for agents 0 to {agents - 1}")
  loops = edges[edges[:, 0] == edges[:, 1]]
  if len(loops):
    raise UserError(f"agent {loops[0, 0]} has an edge to itself; remove it")
  edges = jnp.asarray(edges, jnp.int32)
  return edges, jnp.zeros_like(edges), 1


def _numbered(network: Any, agents: int) -> list[tuple[int, int]]:
  try:
    edges, nodes = graph_lib.numbered(network)
  except ValueError as error:
    raise UserError(str(error)) from error
  if len(nodes) != agents:
    raise UserError(f"the graph has {len(nodes)} agents but x0 has {agents} rows; give one row per node, in their order")
  return edges


def _checked(maps: jax.Array, x0: jax.Array) -> jax.Array:
  if maps.ndim < 3 or 0 in maps.shape or maps.shape[-1] != x0.shape[1]:
    raise UserError(f"maps have shape {maps.shape}, but agents have d_v = {x0.shape[1]} numbers (x0 {x0.shape}); "
                    f"the last axis of the maps must be {x0.shape[1]}")
  _finite("maps", maps)
  return maps.astype(x0.dtype)


def check_objectives(prox: Prox, x0: jax.Array, rho: jax.Array) -> None:
  """Checks that prox(v, rho) fits x0, and that the known families are convex."""
  if not callable(prox):
    raise UserError(f"objectives must be callable as (v, rho) -> x, got {type(prox).__name__}; "
                    "see sakanajax.sheaf_admm.x_update")
  if isinstance(prox, Diagonal):
    _check_diagonal(prox)
  elif isinstance(prox, Quadratic):
    _check_quadratic(prox)
  try:
    out = jax.eval_shape(prox, x0, rho)
  except (TypeError, ValueError) as error:
    raise UserError(f"objectives do not fit x0 of shape {x0.shape}, or are not a pure jax function: "
                    f"{first_line(error)}") from error
  if getattr(out, "shape", None) != x0.shape:
    raise UserError(f"objectives return shape {getattr(out, 'shape', type(out).__name__)} for x0 of shape {x0.shape}; "
                    "they must keep it")


def _check_diagonal(prox: Diagonal) -> None:
  for name in ("q_diag", "q", "l1"):
    _finite(f"objectives.{name}", getattr(prox, name))
  for name in ("q_diag", "l1"):
    _not_negative(f"objectives.{name}", getattr(prox, name), "a convex objective")
  lower, upper = known(prox.lower), known(prox.upper)
  if lower is not None and upper is not None and not (lower <= upper).all():
    raise UserError("objectives.lower exceeds objectives.upper somewhere, or one of them is not a number; exchange them")


def _check_quadratic(prox: Quadratic) -> None:
  _finite("objectives.matrix", prox.matrix)
  _finite("objectives.q", prox.q)
  matrix = known(prox.matrix)
  if matrix is None or matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
    return  # shapes are answered by the trial call
  size = np.abs(matrix).max(initial=1.0)
  if np.abs(matrix - matrix.swapaxes(1, 2)).max() > 1e-4 * size:
    raise UserError("objectives.matrix is not symmetric; give (Q + Qᵀ) / 2")
  lowest = np.linalg.eigvalsh(matrix.astype(np.float64))[:, 0]
  if lowest.min() < -1e-4 * size:
    raise UserError(f"objectives.matrix of agent {lowest.argmin()} has the eigenvalue {lowest.min():.3g}; "
                    "a convex objective needs all of them >= 0")


def coupling_of(coupling: Coupling, sheaf: Sheaf, dtype) -> Coupling:
  """The coupling with its numbers as arrays."""
  if not isinstance(coupling, Coupling):
    raise UserError(f"coupling must be Hard(), Soft(gamma), Lasso(weight) or Huber(weight, delta), got {coupling!r}")
  edges = sheaf.edges.shape[0]
  for field in dataclasses.fields(coupling):
    name, values = f"{type(coupling).__name__}.{field.name}", jnp.asarray(getattr(coupling, field.name), dtype)
    if values.shape not in ((), (edges,)):
      raise UserError(f"{name} has shape {values.shape}; give one number, or one for each of the {edges} edges")
    _finite(name, values)
    _not_negative(name, values, "a convex coupling")
    if field.name == "delta" and (there := known(values)) is not None and not there.all():
      raise UserError(f"{name} must be positive; use Lasso for a kink at agreement")
    coupling = dataclasses.replace(coupling, **{field.name: values})
  if isinstance(coupling, coupling_lib.EDGE_POTENTIALS):
    _check_scaled(sheaf, type(coupling).__name__)
  return coupling


def _check_scaled(sheaf: Sheaf, name: str) -> None:
  """The closed form on edge copies needs F_u F_uᵀ + F_v F_vᵀ = c I with c > 0."""
  ends = None if sheaf.ends is None else known(sheaf.ends)
  if ends is None:
    return
  squares = ends @ ends.swapaxes(-1, -2)
  squares = 2.0 * squares[None] if squares.ndim == 2 else squares.sum(1)
  scale = np.trace(squares, axis1=1, axis2=2)[:, None, None] / squares.shape[-1]
  off = np.abs(squares - scale * np.eye(squares.shape[-1])).max((1, 2))
  if (off > 1e-3 * scale[:, 0, 0]).any() or (scale <= 0).any():
    raise UserError(f"{name} needs maps with F_u F_uᵀ + F_v F_vᵀ = c I on each edge, which edge {off.argmax()} has not; "
                    "use maps with orthonormal rows, or couple by Soft or Hard")


def _finite(name: str, values: Any) -> None:
  there = known(values)
  if there is not None and not np.isfinite(there).all():
    place = np.argwhere(~np.isfinite(np.atleast_1d(there)))[0].tolist()
    raise UserError(f"{name} holds a number that is not finite (at {place}); clean it first")


def _not_negative(name: str, values: Any, reason: str) -> None:
  there = known(values)
  if there is not None and (there < 0).any():
    raise UserError(f"{name} is {there.min():.3g}; {reason} needs it >= 0")
