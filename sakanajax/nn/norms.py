"""Normalisation over the features, in float32 whatever the input is.

    rms_norm:   y = x / sqrt(mean(x^2) + eps) * scale
    layer_norm: y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias

Legend: D features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sakanajax.nn.layer import Layer, stateless


def rms(x: jax.Array, scale: jax.Array, eps: float = 1e-6) -> jax.Array:
  """x `[..., D]` over its root mean square, times scale `[D]`; in the dtype of x."""
  wide = x.astype(jnp.float32)
  wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
  return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def rms_norm(dim: int, eps: float = 1e-6) -> Layer:
  """RMSNorm (Zhang & Sennrich, arXiv 1910.07467); params {"scale": [D]}, ones at first."""
  return stateless(lambda key: {"scale": jnp.ones(dim)}, lambda params, x, ctx: rms(x, params["scale"], eps))


def layer_norm(dim: int, eps: float = 1e-5) -> Layer:
  """LayerNorm (Ba et al., arXiv 1607.06450); params {"scale": [D], "bias": [D]}, ones and zeros at first."""

  def apply(params, x, ctx):
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * params["scale"] + params["bias"]).astype(x.dtype)

  return stateless(lambda key: {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}, apply)
