"""Decoders: from the agents' states to predictions (section 3.4). They read x, never z."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sakanajax.sheaf_admm.encoders import EPSILON, MLPBlock


class PatchDecoder(nn.Module):
  """Maze: the flat view `[..., N, P·V]` and state `[..., N, d]` -> logits `[..., N, P, V]` of the patch cells."""

  cells: int
  classes: int
  hidden: int = 256

  @nn.compact
  def __call__(self, view, x):
    both = jnp.concatenate([view, x], -1)
    y = nn.gelu(nn.Dense(self.hidden)(nn.RMSNorm(epsilon=EPSILON)(both)))
    logits = nn.Dense(self.cells * self.classes)(y)
    return logits.reshape(*logits.shape[:-1], self.cells, self.classes)


class CellDecoder(nn.Module):
  """Sudoku: state `[..., N, S·c]` -> logits `[..., N, S, S + 1]` of the agent's cells."""

  size: int
  hidden: int = 256

  @nn.compact
  def __call__(self, view, x):
    del view
    cells = x.reshape(*x.shape[:-1], self.size, -1)
    return nn.Dense(self.size + 1)(MLPBlock(self.hidden)(cells))


class ClassDecoder(nn.Module):
  """Images: state `[..., N, d]` -> logits `[..., N, C]`, one opinion per agent."""

  classes: int

  @nn.compact
  def __call__(self, view, x):
    del view
    return nn.Dense(self.classes)(x)


class PooledClassDecoder(nn.Module):
  """Images, message passing: the mean state of all agents -> MLP -> logits `[..., 1, C]`."""

  classes: int
  hidden: int = 128

  @nn.compact
  def __call__(self, view, x):
    del view
    pooled = jnp.mean(x, axis=-2, keepdims=True)
    return nn.Dense(self.classes)(jax.nn.gelu(nn.Dense(self.hidden)(pooled)))
