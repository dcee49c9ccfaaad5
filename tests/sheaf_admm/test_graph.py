"""Agent graphs: their sizes, their slots, the neighbour table against a walk over the edges, and cutting agents out."""

from collections import Counter

import jax
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sakanajax.sheaf_admm import graph as graph_lib
from tests.sheaf_admm import problems


def ends(graph):
  """[((u, s), (v, t))] of every edge."""
  return [((u, s), (v, t)) for (u, v), (s, t) in zip(graph.edges.tolist(), graph.slots.tolist())]


def table(graph):
  """(agent, slot) -> Counter of far ends, read off the neighbour table."""
  seen = {}
  for n, slots in enumerate(np.asarray(graph.neighbours).tolist()):
    for s, far in enumerate(slots):
      own = n * graph.num_slots + s
      seen[n, s] = Counter(divmod(f, graph.num_slots) for f in far if f != own)
  return seen


def walked(graph, dropped=()):
  """The same, by walking over the edges."""
  seen = {(n, s): Counter() for n in range(graph.num_agents) for s in range(graph.num_slots)}
  for here, there in ends(graph):
    if here[0] not in dropped and there[0] not in dropped:
      seen[here][there] += 1
      seen[there][here] += 1
  return seen


@pytest.mark.parametrize(
    "size,patch,stride,agents,edges",
    [((19, 19), 3, 2, 81, 272), ((28, 28), 3, 3, 81, 272), ((60, 60), 3, 3, 400, 1482), ((11, 11), 3, 2, 25, 72),
     ((19, 73), 3, 2, 9 * 36, 9 * 35 + 8 * 36 + 2 * 8 * 35), ((3, 3), 3, 2, 1, 0), ((3, 7), 3, 2, 3, 2),
     ((7, 3), 3, 2, 3, 2)],
)
def test_sizes_of_grids(size, patch, stride, agents, edges):
  graph = graph_lib.grid_graph(*size, patch, stride)
  assert (graph.num_agents, graph.num_edges, graph.num_slots) == (agents, edges, 8)


@pytest.mark.parametrize("box,agents,edges", [((3, 3), 27, 243), ((2, 3), 18, 108), ((3, 2), 18, 108), ((2, 2), 12, 48)])
def test_sizes_of_sudokus(box, agents, edges):
  graph = graph_lib.sudoku_graph(box)
  assert (graph.num_agents, graph.num_edges, graph.num_slots) == (agents, edges, box[0] * box[1])
  assert graph.neighbours.shape[-1] == 2  # every cell is seen by two others


def test_slots_of_a_grid_are_opposite_directions():
  graph = graph_lib.grid_graph(9, 13)
  width = len(graph_lib.grid_centres(13, 3, 2))
  pairs = set()
  for (u, s), (v, t) in ends(graph):
    step = (v // width - u // width, v % width - u % width)
    assert step == graph_lib.COMPASS[s] and (-step[0], -step[1]) == graph_lib.COMPASS[t]
    pairs.add(frozenset((u, v)))
  near = {
      frozenset((a, b)) for a in range(graph.num_agents) for b in range(graph.num_agents)
      if max(abs(a // width - b // width), abs(a % width - b % width)) == 1
  }
  assert pairs == near and len(pairs) == graph.num_edges


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 2)])
def test_ends_of_a_sudoku_edge_name_the_same_cell(box):
  cells, graph = graph_lib.sudoku_cells(box), graph_lib.sudoku_graph(box)
  shared = [cells[u, s] for (u, s), (v, t) in ends(graph) if cells[u, s] == cells[v, t]]
  assert len(shared) == graph.num_edges and set(Counter(shared).values()) == {3}
  size = box[0] * box[1]
  board = np.arange(size * size).reshape(size, size)
  inside = board[: box[0], : box[1]].ravel()
  np.testing.assert_array_equal(cells[[0, size, 2 * size]], [board[0], board[:, 0], inside])
  parallel = Counter(frozenset((u, v)) for u, v in graph.edges.tolist())
  assert parallel[frozenset((0, 2 * size))] == box[1] and parallel[frozenset((0, size))] == 1


@pytest.mark.parametrize("name", ["grid", "sudoku", "alone", "random"])
def test_neighbour_table_is_the_edge_list(name):
  graph = problems.graphs()[name]
  assert table(graph) == walked(graph)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), agents=st.integers(2, 6), slots=st.integers(1, 3), edges=st.integers(0, 12))
def test_neighbour_table_of_any_multigraph(data, agents, slots, edges):
  pair = st.tuples(st.integers(0, agents - 1), st.integers(0, agents - 1)).filter(lambda p: p[0] != p[1])
  slot = st.integers(0, slots - 1)
  graph = graph_lib.make_graph(
      data.draw(st.lists(pair, min_size=edges, max_size=edges)),
      data.draw(st.lists(st.tuples(slot, slot), min_size=edges, max_size=edges)), agents, slots)
  assert graph.neighbours.shape[:2] == (agents, slots)
  assert table(graph) == walked(graph)


def test_dropped_agents_lose_their_edges():
  graph = problems.random_multigraph(1, agents=6, edges=14)
  cut = jax.jit(graph_lib.drop_agents)(graph, np.isin(np.arange(6), (1, 4)))
  assert table(cut) == walked(graph, dropped=(1, 4))
  assert cut.num_edges == graph.num_edges  # the list keeps its static length


def test_networkx_graphs_keep_their_names():
  graph, nodes = graph_lib.from_networkx(nx.path_graph(["a", "b", "c"]))
  assert nodes == ["a", "b", "c"] and graph.edges.tolist() == [[0, 1], [1, 2]] and graph.num_slots == 1
  graph, nodes = graph_lib.from_networkx(nx.MultiGraph([(5, 7), (5, 7)]))
  assert nodes == [5, 7] and graph.neighbours.tolist() == [[[1, 1]], [[0, 0]]]


@pytest.mark.parametrize(
    "edges,slots,agents,num_slots,message",
    [([(0, 2)], None, 2, 1, "agent 2"), ([(0, -1)], None, 2, 1, "agent -1"), ([(0, 1)], [(0, 3)], 2, 3, "slot 3"),
     ([(0, 1)], [(-2, 0)], 2, 3, "slot -2"), ([(1, 1)], None, 2, 1, "agent 1 has an edge to itself"),
     ([(0, 1)], [(0, 0), (0, 0)], 2, 1, "same shape")],
)
def test_wrong_edges_are_named(edges, slots, agents, num_slots, message):
  with pytest.raises(ValueError, match=message):
    graph_lib.make_graph(edges, slots, agents, num_slots)


def test_board_smaller_than_a_patch():
  with pytest.raises(ValueError, match="2x9 board is smaller than a 3x3 patch"):
    graph_lib.grid_graph(2, 9)
