"""TwELL and ELL: how the positives of a ReLU are stored (section 3.1, algorithm 1 of arXiv 2603.23198).

TwELL cuts the N columns into tiles of 256, the width of the GEMM tile that makes them, so that a tile can be packed
without knowing the rest of its row. One uint32 array holds everything; each (row, tile) owns W = 256 / C words:

    word 0        how many positives the row has in this tile: the raw count, which can exceed the S = W - 1 slots
    words 1 .. S  global column (bits 0 to 15) | bfloat16 of the value (bits 16 to 31)

The published kernels fill the slots in the order in which atomics happen to run and leave the rest uninitialised.
Here slots are sorted by column and unused ones are zero, so equal inputs give equal bits. A positive that finds no
slot is missing from the words but not from the count: `overflow` says how many are.

What counts as positive is `not (h <= 0)`, decided on the float32 value before it is rounded: a NaN is kept and
propagates as through a dense ReLU; -0.0 is not positive. It is read from the bits, so flushing of subnormals changes
nothing.

Legend: M rows (tokens), N columns (hidden neurons), T = ceil(N / 256) tiles, C compression, W words and S slots of a
tile, E slots of an ELL row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE = 256
COMPRESSIONS = (8, 4, 2)
MAX_N = 1 << 16  # a column must fit into 16 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
  """A sparse non-negative matrix [M, N] in TwELL."""

  words: jax.Array  # [M, T * W] uint32
  n: int = dataclasses.field(metadata={"static": True})  # N before padding to whole tiles
  compression: int = dataclasses.field(metadata={"static": True})  # C

  @property
  def tiled(self) -> jax.Array:
    """The words as `[M, T, W]`."""
    return self.words.reshape(*self.words.shape[:-1], tiles(self.n), width(self.compression))

  @property
  def counts(self) -> jax.Array:
    """`[M, T]` int32: positives of each row in each tile, stored or not."""
    return self.tiled[..., 0].astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ell:
  """A sparse matrix [M, N] in ELLPACK-R: every row has E slots, sorted by column, and says how many it uses."""

  values: jax.Array  # [M, E] any float dtype; 0 beyond the count
  indices: jax.Array  # [M, E] uint32; 0 beyond the count
  counts: jax.Array  # [M] int32 entries the row has; those beyond E are not stored
  n: int = dataclasses.field(metadata={"static": True})  # N


def tiles(n: int) -> int:
  """Returns T, the number of tiles of N columns."""
  return -(-n // TILE)


def width(compression: int) -> int:
  """Returns W, the words of one (row, tile)."""
  return TILE // compression


def packed_width(n: int, compression: int) -> int:
  """Returns the words of one row. Raises ValueError for N or C that the format cannot hold."""
  if compression not in COMPRESSIONS:
    raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression}")
  if not 0 < n <= MAX_N:
    raise ValueError(f"TwELL holds 1 to {MAX_N} columns (16-bit indices), got {n}; split the layer")
  return tiles(n) * width(compression)


def active(h: jax.Array) -> jax.Array:
  """Returns `not (h <= 0)` of a float32 array, element by element: positive numbers and every NaN."""
  signed = jax.lax.bitcast_convert_type(h.astype(jnp.float32), jnp.int32)
  return (signed > 0) | (signed.astype(jnp.uint32) > jnp.uint32(0xFF800000))


def bf16_bits(h: jax.Array) -> jax.Array:
  """Returns the 16 bits of the bfloat16 nearest to each float32 (ties to even; a NaN stays one), as uint32."""
  bits = jax.lax.bitcast_convert_type(h.astype(jnp.float32), jnp.uint32)
  nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
  return jnp.where(jnp.isnan(h), (bits >> 16) | 0x40, nearest)


def float_of_bits(bits: jax.Array) -> jax.Array:
  """Returns the float32 whose upper 16 bits are the lower 16 bits of each uint32."""
  return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)


def pack(h: jax.Array, compression: int = 8, on: jax.Array | None = None) -> Packed:
  """Packs the positives of h `[M, N]` (before or after the ReLU; read as float32), or the entries where `on` is true.

  Raises ValueError for N or C that the format cannot hold.
  """
  rows, n = h.shape
  packed_width(n, compression)
  w = width(compression)
  columns = jnp.arange(tiles(n) * TILE, dtype=jnp.uint32).reshape(-1, TILE)
  whole = lambda a: jnp.pad(a, ((0, 0), (0, columns.size - n))).reshape(rows, *columns.shape)
  on = whole(active(h) if on is None else on)
  h = whole(h.astype(jnp.float32))
  rank = jnp.cumsum(on, axis=-1)  # 1 for the first positive of a tile: word 0 is the count
  slot = jnp.where(on & (rank < w), rank, w)  # w: dropped by the scatter
  row, tile = jnp.arange(rows)[:, None, None], jnp.arange(tiles(n))[:, None]
  words = jnp.zeros((rows, tiles(n), w), jnp.uint32)
  words = words.at[row, tile, slot].set(columns | bf16_bits(h) << 16, mode="drop")
  words = words.at[:, :, 0].set(rank[..., -1].astype(jnp.uint32))
  return Packed(words.reshape(rows, tiles(n) * w), n, compression)


def slots(packed: Packed) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns (values float32, columns int32, used bool) of all slots, each `[M, T, S]`."""
  words = packed.tiled[..., 1:]
  used = jnp.arange(words.shape[-1]) < packed.counts[..., None]
  values = jnp.where(used, float_of_bits(words >> 16), 0.0)
  return values, jnp.where(used, words & 0xFFFF, 0).astype(jnp.int32), used


