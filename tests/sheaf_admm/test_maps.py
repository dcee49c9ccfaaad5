"""Restriction maps: every form against maps multiplied out, adjointness, and how they start."""

import jax
import numpy as np
import pytest

from sakanajax.sheaf_admm import maps as maps_lib
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

GRAPH = problems.random_multigraph(0)


@jax.jit
def compute(maps, z, y):
  """(maps multiplied out, F z, Fᵀ y)"""
  dense = maps_lib.dense(maps, GRAPH.num_agents, GRAPH.num_slots)
  return dense, maps_lib.apply(maps, z, GRAPH.num_slots), maps_lib.adjoint(maps, y)


@pytest.mark.parametrize("kind", problems.KINDS)
def test_apply_and_adjoint_of_every_form(kind):
  maps = problems.random_maps(kind, GRAPH)
  rng = np.random.default_rng(1)
  z, y = rng.normal(size=(5, 5)).astype(np.float32), rng.normal(size=(5, 3, 2)).astype(np.float32)
  full, there, back = jax.device_get(compute(maps, z, y))
  np.testing.assert_allclose(there, np.einsum("nsed,nd->nse", full, z), atol=1e-5)
  np.testing.assert_allclose(back, np.einsum("nsed,nse->nd", full, y), atol=1e-5)
  assert np.vdot(there, y) == pytest.approx(np.vdot(z, back), rel=1e-4, abs=1e-4)
  base, factors = np.asarray(maps.base), 0.0 if maps.a is None else maps.a @ np.swapaxes(maps.b, -1, -2)
  for n in range(5):  # what is shared is repeated
    for s in range(3):
      shared = base[n] if base.ndim == 4 else base
      want = shared[s % len(shared)] + (0.0 if maps.a is None else factors[n, s])
      np.testing.assert_allclose(full[n, s], want, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_modulate_adds_the_scaled_product(rank, scale):
  rng = np.random.default_rng(2)
  base, a, b = rng.normal(size=(3, 2, 3)), rng.normal(size=(4, 3, 2, rank)), rng.normal(size=(4, 3, 3, rank))
  want = base + (1 / rank if scale is None else scale) * a @ np.swapaxes(b, -1, -2)

  @jax.jit
  def modulate(base, a, b):
    maps = maps_lib.modulate(base, a, b, scale)
    assert (maps.a is None) == (2 * 3 <= rank * (2 + 3))  # the cheaper of the two forms: factors for rank 1 only
    return maps_lib.dense(maps, 4, 3)

  np.testing.assert_allclose(modulate(base, a, b), want, atol=1e-5)


def test_orthonormal_rows():
  maps = np.asarray(maps_lib.init_base(jax.random.key(0), 8, 5, 10, "orthonormal"))
  np.testing.assert_allclose(maps @ np.swapaxes(maps, 1, 2), np.tile(np.eye(5), (8, 1, 1)), atol=1e-5)
  assert np.linalg.norm(maps[0] - maps[1]) > 0.5  # slots differ


def test_soft_slice_selects_the_block_of_its_slot():
  maps = np.asarray(maps_lib.init_base(jax.random.key(0), 9, 4, 40, "soft_slice"))
  noise = maps.copy()
  for s in range(9):
    noise[s, :, 4 * s : 4 * s + 4] -= np.eye(4)
  assert noise.std() == pytest.approx(0.01, rel=0.1) and abs(noise.mean()) < 1e-3
  exact = maps_lib.selectors(9, 4, 40)
  np.testing.assert_array_equal(exact @ np.arange(40.0, dtype=np.float32), np.arange(36.0).reshape(9, 4))


def test_identity_is_plain_consensus():
  np.testing.assert_array_equal(maps_lib.init_base(None, 2, 3, 3, "identity"), np.tile(np.eye(3), (2, 1, 1)))


@pytest.mark.parametrize(
    "slots,d_e,d_v,kind,message",
    [(1, 5, 4, "orthonormal", "d_e = 5 and d_v = 4"), (3, 2, 5, "soft_slice", "3 · 2 > 5"),
     (1, 2, 3, "identity", "d_e = 2 and d_v = 3"), (1, 2, 2, "gaussian", "gaussian")],
)
def test_stalks_that_do_not_fit(slots, d_e, d_v, kind, message):
  with pytest.raises(ValueError, match=message):
    maps_lib.init_base(jax.random.key(0), slots, d_e, d_v, kind)
