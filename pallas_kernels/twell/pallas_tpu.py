"""TwELL on TPUs: the gate GEMM that packs its own output, and the feed-forward layer that walks what was packed.

`gate_pack` multiplies on the MXU into a float32 accumulator of C / 2 tiles of the format, whose words fill exactly
the 128 lanes of a register. Compaction needs no scatter: ranks come from a product with a triangular matrix of ones;
then every positive moves left to its rank, by 1, 2, 4, ... 128 columns, as the bits of its distance say. Positives
keep their order, so no two ever meet.

`gated_ffn` and `plain_ffn` read the words as scalars and the weights as neuron-major rows of 128-lane vectors, C / 2
tiles of neurons at a time, while the next tiles are on their way. A block of rows accumulates over all tiles in VMEM.

Same signatures and results as `reference.py`. `interpret=True` runs the same kernels anywhere; `formats.Ell`, which
an accelerator would have to gather, is left to `xla.py`.

Legend: M rows, K input features, N hidden neurons, L output features, B rows of a block, T tiles of a block, W words
of a tile.
"""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.twell import formats
from pallas_kernels.twell.formats import TILE, Ell, Packed

LANES = 128
GEMM_ROWS, GEMM_DEPTH = 256, 512
PACK_ROWS = 16
FFN_ROWS = 64
VMEM_BYTES = 100 << 20  # of the 128 MiB of a v5e core


def _pad(array: jax.Array, *multiples: int) -> jax.Array:
  return jnp.pad(array, [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)])


