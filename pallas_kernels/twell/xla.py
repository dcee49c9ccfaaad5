"""The sparse layer in pure XLA: gather the rows of the active neurons, multiply. For a few rows on any platform.

A row that is alone, as when a model generates text, is bound by reading weights, and this reads only those it needs.
It makes `[M, E, K]` arrays, so for many rows it is slower than dense arithmetic and needs more memory: `api` uses it
up to MAX_ROWS.

Legend: M rows (tokens), K input features, N hidden neurons, L output features, E slots of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.twell import formats
from pallas_kernels.twell.formats import Ell, Packed

MAX_ROWS = 8


def gate_pack(x: jax.Array, w_gate: jax.Array, compression: int = 8) -> Packed:
  """See `reference.gate_pack`; products in the precision of the platform, sums in float32."""
  return formats.pack(_product(x, w_gate), compression)


def gate_ell(x: jax.Array, w_gate: jax.Array, capacity: int) -> Ell:
  """See `reference.gate_ell`."""
  return formats.to_ell(_product(x, w_gate), capacity)


def gated_ffn(x: jax.Array, packed: Packed | Ell, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
  """See `reference.gated_ffn`."""
  values, columns, used = formats.entries(packed)
  up = jnp.einsum("mk,mek->me", x, _rows(w_up, columns, used), preferred_element_type=jnp.float32)
  hidden = jnp.where(used, values * up, 0.0)
  return _down(hidden, columns, used, w_down).astype(x.dtype)


def plain_ffn(packed: Packed | Ell, w_down: jax.Array) -> jax.Array:
  """See `reference.plain_ffn`."""
  values, columns, used = formats.entries(packed)
  return _down(values, columns, used, w_down).astype(w_down.dtype)


def _product(a, b):
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _rows(weights, columns, used):
  """Returns `[M, E, ...]`, the rows of the used slots; 0 for the others, whatever the weights hold."""
  return weights.at[jnp.where(used, columns, weights.shape[0])].get(mode="fill", fill_value=0)


def _down(hidden, columns, used, w_down):
  rows = _rows(w_down, columns, used).astype(jnp.float32)
  return jnp.einsum("me,mel->ml", hidden, rows)
