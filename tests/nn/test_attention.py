"""Attention against naive NumPy; who sees whom, by the gradient; caches, masks, packed documents, half precision."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.attention import KVCache, attend, attention
from sakanajax.nn.layer import Ctx
from sakanajax.nn.positions import no_positions, rope, rope_frequencies, yarn, yarn_frequencies
from tests.nn.helpers import filled
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

B, T, D, H = 2, 7, 12, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D))
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 3, 3]], np.int32)  # ids need not be in order
MASK = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]], bool)  # padding left, amid and right
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 1]], np.int32)
FULL = {"positions": POSITIONS, "segment_ids": SEGMENTS, "mask": MASK}

WIDTH = D // H
CASES = {
    "plain": {"head_dim": 6},
    "gqa": {"head_dim": 6, "kv_heads": 2},
    "mqa": {"head_dim": 2, "kv_heads": 1},
    "window": {"head_dim": 6, "window": 2},
    "window of one": {"head_dim": 4, "window": 1},
    "bidirectional": {"head_dim": 6, "causal": False},
    "bidirectional window": {"head_dim": 6, "causal": False, "window": 3},
    "qk norm": {"head_dim": 6, "kv_heads": 2, "qk_norm": True},
    "yarn": {"head_dim": 6, "positions": yarn(4.0, 16), "window": 3},
    "nope": {"positions": no_positions()},
}


def layer_of(case):
  return attention(D, H, **CASES[case])


@functools.cache
def params_of(case):
  """Params for which attention is far from uniform."""
  return filled(layer_of(case))


@functools.cache
def run_of(case):
  layer = layer_of(case)
  return jax.jit(lambda params, x, state, ctx: layer.apply(params, x, state, ctx)[:2])


def ctx_of(**named):
  return Ctx(**{name: jnp.asarray(value) for name, value in named.items()})


def sees(i, j, row, options, segments, mask):
  """The specification of the mask: may token i look at token j?"""
  window = options.get("window") or T
  return bool(
      mask[row, j]
      and segments[row, i] == segments[row, j]
      and abs(i - j) < window
      and (j <= i or not options.get("causal", True))
  )


def naive(params, x, options, positions, segments, mask):
  """One row, head and query at a time, float64; rotation by complex numbers."""
  kv_heads, width = options.get("kv_heads", H), options.get("head_dim", WIDTH)
  w = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}

  def head(name, vector, h):
    part = (vector @ w[name])[h * width : (h + 1) * width]
    if f"{name}_norm" in w:
      part = part / np.sqrt((part**2).mean() + 1e-6) * w[f"{name}_norm"]
    return part

  def turned(name, vector, h, position):
    part, kind = head(name, vector, h), options.get("positions")
    if kind is CASES["nope"]["positions"]:
      return part
    is_yarn = kind is CASES["yarn"]["positions"]
    frequencies = yarn_frequencies(width, 4.0, 16) if is_yarn else rope_frequencies(width)
    z = (part[: width // 2] + 1j * part[width // 2 :]) * np.exp(1j * position * frequencies.astype(np.float64))
    return np.concatenate([z.real, z.imag]) * (0.1 * np.log(4) + 1 if is_yarn else 1)

  y = np.zeros((B, T, H * width))
  for row in range(B):
    for h in range(H):
      shared = h // (H // kv_heads)
      for i in range(T):
        seen = [j for j in range(T) if sees(i, j, row, options, segments, mask)]
        if not seen:
          continue
        q = turned("q", x[row, i], h, positions[row, i])
        k = [turned("k", x[row, j], shared, positions[row, j]) for j in seen]
        e = np.exp(np.array([q @ kj for kj in k]) / np.sqrt(width))
        y[row, i, h * width : (h + 1) * width] = (e / e.sum()) @ [head("v", x[row, j], shared) for j in seen]
  return y @ w["o"]


@pytest.mark.parametrize("case", CASES)
def test_against_naive_numpy(case):
  x = jnp.asarray(X, jnp.float32)
  with jax.default_matmul_precision("highest"):
    got, state = run_of(case)(params_of(case), x, (), ctx_of(**FULL))
  want = naive(params_of(case), X, CASES[case], POSITIONS, SEGMENTS, MASK)
  assert state == () and got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, atol=2e-5)
  np.testing.assert_array_equal(np.abs(np.asarray(got)).sum(-1) == 0, np.abs(want).sum(-1) == 0)


def test_without_segments_mask_and_positions():
  got, _ = run_of("gqa")(params_of("gqa"), jnp.asarray(X, jnp.float32), (), Ctx())
  ones, index = np.ones((B, T), bool), np.tile(np.arange(T), (B, 1))
  np.testing.assert_allclose(got, naive(params_of("gqa"), X, CASES["gqa"], index, 0 * index, ones), atol=2e-5)


@pytest.mark.parametrize("case", ["plain", "window", "bidirectional window"])
def test_the_gradient_reaches_exactly_what_a_token_sees(case):
  """d y_i / d x_j is 0 wherever j is later, too far, another document's or padding, and only there."""
  layer = layer_of(case)

  @jax.jit
  def influence(x):
    jacobian = jax.jacrev(lambda x: layer.apply(params_of(case), x, (), ctx_of(**FULL))[0])(x)
    return jnp.abs(jacobian).sum((2, 5))  # [B, T, B, T]

  reached = np.asarray(influence(jnp.asarray(X, jnp.float32))) > 0
  for row in range(B):
    assert not reached[row, :, 1 - row].any()
    for i in range(T):
      seen = {j for j in range(T) if sees(i, j, row, CASES[case], SEGMENTS, MASK)}
      if len(seen) > 1:  # the query itself matters only where there is a choice
        seen |= {i}
      assert set(np.flatnonzero(reached[row, i, row])) == seen


