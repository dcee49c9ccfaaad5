"""Rotary positions as multiplication by complex numbers; relative shifts; YaRN's ramp by its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.layer import Ctx
from sakanajax.nn.positions import no_positions, rope, rope_frequencies, rotate_half, yarn, yarn_frequencies
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

RNG = np.random.default_rng(0)
B, T, H, HK, D = 2, 5, 4, 2, 8
Q, K = (jnp.asarray(RNG.normal(size=(B, T, h, D)), jnp.float32) for h in (H, HK))
POSITIONS = jnp.asarray(RNG.integers(0, 50, (B, T)), jnp.int32)


def as_complex(x):
  x = np.asarray(x, np.float64)
  return x[..., : D // 2] + 1j * x[..., D // 2 :]


def turn(source, positions, q=Q, k=K):
  return source.rotate({}, None, q, k, positions, Ctx())


def scores(q, k):
  """q_i . k_j for every pair of tokens, key heads repeated."""
  return np.einsum("bihd,bjhd->bhij", q, np.repeat(k, H // HK, axis=2))


@pytest.mark.parametrize("theta", [1e4, 1e5])
def test_rope_multiplies_by_complex_numbers(theta):
  angles = np.asarray(POSITIONS)[:, :, None, None] * theta ** (-2 * np.arange(D // 2) / D)
  for got, x in zip(turn(rope(theta), POSITIONS), (Q, K)):
    np.testing.assert_allclose(as_complex(got), as_complex(x) * np.exp(1j * angles), atol=1e-5)


@pytest.mark.parametrize("source", [rope(), yarn(4.0, 16)], ids=["rope", "yarn"])
def test_only_differences_of_positions_matter(source):
  base = scores(*turn(source, POSITIONS))
  np.testing.assert_allclose(scores(*turn(source, POSITIONS + 1000)), base, atol=2e-3)
  np.testing.assert_allclose(scores(*turn(source, POSITIONS + 7)), base, atol=2e-5)
  assert not np.allclose(scores(*turn(source, POSITIONS * 2)), base, atol=1e-2)


def test_real_positions_per_head():
  frequencies = rope_frequencies(D)
  z = jnp.asarray(RNG.normal(scale=20, size=(B, T, H)), jnp.float32)
  turned = rotate_half(Q, z, frequencies)
  for head in range(H):  # each head by itself, as if it were alone
    alone = rotate_half(Q[:, :, head : head + 1], z[..., head], frequencies)
    np.testing.assert_allclose(turned[:, :, head : head + 1], alone, atol=1e-6)
  angles = np.asarray(z, np.float64)[..., None] * frequencies
  np.testing.assert_allclose(as_complex(turned), as_complex(Q) * np.exp(1j * angles), atol=1e-5)
  whole = jnp.broadcast_to(POSITIONS[..., None], (B, T, H)).astype(jnp.float32)
  np.testing.assert_array_equal(rotate_half(Q, whole, frequencies), turn(rope(), POSITIONS)[0])


def test_a_real_shift_per_head_and_a_constant_position_change_no_score():
  frequencies, keys = rope_frequencies(D), jnp.repeat(K, H // HK, axis=2)
  z = jnp.asarray(RNG.normal(scale=5, size=(B, T, H)), jnp.float32)
  meet = lambda z: jnp.einsum("bihd,bjhd->bhij", rotate_half(Q, z, frequencies), rotate_half(keys, z, frequencies))
  np.testing.assert_allclose(meet(z + jnp.array([0.5, -3.25, 40.0, 7.0])), meet(z), atol=1e-4)
  np.testing.assert_allclose(meet(jnp.full_like(z, 12.5)), scores(Q, K), atol=1e-5)
  assert not np.allclose(meet(-z), meet(z), atol=1e-2)


def test_positions_have_a_gradient():
  slope = jax.grad(lambda z: jnp.sum(rotate_half(Q, z, rope_frequencies(D)) ** 3))(jnp.zeros((B, T, H)))
  assert np.isfinite(slope).all() and np.abs(slope).max() > 0


def test_half_precision_keeps_large_positions():
  """Angles in bfloat16 would be off by whole turns at position 1000."""
  q = jnp.asarray(Q, jnp.bfloat16)
  turned = rotate_half(q, jnp.full((B, T), 1001), rope_frequencies(D))
  assert turned.dtype == jnp.bfloat16
  want = as_complex(q.astype(jnp.float32)) * np.exp(1j * 1001 * rope_frequencies(D).astype(np.float64))
  np.testing.assert_allclose(as_complex(turned.astype(jnp.float32)), want, atol=2e-2)


def test_yarn_ramp_of_a_published_size():
  """Heads of 128, theta 1e4, 4096 tokens: the ramp runs from pair 20 to pair 46."""
  ratio = yarn_frequencies(128, 16.0, 4096) / rope_frequencies(128)
  np.testing.assert_allclose(ratio[:21], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[46:], 1 / 16, rtol=1e-6)
  np.testing.assert_allclose(np.diff(ratio[20:47]), -(1 - 1 / 16) / 26, rtol=1e-4)


@pytest.mark.parametrize("head_dim,original,theta,fast,slow", [
    (64, 2048, 1e4, 32, 1), (64, 512, 1e5, 16, 2), (16, 96, 1e4, 8, 1), (128, 8192, 5e5, 32, 1), (16, 4, 1e4, 32, 1),
])
def test_yarn_by_definition(head_dim, original, theta, fast, slow):
  kept = rope_frequencies(head_dim, theta).astype(np.float64)
  turns = original * kept / (2 * np.pi)  # of each pair over the original context
  ratio = yarn_frequencies(head_dim, 8.0, original, theta, fast, slow) / kept
  np.testing.assert_allclose(ratio[turns > fast], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[turns < slow / theta ** (2 / head_dim)], 1 / 8, rtol=1e-6)
  assert (np.diff(ratio) <= 1e-7).all() and (ratio >= 1 / 8 - 1e-7).all()


def test_yarn_scales_logits_by_the_square_of_its_temperature():
  frequencies = yarn_frequencies(D, 4.0, 16)
  plain = scores(*(rotate_half(x, POSITIONS, frequencies) for x in (Q, K)))
  for source, factor in ((yarn(4.0, 16), 0.1 * np.log(4) + 1), (yarn(4.0, 16, attention_factor=0.5), 0.5)):
    np.testing.assert_allclose(scores(*turn(source, POSITIONS)), plain * factor**2, rtol=1e-4, atol=1e-5)


def test_yarn_of_factor_one_is_rope_and_no_positions_do_nothing():
  for got, want in zip(turn(yarn(1.0, 16), POSITIONS), turn(rope(), POSITIONS)):
    np.testing.assert_allclose(got, want, atol=1e-6)
  for got, want in zip(turn(no_positions(), POSITIONS), (Q, K)):
    np.testing.assert_array_equal(got, want)


def test_bad_sizes_are_refused():
  with pytest.raises(ValueError, match="even width, got 7"):
    rope_frequencies(7)
  with pytest.raises(ValueError, match="factor=0.5"):
    yarn_frequencies(8, 0.5, 16)
  with pytest.raises(ValueError, match="4 frequencies turn heads of 8, got 6"):
    rotate_half(jnp.ones((1, 1, 1, 6)), jnp.zeros((1, 1)), rope_frequencies(8))