def entries(sparse: Packed | Ell) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns (values float32, columns int32, used bool) of every slot of every row, each `[M, slots of a row]`."""
  if isinstance(sparse, Packed):
    return tuple(part.reshape(part.shape[0], part.shape[1] * part.shape[2]) for part in slots(sparse))
  used = jnp.arange(sparse.values.shape[1]) < sparse.counts[:, None]
  return sparse.values.astype(jnp.float32), sparse.indices.astype(jnp.int32), used


def decode(sparse: Packed | Ell) -> tuple[jax.Array, jax.Array]:
  """Returns (values `[M, N]` float32, pattern `[M, N]` bool) of what is stored; what overflowed is absent from both."""
  values, columns, used = entries(sparse)
  shape = (values.shape[0], sparse.n)
  place = (jnp.arange(shape[0])[:, None], jnp.where(used, columns, sparse.n))
  return jnp.zeros(shape).at[place].set(values, mode="drop"), jnp.zeros(shape, bool).at[place].set(True, mode="drop")


def to_ell(h: jax.Array, capacity: int) -> Ell:
  """Stores the positives of h `[M, N]`, in h's dtype, in rows of E = `capacity` slots."""
  on = active(h)
  rank = jnp.cumsum(on, axis=1)
  place = (jnp.arange(h.shape[0])[:, None], jnp.where(on, rank - 1, capacity))
  columns = jnp.broadcast_to(jnp.arange(h.shape[1], dtype=jnp.uint32), h.shape)
  values = jnp.zeros((h.shape[0], capacity), h.dtype).at[place].set(h, mode="drop")
  indices = jnp.zeros((h.shape[0], capacity), jnp.uint32).at[place].set(columns, mode="drop")
  return Ell(values, indices, rank[:, -1].astype(jnp.int32), h.shape[1])


def nnz(sparse: Packed | Ell) -> jax.Array:
  """Returns `[M]` int32, the positives of each row, stored or not."""
  return jnp.sum(sparse.counts, axis=1) if isinstance(sparse, Packed) else sparse.counts


def overflow(sparse: Packed | Ell) -> jax.Array:
  """Returns `[]` int32, how many positives found no slot. Anything above 0 means that the matrix is not whole."""
  room = width(sparse.compression) - 1 if isinstance(sparse, Packed) else sparse.values.shape[1]
  return jnp.sum(jnp.maximum(sparse.counts - room, 0))
