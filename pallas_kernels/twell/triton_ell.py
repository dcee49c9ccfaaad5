"""Products with an ELL pattern on NVIDIA GPUs: what the training pass is made of (section 3.3).

    sampled_product    R[m, e] = x[m] . w[column(m, e)]          one program a row, a dot product per entry
    ell_matmul         y[m] = sum_e v[m, e] w[column(m, e)]      one program a row, accumulated in registers
    transpose          the pattern by column: a stable sort, so entries of a column are in the order of their rows
    transposed_matmul  dW[n] = sum_{(m, e): column(m, e) = n} v[m, e] a[m]

A column that many rows use would keep one program busy for long. Columns are therefore cut into chunks of CHUNK
entries, each summed by a program of its own, and the partial sums of a column are added in order: no atomics, equal
inputs give equal bits.

Everything is summed in float32. `interpret=True` runs the same kernels in numpy, anywhere.

Legend: M rows, N columns, E slots of an ELL row, K and L features, P chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _compat
from pallas_kernels.twell import formats
from pallas_kernels.twell.formats import Ell, Packed

CHUNK = 1024
WARP_FEATURES = 2048  # features that one warp holds in registers


class Transposed(NamedTuple):
  """An ELL pattern by column; entries of column n are `places[starts[n] : starts[n + 1]]`."""

  places: jax.Array  # [M * E] uint32: row * E + slot, sorted by column and then by row; unused slots last
  starts: jax.Array  # [N + 1] int32
  chunks: jax.Array  # [N + 1] int32: the first chunk of each column
  owners: jax.Array  # [P] int32: the column of each chunk; N for a chunk that no column needs


def warps(features: int) -> int:
  """Returns how many warps hold `features` (a power of two) in registers. Raises NotImplementedError beyond 16."""
  if features > 16 * WARP_FEATURES:
    raise NotImplementedError(f"a row of {features} features does not fit the registers of a block")
  return max(1, features // WARP_FEATURES)


@triton.jit
def sampled_kernel(
    x_ptr, w_ptr, column_ptr, count_ptr, out_ptr, K: tl.constexpr, E: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
  row = tl.program_id(0).to(tl.int64)
  k = tl.arange(0, BK)
  x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
  for slot in range(0, tl.minimum(tl.load(count_ptr + row), E)):
    place = row * E + slot
    w = tl.load(w_ptr + tl.load(column_ptr + place).to(tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, tl.sum(x * w, 0))


def sampled_product(
    x: jax.Array, w: jax.Array, columns: jax.Array, counts: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Returns `[M, E]` float32, x w^T at the pattern and 0 in unused slots: x `[M, K]`, w `[N, K]`."""
  (rows, k), capacity = x.shape, columns.shape[1]
  if rows * capacity == 0:
    return jnp.zeros((rows, capacity), jnp.float32)
  block = triton.next_power_of_2(k)
  (out,) = _compat.triton_call(
      x, w, columns, counts,
      kernel=sampled_kernel,
      out_shape=[jax.ShapeDtypeStruct((rows, capacity), jnp.float32)],
      grid=(rows,), zeroed=(0,), num_warps=warps(block), num_stages=1, interpret=interpret,
      K=k, E=capacity, BK=block,
  )  # fmt: skip
  return out


@triton.jit
def ell_matmul_kernel(
    value_ptr, column_ptr, count_ptr, w_ptr, y_ptr, L: tl.constexpr, E: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
  row = tl.program_id(0).to(tl.int64)
  l = tl.program_id(1) * BL + tl.arange(0, BL)
  acc = tl.zeros((BL,), tl.float32)
  for slot in range(0, tl.minimum(tl.load(count_ptr + row), E)):
    place = row * E + slot
    w_ptrs = w_ptr + tl.load(column_ptr + place).to(tl.int64) * L + l
    acc += tl.load(value_ptr + place).to(tl.float32) * tl.load(w_ptrs, mask=l < L, other=0.0).to(tl.float32)
  tl.store(y_ptr + row * L + l, acc.to(y_ptr.dtype.element_ty), mask=l < L)


def ell_matmul(
    values: jax.Array,
    columns: jax.Array,
    counts: jax.Array,
    w: jax.Array,
    *,
    dtype=jnp.float32,
    interpret: bool = False,
) -> jax.Array:
  """Returns `[M, L]` in `dtype`: the sparse matrix with `values [M, E]` times w `[N, L]`."""
  (rows, capacity), out = values.shape, w.shape[1]
  if rows * capacity == 0:
    return jnp.zeros((rows, out), dtype)
  block = min(triton.next_power_of_2(out), WARP_FEATURES)
  (y,) = _compat.triton_call(
      values, columns, counts, w,
      kernel=ell_matmul_kernel,
      out_shape=[jax.ShapeDtypeStruct((rows, out), dtype)],
      grid=(rows, triton.cdiv(out, block)), num_warps=warps(block), num_stages=1, interpret=interpret,
      L=out, E=capacity, BL=block,
  )  # fmt: skip
  return y


def transpose(columns: jax.Array, counts: jax.Array, n: int, chunk: int = CHUNK) -> Transposed:
  """Sorts the used slots of a pattern by column. Raises NotImplementedError when 31 bits do not number the slots."""
  rows, capacity = columns.shape
  if rows * capacity >= 1 << 31:
    raise NotImplementedError(f"{rows} rows of {capacity} slots are too many to number in 31 bits; use fewer rows")
  used = jnp.arange(capacity) < counts[:, None]
  column = jnp.where(used, columns.astype(jnp.uint32), jnp.uint32(n)).reshape(-1)
  column, places = jax.lax.sort((column, jnp.arange(column.size, dtype=jnp.uint32)), num_keys=1, is_stable=True)
  starts = jnp.searchsorted(column, jnp.arange(n + 1, dtype=jnp.uint32)).astype(jnp.int32)
  needed = -(-jnp.diff(starts) // chunk)
  chunks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(needed).astype(jnp.int32)])
  most = rows * capacity // chunk + min(n, rows * capacity)
  owners = jnp.searchsorted(chunks[1:], jnp.arange(most), side="right").astype(jnp.int32)
  return Transposed(places, starts, chunks, owners)


