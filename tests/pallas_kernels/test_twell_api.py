"""The front door: every implementation, the switch to dense, growing on overflow, gradients, what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.twell import api, cpu, formats, reference
from tests.pallas_kernels import twell_problems as problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

NEEDS_COMPILER = pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler here")
EXACT = [pytest.param("cpu", marks=NEEDS_COMPILER), "xla", "dense"]
FORMS = pytest.mark.parametrize("gated", [True, False])


@pytest.fixture(autouse=True)
def exact_products():
  with problems.exact():
    yield


def problem(gated=True, density=0.05, m=6):
  """Returns (x, layer, the result in float64) with about `density` of the gates on."""
  x, w_gate, w_up, w_down = problems.layer(m, 16, 600, 12)
  x[:, 0] = 1.0
  w_gate[0] = -np.quantile(x[:, 1:] @ w_gate[1:], 1 - density)
  expected = problems.ffn(x.astype(np.float64) @ w_gate, x, w_up if gated else None, w_down)
  return x, api.weights(w_gate, w_up.T if gated else None, w_down), expected


@FORMS
@pytest.mark.parametrize("name", EXACT)
def test_float32_implementations_are_the_dense_layer(name, gated):
  x, layer, expected = problem(gated)
  y, report = api.ffn(x.reshape(2, 3, 16), layer, implementation=name)
  assert y.shape == (2, 3, 12) and problems.relative_error(y.reshape(6, 12), expected) < 1e-5
  np.testing.assert_array_equal(report.nnz, (x @ layer.gate > 0).sum(1).reshape(2, 3))
  assert report.implementation == name and int(report.lost) == 0 and bool(report.dense) == (name == "dense")


@FORMS
def test_the_reference_rounds_to_bfloat16(gated):
  x, layer, expected = problem(gated)
  y, report = api.ffn(x, layer, implementation="reference")
  assert 1e-5 < problems.relative_error(y, expected) < 1e-2 and report.room == 8


@pytest.mark.parametrize("name", [*EXACT[:2], "reference"])
def test_dense_gates_switch_to_the_dense_layer(name):
  x, layer, expected = problem(density=0.3)
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # it is no overflow
    y, report = api.ffn(x, layer, implementation=name)
  assert bool(report.dense) and problems.relative_error(y, expected) < 1e-5
  _, report = api.ffn(x, layer, implementation=name, dense_above=0.9, ell=600, compression=2)
  assert not bool(report.dense)


def crowded():
  """40 of the 600 neurons are on in every row, all in the first tile."""
  x, _, w_up, w_down = problems.layer(4, 16, 600, 12)
  x[:, 0] = 1.0
  w_gate = np.zeros((16, 600), np.float32)
  w_gate[0] = np.where(np.arange(600) < 40, 1.0, -1.0) * np.linspace(1, 2, 600)
  return x, api.Weights(w_gate, w_up, w_down), problems.ffn(x @ w_gate, x, w_up, w_down)


def test_overflow_outside_jit_takes_more_room_and_says_so():
  x, layer, expected = crowded()
  with pytest.warns(UserWarning, match="36 positives found no slot in compression=8; compression=4 was used"):
    y, report = api.ffn(x, layer, implementation="reference")
  assert (report.room, bool(report.dense), int(report.lost)) == (4, False, 0)
  assert problems.relative_error(y, expected) < 1e-2
  with pytest.warns(UserWarning, match="ell=16; ell=64 was used"):
    y, report = api.ffn(x, layer, implementation="xla", ell=16)
  assert (report.room, bool(report.dense)) == (64, False) and problems.relative_error(y, expected) < 1e-5


def test_overflow_inside_jit_is_computed_densely_and_reported():
  x, layer, expected = crowded()
  y, report = jax.jit(lambda x: api.ffn(x, layer, implementation="reference"))(x)
  assert bool(report.dense) and int(report.lost) == 36 and problems.relative_error(y, expected) < 1e-5


def test_without_the_switch_the_report_tells_what_is_missing():
  x, layer, expected = crowded()
  y, report = jax.jit(lambda x: api.ffn(x, layer, implementation="reference", dense_above=None))(x)
  assert not bool(report.dense) and int(report.lost) == 36 and problems.relative_error(y, expected) > 0.05


def test_when_there_is_no_more_room_it_is_dense():
  x, layer, _ = crowded()
  layer = layer._replace(gate=np.abs(layer.gate))  # every neuron is on
  expected = problems.ffn(x @ layer.gate, x, layer.up, layer.down)
  for dense_above in (None, 1.0):
    with pytest.warns(UserWarning, match="slot in compression=2; no room is enough; computed densely"):
      y, report = api.ffn(x, layer, implementation="reference", compression=2, dense_above=dense_above)
    assert bool(report.dense) and problems.relative_error(y, expected) < 1e-5


@FORMS
@pytest.mark.parametrize("name", [EXACT[0], "reference"])
def test_gradients_are_those_of_the_dense_layer(name, gated):
  x, layer, _ = problem(gated)
  out = np.random.default_rng(1).normal(size=(6, 12)).astype(np.float32)
  fast = lambda x, layer: jnp.sum(api.ffn(x, layer, implementation=name)[0] * out)
  slow = lambda x, layer: jnp.sum(reference.dense_ffn(x, *layer) * out)
  got, expected = (jax.jit(jax.grad(f, (0, 1)))(x, layer) for f in (fast, slow))
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert problems.relative_error(a, b) < 1e-5


def test_the_choice_on_a_cpu(monkeypatch):
  assert api.choose(jnp.bfloat16, 1) == "xla" and api.choose(jnp.bfloat16, 9) == "dense"
  monkeypatch.setattr(cpu, "unavailable", lambda: None)
  assert api.choose(jnp.float32, 1) == "cpu"
  monkeypatch.setattr(cpu, "unavailable", lambda: "it rained")
  with pytest.warns(UserWarning, match="it rained"):
    assert api.choose(jnp.float32, 1) == "xla"
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # once is enough
    assert api.choose(jnp.float32, 100) == "dense"


def test_bfloat16_goes_through_the_default():
  x, layer, expected = problem()
  y, _ = api.ffn(jnp.asarray(x, jnp.bfloat16), jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), layer))
  assert y.dtype == jnp.bfloat16 and problems.relative_error(y, expected) < 3e-2


def test_a_nan_passes():
  x, layer, _ = problem()
  x[2] = np.nan
  for name in ("xla", "reference"):
    run = jax.jit(lambda x, name=name: api.ffn(x, layer, implementation=name, dense_above=None, ell=600))
    y, report = run(x)
    assert np.isnan(y[2]).all() and np.isfinite(np.delete(y, 2, 0)).all() and int(report.nnz[2]) == 600


def test_weights_of_another_type_are_no_reason_to_fail():
  x, layer, expected = problem()
  y, report = api.ffn(x, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer))
  assert report.implementation in ("xla", "dense") and y.dtype == jnp.float32
  np.testing.assert_allclose(y, expected, atol=3e-2 * np.abs(expected).max())


def test_what_cannot_be_done_is_refused():
  x, layer, _ = problem()
  with pytest.raises(ValueError, match="implementation"):
    api.ffn(x, layer, implementation="fast")
  with pytest.raises(ValueError, match="compression"):
    api.ffn(x, layer, compression=3)
  with pytest.raises(ValueError, match="ell must be at least 1, got 0"):
    api.ffn(x, layer, implementation="xla", ell=0)
  with pytest.raises(ValueError, match="float32 or bfloat16, got float32, int32"):
    api.ffn(jnp.ones(x.shape, int), layer)
  with pytest.raises(NotImplementedError, match="'tpu' needs a tpu, this is a cpu"):
    api.ffn(x, layer, implementation="tpu")
  with pytest.raises(ValueError, match="w_up"):
    api.ffn(x, layer._replace(up=layer.up.T))
  if cpu.compiler() is not None:
    with pytest.raises(NotImplementedError, match="float32"):
      api.ffn(jnp.asarray(x, jnp.bfloat16), layer, implementation="cpu")
  wide = jnp.zeros((1, formats.MAX_N + 1))
  with pytest.raises(ValueError, match="65536"):
    api.ffn(x[:, :1], api.weights(wide, wide, wide.T))
