"""What each agent sees of a board, and how opinions become one prediction.

A layout lists the board cells of every agent, so taking views is a gather and merging them a scatter-mean.

Legend: B batch, N agents, P cells of a view, H x W board, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.sheaf_admm import graph as graph_lib


class Layout(NamedTuple):
  """Which cells an agent sees."""

  cells: np.ndarray  # [N, P] int32 flat cell numbers; cells off the board point at H·W
  size: int  # H·W

  @property
  def inside(self) -> np.ndarray:
    """`[N, P]` bool: the cell is on the board."""
    return self.cells < self.size


def patch_layout(height: int, width: int, patch: int, stride: int) -> Layout:
  """Square patches around the grid centres (`graph.grid_centres`), row by row."""
  offsets = np.arange(patch) - patch // 2
  rows = graph_lib.grid_centres(height, patch, stride)[:, None] + offsets
  cols = graph_lib.grid_centres(width, patch, stride)[:, None] + offsets
  cells = rows[:, None, :, None] * width + cols[None, :, None, :]
  off = (rows >= height)[:, None, :, None] | (cols >= width)[None, :, None, :]
  cells = np.where(off | (cells < 0), height * width, cells)
  return Layout(cells.reshape(len(rows) * len(cols), patch * patch).astype(np.int32), height * width)


def sudoku_layout(box: tuple[int, int]) -> Layout:
  """Rows, columns and boxes of a Sudoku."""
  cells = graph_lib.sudoku_cells(box)
  return Layout(cells, cells.shape[1] ** 2)


def take(layout: Layout, boards: jax.Array, outside: float) -> jax.Array:
  """Views of boards: `[B, H, W]` -> `[B, N, P]`; cells off the board read `outside`.

  Raises:
    ValueError: when the boards have another number of cells than the layout.
  """
  flat = jnp.asarray(boards).reshape(boards.shape[0], -1)
  if flat.shape[1] != layout.size:
    raise ValueError(f"{'x'.join(map(str, boards.shape[1:]))} boards, but the agents look at {layout.size} cells")
  flat = jnp.concatenate([flat, jnp.full((flat.shape[0], 1), outside, flat.dtype)], 1)
  return flat[:, layout.cells]


def merge(layout: Layout, opinions: jax.Array) -> jax.Array:
  """Mean over the agents that see a cell: `[..., N, P, C]` -> `[..., H·W, C]`; unseen cells get 0."""
  count = np.bincount(layout.cells.ravel(), minlength=layout.size + 1)[: layout.size]
  flat = opinions.reshape(*opinions.shape[:-3], -1, opinions.shape[-1])
  total = jnp.zeros((*flat.shape[:-2], layout.size + 1, flat.shape[-1]), flat.dtype)
  total = total.at[..., layout.cells.ravel(), :].add(flat)[..., : layout.size, :]
  return total / np.maximum(1, count)[:, None].astype(np.float32)
