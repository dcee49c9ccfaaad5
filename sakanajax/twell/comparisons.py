"""Sparsity that is imposed instead of learned: the k largest activations, or those above a calibrated threshold.

    top-k       keep the k largest |h| of a token           (Q-Sparse, arXiv 2407.10969)
    threshold   keep |h| > t, t a quantile of calibration   (TEAL, arXiv 2408.14690; CATS, arXiv 2404.08763)

The paper argues against both without measuring them. `selected` puts either into a trained layer, so that their cost in
cross-entropy stands beside that of L1 at the same number of non-zeros.

Legend: M tokens, D model width, N hidden width.
"""

from __future__ import annotations

from typing import Callable

import jax
import jax.numpy as jnp

from sakanajax.nn import ffn
from sakanajax.nn.layer import Layer, dense

Select = Callable[[jax.Array], jax.Array]  # h [..., N] -> h with some entries 0


def top_k(h: jax.Array, k: int) -> jax.Array:
  """Returns h `[..., N]` with all but the k largest |h| of each row 0; of equals the first stay. A NaN is largest."""
  n = h.shape[-1]
  if not 0 <= k <= n:
    raise ValueError(f"k must be between 0 and {n}, got {k}")
  if k == 0:
    return jnp.zeros_like(h)
  _, kept = jax.lax.top_k(jnp.where(jnp.isnan(h), jnp.inf, jnp.abs(h)), k)
  flat, index = h.reshape(-1, n), kept.reshape(-1, k)
  on = jnp.zeros(flat.shape, bool).at[jnp.arange(flat.shape[0])[:, None], index].set(True)
  return jnp.where(on, flat, 0).reshape(h.shape)


def threshold(h: jax.Array, t: jax.Array | float) -> jax.Array:
  """Returns h with entries of |h| <= t 0; a NaN stays."""
  return jnp.where(jnp.abs(h) <= t, 0, h)


def calibrate(h: jax.Array, nnz: float) -> jax.Array:
  """Returns the t, `[]`, for which `threshold` keeps `nnz` entries of a row of h `[M, N]`, mean over the rows."""
  n = h.shape[-1]
  if not 0 <= nnz <= n:
    raise ValueError(f"nnz must be between 0 and {n}, got {nnz}")
  return jnp.quantile(jnp.abs(h.astype(jnp.float32)), 1.0 - nnz / n, method="lower")


def selected(select: Select, activation: str = "relu", gated: bool = True) -> Layer:
  """The feed-forward layer whose h passes through `select` before it is projected down; params as in `ffn`.

  Reports nnz `[]`: non-zeros of h per token, mean over tokens that are not padding. It has no init: its params are
  those of a trained layer.
  """
  act = ffn.ACTIVATIONS[activation]

  def init(key):
    raise NotImplementedError("a rule of selection reads the params of a trained layer")

  def apply(params, x, state, ctx):
    h = select(hidden(params, x, act, gated))
    on = jnp.sum(h != 0, axis=-1, dtype=jnp.float32)
    mask = jnp.ones(on.shape, bool) if ctx.mask is None else ctx.mask
    nnz = jnp.sum(jnp.where(mask, on, 0)) / jnp.maximum(jnp.sum(mask), 1)
    return dense(h, params["down"]), (), {"nnz": nnz}

  return Layer(init, lambda batch, max_len, dtype: (), apply)


def hidden(params, x: jax.Array, act: Callable, gated: bool) -> jax.Array:
  """Returns h `[..., N]` of a trained layer."""
  up = dense(x, params["up"])
  return act(dense(x, params["gate"])) * up if gated else act(up)