CACHED = [(name, (5, 1, 1)) for name in CASES if "bidirectional" not in name] + [("gqa", (7,)), ("gqa", (1,) * 7)]


@pytest.mark.parametrize("case,pieces", CACHED, ids=str)
def test_in_pieces_through_the_cache_as_at_once(case, pieces):
  x = jnp.asarray(X, jnp.float32)
  want, _ = run_of(case)(params_of(case), x, (), ctx_of(**FULL))
  state, got, start = layer_of(case).init_state(B, T + 2, jnp.float32), [], 0
  for size in pieces:
    part = slice(start, start + size)
    ctx = ctx_of(**{name: value[:, part] for name, value in FULL.items()})
    y, state = run_of(case)(params_of(case), x[:, part], state, ctx)
    got.append(y)
    start += size
  np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=1e-5)
  assert int(state.length) == T


def test_a_bidirectional_cache_holds_the_past_and_the_whole_present():
  """Blocks of masked diffusion: the second call sees all of the first and all of itself."""
  x, run, params = jnp.asarray(X, jnp.float32)[:, :6], run_of("bidirectional"), params_of("bidirectional")
  state = layer_of("bidirectional").init_state(B, T + 2, jnp.float32)
  first, state = run(params, x[:, :3], state, Ctx())
  second, _ = run(params, x[:, 3:], state, Ctx())
  np.testing.assert_allclose(second, run(params, x, (), Ctx())[0][:, 3:], atol=1e-5)
  np.testing.assert_allclose(first, run(params, x[:, :3], (), Ctx())[0], atol=1e-5)


def test_positions_count_on_from_the_cache():
  state, got = layer_of("plain").init_state(B, 8, jnp.float32), []
  x = jnp.asarray(X, jnp.float32)[:, :6]
  for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
    y, state = run_of("plain")(params_of("plain"), x[:, part], state, Ctx())
    got.append(y)
  np.testing.assert_allclose(jnp.concatenate(got, 1), run_of("plain")(params_of("plain"), x, (), Ctx())[0], atol=1e-5)


def test_order_is_unknown_without_positions_when_bidirectional():
  order = np.array([3, 0, 6, 1, 5, 2, 4])
  for positions, unknown in ((no_positions(), True), (rope(), False)):
    layer = attention(D, H, 2, 6, positions, causal=False)
    y = jax.jit(lambda x: layer.apply(params_of("gqa"), jnp.asarray(x, jnp.float32), (), Ctx())[0])
    assert np.allclose(y(X)[:, order], y(X[:, order]), atol=1e-5) == unknown


def test_grouped_heads_are_heads_with_equal_keys():
  params = dict(params_of("gqa"))
  x = jnp.asarray(X, jnp.float32)
  grouped, _ = run_of("gqa")(params, x, (), Ctx())
  for name in "kv":
    params[name] = jnp.repeat(params[name].reshape(D, 2, 6), 2, axis=1).reshape(D, H * 6)
  for kv_heads in (None, H):
    layer = attention(D, H, kv_heads, 6)
    many = jax.jit(lambda params, x: layer.apply(params, x, (), Ctx())[0])(params, x)
    np.testing.assert_allclose(many, grouped, atol=1e-5)


