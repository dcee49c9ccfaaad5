"""The TPU kernels: in interpret mode on awkward rows, and compiled for a v5e."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.twell import formats, pallas_tpu
from tests.pallas_kernels import compilers, twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

shape = jax.ShapeDtypeStruct
M, K, N = 256, 2048, 5632


@pytest.mark.parametrize("compression", [8, pytest.param(4, marks=pytest.mark.slow), 2])
def test_words_equal_those_of_the_format_bit_by_bit(compression):
  h = problems.adversarial_rows(subnormals=False)  # XLA flushes them in the product
  x, w_gate, *_ = problems.layer_of(h)
  with problems.exact():
    got = pallas_tpu.gate_pack(x, w_gate, compression, interpret=True)
  np.testing.assert_array_equal(got.words, problems.pack(h, compression))


def test_nan_and_inf_are_packed_and_padding_is_not():
  x = np.array([[np.nan], [np.inf], [-np.inf], [1.0]], np.float32)
  w = np.zeros((1, 300), np.float32)
  w[0, [3, 299]] = 1.0, -1.0
  got = pallas_tpu.gate_pack(x, w, 2, interpret=True)
  np.testing.assert_array_equal(got.counts, [[256, 44], [256, 43], [255, 44], [1, 0]])
  values, _ = formats.decode(got)
  assert np.isnan(values[0, :127]).all() and np.isposinf(values[1, 3])


@pytest.mark.parametrize("compression", [8, 2])
def test_layers_walk_what_is_packed(compression):
  h = problems.adversarial_rows(subnormals=False)
  x, _, w_up, w_down = problems.layer_of(h)
  packed, stored = formats.pack(jnp.asarray(h), compression), problems.stored(h, compression)
  got = pallas_tpu.gated_ffn(x, packed, w_up, w_down, interpret=True)
  assert got.shape == (16, 40) and problems.relative_error(got, problems.ffn(stored, x, w_up, w_down)) < 1e-6
  got = pallas_tpu.plain_ffn(packed, w_down, interpret=True)
  assert problems.relative_error(got, problems.ffn(stored, x, None, w_down)) < 1e-6


def test_what_the_kernels_cannot_do_is_refused():
  x, w = jnp.zeros((2, 8)), jnp.zeros((8, 300))
  with pytest.raises(ValueError, match="65536"):
    pallas_tpu.gate_pack(x, jnp.zeros((8, 65537)))
  with pytest.raises(ValueError, match="features"):
    pallas_tpu.gate_pack(x, w[:7])
  with pytest.raises(ValueError, match="300 neurons"):
    pallas_tpu.plain_ffn(formats.pack(x @ w), jnp.zeros((299, 8)))
  with pytest.raises(NotImplementedError, match="ELL"):
    pallas_tpu.plain_ffn(formats.to_ell(x @ w, 4), w.T)
  assert pallas_tpu.gate_pack(x[:0], w).words.shape == (0, 64)


def programs(dtype, compression):
  packed = formats.Packed(shape((M, formats.packed_width(N, compression)), jnp.uint32), N, compression)
  x, gate, rows = shape((M, K), dtype), shape((K, N), dtype), shape((N, K), dtype)
  return {
      "gate_pack": (lambda x, g: pallas_tpu.gate_pack(x, g, compression), x, gate),
      "gated_ffn": (pallas_tpu.gated_ffn, x, packed, rows, rows),
      "plain_ffn": (pallas_tpu.plain_ffn, packed, rows),
  }


@pytest.mark.parametrize("name", ["gate_pack", "gated_ffn", "plain_ffn"])
@pytest.mark.parametrize("dtype,compression", [
    (jnp.bfloat16, 8),
    pytest.param(jnp.bfloat16, 2, marks=pytest.mark.slow),
    pytest.param(jnp.float32, 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_published_widths_compile_for_a_v5e(name, dtype, compression):
  compilers.need(_compat.tpu_topology)
  compiled = _compat.compile_for_tpu(*programs(dtype, compression)[name])
  assert "tpu_custom_call" in compiled.as_text()
