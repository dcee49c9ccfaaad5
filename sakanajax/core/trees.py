"""Measures of a pytree: how many numbers, how many bytes, how long as one vector."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from optax.tree import norm as global_norm

__all__ = ["cast", "count_params", "global_norm", "tree_bytes"]


def count_params(tree: Any) -> int:
  """Returns how many numbers the leaves hold in all (arrays or ShapeDtypeStructs)."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def tree_bytes(tree: Any) -> int:
  """Returns the bytes that the leaves occupy (arrays or ShapeDtypeStructs)."""
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cast(tree: Any, dtype: Any) -> Any:
  """Casts the floating leaves to `dtype`; integers, booleans and keys stay as they are."""

  def one(leaf):
    return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

  return jax.tree.map(one, tree)
