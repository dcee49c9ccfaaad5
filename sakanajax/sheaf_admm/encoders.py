"""Encoders: from an agent's view to its convex objective and its restriction-map factors (section 3.3).

All agents share the weights. A trunk turns the view into features; `Heads` turns features into the stalk
seed h, the terms of the objective and, when rank > 0, the LoRA factors. Three trunks, one per task, follow
the released code: parameter counts of the paper's configurations come out exactly.

Legend: N agents, S slots, d_v vertex stalk, d_e edge stalk, r rank; leading batch axes are free.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-6


def softplus_inverse(y: float) -> float:
  """x with softplus(x) = y."""
  return float(np.log(np.expm1(y)))


class Encoding(NamedTuple):
  """What an agent brings to the negotiation; fields the objective does not use are None."""

  h: jax.Array  # [..., N, d_v] seed of x and z
  q_diag: jax.Array | None = None  # [..., N, d_v] > 0
  q: jax.Array | None = None  # [..., N, d_v]
  l1: jax.Array | None = None  # [..., N, d_v] >= 0
  upper: jax.Array | None = None  # [..., N, d_v] > 0
  a: jax.Array | None = None  # [..., N, S, d_e, r]
  b: jax.Array | None = None  # [..., N, S, d_v, r]


class MLPBlock(nn.Module):
  """x + Dense(GELU(Dense(RMSNorm x))) with a linear skip where the width changes."""

  width: int

  @nn.compact
  def __call__(self, x):
    y = nn.Dense(self.width)(nn.RMSNorm(epsilon=EPSILON)(x))
    y = nn.Dense(self.width)(nn.gelu(y))
    return y + (x if x.shape[-1] == self.width else nn.Dense(self.width)(x))


class SwiGLU(nn.Module):
  """Dense(silu(gate) · up) with an inner width."""

  inner: int

  @nn.compact
  def __call__(self, x):
    gate, up = nn.Dense(self.inner)(x), nn.Dense(self.inner)(x)
    return nn.Dense(x.shape[-1])(nn.silu(gate) * up)


class MixerBlock(nn.Module):
  """Mixes cells, then channels, each with a normalised residual (post-norm)."""

  @nn.compact
  def __call__(self, x):
    cells, channels = x.shape[-2:]
    mixed = SwiGLU(2 * cells)(jnp.swapaxes(x, -1, -2))
    x = nn.RMSNorm(epsilon=EPSILON)(x + jnp.swapaxes(mixed, -1, -2))
    return nn.RMSNorm(epsilon=EPSILON)(x + SwiGLU(2 * channels)(x))


class Heads(nn.Module):
  """Objective terms and map factors from features; `norm` normalises the features for the factors."""

  d_v: int
  d_e: int
  slots: int
  objective: str  # l1box_diag | lasso | non_negative | simple
  rank: int = 0
  lora_init: str = "standard"  # which factor starts at zero: standard A, legacy B
  norm: str = "layer"
  curvature: str = "learned"  # or fixed: Q = 1 (the ablation without curvature)

  @nn.compact
  def __call__(self, h, features) -> Encoding:
    terms = {}
    if self.objective != "simple":
      curvature = jax.nn.softplus(nn.Dense(self.d_v, name="q_diag")(features)) + 1e-4
      terms["q_diag"] = curvature if self.curvature == "learned" else jnp.ones_like(curvature)
      terms["q"] = nn.Dense(self.d_v, name="q")(features)
    if self.objective == "l1box_diag":
      terms["l1"] = self._positive("l1", 0.01, features)
      terms["upper"] = self._positive("upper", 1.0, features)
    if self.rank:
      norm = nn.LayerNorm if self.norm == "layer" else nn.RMSNorm
      features = norm(epsilon=EPSILON, name="factor_norm")(features)
      terms["a"] = self._factor("a", self.d_e, self.lora_init == "standard", features)
      terms["b"] = self._factor("b", self.d_v, self.lora_init == "legacy", features)
    return Encoding(h, **terms)

  def _positive(self, name, start, features):
    bias = nn.initializers.constant(softplus_inverse(start))
    return jax.nn.softplus(nn.Dense(self.d_v, kernel_init=nn.initializers.zeros, bias_init=bias, name=name)(features))

  def _factor(self, name, rows, zero, features):
    kernel = nn.initializers.zeros if zero else nn.initializers.lecun_normal()
    flat = nn.Dense(self.slots * rows * self.rank, kernel_init=kernel, name=name)(features)
    return flat.reshape(*flat.shape[:-1], self.slots, rows, self.rank)


class PatchEncoder(nn.Module):
  """Maze and image agents: a flat view `[..., N, P]` -> Encoding.

  `deep` False is the maze trunk (RMSNorm, Dense, GELU); True the MNIST trunk (Dense, one residual MLP block).
  """

  hidden: int
  deep: bool
  heads: dict

  @nn.compact
  def __call__(self, view) -> Encoding:
    if self.deep:
      features = MLPBlock(self.hidden)(nn.Dense(self.hidden)(view))
    else:
      features = nn.gelu(nn.Dense(self.hidden)(nn.RMSNorm(epsilon=EPSILON)(view)))
    h = nn.LayerNorm(epsilon=EPSILON)(nn.Dense(self.heads["d_v"], name="h")(features))
    return Heads(**self.heads, norm="layer")(h, features)


class CellEncoder(nn.Module):
  """Sudoku agents: digits `[..., N, S]` of cells `cells` `[N, S]` -> Encoding; stalk block k belongs to cell k."""

  hidden: int
  digits: int  # S + 1, zero is empty
  cells: tuple  # [N, S] flat cell numbers as nested tuples
  heads: dict
  blocks: int = 2

  @nn.compact
  def __call__(self, view) -> Encoding:
    size = view.shape[-1]
    per_cell = self.heads["d_v"] // size
    embed = nn.initializers.normal(self.hidden**-0.5)
    x = nn.Dense(self.hidden)(jax.nn.one_hot(view.astype(jnp.int32), self.digits))
    cells = np.asarray(self.cells)
    x = x + self.param("cell", embed, (cells.size // 3, self.hidden))[cells]
    x = (x + self.param("position", embed, (size, self.hidden))) * (self.hidden / 2) ** 0.5
    for _ in range(self.blocks):
      x = MixerBlock()(x)
    x = nn.RMSNorm(epsilon=EPSILON)(x)
    stalk = nn.RMSNorm(epsilon=EPSILON)(nn.Dense(per_cell)(x))
    stalk = stalk.reshape(*stalk.shape[:-2], size * per_cell)
    h = nn.LayerNorm(epsilon=EPSILON)(nn.Dense(self.heads["d_v"], name="h")(stalk))
    return Heads(**self.heads, norm="rms")(h, x.mean(-2))
