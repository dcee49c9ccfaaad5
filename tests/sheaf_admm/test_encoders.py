"""Encoders: what the heads start with, that agents see their own view only, and the blocks by hand."""

import functools

import jax
import numpy as np
import pytest

from sakanajax.sheaf_admm import encoders
from sakanajax.sheaf_admm import graph as graph_lib
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

CELLS = tuple(map(tuple, graph_lib.sudoku_cells((2, 2)).tolist()))
HEADS = dict(d_v=8, d_e=2, slots=4, objective="l1box_diag", rank=2)


def build(trunk, **changes):
  """(module, views) of a small encoder."""
  heads, rng = HEADS | changes, np.random.default_rng(0)
  if trunk == "cell":
    return encoders.CellEncoder(6, 5, CELLS, heads), rng.integers(0, 5, (3, 12, 4))
  return encoders.PatchEncoder(6, trunk == "deep", heads), rng.normal(size=(3, 12, 9)).astype(np.float32)


@functools.cache
def run(trunk, **changes):
  """(params, encoding, jitted apply)"""
  module, view = build(trunk, **changes)
  params = jax.jit(module.init)(jax.random.key(0), view) if trunk != "cell" else problems.random_weights(module, view)
  apply = jax.jit(module.apply)
  return params, jax.device_get(apply(params, view)), apply


@pytest.mark.parametrize("trunk", ["flat", "deep"])
def test_what_the_heads_start_with(trunk):
  _, encoding, _ = run(trunk)
  np.testing.assert_allclose(encoding.h.mean(-1), 0.0, atol=1e-5)
  np.testing.assert_allclose(encoding.h.var(-1), 1.0, atol=1e-2)
  assert (encoding.q_diag > 1e-4).all() and encoding.q_diag.std() > 0.01 and encoding.q.std() > 0.01
  np.testing.assert_allclose(encoding.l1, 0.01, rtol=1e-5)
  np.testing.assert_allclose(encoding.upper, 1.0, rtol=1e-5)
  assert encoding.a.shape == (3, 12, 4, 2, 2) and encoding.b.shape == (3, 12, 4, 8, 2)
  assert not encoding.a.any() and (encoding.b != 0).all()  # F = R to begin with


def test_the_other_factor_may_start_at_zero():
  _, encoding, _ = run("flat", lora_init="legacy")
  assert (encoding.a != 0).all() and not encoding.b.any()


@pytest.mark.parametrize(
    "objective,missing",
    [("lasso", {"l1", "upper"}), ("non_negative", {"l1", "upper"}), ("simple", {"q_diag", "q", "l1", "upper"})],
)
def test_objectives_have_their_own_heads(objective, missing):
  module, view = build("flat", objective=objective, rank=0)
  encoding, params = jax.eval_shape(module.init_with_output, jax.random.key(0), view)
  absent = {name for name, value in encoding._asdict().items() if value is None}
  assert absent == missing | {"a", "b"}
  assert not absent & set(params["params"].get("Heads_0", {}))


def test_fixed_curvature_is_one():
  _, encoding, _ = run("flat", curvature="fixed")
  np.testing.assert_array_equal(encoding.q_diag, 1.0)


@pytest.mark.parametrize("trunk", ["flat", "deep", "cell"])
def test_agents_see_their_own_view_only(trunk):
  params, encoding, apply = run(trunk)
  _, view = build(trunk)
  other = view.copy()
  other[1, 5] = (other[1, 5] + 1) % 5
  changed = jax.device_get(apply(params, other))
  for before, after in zip(encoding, changed):
    moved = np.argwhere((before != after).reshape(3, 12, -1).any(-1))
    assert moved.tolist() in ([[1, 5]], [])  # nobody else; heads with a zero kernel do not move at all
  assert (encoding.h[1, 5] != changed.h[1, 5]).any()


def test_cells_have_a_place_on_the_board_and_in_the_agent():
  """The same digits in another row read differently; patches do not know where they are."""
  params, _, apply = run("cell")
  h = apply(params, np.full((3, 12, 4), 2)).h[0]
  assert all(np.abs(h[0] - h[n]).max() > 1e-3 for n in range(1, 12))
  params, _, apply = run("flat")
  h = apply(params, np.ones((3, 12, 9), np.float32)).h[0]
  np.testing.assert_allclose(h, np.tile(h[:1], (12, 1)), atol=1e-6)


def test_blocks_by_hand():
  x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
  sigmoid = lambda y: 1 / (1 + np.exp(-y))
  dense = lambda y, p: y @ p["kernel"] + p["bias"]
  rms = lambda y: y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
  gelu = lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))

  module = encoders.SwiGLU(5)
  params = jax.device_get(problems.random_weights(module, x)["params"])
  gate = dense(x, params["Dense_0"])
  want = dense(gate * sigmoid(gate) * dense(x, params["Dense_1"]), params["Dense_2"])
  np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x), want, atol=1e-5)

  for width in (4, 6):  # plain residual, and a linear skip
    module = encoders.MLPBlock(width)
    params = jax.device_get(problems.random_weights(module, x)["params"])
    scaled = rms(x) * params["RMSNorm_0"]["scale"]
    want = dense(gelu(dense(scaled, params["Dense_0"])), params["Dense_1"])
    want += x if width == 4 else dense(x, params["Dense_2"])
    np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x), want, atol=1e-5)


@pytest.mark.parametrize("y", [0.01, 0.25, 1.0, 5.0])
def test_softplus_inverse(y):
  assert np.log1p(np.exp(encoders.softplus_inverse(y))) == pytest.approx(y)
