"""Small graphs, maps and networks that the tests of the sheaf share, and the slow ways to compute with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import maps as maps_lib
from sakanajax.sheaf_admm import tasks
from sakanajax.sheaf_admm.maps import RestrictionMaps
from sakanajax.sheaf_admm.model import ModelConfig

KINDS = ("slot", "global", "agent", "factored", "factored_global", "multiplied")


def random_multigraph(seed, agents=5, slots=3, edges=9):
  """Random ends; parallel edges, crowded slots and lonely agents all occur."""
  rng = np.random.default_rng(seed)
  u = rng.integers(agents, size=edges)
  v = (u + rng.integers(1, agents, size=edges)) % agents
  return graph_lib.make_graph(np.stack([u, v], 1), rng.integers(slots, size=(edges, 2)), agents, slots)


def graphs():
  """One graph of every sort."""
  return {
      "grid": graph_lib.grid_graph(7, 5),
      "sudoku": graph_lib.sudoku_graph((2, 2)),
      "alone": graph_lib.make_graph([], None, 1),
      "random": random_multigraph(0),
  }


def random_maps(kind, graph, d_e=2, d_v=5, seed=0, rank=1):
  """Restriction maps of every sort that a network can make."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  agents, slots = graph.num_agents, graph.num_slots
  if kind == "agent":
    return RestrictionMaps(normal(agents, slots, d_e, d_v))
  base = normal(1 if "global" in kind else slots, d_e, d_v)
  if kind in ("slot", "global"):
    return RestrictionMaps(base)
  if kind == "multiplied":
    rank = d_e + d_v  # so many factors that the product is cheaper
  maps = jax.jit(maps_lib.modulate)(base, normal(agents, slots, d_e, rank), normal(agents, slots, d_v, rank))
  assert (maps.a is None) == (kind == "multiplied")
  return maps


def coboundary_by_hand(graph, full):
  """F `[E · d_e, N · d_v]` in numpy, edge by edge, from all maps `[N, S, d_e, d_v]`."""
  full = np.asarray(full, np.float64)
  agents, _, d_e, d_v = full.shape
  out = np.zeros((graph.num_edges, d_e, agents, d_v))
  for e, ((u, v), (s, t)) in enumerate(zip(np.asarray(graph.edges), np.asarray(graph.slots))):
    out[e, :, u] += full[u, s]
    out[e, :, v] -= full[v, t]
  return out.reshape(graph.num_edges * d_e, agents * d_v)


def permute(graph, order):
  """The same graph with agent i renamed order[i]."""
  order = np.asarray(order)
  return graph_lib.make_graph(order[np.asarray(graph.edges)], graph.slots, graph.num_agents, graph.num_slots)


TINY = ModelConfig(d_v=4, d_e=2, hidden=8, decoder_hidden=8, z_steps=1, window=2, lora_rank=1)


def tiny_maze(**changes):
  """A network config and its task on 5x5 mazes (4 agents, 6 edges)."""
  return dataclasses.replace(TINY, **changes), tasks.maze((5, 5))


def mazes(count, seed=0, size=(5, 5)):
  """Boards of random cells (no real mazes; networks do not mind) and labels."""
  rng = np.random.default_rng(seed)
  return rng.integers(1, 5, (count, *size)).astype(np.uint8), rng.integers(1, 6, (count, *size)).astype(np.uint8)


def random_weights(network, *inputs, seed=0):
  """Weights of the usual sizes with no compilation; heads that begin at zero take part, too.

  network: has `init(key, *inputs)`.
  """
  rng = np.random.default_rng(seed)

  def one(path, leaf):
    draw = rng.normal(size=leaf.shape)
    if path[-1].key == "scale":
      return jnp.asarray(1 + 0.1 * draw, leaf.dtype)
    return jnp.asarray(draw * (leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 0.1), leaf.dtype)

  return jax.tree_util.tree_map_with_path(one, jax.eval_shape(network.init, jax.random.key(0), *inputs))
