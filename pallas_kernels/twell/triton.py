"""TwELL on NVIDIA GPUs: the gate GEMM that packs its own output, and the feed-forward layer that walks what was
packed.

`gate_pack` computes ReLU(x G) in tiles of 256 columns, the tiles of the format, and packs each from the accumulator:
the dense hidden layer never exists in memory. A positive's slot is its rank among the positives of its row and tile,
a running sum along the accumulator's columns, so slots come out sorted and equal inputs give equal bits; the
published kernel lets shared-memory atomics decide. Programs walk the output in groups of row blocks, so that the
strip of x and the tile of G that neighbours need are still in the L2 cache.

`gated_ffn` gives a row to each program, a single warp when 2048 features fit it. It reads the row's words tile by
tile; for every positive it dots the neuron's up row with x, scales by the gate and adds that much of the down row,
all in float32 registers. `plain_ffn` has no dot product and divides the output features over more programs.

Same signatures and results as `reference.py`. `interpret=True` runs the same kernels in numpy, anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _compat
from pallas_kernels.twell import formats
from pallas_kernels.twell.formats import Ell, Packed
from pallas_kernels.twell.triton_ell import WARP_FEATURES, ell_matmul, sampled_product, warps

GROUP = 16  # row blocks that share the tiles of G in the L2 cache
GEMM_TILES = {  # dtype size -> rows and depth of a block, warps, stages
    2: {"BM": 128, "BK": 64, "num_warps": 8, "num_stages": 4},
    4: {"BM": 64, "BK": 32, "num_warps": 8, "num_stages": 3},
}
FLOATS = (jnp.float32, jnp.bfloat16)


@triton.jit
def store_positives(acc, column, inside, before, base, N: tl.constexpr, W: tl.constexpr):
  # Slot r holds the r-th positive of the row and tile; `before` counts those of the columns to the left.
  bits = acc.to(tl.uint32, bitcast=True)
  magnitude = bits & 0x7FFFFFFF
  nan = magnitude > 0x7F800000
  on = (nan | ((bits >> 31 == 0) & (magnitude > 0))) & (column < N)[None, :]
  nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # bfloat16, ties to even
  word = (tl.where(nan, (bits >> 16) | 0x40, nearest) << 16) | column.to(tl.uint32)[None, :]
  rank = tl.cumsum(on.to(tl.int32), 1) + before[:, None]
  tl.store(base[:, None] + rank, word, mask=on & (rank < W) & inside[:, None])
  return before + tl.sum(on.to(tl.int32), 1)


@triton.jit
def gate_pack_kernel(
    x_ptr, gate_ptr, rows, words_ptr,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
  # Group after group of GROUP row blocks; inside a group, tile after tile, and inside a tile the row blocks.
  program = tl.program_id(0)
  group = program // (GROUP * TILES)
  rest = program % (GROUP * TILES)
  blocks = tl.minimum(tl.cdiv(rows, BM) - group * GROUP, GROUP)
  tile = rest // blocks
  row = (group * GROUP + rest % blocks) * BM + tl.arange(0, BM)
  column = tile * BN + tl.arange(0, BN)
  depth = tl.arange(0, BK)

  # Rows beyond the last are computed from the last and never stored.
  x_ptrs = x_ptr + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K + depth[None, :]
  gate_ptrs = gate_ptr + depth[:, None] * (TILES * BN) + column[None, :]
  acc = tl.zeros((BM, BN), tl.float32)
  for _ in range(0, K, BK):
    acc = tl.dot(tl.load(x_ptrs), tl.load(gate_ptrs), acc, input_precision=PRECISION)
    x_ptrs += BK
    gate_ptrs += BK * TILES * BN

  # A quarter of the tile at a time: the running sums of a whole one do not fit the registers beside the accumulator.
  base = words_ptr + row.to(tl.int64) * (TILES * W) + tile * W
  inside = row < rows
  count = tl.zeros((BM,), tl.int32)
  left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
  first, second = tl.split(tl.permute(tl.reshape(left, (BM, 2, BN // 4)), (0, 2, 1)))
  third, fourth = tl.split(tl.permute(tl.reshape(right, (BM, 2, BN // 4)), (0, 2, 1)))
  column = tile * BN + tl.arange(0, BN // 4)
  count = store_positives(first, column, inside, count, base, N, W)
  count = store_positives(second, column + BN // 4, inside, count, base, N, W)
  count = store_positives(third, column + BN // 2, inside, count, base, N, W)
  count = store_positives(fourth, column + 3 * BN // 4, inside, count, base, N, W)
  tl.store(base, count.to(tl.uint32), mask=inside)


def gate_pack(x: jax.Array, w_gate: jax.Array, compression: int = 8, *, interpret: bool = False) -> Packed:
  """Returns the packed ReLU(x G): x `[M, K]`, w_gate `[K, N]`. Raises ValueError for what the format cannot hold."""
  (rows, k), n = x.shape, w_gate.shape[1]
  _check(k, w_gate.shape[0], "the features of x and of w_gate", x, w_gate)
  words = formats.packed_width(n, compression)
  tiles, width = formats.tiles(n), formats.width(compression)
  if rows == 0:
    return Packed(jnp.zeros((0, words), jnp.uint32), n, compression)
  config = GEMM_TILES[x.dtype.itemsize]
  deep = -k % config["BK"]
  x = jnp.pad(x, ((0, 0), (0, deep)))  # no copy when the shapes are whole blocks
  w_gate = jnp.pad(w_gate.astype(x.dtype), ((0, deep), (0, tiles * formats.TILE - n)))
  (out,) = _compat.triton_call(
      x, w_gate, rows,
      kernel=gate_pack_kernel,
      out_shape=[jax.ShapeDtypeStruct((rows, words), jnp.uint32)],
      grid=(tiles * triton.cdiv(rows, config["BM"]),),
      zeroed=(0,), interpret=interpret,
      N=n, K=x.shape[1], TILES=tiles, W=width, PRECISION="ieee", BN=formats.TILE, GROUP=GROUP, **config,
  )  # fmt: skip
  return Packed(out, n, compression)


@triton.jit
def gated_kernel(
    x_ptr, words_ptr, up_ptr, down_ptr, y_ptr,
    K: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
  row = tl.program_id(0).to(tl.int64)
  k = tl.arange(0, BK)
  l = tl.program_id(1) * BL + tl.arange(0, BL)
  x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
  acc = tl.zeros((BL,), tl.float32)
  base = words_ptr + row * (TILES * W)
  count = tl.load(base).to(tl.int32)
  for tile in range(TILES):
    here = base + tile * W
    following = tl.load(here + W, mask=tile + 1 < TILES, other=0).to(tl.int32)  # fetched meanwhile
    for slot in range(1, tl.minimum(count, W - 1) + 1):
      word = tl.load(here + slot)
      neuron = (word & 0xFFFF).to(tl.int64)
      gate = ((word >> 16) << 16).to(tl.float32, bitcast=True)
      up = tl.load(up_ptr + neuron * K + k, mask=k < K, other=0.0).to(tl.float32)
      down = tl.load(down_ptr + neuron * L + l, mask=l < L, other=0.0).to(tl.float32)
      acc += (gate * tl.sum(x * up, 0)) * down
    count = following
  tl.store(y_ptr + row * L + l, acc.to(y_ptr.dtype.element_ty), mask=l < L)


@triton.jit
def plain_kernel(
    words_ptr, down_ptr, y_ptr, L: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
  row = tl.program_id(0).to(tl.int64)
  l = tl.program_id(1) * BL + tl.arange(0, BL)
  acc = tl.zeros((BL,), tl.float32)
  base = words_ptr + row * (TILES * W)
  count = tl.load(base).to(tl.int32)
  for tile in range(TILES):
    here = base + tile * W
    following = tl.load(here + W, mask=tile + 1 < TILES, other=0).to(tl.int32)
    for slot in range(1, tl.minimum(count, W - 1) + 1):
      word = tl.load(here + slot)
      value = ((word >> 16) << 16).to(tl.float32, bitcast=True)
      acc += value * tl.load(down_ptr + (word & 0xFFFF).to(tl.int64) * L + l, mask=l < L, other=0.0).to(tl.float32)
    count = following
  tl.store(y_ptr + row * L + l, acc.to(y_ptr.dtype.element_ty), mask=l < L)


def gated_ffn(
    x: jax.Array, packed: Packed | Ell, w_up: jax.Array, w_down: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Returns y `[M, L]` in x's dtype: x `[M, K]`, packed ReLU(x G), w_up `[N, K]`, w_down `[N, L]`."""
  if isinstance(packed, Ell):
    at = (packed.indices, packed.counts)
    hidden = sampled_product(x, w_up, *at, interpret=interpret) * packed.values.astype(jnp.float32)
    return ell_matmul(hidden, *at, w_down, dtype=x.dtype, interpret=interpret)
  (rows, k), out = x.shape, w_down.shape[1]
  _check(k, w_up.shape[1], "the features of x and of w_up", x, w_up)
  _check(packed.n, w_up.shape[0], "the neurons of packed and of w_up")
  _check(packed.n, w_down.shape[0], "the neurons of packed and of w_down", w_down)
  if rows == 0:
    return jnp.zeros((0, out), x.dtype)
  block_k, block_l = triton.next_power_of_2(k), triton.next_power_of_2(out)
  (y,) = _compat.triton_call(
      x, packed.words, w_up, w_down,
      kernel=gated_kernel,
      out_shape=[jax.ShapeDtypeStruct((rows, out), x.dtype)],
      grid=(rows, 1), num_warps=warps(max(block_k, block_l)), num_stages=1, interpret=interpret,
      K=k, L=out, BK=block_k, BL=block_l, **_tiling(packed),
  )  # fmt: skip
  return y


