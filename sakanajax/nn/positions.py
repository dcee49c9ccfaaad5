"""Position sources: how attention learns where a token stands.

A source turns queries and keys before they meet; keys are cached turned, so a source may use nothing but the token
itself and what stands before it. A new source is a new `Positions` (RePo computes real-valued positions from `x`).

    rotate_half: pair (i, i + d/2) of a head at position p turns by the angle p * frequency_i
    rope:        frequency_i = theta^(-2i/d)                              (Su et al., arXiv 2104.09864)
    yarn:        slow pairs are slowed down by `factor`, fast ones kept   (Peng et al., arXiv 2309.00071)

Legend: B batch, T tokens, D model width, H heads, Hk key heads, d head width.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.nn.layer import Ctx

Rotate = Callable[
    [Any, jax.Array, jax.Array, jax.Array, jax.Array, Ctx], tuple[jax.Array, jax.Array]
]  # (params, x [B, T, D], q [B, T, H, d], k [B, T, Hk, d], positions [B, T], ctx) -> (q, k)


class Positions(NamedTuple):
  """A position source; `{}` are the params of one that learns nothing."""

  init: Callable[[jax.Array], Any]
  rotate: Rotate


def rotate_half(x: jax.Array, positions: jax.Array, frequencies: jax.Array, scale: float = 1.0) -> jax.Array:
  """Turns pair (i, i + d/2) of x `[B, T, H, d]` by positions * frequencies_i, in float32; keeps the dtype of x.

  Args:
    x: queries or keys.
    positions: `[B, T]` for all heads or `[B, T, H]` for each; whole or real numbers.
    frequencies: `[d/2]` radians per position.
    scale: also multiplies the result (the attention temperature of YaRN).
  """
  if x.shape[-1] != 2 * len(frequencies):
    raise ValueError(f"{len(frequencies)} frequencies turn heads of {2 * len(frequencies)}, got {x.shape[-1]}")
  positions = positions if positions.ndim == 3 else positions[..., None]
  angles = positions[..., None].astype(jnp.float32) * frequencies  # [B, T, H or 1, d/2]
  cos, sin = scale * jnp.cos(angles), scale * jnp.sin(angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float = 1e4) -> np.ndarray:
  """theta^(-2i/d) for i in 0 .. d/2 - 1, float32 `[d/2]`."""
  if head_dim % 2:
    raise ValueError(f"rotary positions need heads of even width, got {head_dim}")
  return (theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def yarn_frequencies(
    head_dim: int,
    factor: float,
    original: int,
    theta: float = 1e4,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> np.ndarray:
  """Frequencies for a context `factor` times as long as the `original` one, float32 `[d/2]` (YaRN, section 3).

  Pairs that turn more than `beta_fast` times in the original context keep their frequency, those that turn less than
  `beta_slow` times have it divided by `factor`, and between the two a ramp blends. The ramp is linear in the index of
  the pair and its ends are whole indices, as in released models; the paper's equation is linear in the turns.
  """
  if factor < 1 or original < 1 or not 0 < beta_slow < beta_fast:
    raise ValueError(
        "yarn needs factor >= 1, original >= 1 and 0 < beta_slow < beta_fast, got "
        f"factor={factor}, original={original}, beta_slow={beta_slow}, beta_fast={beta_fast}"
    )
  kept = rope_frequencies(head_dim, theta)
  pair = lambda turns: head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
  low = max(math.floor(pair(beta_fast)), 0)
  high = min(math.ceil(pair(beta_slow)), head_dim - 1)
  slow = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
  return (kept * (1 - slow) + kept / factor * slow).astype(np.float32)


def rope(theta: float = 1e4) -> Positions:
  """Rotary positions at the whole-numbered `positions`."""
  return _rotary(lambda head_dim: rope_frequencies(head_dim, theta))


def yarn(
    factor: float,
    original: int,
    theta: float = 1e4,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
) -> Positions:
  """Rotary positions for a longer context; see `yarn_frequencies`.

  Queries and keys are both multiplied by `attention_factor`, logits by its square; None: 0.1 ln factor + 1.
  """
  scale = 0.1 * math.log(factor) + 1.0 if attention_factor is None else attention_factor
  return _rotary(lambda head_dim: yarn_frequencies(head_dim, factor, original, theta, beta_fast, beta_slow), scale)


def no_positions() -> Positions:
  """Order is known through the causal mask only (NoPE)."""
  return Positions(lambda key: {}, lambda params, x, q, k, positions, ctx: (q, k))


def _rotary(frequencies: Callable[[int], np.ndarray], scale: float = 1.0) -> Positions:
  def rotate(params, x, q, k, positions, ctx):
    of_pairs = frequencies(q.shape[-1])
    return rotate_half(q, positions, of_pairs, scale), rotate_half(k, positions, of_pairs, scale)

  return Positions(lambda key: {}, rotate)
