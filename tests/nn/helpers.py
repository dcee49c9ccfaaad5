"""What the tests of the layers share: params without compiling an initialisation, and quick compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.nn.layer import Layer




def filled(layer: Layer, scale: float = 0.5, seed: int = 0):
  """Params of `layer` with numbers of order `scale` everywhere, so that nothing is nearly uniform, zero or one."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(layer.init, jax.random.key(0))
  return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype), shapes)
