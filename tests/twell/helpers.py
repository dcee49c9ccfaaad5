"""A tiny language model and its batches, for all tests of the method."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.twell import model as models
from tests.quick import quick

TINY = models.ModelConfig(vocab=19, dim=8, hidden=24, layers=2, heads=2)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """For all tests of a module that imports it; products are exact."""
  with quick(), jax.default_matmul_precision("highest"):
    yield


def params_of(layer, scale: float = 0.4, seed: int = 0):
  """Params of order `scale` everywhere, without compiling an initialisation."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(layer.init, jax.random.key(0))
  return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype), shapes)


def batch_of(rows: int = 2, length: int = 6, vocab: int = 19, padded: int = 0, seed: int = 0):
  """Rows as `core.text.rows` makes them: one document each, the last `padded` tokens padding."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(vocab, size=(rows, length + 1)).astype(np.int32)
  inside = np.broadcast_to(np.arange(length) < length - padded, (rows, length))
  return {
      "tokens": np.where(inside, ids[:, :-1], 0).astype(np.int32), "labels": ids[:, 1:],
      "segment_ids": inside.astype(np.int32), "positions": np.where(inside, np.arange(length), 0).astype(np.int32),
      "mask": inside,
  }
