"""TwELL in Mosaic GPU: the feed-forward layer that walks packed words, one warpgroup a row and 512 features.

The gate GEMM that packs its own output is not here: ranks need a running sum along the accumulator and a scatter by
rank, and Mosaic GPU has neither for the layout in which Hopper's matrix instructions leave an accumulator.
`gate_pack` therefore raises NotImplementedError; on a GPU take `triton.gate_pack`, whose words these functions read
as well.

Same signatures and results as `reference.py`. `interpret=True` runs the same kernels anywhere.

Legend: M rows, K input features, N hidden neurons, L output features, W words of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels.twell import formats
from pallas_kernels.twell.formats import Ell, Packed

FEATURES = 512  # features that a program holds, 4 in each thread of a warpgroup


def gate_pack(x: jax.Array, w_gate: jax.Array, compression: int = 8, *, interpret: bool = False) -> Packed:
  """Raises NotImplementedError (see the module)."""
  del x, w_gate, compression, interpret
  raise NotImplementedError("Mosaic GPU has no running sum over an accumulator; use implementation='triton'")


def _spread(row: jax.Array) -> jax.Array:
  """Gives four neighbours to each thread."""
  return plgpu.layout_cast(row, plgpu.Layout.WG_STRIDED((FEATURES,), vec_size=4))


def _kernel(words_ref, values_ref, *refs, tiles: int, width: int, gated: bool, spread: Callable):
  x_ref, up_ref, down_ref, y_ref = refs if gated else (None, None, *refs)
  row, first = jax.lax.axis_index("row"), jax.lax.axis_index("block") * FEATURES
  features = lambda ref, row, first: spread(ref[row, pl.ds(first, FEATURES)]).astype(jnp.float32)

  def slot(at, acc):
    neuron, value = words_ref[row, at] & 0xFFFF, values_ref[row, at]
    if gated:
      dots = [features(x_ref, row, k) * features(up_ref, neuron, k) for k in range(0, x_ref.shape[1], FEATURES)]
      value *= jnp.sum(functools.reduce(jnp.add, dots))
    return acc + value * features(down_ref, neuron, first)

  def of_tile(tile, acc):
    stored = jnp.minimum(words_ref[row, tile * width], width - 1)
    return jax.lax.fori_loop(1, stored + 1, lambda s, acc: slot(tile * width + s, acc), acc)

  acc = spread(jnp.zeros((FEATURES,), jnp.float32))
  y_ref[row, pl.ds(first, FEATURES)] = jax.lax.fori_loop(0, tiles, of_tile, acc).astype(y_ref.dtype)


def _ffn(packed: Packed | Ell, arrays: tuple[jax.Array, ...], dtype, interpret: bool) -> jax.Array:
  if isinstance(packed, Ell):
    raise NotImplementedError("the Mosaic GPU kernels read TwELL; use implementation='triton' for ELL")
  rows, out = packed.words.shape[0], arrays[-1].shape[1]
  if rows == 0:
    return jnp.zeros((0, out), dtype)
  arrays = [jnp.pad(a, ((0, 0), (0, -a.shape[1] % FEATURES))) for a in arrays]
  wide = arrays[-1].shape[1]
  words = jax.lax.bitcast_convert_type(packed.words, jnp.int32)
  y = plgpu.kernel(
      functools.partial(
          _kernel, tiles=formats.tiles(packed.n), width=formats.width(packed.compression), gated=len(arrays) == 3,
          spread=(lambda row: row) if interpret else _spread,  # the interpreter of jax 0.10 knows no layouts
      ),
      out_type=jax.ShapeDtypeStruct((rows, wide), dtype),
      grid=(rows, wide // FEATURES),
      grid_names=("row", "block"),
      interpret=_compat.gpu_interpreter() if interpret else None,
  )(words, formats.float_of_bits(packed.words >> 16), *arrays)
  return y[:, :out]


def gated_ffn(
    x: jax.Array, packed: Packed | Ell, w_up: jax.Array, w_down: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Returns y `[M, L]` in x's dtype: x `[M, K]`, packed ReLU(x G), w_up `[N, K]`, w_down `[N, L]`."""
  return _ffn(packed, (x, w_up, w_down), x.dtype, interpret)


def plain_ffn(packed: Packed | Ell, w_down: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Returns y `[M, L]` in w_down's dtype: packed ReLU(x G), w_down `[N, L]`."""
  return _ffn(packed, (w_down,), w_down.dtype, interpret)
