"""The Mosaic GPU kernels: in jax's GPU interpreter on awkward rows, and lowered for an H200."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _compat
from pallas_kernels.twell import formats, pallas_gpu
from tests.pallas_kernels import compilers, twell_problems as problems

shape = jax.ShapeDtypeStruct
M, K, N = 131072, 2048, 5632


@pytest.mark.parametrize("gated", [True, False])
def test_layers_walk_what_is_packed(gated):
  h = problems.adversarial_rows(subnormals=False)[[0, 3, 8, 9]]
  x, _, w_up, w_down = problems.layer_of(h)
  packed, stored = formats.pack(jnp.asarray(h)), problems.stored(h, 8)
  if gated:
    got = pallas_gpu.gated_ffn(x, packed, w_up, w_down, interpret=True)
  else:
    got = pallas_gpu.plain_ffn(packed, w_down, interpret=True)
  assert got.shape == (4, 40)
  assert problems.relative_error(got, problems.ffn(stored, x, w_up if gated else None, w_down)) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_published_sizes_lower_for_an_h200(dtype):
  packed = formats.Packed(shape((M, formats.packed_width(N, 8)), jnp.uint32), N, 8)
  x, rows = shape((M, K), dtype), shape((N, K), dtype)
  compilers.need(_compat.jax_triton)  # the plugin that brings it brings Mosaic's dialect, too
  for layer, args in ((pallas_gpu.gated_ffn, (x, packed, rows, rows)), (pallas_gpu.plain_ffn, (packed, rows))):
    assert "mosaic_gpu" in _compat.lower_for_h200(layer, *args)


def test_what_mosaic_cannot_express_is_refused():
  with pytest.raises(NotImplementedError, match="triton"):
    pallas_gpu.gate_pack(jnp.zeros((2, 8)), jnp.zeros((8, 300)))
  with pytest.raises(NotImplementedError, match="ELL"):
    pallas_gpu.plain_ffn(formats.to_ell(jnp.zeros((2, 300)), 4), jnp.zeros((300, 8)))
