"""The format of training (section 3.4): short rows in ELL, long rows whole in a dense tail.

A TwELL row has as many slots as tiles; what the backward pass keeps should be as small as the row's own count. Rows of
at most E entries go to ELL with 16-bit columns. The few longer ones (first tokens, early training) go to Q dense
rows, so nothing is lost while they fit; a row that finds the tail full is dropped whole and counted by
`Pattern.overflow`.

One `Pattern` serves all matrices of a layer that share their non-zeros. Which entries of a tail row are on is a bit
each, not "value != 0": a small positive can round to 0 and still has a gradient.

Legend: M rows (tokens), N columns (hidden neurons), E slots of an ELL row, Q rows of the tail.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.twell import formats

IN_ELL, DROPPED = -1, -3  # of `Pattern.tail_row`; the published kernels use the same codes


@dataclasses.dataclass(frozen=True)
class Capacity:
  """How much room there is. The published runs use E = 128 and Q = M / 8 for coefficients above 1.5e-5.

  Attributes:
    ell: E, entries of a row outside the tail.
    tail: Q, dense rows.
  """

  ell: int
  tail: int

  def __post_init__(self):
    if self.ell < 1 or self.tail < 0:
      raise ValueError(f"ell must be at least 1 and tail not negative, got {self.ell} and {self.tail}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pattern:
  """Where the non-zeros of a matrix [M, N] are."""

  columns: jax.Array  # [M, E] uint16, sorted; 0 beyond the count
  counts: jax.Array  # [M] int32 entries of the row, wherever they are stored
  tail_row: jax.Array  # [M] int32 row of the tail, or IN_ELL, or DROPPED
  rows: jax.Array  # [Q] int32 row of the matrix that a tail row holds; -1: unused
  tail_bits: jax.Array  # [Q, ceil(N / 8)] uint8: which entries of a tail row are on (`jnp.packbits`)
  n: int = dataclasses.field(metadata={"static": True})  # N

  @property
  def used(self) -> jax.Array:
    """`[M, E]` bool: the ELL slots that hold an entry."""
    in_ell = self.tail_row == IN_ELL
    return (jnp.arange(self.columns.shape[1]) < self.counts[:, None]) & in_ell[:, None]

  @property
  def tail_on(self) -> jax.Array:
    """`[Q, N]` bool: the entries of the tail that are on."""
    if not self.rows.size:
      return jnp.zeros((0, self.n), bool)
    return jnp.unpackbits(self.tail_bits, axis=1, count=self.n).astype(bool)

  @property
  def overflow(self) -> jax.Array:
    """`[]` int32: rows that are stored nowhere. Anything above 0 means: take a larger capacity and repeat."""
    return jnp.sum(self.tail_row == DROPPED)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hybrid:
  """A sparse matrix [M, N]."""

  pattern: Pattern
  ell: jax.Array  # [M, E] values; 0 in unused slots
  tail: jax.Array  # [Q, N] values; 0 where the pattern is off


def check_columns(n: int) -> None:
  """Raises ValueError for more columns than 16 bits can name."""
  if n > formats.MAX_N:
    raise ValueError(f"the hybrid format holds up to {formats.MAX_N} columns, got {n}; split the layer")


def pattern_of(on: jax.Array, capacity: Capacity) -> Pattern:
  """Returns the pattern of a bool matrix [M, N]. Raises ValueError for more than 65,536 columns."""
  m, n = on.shape
  check_columns(n)
  rank = jnp.cumsum(on, axis=1)
  counts = rank[:, -1].astype(jnp.int32)
  tail_row, rows = assign_tail(counts, capacity)
  place = jnp.where(on & (tail_row == IN_ELL)[:, None], rank - 1, capacity.ell)
  columns = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint16), on.shape)
  columns = jnp.zeros((m, capacity.ell), jnp.uint16).at[jnp.arange(m)[:, None], place].set(columns, mode="drop")
  return Pattern(columns, counts, tail_row, rows, tail_bits(on, rows), n)


def assign_tail(counts: jax.Array, capacity: Capacity) -> tuple[jax.Array, jax.Array]:
  """Returns (tail_row `[M]`, rows `[Q]`): rows of more than E entries take places in the tail in their own order."""
  long = counts > capacity.ell
  place = jnp.cumsum(long) - 1
  fits = long & (place < capacity.tail)
  tail_row = jnp.where(long, jnp.where(fits, place, DROPPED), IN_ELL).astype(jnp.int32)
  rows = jnp.full((capacity.tail,), -1, jnp.int32)
  rows = rows.at[jnp.where(fits, place, capacity.tail)].set(jnp.arange(counts.size, dtype=jnp.int32), mode="drop")
  return tail_row, rows


def tail_bits(on: jax.Array, rows: jax.Array) -> jax.Array:
  """Returns the bits of the tail: `on` [M, N] at `rows` [Q]."""
  return bits(on[jnp.maximum(rows, 0)] & (rows >= 0)[:, None])


def bits(on: jax.Array) -> jax.Array:
  """Returns a bool matrix [Q, N] as `[Q, ceil(N / 8)]` uint8."""
  return jnp.packbits(on, axis=1) if on.size else jnp.zeros((on.shape[0], -(-on.shape[1] // 8)), jnp.uint8)


def sample(dense: jax.Array, pattern: Pattern, dtype=None) -> Hybrid:
  """Returns the entries of a dense [M, N] at the pattern, rounded to `dtype` (default: that of `dense`)."""
  dense = jnp.asarray(dense, dtype)
  ell = jnp.take_along_axis(dense, pattern.columns.astype(jnp.int32), axis=1)
  return Hybrid(
      pattern, jnp.where(pattern.used, ell, 0), jnp.where(pattern.tail_on, dense[jnp.maximum(pattern.rows, 0)], 0)
  )


def pack(h: jax.Array, capacity: Capacity, dtype=None) -> Hybrid:
  """Stores the positives of h [M, N] (before or after the ReLU), rounded to `dtype`."""
  return sample(h, pattern_of(formats.active(h), capacity), dtype)


def to_dense(sparse: Hybrid) -> jax.Array:
  """Returns the matrix [M, N]; rows that were dropped are 0."""
  pattern, m = sparse.pattern, sparse.ell.shape[0]
  columns = jnp.where(pattern.used, pattern.columns.astype(jnp.int32), pattern.n)
  dense = jnp.zeros((m, pattern.n), sparse.ell.dtype)
  dense = dense.at[jnp.arange(m)[:, None], columns].set(sparse.ell, mode="drop")
  return dense.at[jnp.where(pattern.rows >= 0, pattern.rows, m)].set(sparse.tail, mode="drop")


def zip_values(fn, first: Hybrid, *others: Hybrid, dtype=None) -> Hybrid:
  """Applies `fn` to the float32 values of matrices of one pattern; fn(0, 0, ...) must be 0."""
  dtype = dtype or first.ell.dtype
  values = [[jnp.asarray(part, jnp.float32) for part in (sparse.ell, sparse.tail)] for sparse in (first, *others)]
  ell, tail = (fn(*parts).astype(dtype) for parts in zip(*values))
  return Hybrid(first.pattern, ell, tail)


def total(fn, sparse: Hybrid) -> jax.Array:
  """Returns the sum of `fn` over the float32 values; fn(0) must be 0."""
  return jnp.sum(fn(sparse.ell.astype(jnp.float32))) + jnp.sum(fn(sparse.tail.astype(jnp.float32)))