@triton.jit
def chunk_kernel(
    owner_ptr, chunk_ptr, start_ptr, place_ptr, value_ptr, a_ptr, part_ptr,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
  program = tl.program_id(0)
  column = tl.load(owner_ptr + program)
  if column < N:
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    first = tl.load(start_ptr + column) + (program - tl.load(chunk_ptr + column)) * CHUNK
    acc = tl.zeros((BK,), tl.float32)
    for i in range(first, tl.minimum(first + CHUNK, tl.load(start_ptr + column + 1))):
      place = tl.load(place_ptr + i).to(tl.int64)
      a = tl.load(a_ptr + (place // E) * K + k, mask=k < K, other=0.0).to(tl.float32)
      acc += tl.load(value_ptr + place).to(tl.float32) * a
    tl.store(part_ptr + program.to(tl.int64) * K + k, acc, mask=k < K)


@triton.jit
def sum_chunks_kernel(chunk_ptr, part_ptr, out_ptr, K: tl.constexpr, BK: tl.constexpr):
  column = tl.program_id(0)
  k = tl.program_id(1) * BK + tl.arange(0, BK)
  acc = tl.zeros((BK,), tl.float32)
  first = tl.load(chunk_ptr + column)
  part_ptrs = part_ptr + first.to(tl.int64) * K + k
  for _ in range(first, tl.load(chunk_ptr + column + 1)):
    acc += tl.load(part_ptrs, mask=k < K, other=0.0)
    part_ptrs += K
  tl.store(out_ptr + column.to(tl.int64) * K + k, acc, mask=k < K)


def transposed_matmul(
    values: jax.Array, by_column: Transposed, a: jax.Array, *, chunk: int = CHUNK, interpret: bool = False
) -> jax.Array:
  """Returns `[N, K]` float32: the transpose of the sparse matrix with `values [M, E]` times a `[M, K]`."""
  k, n, parts = a.shape[1], by_column.starts.size - 1, by_column.owners.size
  if parts == 0:
    return jnp.zeros((n, k), jnp.float32)
  block = min(triton.next_power_of_2(k), WARP_FEATURES)
  blocks = triton.cdiv(k, block)
  launch = {"num_warps": 1, "num_stages": 1, "interpret": interpret, "K": k, "BK": block}
  (partial,) = _compat.triton_call(
      by_column.owners, by_column.chunks, by_column.starts, by_column.places, values, a,
      kernel=chunk_kernel,
      out_shape=[jax.ShapeDtypeStruct((parts, k), jnp.float32)],
      grid=(parts, blocks), N=n, E=values.shape[1], CHUNK=chunk, **launch,
  )  # fmt: skip
  (out,) = _compat.triton_call(
      by_column.chunks, partial,
      kernel=sum_chunks_kernel,
      out_shape=[jax.ShapeDtypeStruct((n, k), jnp.float32)],
      grid=(n, blocks), **launch,
  )  # fmt: skip
  return out


@triton.jit
def unpack_kernel(
    words_ptr, value_ptr, index_ptr, count_ptr,
    TILES: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
  row = tl.program_id(0).to(tl.int64)
  tile = tl.arange(0, BT)
  slot = tl.arange(0, W)
  base = words_ptr + row * (TILES * W) + tile * W
  count = tl.load(base, mask=tile < TILES, other=0).to(tl.int32)
  stored = tl.minimum(count, W - 1)
  before = tl.cumsum(stored, 0) - stored
  used = (slot >= 1)[None, :] & (slot[None, :] <= stored[:, None])
  word = tl.load(base[:, None] + slot[None, :], mask=used, other=0)
  place = before[:, None] + slot[None, :] - 1
  keep = used & (place < E)
  tl.store(value_ptr + row * E + place, ((word >> 16) << 16).to(tl.float32, bitcast=True), mask=keep)
  tl.store(index_ptr + row * E + place, word & 0xFFFF, mask=keep)
  tl.store(count_ptr + row, tl.sum(stored, 0))


def unpack(packed: Packed, capacity: int, *, interpret: bool = False) -> Ell:
  """Returns the stored entries in ELL rows of `capacity` float32 slots; the counts are of what was stored."""
  rows, tiles = packed.words.shape[0], formats.tiles(packed.n)
  if rows == 0:
    return Ell(jnp.zeros((0, capacity)), jnp.zeros((0, capacity), jnp.uint32), jnp.zeros(0, jnp.int32), packed.n)
  shape = (rows, capacity)
  out = _compat.triton_call(
      packed.words,
      kernel=unpack_kernel,
      out_shape=[
          jax.ShapeDtypeStruct(shape, jnp.float32),
          jax.ShapeDtypeStruct(shape, jnp.uint32),
          jax.ShapeDtypeStruct((rows,), jnp.int32),
      ],
      grid=(rows,), zeroed=(0, 1), num_warps=4, num_stages=1, interpret=interpret,
      TILES=tiles, BT=triton.next_power_of_2(tiles), W=formats.width(packed.compression), E=capacity,
  )  # fmt: skip
  return Ell(*out, packed.n)
