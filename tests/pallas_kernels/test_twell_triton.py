"""The Triton kernels: their own code run by Triton's interpreter on awkward rows, and compiled for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton as triton_language
import triton.language as tl

from pallas_kernels import _compat
from pallas_kernels.twell import formats, hybrid, train, triton, triton_ell, triton_train
from tests.pallas_kernels import compilers, twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

M, K, N = 131072, 2048, 5632
BF16 = jnp.bfloat16
shape = jax.ShapeDtypeStruct


def sparse_layer(rows=6, k=5, n=300, seed=0):
  """Returns (h, x, w_gate, w_up, w_down) with at most five neurons on in each row, the second row's all off."""
  rng = np.random.default_rng(seed)
  h = -np.abs(rng.normal(size=(rows, n))).astype(np.float32)
  for row in range(rows):
    if row != 1:
      h[row, rng.choice(n, rng.integers(1, 6), replace=False)] = rng.integers(1, 9)
  _, _, w_up, w_down = problems.layer(1, k, n, k + 2, seed)
  return h, rng.normal(size=(rows, k)).astype(np.float32), None, w_up, w_down


@pytest.mark.parametrize("compression", [8, 2])
def test_words_equal_those_of_the_format_bit_by_bit(compression):
  h = problems.adversarial_rows()
  x, w_gate, *_ = problems.layer_of(h)
  got = triton.gate_pack(x, w_gate, compression, interpret=True)
  np.testing.assert_array_equal(got.words, problems.pack(h, compression))


def test_more_rows_than_a_block_and_more_depth_than_a_step():
  rng = np.random.default_rng(0)
  x, w = rng.integers(-4, 5, (70, 40)).astype(np.float32), rng.integers(-4, 5, (40, 300)).astype(np.float32)
  got = triton.gate_pack(x, w - 3, 4, interpret=True)
  np.testing.assert_array_equal(got.words, problems.pack(x @ (w - 3), 4))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_nan_and_inf_are_packed_and_padding_is_not():
  x = np.array([[np.nan], [np.inf], [-np.inf], [1.0]], np.float32)
  w = np.zeros((1, 300), np.float32)
  w[0, [3, 299]] = 1.0, -1.0
  got = triton.gate_pack(x, w, interpret=True)
  np.testing.assert_array_equal(got.counts, [[256, 44], [256, 43], [255, 44], [1, 0]])
  values, _ = formats.decode(got)
  assert np.isnan(values[0, :31]).all() and np.isposinf(values[1, 3])


def test_layers_walk_what_is_packed():
  h, x, _, w_up, w_down = sparse_layer()
  h[3, :40] = 1.0  # nine more than there are slots
  packed = formats.pack(h, 8)
  got = triton.gated_ffn(x, packed, w_up, w_down, interpret=True)
  np.testing.assert_allclose(got, problems.ffn(problems.stored(h, 8), x, w_up, w_down), rtol=1e-5, atol=1e-5)
  assert not np.asarray(got)[1].any()
  got = triton.plain_ffn(packed, w_down, interpret=True)
  np.testing.assert_allclose(got, problems.ffn(problems.stored(h, 8), x, None, w_down), rtol=1e-5, atol=1e-5)


def test_weights_of_neurons_that_are_off_are_not_read():
  h, x, _, w_up, w_down = sparse_layer()
  off = ~(h > 0).any(axis=0)
  clean = triton.gated_ffn(x, formats.pack(h), w_up, w_down, interpret=True)
  w_up[off], w_down[off] = np.nan, np.inf
  np.testing.assert_array_equal(triton.gated_ffn(x, formats.pack(h), w_up, w_down, interpret=True), clean)


