"""The three tasks: boards in, agent views, a loss on every agent's opinion, one merged prediction, a score.

A task is a tuple of pure functions; the models know nothing else of mazes, Sudokus or digits.

Legend: B batch, W iterates in the loss window, N agents, P cells of a view, C classes.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sakanajax.sheaf_admm import decoders, encoders, graph as graph_lib, views
from sakanajax.sheaf_admm.graph import Graph

WALL, PATH, MAZE_CELLS = 1, 5, 6


class Task(NamedTuple):
  """What a network needs to know of a task, and what an experiment measures."""

  slots: int  # S
  board: tuple[int, int]  # the size it is trained on
  graph: Callable[[tuple[int, int]], Graph]  # board size -> agents
  view: Callable[[jax.Array], jax.Array]  # boards [B, H, W] -> views [B, N, ...]
  encoder: Callable[..., encoders.nn.Module]  # (hidden, heads) -> module
  decoder: Callable[..., encoders.nn.Module]  # (hidden, pooled) -> module
  loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (logits [W, B, N, ...], inputs, labels) -> []
  predict: Callable[[jax.Array, tuple[int, int]], jax.Array]  # (logits [B, N, ...], board size) -> prediction
  score: Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]  # -> name: [B]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def maze(board: tuple[int, int], patch: int = 3, stride: int = 2) -> Task:
  """Mark the shortest path: each agent sees a patch and labels its cells."""
  layout = lambda size: views.patch_layout(*size, patch, stride)

  def view(boards):
    cells = views.take(layout(boards.shape[1:]), boards, WALL)
    return jax.nn.one_hot(cells.astype(jnp.int32), MAZE_CELLS).reshape(*cells.shape[:2], -1)

  def loss(logits, inputs, labels):
    places = layout(inputs.shape[1:])
    target = jnp.broadcast_to(views.take(places, labels, 0), logits.shape[:-1])
    inside = jnp.asarray(places.inside, logits.dtype)
    return jnp.sum(_cross_entropy(logits, target) * inside) / (inside.sum() * logits.shape[0] * logits.shape[1])

  def predict(logits, size):
    return jnp.argmax(views.merge(layout(size), logits), -1).reshape(-1, *size)

  def score(prediction, inputs, labels):
    right = (prediction == PATH) == (labels == PATH)
    return {"solved": right.all((1, 2)), "cell_acc": (prediction == labels).mean((1, 2))}

  return Task(
      slots=8, board=board, graph=lambda size: graph_lib.grid_graph(*size, patch, stride), view=view,
      encoder=lambda hidden, heads: encoders.PatchEncoder(hidden, False, heads),
      decoder=lambda hidden, pooled: decoders.PatchDecoder(patch * patch, MAZE_CELLS, hidden),
      loss=loss, predict=predict, score=score,
  )


def sudoku(box: tuple[int, int]) -> Task:
  """Fill the grid: row, column and box agents each see S cells. `box` is (height, width) of a box."""
  layout = views.sudoku_layout(box)
  size = box[0] * box[1]
  cells = layout.cells

  def encoder(hidden, heads):
    if heads["d_v"] % size:
      raise ValueError(f"d_v {heads['d_v']} must be a multiple of {size}, the cells of an agent")
    return encoders.CellEncoder(hidden, size + 1, tuple(map(tuple, cells.tolist())), heads)

  def loss(logits, inputs, labels):
    target = jnp.broadcast_to(views.take(layout, labels, 0), logits.shape[:-1])
    return jnp.mean(_cross_entropy(logits, target))

  def predict(logits, board):
    return jnp.argmax(views.merge(layout, logits), -1).reshape(-1, *board)

  def score(prediction, inputs, labels):
    right, empty = prediction == labels, inputs == 0
    filled = (right & empty).sum((1, 2)) / jnp.maximum(1, empty.sum((1, 2)))
    return {"solved": right.all((1, 2)), "cell_acc": right.mean((1, 2)), "empty_acc": filled}

  return Task(
      slots=size, board=(size, size), graph=lambda board: graph_lib.sudoku_graph(box),
      view=lambda boards: views.take(layout, boards, 0), encoder=encoder,
      decoder=lambda hidden, pooled: decoders.CellDecoder(size, hidden),
      loss=loss, predict=predict, score=score,
  )


def digits(board: tuple[int, int], patch: int = 3, stride: int = 3, classes: int = 10) -> Task:
  """Name the digit: each agent sees a patch of pixels in [0, 1] and holds an opinion on the whole image."""

  def loss(logits, inputs, labels):
    return jnp.mean(_cross_entropy(logits, jnp.broadcast_to(labels[:, None], logits.shape[:-1])))

  def score(prediction, inputs, labels):
    return {"acc": prediction == labels}

  return Task(
      slots=8, board=board, graph=lambda size: graph_lib.grid_graph(*size, patch, stride),
      view=lambda boards: views.take(views.patch_layout(*boards.shape[1:], patch, stride), boards, 0.0),
      encoder=lambda hidden, heads: encoders.PatchEncoder(hidden, True, heads),
      decoder=lambda hidden, pooled: (decoders.PooledClassDecoder if pooled else decoders.ClassDecoder)(classes),
      loss=loss, predict=lambda logits, size: jnp.argmax(jax.nn.softmax(logits).mean(1), -1), score=score,
  )


def as_numpy(scores: dict[str, jax.Array]) -> dict[str, np.ndarray]:
  """Per-example scores as float32 arrays."""
  return {name: np.asarray(values, np.float32) for name, values in scores.items()}
