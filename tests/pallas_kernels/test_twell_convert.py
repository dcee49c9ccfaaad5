"""Conversions keep every entry, or say how many they could not."""

import functools

import jax
from jax.experimental import sparse as jsparse
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.twell import convert, formats, hybrid
from pallas_kernels.twell.hybrid import Capacity
from tests.pallas_kernels import twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

ROWS = problems.adversarial_rows()
ON = ~(ROWS <= 0)
LONG = np.flatnonzero(ON.sum(1) > 32)
TIGHT = Capacity(ell=32, tail=2)  # rows 1 and 4 (33 entries) fill the tail, row 5 and others find it full
WIDE = Capacity(ell=32, tail=16)
twell = functools.cache(lambda compression=2: jax.jit(formats.pack, static_argnums=1)(ROWS, compression))
pack = functools.cache(lambda capacity: jax.jit(hybrid.pack, static_argnums=1)(ROWS, capacity))
to_ell = jax.jit(convert.to_ell, static_argnums=1)
to_hybrid = jax.jit(convert.to_hybrid, static_argnums=(1, 2))
to_packed = jax.jit(convert.to_packed, static_argnums=1)


def test_hybrid_keeps_all_rows_while_the_tail_has_room():
  packed = pack(WIDE)
  values, on = problems.unhybrid(packed)
  problems.same_bits(values, np.where(ON, ROWS, 0))
  np.testing.assert_array_equal(on, ON)
  np.testing.assert_array_equal(packed.pattern.counts, ON.sum(1))
  assert int(packed.pattern.overflow) == 0 and packed.pattern.columns.dtype == jnp.uint16
  problems.same_bits(jax.jit(convert.to_dense)(packed), values)
  np.testing.assert_array_equal(jax.jit(convert.pattern)(packed), on)


def test_long_rows_are_in_the_tail_and_only_there():
  pattern = jax.tree.map(np.asarray, pack(WIDE).pattern)
  np.testing.assert_array_equal(pattern.rows[: LONG.size], LONG)
  np.testing.assert_array_equal(pattern.rows[LONG.size :], -1)
  np.testing.assert_array_equal(pattern.tail_row[LONG], np.arange(LONG.size))
  assert not pattern.columns[LONG].any() and (np.delete(pattern.tail_row, LONG) == hybrid.IN_ELL).all()
  assert 3 not in LONG and 4 in LONG  # 32 entries fit exactly, 33 do not


def test_rows_that_find_the_tail_full_are_dropped_whole_and_counted():
  packed = pack(TIGHT)
  assert int(packed.pattern.overflow) == LONG.size - 2 > 0
  assert (np.asarray(packed.pattern.tail_row)[LONG[2:]] == hybrid.DROPPED).all()
  expected = np.where(ON, ROWS, 0)
  expected[LONG[2:]] = 0
  problems.same_bits(problems.unhybrid(packed)[0], expected)


def test_a_tail_of_no_rows():
  packed = pack(Capacity(32, 0))
  assert packed.tail.shape == (0, problems.N) and int(packed.pattern.overflow) == LONG.size
  assert packed.pattern.tail_on.shape == packed.tail.shape


def test_the_pattern_outlives_rounding():
  tiny = np.full((2, 300), problems.UP_TO_0)
  packed = jax.jit(hybrid.pack, static_argnums=(1, 2))(tiny, Capacity(8, 1), jnp.bfloat16)
  values, on = problems.unhybrid(packed)
  assert on[0].all() and not values.any()


@pytest.mark.parametrize("compression", formats.COMPRESSIONS)
def test_twell_to_ell(compression):
  ell, lost = to_ell(twell(compression), 50)
  values, on = problems.unpack(twell(compression))
  within = on & (np.cumsum(on, 1) <= 50)
  problems.same_bits(problems.unell(ell)[0], np.where(within, values, 0))
  np.testing.assert_array_equal(problems.unell(ell)[1], within)
  assert int(lost) == ON.sum() - within.sum() > 0


@pytest.mark.parametrize("compression", formats.COMPRESSIONS)
@pytest.mark.parametrize("capacity", [WIDE, TIGHT])
def test_twell_to_hybrid_equals_the_direct_way(compression, capacity):
  got, lost = to_hybrid(twell(compression), capacity, jnp.float32)
  direct = from_dense(*problems.unpack(twell(compression)), capacity)
  jax.tree.map(np.testing.assert_array_equal, got, direct)
  assert int(lost) == ON.sum() - problems.unhybrid(got)[1].sum()