def test_the_float32_path_goes_through_ell():
  h, x, _, w_up, w_down = sparse_layer(seed=1)
  ell = formats.to_ell(jnp.asarray(h) * 1.001, 8)
  exact = np.float32(h * np.float32(1.001))
  got = triton.gated_ffn(x, ell, w_up, w_down, interpret=True)
  np.testing.assert_allclose(got, problems.ffn(exact, x, w_up, w_down), rtol=1e-5, atol=1e-5)
  got = triton.plain_ffn(ell, w_down, interpret=True)
  np.testing.assert_allclose(got, problems.ffn(exact, x, None, w_down), rtol=1e-5, atol=1e-5)


def test_unpacking_moves_entries_and_nothing_else():
  h = problems.adversarial_rows()[[0, 2, 5, 7, 8, 9, 12]]
  got = triton_ell.unpack(formats.pack(h, 4), 80, interpret=True)
  values, on = formats.decode(got)
  stored = problems.stored(h, 4)
  problems.same_bits(values, stored)
  np.testing.assert_array_equal(got.counts[:2], [0, 31])
  assert on[3, [0, 300, 599]].all()  # a positive that is 0 in bfloat16 stays an entry


def test_a_long_column_is_summed_in_chunks():
  rng = np.random.default_rng(0)
  dense = np.where(rng.random((23, 6)) < 0.3, rng.integers(1, 5, (23, 6)), 0).astype(np.float32)
  dense[:, 2], dense[:, 4] = 1.0, 0.0  # in every row, in none
  a = rng.integers(-4, 5, (23, 7)).astype(np.float32)
  ell = formats.to_ell(dense, 6)
  by_column = triton_ell.transpose(ell.indices, ell.counts, 6, chunk=4)
  got = triton_ell.transposed_matmul(ell.values, by_column, a, chunk=4, interpret=True)
  np.testing.assert_array_equal(got, dense.T @ a)
  rows = np.asarray(by_column.places[by_column.starts[2] : by_column.starts[3]]) // 6
  np.testing.assert_array_equal(rows, np.arange(23))  # in the order of their rows: the sum is always the same


@pytest.mark.parametrize("dtype,limit", [(np.float32, 1e-5), pytest.param(BF16, 2e-2, marks=pytest.mark.slow)])
def test_all_gradients_of_a_training_step(dtype, limit):
  rng = np.random.default_rng(0)
  x, g, u, d = (rng.normal(size=s).astype(np.float32) for s in ((5, 6), (6, 20), (6, 20), (20, 6)))
  x[0] = np.sign(g[:, :1].T) * 2  # a long row: it goes to the tail
  g -= np.where(np.arange(6) == 0, 0.8, 0)[:, None]
  args = [jnp.asarray(a, dtype) for a in (x, g, u, d)]
  wave = jnp.cos(jnp.arange(30.0)).reshape(5, 6)

  def loss(layer, *args):
    y, l1 = layer(*args)[:2]
    return jnp.sum(y.astype(jnp.float32) * wave) + 0.3 * l1

  sparse = lambda *a: train.sparse_ffn(*a, capacity=hybrid.Capacity(12, 3), ops=triton_train.ops(interpret=True))
  gradients = lambda layer: jax.value_and_grad(lambda *a: loss(layer, *a), argnums=(0, 1, 2, 3))(*args)
  with problems.exact():
    got, wanted = gradients(sparse), gradients(train.dense_ffn)
    counts = train.sparse_ffn(*args, capacity=hybrid.Capacity(12, 3))[2]
  assert int(jnp.max(counts.nnz)) > 12 and int(counts.overflow) == 0
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert problems.relative_error(a, b) < limit


def test_a_tile_that_overflows_sends_its_row_to_the_tail():
  x = np.ones((3, 1), np.float32)
  g = np.concatenate([np.ones((1, 70)), -np.ones((1, 230))], axis=1).astype(np.float32)  # 70 in one tile: 7 too many
  got = triton_train.gate(x[:2], g, hybrid.Capacity(128, 2), interpret=True)
  np.testing.assert_array_equal(got.pattern.tail_row, [0, 1])
  np.testing.assert_array_equal(hybrid.to_dense(got), np.maximum(x[:2] @ g, 0))


