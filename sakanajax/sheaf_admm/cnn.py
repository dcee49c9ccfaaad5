"""The convolutional baseline for images, with global average or global max pooling.

The paper names a CNN without its architecture. Average pooling dilutes the evidence on a larger canvas (its
reported collapse at padding 16); max pooling does not, so both are always reported.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class CNN(nn.Module):
  """Three 3x3 convolutions, two of them strided, global pooling, one dense layer: `[B, H, W]` -> `[B, C]`."""

  width: int
  pool: str  # average | max
  classes: int = 10

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    x = images[..., None]
    for factor, stride in ((1, 1), (2, 2), (2, 2)):
      x = nn.relu(nn.Conv(factor * self.width, (3, 3), strides=(stride, stride))(x))
    pooled = jnp.mean(x, axis=(1, 2)) if self.pool == "average" else jnp.max(x, axis=(1, 2))
    return nn.Dense(self.classes)(pooled)