def plain_ffn(packed: Packed | Ell, w_down: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Returns y `[M, L]` in w_down's dtype: packed ReLU(x G), w_down `[N, L]`."""
  if isinstance(packed, Ell):
    at = (packed.indices, packed.counts)
    return ell_matmul(packed.values, *at, w_down, dtype=w_down.dtype, interpret=interpret)
  rows, out = packed.words.shape[0], w_down.shape[1]
  _check(packed.n, w_down.shape[0], "the neurons of packed and of w_down", w_down)
  if rows == 0:
    return jnp.zeros((0, out), w_down.dtype)
  block = min(triton.next_power_of_2(out), WARP_FEATURES // 2)
  (y,) = _compat.triton_call(
      packed.words, w_down,
      kernel=plain_kernel,
      out_shape=[jax.ShapeDtypeStruct((rows, out), w_down.dtype)],
      grid=(rows, triton.cdiv(out, block)), num_warps=1, num_stages=1, interpret=interpret,
      L=out, BL=block, **_tiling(packed),
  )  # fmt: skip
  return y


def _tiling(packed: Packed) -> dict[str, int]:
  return {"TILES": formats.tiles(packed.n), "W": formats.width(packed.compression)}


def _check(inner: int, outer: int, what: str, *arrays: jax.Array) -> None:
  if inner != outer:
    raise ValueError(f"{what} do not fit: {inner} and {outer}")
  for array in arrays:
    if array.dtype not in FLOATS:
      raise NotImplementedError(f"the Triton kernels take float32 and bfloat16, got {array.dtype}")
