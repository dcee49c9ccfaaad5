"""The specification, and the pure-XLA path, against numpy in float64: bad rows, odd shapes, NaN and inf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.twell import formats, reference, shapes, xla
from tests.pallas_kernels import twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

MODULES = {"reference": reference, "xla": xla}
both = pytest.mark.parametrize("name", MODULES)



def _layer(name, gated, capacity, x, w_gate, w_up, w_down):
  module = MODULES[name]
  with problems.exact():
    packed = module.gate_pack(x, w_gate, -capacity) if capacity < 0 else module.gate_ell(x, w_gate, capacity)
    return module.gated_ffn(x, packed, w_up, w_down) if gated else module.plain_ffn(packed, w_down)


layer = jax.jit(_layer, static_argnums=(0, 1, 2))


@both
@pytest.mark.parametrize("gated", [True, False])
def test_packed_values_are_rounded_and_what_has_no_slot_is_absent(name, gated):
  h = problems.adversarial_rows(subnormals=False)
  x, w_gate, w_up, w_down = problems.layer_of(h)
  expected = problems.ffn(problems.stored(h, 8), x, w_up if gated else None, w_down)
  assert problems.relative_error(layer(name, gated, -8, x, w_gate, w_up, w_down), expected) < 1e-6


@both
@pytest.mark.parametrize("gated", [True, False])
def test_the_float32_path_is_the_dense_layer(name, gated):
  h = problems.adversarial_rows(subnormals=False)
  x, w_gate, w_up, w_down = problems.layer_of(h)
  got = layer(name, gated, problems.N, x, w_gate, w_up, w_down)
  assert problems.relative_error(got, problems.ffn(h, x, w_up if gated else None, w_down)) < 1e-6
  assert np.abs(got[1]).min() > 0 and not got[0].any()  # the full row and the empty one


@both
@pytest.mark.parametrize("shape", shapes.ODD)
def test_odd_shapes(name, shape):
  x, w_gate, w_up, w_down = problems.layer(*shape)
  h = x.astype(np.float64) @ w_gate
  exact = problems.ffn(h, x, w_up, w_down)
  assert problems.relative_error(layer(name, True, shape.n, x, w_gate, w_up, w_down), exact) < 1e-5
  packed = problems.ffn(problems.stored(h.astype(np.float32), 2), x, w_up, w_down)
  assert problems.relative_error(layer(name, True, -2, x, w_gate, w_up, w_down), packed) < 1e-3


@both
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gate_that_is_not_finite_does_what_it_does_in_the_dense_layer(name, value):
  x = np.array([[1.0], [-1.0]], np.float32)  # the second row's gate is -inf or NaN
  w_gate = -np.abs(problems.layer(1, 1, 300, 5)[1])
  w_gate[0, [3, 70]] = value, 1.0
  _, _, w_up, w_down = problems.layer(1, 1, 300, 5)
  with problems.exact():
    dense = np.asarray(reference.dense_ffn(x, w_gate, w_up, w_down))
  got = np.asarray(layer(name, True, 300, x, w_gate, w_up, w_down))
  assert not np.isfinite(dense[0]).any() and np.isfinite(dense[1]).all() == np.isinf(value)
  np.testing.assert_allclose(got, dense, rtol=1e-5)
  np.testing.assert_allclose(layer(name, True, -2, x, w_gate, w_up, w_down)[0], dense[0], rtol=1e-5)


def test_weights_of_neurons_that_are_off_are_not_read():
  x, w_gate, w_up, w_down = problems.layer_of(problems.adversarial_rows(subnormals=False)[8:9])
  expected = problems.ffn(w_gate, x, w_up, w_down)
  w_up[:-1], w_down[:-1] = np.nan, np.inf  # all but the last neuron, the one that is on
  for capacity in (-8, 16):
    got = layer("xla", True, capacity, x, w_gate, w_up, w_down)
    np.testing.assert_allclose(got, expected, rtol=1e-2 if capacity < 0 else 1e-5)


@both
def test_bfloat16(name):
  x, w_gate, w_up, w_down = (jnp.asarray(a, jnp.bfloat16) for a in problems.layer(16, 64, 300, 32))
  got = layer(name, True, 300, x, w_gate, w_up, w_down)
  wide = [np.asarray(a, np.float64) for a in (x, w_gate, w_up, w_down)]
  assert got.dtype == jnp.bfloat16
  assert problems.relative_error(got, problems.ffn(wide[0] @ wide[1], wide[0], wide[2], wide[3])) < 1e-2


def test_gate_pack_packs_the_gate_product():
  x, w_gate, _, _ = problems.layer(9, 64, 300, 1)
  h = np.asarray(reference.matmul(x, w_gate))
  np.testing.assert_array_equal(jax.jit(reference.gate_pack)(x, w_gate).words, problems.pack(h, 8))
  assert formats.packed_width(300, 8) == 64


def test_shapes_that_do_not_fit_are_named():
  x, w_gate, w_up, w_down = problems.layer(2, 3, 5, 4)
  shapes.check(x, w_gate, w_up, w_down)
  shapes.check(x, w_gate, None, w_down)
  with pytest.raises(ValueError, match=r"w_up must have shape \(5, 3\)"):
    shapes.check(x, w_gate, w_up.T, w_down)
  with pytest.raises(ValueError, match="w_gate"):
    shapes.check(x, w_gate[:2], w_up, w_down)
  with pytest.raises(ValueError, match="two dimensions"):
    shapes.check(x[None], w_gate, w_up, w_down)
