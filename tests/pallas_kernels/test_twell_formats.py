"""TwELL and ELL bit by bit against plain Python, on rows that formats get wrong."""

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.twell import formats
from tests.pallas_kernels import twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

ROWS = problems.adversarial_rows()
ON = ~(ROWS <= 0)
pack = jax.jit(formats.pack, static_argnums=1)
to_ell = jax.jit(formats.to_ell, static_argnums=1)
decode = jax.jit(formats.decode)
sums = jax.jit(lambda sparse: (formats.nnz(sparse), formats.overflow(sparse)))


@pytest.mark.parametrize("compression,room", list(zip((8, 4, 2), (31, 63, 127))))
def test_words_are_those_of_the_specification(compression, room):
  packed = pack(ROWS, compression)
  np.testing.assert_array_equal(packed.words, problems.pack(ROWS, compression))
  assert packed.words.dtype == jnp.uint32 and packed.words.shape == (16, 3 * (room + 1))


@pytest.mark.parametrize("compression,room", list(zip((8, 4, 2), (31, 63, 127))))
def test_decoding_returns_what_found_a_slot(compression, room):
  packed = pack(ROWS, compression)
  values, on = decode(packed)
  problems.same_bits(values, problems.stored(ROWS, compression))
  assert on[7, 300] and values[7, 300] == 0  # rounded to 0, but still part of the pattern
  nnz, lost = sums(packed)
  missing = sum(max(int(row[i : i + 256].sum()) - room, 0) for row in ON for i in (0, 256, 512))
  assert int(lost) == missing == ON.sum() - np.asarray(on).sum() > 0
  np.testing.assert_array_equal(nnz, ON.sum(1))
  assert not np.any(on & ~ON)


def test_counts_are_raw():
  counts = np.asarray(pack(ROWS, 8).words).reshape(16, 3, 32)[..., 0]
  np.testing.assert_array_equal(counts[1], [256, 256, 88])
  np.testing.assert_array_equal(counts[2:6], [[31, 0, 0], [0, 32, 0], [0, 0, 33], [256, 0, 0]])
  np.testing.assert_array_equal(counts[6:8], [[0, 0, 0], [1, 1, 1]])  # -0.0 is off, subnormals are on


def test_nan_and_inf_are_packed():
  h = -ROWS[:1]
  h[0, :6] = [np.nan, np.nan, np.inf, -np.inf, 1.0, 3.4e38]  # the last one rounds to inf
  h[0, 1] = np.uint32(0xFF800001).view(np.float32)  # a NaN with a sign, and a payload that rounding would lose
  h[0, 6:] = -1.0
  values, on = decode(pack(h, 8))
  np.testing.assert_array_equal(on[0, :7], [True, True, True, False, True, True, False])
  np.testing.assert_array_equal(values[0, :7], [np.nan, np.nan, np.inf, 0, 1, np.inf, 0])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_any_bits_round_as_bfloat16_does(bits):
  numbers = np.array(bits, np.uint32).view(np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    expected = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
  nan = np.isnan(numbers)
  found, active = (np.asarray(a) for a in rounding(numbers))
  np.testing.assert_array_equal(found[~nan], expected[~nan])
  assert np.isnan((found[nan].astype(np.uint32) << 16).view(np.float32)).all()
  np.testing.assert_array_equal(active, ~(numbers <= 0))


rounding = jax.jit(lambda h: (formats.bf16_bits(h), formats.active(h)))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_random_rows(seed, density):
  rng = np.random.default_rng(seed)
  h = np.where(rng.random((4, 300)) < density, rng.random((4, 300)), -1.0).astype(np.float32)
  np.testing.assert_array_equal(pack(h, 8).words, problems.pack(h, 8))


def test_a_pattern_of_ones_own_may_hold_negative_values():
  on = np.zeros_like(ROWS, bool)
  on[:, ::20] = True
  values, stored = problems.unpack(pack(ROWS, 8, on))
  np.testing.assert_array_equal(stored, on)
  problems.same_bits(values, np.where(on, problems.rounded(ROWS), 0))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_ell_is_exact_up_to_its_capacity(dtype):
  h = ROWS.astype(dtype)
  ell = to_ell(h, 40)
  on = ~(h.astype(np.float32) <= 0)
  kept = on & (np.cumsum(on, 1) <= 40)
  values, pattern = problems.unell(ell)
  np.testing.assert_array_equal(pattern, kept)
  problems.same_bits(values, np.where(kept, h.astype(np.float32), 0))
  np.testing.assert_array_equal(ell.counts, on.sum(1))
  assert ell.values.dtype == dtype and ell.indices.dtype == jnp.uint32
  assert int(sums(ell)[1]) == on.sum() - kept.sum() > 0
  np.testing.assert_array_equal(decode(ell)[1], kept)


def test_one_row_and_no_row():
  np.testing.assert_array_equal(pack(ROWS[1:2], 8).words, problems.pack(ROWS[1:2], 8))
  empty = jax.eval_shape(lambda h: formats.decode(formats.pack(h)), jax.ShapeDtypeStruct((0, 300), jnp.float32))
  assert empty[0].shape == (0, 300)


def test_what_the_format_cannot_hold_is_refused():
  assert formats.packed_width(65536, 8) == 256 * 32
  with pytest.raises(ValueError, match="65537"):
    formats.packed_width(65537, 8)
  with pytest.raises(ValueError, match="compression"):
    pack(ROWS, 16)
  with pytest.raises(ValueError, match="columns"):
    formats.pack(jnp.zeros((2, 0)))


def test_the_last_column_of_the_widest_matrix_fits():
  h = np.full((1, 65536), -1.0, np.float32)
  h[0, [0, -1]] = 1.0, 2.0
  words = np.asarray(pack(h, 8).words).reshape(256, 32)
  assert words[-1, :2].tolist() == [1, 65535 | 0x4000 << 16]
