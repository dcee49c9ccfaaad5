"""`train.Ops` on NVIDIA GPUs: the products of a training step with the kernels of `triton.py` and `triton_ell.py`.

Short rows live in ELL and go through the sparse kernels; the dense tail is a few long rows, which XLA multiplies
densely. The gate comes packed in TwELL. A row that has more positives in one tile than TwELL has slots would come
incomplete, so such a row goes to the tail too, like one that is longer than an ELL row; rows of the tail are computed
again, densely, from x. With float32 inputs the values, which TwELL rounds to bfloat16, are computed again at the
pattern that it found.

    y, l1, counts = train.sparse_ffn(x, w_gate, w_up, w_down, capacity=capacity, ops=triton_train.OPS)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.twell import formats, hybrid, train, triton, triton_ell
from pallas_kernels.twell.hybrid import Capacity, Hybrid, Pattern

COMPRESSION = 4  # 63 slots of 256: at 2 % density no tile of a million overflows by chance


def gate(x: jax.Array, g: jax.Array, capacity: Capacity, *, interpret: bool = False) -> Hybrid:
  """Returns ReLU(x g) in x's dtype: x `[M, K]`, g `[K, N]`."""
  packed = triton.gate_pack(x, g, COMPRESSION, interpret=interpret)
  counts = formats.nnz(packed)
  whole = jnp.all(packed.counts < formats.width(COMPRESSION), axis=1)
  tail_row, rows = hybrid.assign_tail(jnp.where(whole, counts, jnp.maximum(counts, capacity.ell + 1)), capacity)
  ell = triton_ell.unpack(packed, capacity.ell, interpret=interpret)
  h = jnp.where((rows >= 0)[:, None], _product(x[jnp.maximum(rows, 0)], g), 0)
  on = formats.active(h)
  own = (tail_row == hybrid.IN_ELL)[:, None]
  columns = jnp.where(own, ell.indices, 0).astype(jnp.uint16)
  pattern = Pattern(columns, counts, tail_row, rows, hybrid.bits(on), packed.n)
  values = jnp.where(own, ell.values, 0)
  if x.dtype == jnp.float32:
    values = triton_ell.sampled_product(x, g.T, columns, _in_ell(pattern), interpret=interpret)
  return Hybrid(pattern, values.astype(x.dtype), jnp.where(on, h, 0).astype(x.dtype))


def sample(a: jax.Array, w: jax.Array, pattern: Pattern, *, interpret: bool = False) -> Hybrid:
  """Returns a w^T at the pattern, in float32: a `[M, K]`, w `[N, K]`."""
  ell = triton_ell.sampled_product(a, w, pattern.columns, _in_ell(pattern), interpret=interpret)
  tail = _product(a[jnp.maximum(pattern.rows, 0)], w.T)
  return Hybrid(pattern, ell, jnp.where(pattern.tail_on, tail, 0))


def matmul(s: Hybrid, w: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Returns s w `[M, L]` in float32: w `[N, L]`."""
  pattern = s.pattern
  y = triton_ell.ell_matmul(s.ell, pattern.columns, _in_ell(pattern), w, interpret=interpret)
  rows = jnp.where(pattern.rows >= 0, pattern.rows, y.shape[0])
  return y.at[rows].set(_product(s.tail, w), mode="drop")


def matmul_t(s: Hybrid, a: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Returns s^T a `[N, L]` in float32: a `[M, L]`."""
  pattern = s.pattern
  by_column = triton_ell.transpose(pattern.columns, _in_ell(pattern), pattern.n)
  out = triton_ell.transposed_matmul(s.ell, by_column, a, interpret=interpret)
  return out + _product(s.tail.T, a[jnp.maximum(pattern.rows, 0)])


def _in_ell(pattern: Pattern) -> jax.Array:
  """Returns `[M]` int32, the entries that a row has in the ELL part."""
  return jnp.where(pattern.tail_row == hybrid.IN_ELL, pattern.counts, 0)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def ops(interpret: bool = False) -> train.Ops:
  """Returns the four operations; with `interpret` their kernels run in numpy, anywhere."""
  return train.Ops(*(functools.partial(f, interpret=interpret) for f in (gate, sample, matmul, matmul_t)))


OPS = ops()