@triton_language.jit
def careless_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
  at = tl.arange(0, SIZE)
  tl.store(y_ptr + at, tl.load(x_ptr + at) * 2.0)


def test_the_interpreter_sees_writes_beyond_the_end():
  x = jnp.arange(8.0)
  run = lambda size: _compat.triton_call(
      x, kernel=careless_kernel, out_shape=[shape((8,), jnp.float32)], grid=(1,), interpret=True, SIZE=size
  )
  np.testing.assert_array_equal(run(8)[0], 2 * x)
  with pytest.raises(Exception, match="wrote outside"):
    jax.block_until_ready(run(16))


def test_what_the_kernels_cannot_do_is_refused():
  x = jnp.zeros((2, 8))
  with pytest.raises(ValueError, match="65536"):
    triton.gate_pack(x, jnp.zeros((8, 65537)))
  with pytest.raises(ValueError, match="features"):
    triton.gate_pack(x, jnp.zeros((9, 300)))
  with pytest.raises(NotImplementedError, match="float16"):
    triton.gate_pack(x.astype(jnp.float16), jnp.zeros((8, 300), jnp.float16))
  assert triton.gate_pack(jnp.zeros((0, 8)), jnp.zeros((8, 300))).words.shape == (0, 64)


def packed_shape(compression=8):
  return formats.Packed(shape((M, formats.packed_width(N, compression)), jnp.uint32), N, compression)


def transposed(values, columns, counts, x):
  return triton_ell.transposed_matmul(values, triton_ell.transpose(columns, counts, N), x)


PATTERN = (shape((M, 128), jnp.uint16), shape((M,), jnp.int32))
VALUES = shape((M, 128), BF16)
X, GATE, ROWS = shape((M, K), BF16), shape((K, N), BF16), shape((N, K), BF16)
FAST = {
    "gated_ffn": (triton.gated_ffn, X, packed_shape(), ROWS, ROWS),
    "plain_ffn": (triton.plain_ffn, packed_shape(), ROWS),
    "sampled_product": (triton_ell.sampled_product, X, ROWS, *PATTERN),
    "ell_matmul": (triton_ell.ell_matmul, VALUES, *PATTERN, ROWS),
    "transposed": (transposed, VALUES, *PATTERN, X),
    "unpack": (lambda p: triton_ell.unpack(p, 128), packed_shape(4)),
}


@pytest.mark.parametrize("name", FAST)
def test_published_sizes_compile_for_an_h200(name):
  compilers.need(_compat.jax_triton)
  kernels = _compat.compile_triton(*FAST[name])
  assert kernels and all(".target sm_90a" in kernel.ptx and kernel.spill_bytes == 0 for kernel in kernels)


def test_the_gate_gemm_compiles_to_tensor_core_instructions_without_spilling():
  compilers.need(_compat.jax_triton)
  (kernel,) = _compat.compile_triton(triton.gate_pack, X, GATE)  # ten seconds, most of them in ptxas
  assert "wgmma.mma_async" in kernel.ptx and kernel.spill_bytes == 0
  assert "atom" not in kernel.ptx  # a slot never depends on who comes first


@pytest.mark.slow
def test_a_float32_training_step_of_an_odd_shape_compiles_for_an_h200():
  compilers.need(_compat.jax_triton)
  args = [shape(s, jnp.float32) for s in ((33, 70), (70, 300), (70, 300), (300, 50))]
  layer = lambda *a: jnp.sum(train.sparse_ffn(*a, capacity=hybrid.Capacity(16, 4), ops=triton_train.OPS)[0])
  names = {kernel.name for kernel in _compat.compile_triton(jax.grad(layer, argnums=(0, 1, 2, 3)), *args)}
  assert {"gate_pack_kernel", "sampled_kernel", "ell_matmul_kernel", "chunk_kernel", "sum_chunks_kernel"} <= names