def test_grouped_keys_are_never_copied():
  """Decoding one token with 8 query heads per key head makes nothing larger than the cache."""
  layer = attention(16, 8, kv_heads=1, head_dim=8)
  params = jax.eval_shape(layer.init, jax.random.key(0))
  state = jax.eval_shape(lambda: layer.init_state(1, 512, jnp.float32))
  token = jax.ShapeDtypeStruct((1, 1, 16), jnp.float32)
  program = jax.make_jaxpr(lambda *args: layer.apply(*args, Ctx()))(params, token, state)
  made = max(var.aval.size for equation in program.jaxpr.eqns for var in equation.outvars)
  assert made <= state.k.size == 512 * 8


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
  layer, x = layer_of("qk norm"), jnp.asarray(X, jnp.float32)
  nothing, some = np.zeros((B, T), bool), MASK

  def loss(params, x, mask):
    y, _, _ = layer.apply(params, x, (), Ctx(mask=mask))
    return jnp.sum(jnp.sin(y)), y

  slope = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  jax.config.update("jax_debug_nans", True)
  try:
    (_, y), gradient = slope(params_of("qk norm"), x, nothing)
    (_, part), of_part = slope(params_of("qk norm"), x, some)
  finally:
    jax.config.update("jax_debug_nans", False)
  assert not y.any() and all(not leaf.any() for leaf in jax.tree.leaves(gradient))
  assert not part[0, :2].any() and part[0, 2:].any()
  chex.assert_tree_all_finite(of_part)


def test_large_scores_stay_finite_and_pick_the_largest():
  q = jnp.full((1, 1, 1, 4), 1e18)
  k = jnp.asarray(RNG.normal(size=(1, 5, 1, 4)), jnp.float32) * 1e18
  v = jnp.asarray(RNG.normal(size=(1, 5, 1, 4)), jnp.float32)
  y = jax.jit(attend)(q, k, v, jnp.ones((1, 1, 5), bool))
  np.testing.assert_allclose(y[0, 0, 0], v[0, int(jnp.argmax(k.sum(-1))), 0], rtol=1e-6)


def test_half_precision_is_close_and_stays_half():
  half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of("gqa"))
  state = layer_of("gqa").init_state(B, T, jnp.bfloat16)
  want, _ = run_of("gqa")(params_of("gqa"), jnp.asarray(X, jnp.float32), (), Ctx())
  for before in ((), state):
    y, after = run_of("gqa")(half, jnp.asarray(X, jnp.bfloat16), before, Ctx())
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=0.08)  # outputs are of order 2


def test_a_full_cache_is_never_silent():
  layer, params, x = layer_of("plain"), params_of("plain"), jnp.asarray(X, jnp.float32)
  with pytest.raises(ValueError, match="7 tokens don't fit in a cache of 4 slots"):
    run_of("plain")(params, x, layer.init_state(B, 4, jnp.float32), Ctx())
  state = layer.init_state(B, 8, jnp.float32)
  y, state = run_of("plain")(params, x, state, Ctx())
  assert np.isfinite(y).all() and isinstance(state, KVCache)
  assert np.isfinite(run_of("plain")(params, x[:, :1], state, Ctx())[0]).all()
  assert np.isnan(run_of("plain")(params, x[:, :2], state, Ctx())[0]).all()


def test_params_are_named_two_dimensional_kernels():
  shapes = lambda layer: {name: leaf.shape for name, leaf in jax.eval_shape(layer.init, jax.random.key(0)).items()}
  assert shapes(attention(D, H, kv_heads=2)) == {"q": (D, D), "k": (D, 6), "v": (D, 6), "o": (D, D)}
  assert shapes(attention(D, H, 2, 5, no_positions(), qk_norm=True))["q_norm"] == (5,)


@pytest.mark.parametrize("options,message", [
    ({"heads": 5}, "dim must be a multiple of heads unless head_dim is given, got 12 and 5"),
    ({"heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
    ({"heads": 4, "kv_heads": 0}, "got 4 and 0"),
    ({"heads": 4, "window": 0}, "window must be at least 1, got 0"),
])
def test_bad_sizes_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    attention(D, **options)
