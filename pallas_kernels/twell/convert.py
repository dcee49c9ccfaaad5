"""From one sparse format to another, without a dense matrix in between where both ends are sparse.

What a target cannot hold is never dropped silently: conversions into a format of limited room return (result, lost),
where `lost` is how many entries of the original matrix the result lacks, those that the source had lost already
included.

Legend: M rows, N columns, E slots of an ELL row, Q rows of the dense tail.
"""

from __future__ import annotations

import jax
from jax.experimental import sparse as jsparse
import jax.numpy as jnp

from pallas_kernels.twell import formats, hybrid
from pallas_kernels.twell.formats import Ell, Packed
from pallas_kernels.twell.hybrid import Capacity, Hybrid, Pattern


def to_dense(sparse: Packed | Ell | Hybrid) -> jax.Array:
  """Returns the matrix `[M, N]` in float32; what overflowed is 0."""
  if isinstance(sparse, Hybrid):
    return hybrid.to_dense(sparse).astype(jnp.float32)
  return formats.decode(sparse)[0]


def pattern(sparse: Packed | Ell | Hybrid) -> jax.Array:
  """Returns `[M, N]` bool: which entries are stored, whatever their values."""
  if isinstance(sparse, Hybrid):
    ones = Hybrid(sparse.pattern, sparse.pattern.used, sparse.pattern.tail_on)
    return hybrid.to_dense(ones)
  return formats.decode(sparse)[1]


def to_packed(sparse: Ell | Hybrid, compression: int = 8) -> tuple[Packed, jax.Array]:
  """Returns (TwELL with values rounded to bfloat16, lost)."""
  on = pattern(sparse)
  packed = formats.pack(to_dense(sparse), compression, on)
  counts = sparse.pattern.counts if isinstance(sparse, Hybrid) else sparse.counts
  return packed, formats.overflow(packed) + jnp.sum(counts) - jnp.sum(on)


def to_ell(sparse: Packed | Ell | Hybrid, capacity: int) -> tuple[Ell, jax.Array]:
  """Returns (ELL of E = `capacity` with float32 values, lost)."""
  if isinstance(sparse, Hybrid):
    dense, on = to_dense(sparse), pattern(sparse)
    columns = jnp.broadcast_to(jnp.arange(dense.shape[1]), dense.shape)
    ell = _compact(dense, columns, on, capacity, dense.shape[1])
    return ell, formats.overflow(ell) + jnp.sum(sparse.pattern.counts) - jnp.sum(on)
  ell = _compact(*formats.entries(sparse), capacity, sparse.n)
  return ell, formats.overflow(ell) + formats.overflow(sparse)


def to_hybrid(sparse: Packed | Ell, capacity: Capacity, dtype=jnp.float32) -> tuple[Hybrid, jax.Array]:
  """Returns (hybrid, entries lost); `result.pattern.overflow` says how many whole rows are among them.

  Raises ValueError for more than 65,536 columns.
  """
  hybrid.check_columns(sparse.n)
  values, columns, used = formats.entries(sparse)
  ell = _compact(values, columns, used, capacity.ell, sparse.n)
  tail_row, rows = hybrid.assign_tail(ell.counts, capacity)
  own = (tail_row == hybrid.IN_ELL)[:, None]
  source = jnp.maximum(rows, 0)
  place = (jnp.arange(rows.size)[:, None], jnp.where(used[source] & (rows >= 0)[:, None], columns[source], sparse.n))
  tail = jnp.zeros((rows.size, sparse.n), dtype).at[place].set(values[source].astype(dtype), mode="drop")
  on = jnp.zeros(tail.shape, bool).at[place].set(True, mode="drop")
  indices = jnp.where(own, ell.indices, 0).astype(jnp.uint16)
  where = Pattern(indices, ell.counts, tail_row, rows, hybrid.bits(on), sparse.n)
  dropped = jnp.sum(jnp.where(tail_row == hybrid.DROPPED, ell.counts, 0))
  return Hybrid(where, jnp.where(own, ell.values, 0).astype(dtype), tail), formats.overflow(sparse) + dropped


def to_bcsr(ell: Ell, nse: int | None = None) -> jsparse.BCSR:
  """Returns the stored entries as `jax.experimental.sparse.BCSR`.

  Args:
    ell: the matrix.
    nse: how many entries to make room for; None: exactly those there are, which needs concrete arrays. Entries beyond
      the last row's end are padding; those beyond `nse` are left out (compare it with `indptr[-1]`).
  """
  _, columns, used = formats.entries(ell)
  ends = jnp.cumsum(jnp.sum(used, axis=1))
  starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
  nse = int(starts[-1]) if nse is None else nse
  place = jnp.where(used, starts[:-1, None] + jnp.arange(used.shape[1]), nse)
  data = jnp.zeros(nse, ell.values.dtype).at[place].set(ell.values, mode="drop")
  indices = jnp.full(nse, ell.n, jnp.int32).at[place].set(columns, mode="drop")
  return jsparse.BCSR((data, indices, starts.astype(jnp.int32)), shape=(ell.values.shape[0], ell.n))


def from_bcsr(matrix: jsparse.BCSR, capacity: int) -> tuple[Ell, jax.Array]:
  """Returns (ELL, lost) of a BCSR matrix [M, N] without batch or dense axes and with sorted columns."""
  if matrix.n_batch or matrix.n_dense:
    raise ValueError(f"a plain matrix was expected, got n_batch={matrix.n_batch}, n_dense={matrix.n_dense}")
  starts = matrix.indptr[:-1, None]
  counts = (matrix.indptr[1:] - matrix.indptr[:-1]).astype(jnp.int32)
  used = jnp.arange(capacity) < counts[:, None]
  place = jnp.where(used, starts + jnp.arange(capacity), matrix.data.size)
  data, columns = (jnp.pad(part, (0, 1)) for part in (matrix.data, matrix.indices))  # never empty
  values = data.at[place].get(mode="fill", fill_value=0)
  indices = columns.at[place].get(mode="fill", fill_value=0).astype(jnp.uint32)
  ell = Ell(values, indices, counts, matrix.shape[1])
  return ell, formats.overflow(ell)


def _compact(values, columns, used, capacity: int, n: int) -> Ell:
  """Moves the used slots of each row to its front. The counts are those of the used slots."""
  rank = jnp.cumsum(used, axis=1)
  place = (jnp.arange(used.shape[0])[:, None], jnp.where(used, rank - 1, capacity))
  empty = (used.shape[0], capacity)
  return Ell(
      jnp.zeros(empty, values.dtype).at[place].set(values, mode="drop"),
      jnp.zeros(empty, jnp.uint32).at[place].set(columns.astype(jnp.uint32), mode="drop"),
      rank[:, -1].astype(jnp.int32),
      n,
  )