@functools.partial(jax.jit, static_argnums=2)
def from_dense(values, on, capacity):
  return hybrid.sample(values, hybrid.pattern_of(on, capacity))


def test_there_and_back():
  held, lost = to_hybrid(twell(), Capacity(150, 4), jnp.bfloat16)
  assert int(lost) == int(formats.overflow(twell())) > 0
  values, on = problems.unpack(twell())
  for packed, lost in (to_packed(held, 2), to_packed(to_ell(held, 600)[0], 2)):
    again = problems.unpack(packed)
    assert int(lost) == 0
    problems.same_bits(again[0], values)
    np.testing.assert_array_equal(again[1], on)


def test_hybrid_to_ell_counts_dropped_rows():
  ell, lost = to_ell(pack(TIGHT), 60)
  assert int(lost) == ON.sum() - problems.unell(ell)[1].sum() > 0


def test_twell_of_what_is_not_whole_counts_what_was_lost_before():
  for held in (pack(TIGHT), to_ell(pack(WIDE), 20)[0]):
    packed, lost = to_packed(held, 8)
    assert int(lost) == ON.sum() - problems.unpack(packed)[1].sum() > int(formats.overflow(packed))


def test_columns_that_sixteen_bits_cannot_name_are_refused():
  wide = formats.Ell(jnp.ones((1, 1)), jnp.full((1, 1), 69_999, jnp.uint32), jnp.ones(1, jnp.int32), 70_000)
  with pytest.raises(ValueError, match="65536 columns, got 70000"):
    convert.to_hybrid(wide, WIDE)


def test_bcsr_of_nothing():
  empty = formats.to_ell(jnp.zeros((3, 5)), 2)
  back, lost = convert.from_bcsr(convert.to_bcsr(empty), 2)
  jax.tree.map(np.testing.assert_array_equal, back, empty)
  assert int(lost) == 0 and convert.to_bcsr(formats.to_ell(jnp.zeros((0, 5)), 2)).shape == (0, 5)


@pytest.mark.parametrize("spare", [0, 100])
def test_bcsr_is_the_same_matrix(spare):
  wide = jax.jit(formats.to_ell, static_argnums=1)(ROWS, problems.N)
  nse = int(ON.sum()) + spare
  matrix = convert.to_bcsr(wide) if not spare else jax.jit(convert.to_bcsr, static_argnums=1)(wide, nse)
  assert int(matrix.indptr[-1]) == ON.sum() and matrix.data.size == nse
  dense = np.where(ON, ROWS, 0)
  np.testing.assert_allclose(matrix.todense(), dense, atol=1e-37)  # which flushes subnormals
  ones = np.ones((problems.N, 2), np.float32)
  np.testing.assert_allclose(matrix @ ones, dense @ ones, rtol=1e-5, atol=1e-37)
  back, lost = jax.jit(convert.from_bcsr, static_argnums=1)(matrix, problems.N)
  jax.tree.map(np.testing.assert_array_equal, back, wide)
  assert int(lost) == 0


def test_bcsr_of_others_comes_in():
  dense = np.where(ON, ROWS, 0)[:, :40]
  ell, lost = jax.jit(convert.from_bcsr, static_argnums=1)(jsparse.BCSR.from_scipy_sparse(sparse_of(dense)), 7)
  assert int(lost) == sum(max(int((row != 0).sum()) - 7, 0) for row in dense) > 0
  problems.same_bits(problems.unell(ell)[0][9], dense[9])
  with pytest.raises(ValueError, match="n_batch"):
    convert.from_bcsr(jsparse.BCSR.fromdense(jnp.ones((2, 3, 4)), n_batch=1), 4)


def sparse_of(dense):
  import scipy.sparse  # pylint: disable=import-outside-toplevel

  return scipy.sparse.csr_array(dense)


def test_bad_capacities_are_refused():
  with pytest.raises(ValueError, match="ell"):
    Capacity(0, 1)
  with pytest.raises(ValueError, match="65537"):
    hybrid.pattern_of(jnp.ones((1, 65537), bool), WIDE)
