"""LoRA: low-rank changes of chosen weights as a pytree of their own (Hu et al., arXiv 2106.09685).

    W' = W + scale * A B,   A [in, r] ~ N(0, 1/in),   B [r, out] = 0 at first

An adapter is {path: {"a", "b"}}, where the path joins the keys of a weight by "/" ("body/mixer/layer/q"). It is
trained, averaged or predicted like any pytree; `apply` gives the params of the changed model, and no layer knows of it.
Weights of a stack `[n, in, out]` get one pair per layer, `[n, in, r]` and `[n, r, out]`.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping

import jax
import jax.numpy as jnp

PyTree = Any
Adapter = Mapping[str, Mapping[str, jax.Array]]


def paths(params: PyTree) -> dict[str, jax.Array]:
  """Returns {path: leaf} of all weights."""
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def init(key: jax.Array, params: PyTree, rank: int, match: str) -> dict[str, dict[str, jax.Array]]:
  """Returns the adapter that changes nothing yet, for the weights whose path the regex `match` finds.

  Raises:
    ValueError: rank < 1, a regex that finds no path, or one that finds a weight which is no matrix.
  """
  if rank < 1:
    raise ValueError(f"rank must be at least 1, got {rank}")
  known = paths(params)
  found = [path for path in known if re.search(match, path)]
  if not found:
    raise ValueError(f"no weight matches {match!r}; there are {', '.join(known)}")
  if flat := [path for path in found if known[path].ndim < 2]:
    raise ValueError(f"{match!r} matches {', '.join(flat)}, which are no matrices; name kernels only")
  keys = jax.random.split(key, len(found))
  return {path: _pair(k, known[path], rank) for path, k in zip(found, keys)}


def apply(params: PyTree, adapter: Adapter, scale: float | jax.Array = 1.0) -> PyTree:
  """Returns `params` with W + scale A B in place of every adapted W; summed in float32, in the dtype of W.

  Raises:
    ValueError: the adapter names a path that `params` doesn't have.
  """
  known = paths(params)
  if unknown := [path for path in adapter if path not in known]:
    raise ValueError(f"no weight at {', '.join(unknown)}; there are {', '.join(known)}")

  def one(path, weight):
    pair = adapter.get(jax.tree_util.keystr(path, simple=True, separator="/"))
    if pair is None:
      return weight
    change = jnp.matmul(pair["a"], pair["b"], preferred_element_type=jnp.float32)
    return (weight.astype(jnp.float32) + scale * change).astype(weight.dtype)

  return jax.tree_util.tree_map_with_path(one, params)


merge = apply  # folding an adapter in for good is the same map


def _pair(key: jax.Array, weight: jax.Array, rank: int) -> dict[str, jax.Array]:
  *lead, rows, columns = weight.shape
  return {
      "a": (jax.random.normal(key, (*lead, rows, rank)) / math.sqrt(rows)).astype(weight.dtype),
      "b": jnp.zeros((*lead, rank, columns), weight.dtype),
  }