def _gate_kernel(x_ref, gate_ref, words_ref, acc_ref, *, n: int, width: int):
  tile = pl.program_id(1) * (LANES // width)

  @pl.when(pl.program_id(2) == 0)
  def _():
    acc_ref[...] = jnp.zeros_like(acc_ref)

  precision = "highest" if x_ref.dtype == jnp.float32 else "default"
  acc_ref[...] += jnp.dot(x_ref[...], gate_ref[...], preferred_element_type=jnp.float32, precision=precision)

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    def some_rows(i, _):  # as many as their running sums fit the registers
      rows = pl.ds(i * PACK_ROWS, PACK_ROWS)
      words_ref[rows, :] = _pack(acc_ref[rows, :], tile * TILE, n, width)
      return 0

    jax.lax.fori_loop(0, words_ref.shape[0] // PACK_ROWS, some_rows, 0)


def _pack(h: jax.Array, first: jax.Array, n: int, width: int) -> jax.Array:
  """Returns the words `[B, 128]` int32 of h `[B, T * 256]` float32, columns `first` on; those from n on are off."""
  lane = jax.lax.broadcasted_iota(jnp.int32, h.shape, 1)
  bits = jax.lax.bitcast_convert_type(h, jnp.int32)
  nan = (bits & 0x7FFFFFFF) > 0x7F800000
  on = ((bits > 0) | nan) & (first + lane < n)
  rounded = bits + 0x7FFF + (jax.lax.shift_right_logical(bits, 16) & 1)  # bfloat16, ties to even
  word = (jnp.where(nan, bits | 0x400000, rounded) & -65536) | (first + lane)
  rank = _ranks(on)
  words = _compact(jnp.where(on, word, 0), jnp.where(on, (lane & (TILE - 1)) - rank + 2, 0))
  lane = lane[:, :LANES]
  out = jnp.zeros(lane.shape, jnp.int32)
  for t in range(h.shape[1] // TILE):
    count = rank[:, (t + 1) * TILE - 1 : (t + 1) * TILE]
    own = jnp.where(lane == 0, count, pltpu.roll(words[:, t * TILE : t * TILE + LANES], 1, 1))
    out = jnp.where((lane & -width) == t * width, pltpu.roll(own, t * width, 1) if t else own, out)
  return out


def _ranks(on: jax.Array) -> jax.Array:
  """Returns how many columns of the own tile are on, up to and with each: a product with a triangle of ones."""
  source = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
  ones = (source <= jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)).astype(jnp.bfloat16)
  on = on.astype(jnp.float32).astype(jnp.bfloat16)
  count = lambda t: jnp.dot(on[:, t : t + TILE], ones, precision="default", preferred_element_type=jnp.float32)
  return jnp.concatenate([count(t) for t in range(0, on.shape[1], TILE)], axis=1).astype(jnp.int32)


def _compact(word: jax.Array, distance: jax.Array) -> jax.Array:
  """Moves every word left by its distance - 1, one bit of it at a time; distance 0 marks an empty place."""

  def move(bit, places):
    word, distance = places
    step = jnp.left_shift(1, bit)
    occupied = distance > 0
    moves = occupied & (((distance - 1) & step) != 0)
    left = lambda a: pltpu.roll(jnp.where(moves, a, 0), a.shape[1] - step, 1)
    arriving, arriving_distance = left(word), left(distance)
    arrives, stays = arriving_distance > 0, occupied & ~moves
    return (
        jnp.where(arrives, arriving, jnp.where(stays, word, 0)),
        jnp.where(arrives, arriving_distance, jnp.where(stays, distance, 0)),
    )

  return jax.lax.fori_loop(0, 8, move, (word, distance))[0]


def gate_pack(x: jax.Array, w_gate: jax.Array, compression: int = 8, *, interpret: bool = False) -> Packed:
  """Returns the packed ReLU(x G): x `[M, K]`, w_gate `[K, N]`. Raises ValueError for what the format cannot hold."""
  (rows, k), n = x.shape, w_gate.shape[1]
  if w_gate.shape[0] != k:
    raise ValueError(f"x has {k} features, w_gate {w_gate.shape[0]}")
  words, width = formats.packed_width(n, compression), formats.width(compression)
  if rows == 0:
    return Packed(jnp.zeros((0, words), jnp.uint32), n, compression)
  block = min(GEMM_ROWS, -(-rows // PACK_ROWS) * PACK_ROWS)
  depth = min(GEMM_DEPTH, -(-k // LANES) * LANES)
  columns = TILE * LANES // width
  x, w_gate = _pad(x, block, depth), _pad(w_gate.astype(x.dtype), depth, columns)
  grid = (x.shape[0] // block, w_gate.shape[1] // columns, x.shape[1] // depth)
  out = pl.pallas_call(
      functools.partial(_gate_kernel, n=n, width=width),
      grid=grid,
      in_specs=[
          pl.BlockSpec((block, depth), lambda i, j, k: (i, k)),
          pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
      ],
      out_specs=pl.BlockSpec((block, LANES), lambda i, j, k: (i, j)),
      out_shape=jax.ShapeDtypeStruct((x.shape[0], grid[1] * LANES), jnp.int32),
      scratch_shapes=[pltpu.VMEM((block, columns), jnp.float32)],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
      ),
      interpret=interpret,
  )(x, w_gate)
  return Packed(jax.lax.bitcast_convert_type(out[:rows, :words], jnp.uint32), n, compression)


def _ffn_kernel(words_ref, *refs, width: int, gated: bool):
  x_ref, up_ref = refs[:2] if gated else (None, None)
  down_ref, y_ref, acc_ref = refs[-3:]
  first = pl.program_id(1) * (LANES // width) * TILE

  @pl.when(pl.program_id(1) == 0)
  def _():
    acc_ref[...] = jnp.zeros_like(acc_ref)

  def slot(row, at, acc):
    word = words_ref[row, at]
    neuron = (word & 0xFFFF) - first
    value = jax.lax.bitcast_convert_type(word & -65536, jnp.float32)
    if gated:
      value *= jnp.sum(x_ref[row].astype(jnp.float32) * up_ref[neuron].astype(jnp.float32))
    return acc + value * down_ref[neuron].astype(jnp.float32)

  def of_row(row, _):
    acc = acc_ref[row]
    for tile in range(LANES // width):
      stored = jnp.minimum(words_ref[row, tile * width], width - 1)
      acc = jax.lax.fori_loop(
          tile * width + 1, tile * width + 1 + stored, lambda at, acc: slot(row, at, acc), acc
      )
    acc_ref[row] = acc
    return 0

  jax.lax.fori_loop(0, acc_ref.shape[0], of_row, 0)

  @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
  def _():
    y_ref[...] = acc_ref[...].astype(y_ref.dtype)


def _ffn(x, packed: Packed, w_up, w_down, dtype, interpret: bool) -> jax.Array:
  if isinstance(packed, Ell):
    raise NotImplementedError("the TPU kernels read TwELL; use implementation='xla' for ELL")
  rows, out, width = packed.words.shape[0], w_down.shape[1], formats.width(packed.compression)
  neurons = TILE * LANES // width
  if w_down.shape[0] != packed.n or (w_up is not None and w_up.shape != (packed.n, x.shape[1])):
    raise ValueError(f"packed has {packed.n} neurons; w_up and w_down do not fit it and x")
  if rows == 0:
    return jnp.zeros((0, out), dtype)
  block = min(FFN_ROWS, -(-rows // 8) * 8)
  words = _pad(jax.lax.bitcast_convert_type(packed.words, jnp.int32), block, LANES)
  vectors = lambda a, multiple: _pad(a, multiple, LANES).reshape(-(-a.shape[0] // multiple) * multiple, -1, LANES)
  gated = w_up is not None
  arrays = [vectors(x, block), vectors(w_up, neurons)] if gated else []
  arrays.append(vectors(w_down, neurons))
  of_rows = lambda line: pl.BlockSpec((block, line, LANES), lambda i, j: (i, 0, 0))
  of_neurons = lambda line: pl.BlockSpec((neurons, line, LANES), lambda i, j: (j, 0, 0))
  kinds = (of_rows, of_neurons, of_neurons) if gated else (of_neurons,)
  lines = [a.shape[1] for a in arrays]
  specs = [kind(line) for kind, line in zip(kinds, lines, strict=True)]
  grid = (words.shape[0] // block, words.shape[1] // LANES)
  y = pl.pallas_call(
      functools.partial(_ffn_kernel, width=width, gated=gated),
      grid=grid,
      in_specs=[pl.BlockSpec((block, LANES), lambda i, j: (i, j), memory_space=pltpu.SMEM), *specs],
      out_specs=of_rows(lines[-1]),
      out_shape=jax.ShapeDtypeStruct((words.shape[0], lines[-1], LANES), dtype),
      scratch_shapes=[pltpu.VMEM((block, lines[-1], LANES), jnp.float32)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
      interpret=interpret,
  )(words, *arrays)
  return y.reshape(words.shape[0], -1)[:rows, :out]


def gated_ffn(
    x: jax.Array, packed: Packed | Ell, w_up: jax.Array, w_down: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Returns y `[M, L]` in x's dtype: x `[M, K]`, packed ReLU(x G), w_up `[N, K]`, w_down `[N, L]`."""
  return _ffn(x, packed, w_up, w_down, x.dtype, interpret)


def plain_ffn(packed: Packed | Ell, w_down: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Returns y `[M, L]` in w_down's dtype: packed ReLU(x G), w_down `[N, L]`."""
  return _ffn(None, packed, None, w_down, w_down.dtype, interpret)
