"""What is timed computes the same layer: every sparse way against NumPy; and medians of pairs by a fake clock."""

import jax
import numpy as np
import pytest

from pallas_kernels.twell import bench_cpu, cpu
from pallas_kernels.twell.hybrid import Capacity
from pallas_kernels.twell.shapes import Shape
from sakanajax.core.errors import UserError
from sakanajax.twell import speed
from tests.twell.helpers import quick_compilation  # noqa: F401

SHAPE, DENSITY = Shape(9, 16, 300, 12), 0.05
needs_compiler = pytest.mark.skipif(cpu.unavailable() is not None, reason="no C++ compiler")


def numpy_layer(arrays, act, select=lambda h: h):
  x, gate, up, down = (None if a is None else np.asarray(a, np.float64) for a in arrays)
  h = act(x @ gate)
  return select(h if up is None else h * (x @ up)) @ down


def relu(z):
  return np.maximum(z, 0)


def silu(z):
  return z / (1 + np.exp(-z))


@needs_compiler
@pytest.mark.parametrize("gated", [True, False])
def test_every_way_computes_the_layer(gated):
  arrays = speed.arrays_of(SHAPE, DENSITY, gated, seed=3)
  want = numpy_layer(arrays, relu)
  call, report = speed.sparse_call(arrays, None)
  active = (np.asarray(arrays[0]) @ np.asarray(arrays[1]) > 0).sum(1)
  np.testing.assert_array_equal(report.nnz, active)
  ways = {"dense": bench_cpu.dense_call(arrays, "tnt"), "ours": call} | speed.alternatives(arrays, int(active.max()))
  assert set(ways) == {"dense", "ours", "ell", "packed"} | (set() if gated else {"bcsr"})
  for name, way in ways.items():
    tolerance = 1e-2 if name == "packed" else 1e-5  # its values are bfloat16
    np.testing.assert_allclose(way(), want, atol=tolerance * np.abs(want).max(), err_msg=name)


@needs_compiler
def test_imposed_ways_compute_what_they_say():
  arrays = speed.arrays_of(SHAPE, 0.5, True, seed=3)
  x, gate, up, down = (np.asarray(a, np.float64) for a in arrays)
  ways = speed.imposed(arrays, DENSITY)
  k = round(DENSITY * SHAPE.n)
  kept = lambda h: np.where(np.abs(h) >= -np.sort(-np.abs(h), axis=1)[:, k - 1 : k], h, 0)
  np.testing.assert_allclose(ways["topk"](), numpy_layer(arrays, silu, kept), atol=1e-5)
  h = silu(x @ gate)
  t = np.quantile(np.abs(h), 1 - DENSITY)
  np.testing.assert_allclose(ways["threshold"](), (np.where(np.abs(h) > t, h, 0) * (x @ up)) @ down, atol=1e-4)


def test_a_threshold_within_the_dip_of_silu_is_left_out():
  arrays = speed.arrays_of(SHAPE, 0.001, True, seed=3)  # gates far below 0: nearly all of |silu| is small
  assert "threshold" not in speed.imposed(arrays, 0.9)


def test_medians_of_pairs_by_a_fake_clock(monkeypatch):
  seconds = {"dense": iter([1.0, 9.0, 4.0]), "other": iter([0.5, 3.0, 4.0])}
  monkeypatch.setattr(speed.bench_cpu, "seconds", lambda call: next(seconds[call()]))
  monkeypatch.setattr(jax, "block_until_ready", lambda x: x)
  times = speed.pairs(lambda: "dense", lambda: "other", 3)
  assert times.speedup == 2.0 and times.dense_ms == 4000 and times.other_ms == 3000  # not 4000 / 3000


def test_saved_bytes_by_hand():
  shape, room = Shape(64, 32, 512, 32), Capacity(16, 8)
  got = speed.backward_bytes(shape, room)
  m, n, e, q = shape.m, shape.n, room.ell, room.tail
  # columns 2, P and R 2 each; counts and places 4 each; the tail twice, with a bit for each entry and its row's number
  assert got["backward_bytes_hybrid"] == m * e * 6 + m * 8 + q * n * 4 + q * n // 8 + q * 4
  assert got["backward_bytes_dense"] == 2 * m * n * 2 < got["backward_bytes_autodiff"]  # both projections in bfloat16
  assert got["backward_bytes_ratio"] == got["backward_bytes_dense"] / got["backward_bytes_hybrid"]


def test_a_machine_without_the_fast_path_is_told_so(monkeypatch):
  monkeypatch.setattr(cpu, "unavailable", lambda: "no C++ compiler")
  with pytest.raises(UserError, match="no C"):
    speed.measure_curve(8, 16)
