"""Agent graphs whose edge ends carry slots.

A slot is the place of an agent to which an edge is attached: a compass direction on a grid, a cell of a
Sudoku row. Both ends of an edge own a slot, and the slot decides which restriction map the end uses, so
one undirected edge has two different maps. `neighbours` is the same edge list seen from the slots; it
turns the sheaf Laplacian into gathers (see sheaf.py).

Legend: N agents, E undirected edges (each stored once), S slots of an agent, D most edges on one slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Row and column offset of the eight compass directions N, NE, E, SE, S, SW, W, NW: the slots of a grid.
COMPASS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Graph:
  """An undirected multigraph of agents with slotted edge ends."""

  edges: jax.Array  # [E, 2] int32: the agents u and v.
  slots: jax.Array  # [E, 2] int32: the slot of the edge at u and at v.
  neighbours: jax.Array  # [N, S, D] int32: n'·S + s' of the far ends; the slot's own number where there is none.

  @property
  def num_agents(self) -> int:
    return self.neighbours.shape[0]

  @property
  def num_slots(self) -> int:
    return self.neighbours.shape[1]

  @property
  def num_edges(self) -> int:
    return self.edges.shape[0]


def make_graph(edges: Sequence, slots: Sequence | None, num_agents: int, num_slots: int = 1) -> Graph:
  """Builds a graph from an edge list.

  Args:
    edges: [E, 2] pairs of agents in [0, N); parallel edges are allowed, loops are not.
    slots: [E, 2] slot of each end in [0, S); None puts every end on slot 0.
    num_agents: N >= 1.
    num_slots: S >= 1.

  Raises:
    ValueError: for agents or slots out of range, loops, or shapes that do not match.
  """
  edges = np.asarray(edges, np.int32).reshape(-1, 2)
  slots = np.zeros_like(edges) if slots is None else np.asarray(slots, np.int32).reshape(-1, 2)
  if edges.shape != slots.shape:
    raise ValueError(f"edges {edges.shape} and slots {slots.shape} must have the same shape")
  for what, values, count in (("agent", edges, num_agents), ("slot", slots, num_slots)):
    wrong = values[(values < 0) | (values >= count)]
    if wrong.size:
      raise ValueError(f"an edge names {what} {wrong[0]}, but {what}s are 0 to {count - 1}")
  if (edges[:, 0] == edges[:, 1]).any():
    raise ValueError(f"agent {edges[edges[:, 0] == edges[:, 1]][0, 0]} has an edge to itself")
  ends = edges * num_slots + slots
  return Graph(jnp.asarray(edges), jnp.asarray(slots), jnp.asarray(_neighbour_table(ends, num_agents, num_slots)))


def _neighbour_table(ends: np.ndarray, num_agents: int, num_slots: int) -> np.ndarray:
  here = np.concatenate([ends[:, 0], ends[:, 1]])
  there = np.concatenate([ends[:, 1], ends[:, 0]])
  total = num_agents * num_slots
  degree = np.bincount(here, minlength=total)
  width = max(1, int(degree.max(initial=0)))
  table = np.repeat(np.arange(total, dtype=np.int32)[:, None], width, axis=1)
  order = np.argsort(here, kind="stable")
  first = np.concatenate([[0], np.cumsum(degree)[:-1]])
  rank = np.arange(here.size) - first[here[order]]
  table[here[order], rank] = there[order]
  return table.reshape(num_agents, num_slots, width)


def grid_centres(size: int, patch: int, stride: int) -> np.ndarray:
  """Centres of the patches along one side: range(patch // 2, size, stride)."""
  return np.arange(patch // 2, size, stride)


def grid_graph(height: int, width: int, patch: int = 3, stride: int = 2) -> Graph:
  """Agents on patches of a board, joined to their eight neighbours; slots are the compass directions.

  The end at u uses the direction of v - u, the end at v the opposite one. A 19x19 board with patch 3 and
  stride 2 has 81 agents and 272 edges.

  Raises:
    ValueError: when the board is smaller than a patch.
  """
  if min(height, width) < patch:
    raise ValueError(f"a {height}x{width} board is smaller than a {patch}x{patch} patch")
  rows, cols = len(grid_centres(height, patch, stride)), len(grid_centres(width, patch, stride))
  agent = np.arange(rows * cols).reshape(rows, cols)
  edges, slots = [], []
  for slot in (2, 4, 3, 5):  # E, S, SE, SW: each undirected edge once.
    down, right = COMPASS[slot]
    here = agent[: rows - down, max(0, -right) : cols - max(0, right)]
    there = agent[down:, max(0, right) : cols + min(0, right)]
    edges.append(np.stack([here.ravel(), there.ravel()], 1))
    slots.append(np.tile([slot, (slot + 4) % 8], (here.size, 1)))
  return make_graph(np.concatenate(edges), np.concatenate(slots), rows * cols, len(COMPASS))


def sudoku_cells(box: tuple[int, int]) -> np.ndarray:
  """Cells of each agent, `[3S, S]` flat numbers: S rows, S columns, S boxes of `box` = (height, width)."""
  height, width = box
  size = height * width
  board = np.arange(size * size).reshape(size, size)
  boxes = board.reshape(width, height, height, width).transpose(0, 2, 1, 3).reshape(size, size)
  return np.concatenate([board, board.T, boxes]).astype(np.int32)


def sudoku_graph(box: tuple[int, int]) -> Graph:
  """Row, column and box agents; every cell joins its three agents in a clique. 9x9: 27 agents, 243 edges.

  The slot of an end is the place of the shared cell inside that agent, so a row and a box that share
  three cells are joined by three parallel edges.
  """
  cells = sudoku_cells(box)
  size = cells.shape[1]
  owners = [np.argwhere(cells == cell) for cell in range(size * size)]  # three (agent, slot) pairs a cell
  pairs = [(owner[i], owner[j]) for owner in owners for i, j in ((0, 1), (0, 2), (1, 2))]
  return make_graph([(a[0], b[0]) for a, b in pairs], [(a[1], b[1]) for a, b in pairs], 3 * size, size)


def from_networkx(network) -> tuple[Graph, list]:
  """Builds a one-slot graph from an undirected networkx graph; also returns its nodes in agent order.

  Raises ValueError for a directed graph.
  """
  edges, nodes = numbered(network)
  return make_graph(edges, None, len(nodes)), nodes


def numbered(network) -> tuple[list[tuple[int, int]], list]:
  """Returns (edges between agent numbers, nodes in agent order) of an undirected networkx graph; else ValueError."""
  if network.is_directed():
    raise ValueError("the networkx graph is directed; give graph.to_undirected()")
  nodes = list(network.nodes)
  number = {node: index for index, node in enumerate(nodes)}
  return [(number[edge[0]], number[edge[1]]) for edge in network.edges], nodes


def drop_agents(graph: Graph, dropped: jax.Array) -> Graph:
  """Cuts every edge of the agents in `dropped` `[N]` bool: their far ends become their own slot.

  Only the Laplacian and messages see the cut (`neighbours`); the edge list keeps its static length.
  """
  slots = graph.num_slots
  own = jnp.arange(graph.num_agents * slots, dtype=jnp.int32).reshape(graph.num_agents, slots, 1)
  cut = dropped[:, None, None] | dropped[graph.neighbours // slots]
  return dataclasses.replace(graph, neighbours=jnp.where(cut, own, graph.neighbours))
