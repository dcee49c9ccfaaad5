"""Language models: no leak from the future, decoding as teacher forcing, one trace, the loss, learning by heart."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sakanajax.core import trees
from sakanajax.nn.attention import attention
from sakanajax.nn.ffn import glu, mlp
from sakanajax.nn.layer import Ctx, Layer, chain, collect, stack
from sakanajax.nn.norms import layer_norm
from sakanajax.nn.positions import no_positions, yarn
from sakanajax.nn.transformer import block, lm, nll, token_nll
from tests.nn.helpers import filled
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

V, D, B, T = 11, 8, 2, 6
TOKENS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
OPTIONS = {
    "gqa": {"kv_heads": 2},
    "window": {"window": 2},
    "yarn": {"positions": yarn(2.0, 4), "qk_norm": True},
    "bidirectional": {"causal": False},
}


@functools.cache
def model_of(name, layers=2):
  """A model, its params, and the jitted (params, tokens, state, ctx) -> (logits, state)."""
  model = lm(V, D, stack(block(D, attention(D, 4, **OPTIONS[name]), glu(D, 12)), layers))
  return model, filled(model), jax.jit(lambda *args: model.apply(*args)[:2])


def logits_of(name, tokens, **ctx):
  _, params, run = model_of(name)
  return np.asarray(run(params, jnp.asarray(tokens), (), Ctx(**ctx))[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_which_logits_change_with_a_token(name):
  base = logits_of(name, TOKENS)
  for t in range(T):
    other = TOKENS.copy()
    other[:, t] = (other[:, t] + 1) % V
    changed = np.abs(logits_of(name, other) - base).max((0, 2)) > 1e-6
    reach = 2 * (OPTIONS[name].get("window", T) - 1)  # two layers
    expected = [name == "bidirectional" or t <= i <= t + reach for i in range(T)]
    np.testing.assert_array_equal(changed, expected)


def test_no_gradient_comes_from_the_future():
  body = stack(block(D, attention(D, 4), glu(D, 12)), 2)
  params = filled(body)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(1, T, D)), jnp.float32)
  jacobian = jax.jit(jax.jacrev(lambda x: body.apply(params, x, (), Ctx())[0]))(x)
  reached = np.abs(jacobian).sum((0, 2, 3, 5)) > 0
  np.testing.assert_array_equal(reached, np.tril(np.ones((T, T), bool)))


@pytest.mark.parametrize("name,packed", [("gqa", False), ("window", True), ("yarn", True)])
def test_decoding_with_a_cache_is_teacher_forcing(name, packed):
  model, params, run = model_of(name)
  known = {}
  if packed:  # two documents a row
    known = {
        "segment_ids": jnp.array([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]),
        "positions": jnp.array([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]]),
    }
  want = logits_of(name, TOKENS, **known)
  state, got = model.init_state(B, T, jnp.float32), []
  for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
    logits, state = run(params, TOKENS[:, part], state, Ctx(**{k: v[:, part] for k, v in known.items()}))
    got.append(logits)
  np.testing.assert_allclose(np.concatenate(got, 1), want, atol=2e-5)


def test_packed_documents_are_what_they_are_alone():
  segments, positions = jnp.array([[0, 0, 1, 1, 1, 1]]), jnp.array([[0, 1, 0, 1, 2, 3]])
  together = logits_of("gqa", TOKENS[:1], segment_ids=segments, positions=positions)
  apart = [logits_of("gqa", TOKENS[:1, :2]), logits_of("gqa", TOKENS[:1, 2:])]
  np.testing.assert_allclose(together, np.concatenate(apart, 1), atol=2e-5)


@pytest.mark.parametrize("name", ["gqa", "bidirectional"])
@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(name, left):
  alone = logits_of(name, TOKENS[:, :4], mask=jnp.ones((B, 4), bool))
  junk = np.full((B, 2), 7, np.int32)
  tokens = np.concatenate([junk, TOKENS[:, :4]] if left else [TOKENS[:, :4], junk], axis=1)
  real = slice(2, None) if left else slice(0, 4)
  mask = np.zeros((B, T), bool)
  mask[:, real] = True
  np.testing.assert_allclose(logits_of(name, tokens, mask=jnp.asarray(mask))[:, real], alone, atol=2e-5)


def test_without_positions_a_bidirectional_model_sees_a_bag():
  mixer = attention(D, 4, positions=no_positions(), causal=False)
  model = lm(V, D, stack(block(D, mixer, mlp(D, 12)), 2), norm=layer_norm)
  params = filled(model)
  run = jax.jit(lambda tokens: model.apply(params, tokens, (), Ctx())[0])
  order = np.array([4, 2, 0, 5, 1, 3])
  np.testing.assert_allclose(run(TOKENS[:, order]), run(TOKENS)[:, order], atol=2e-5)


def test_thirty_layers_are_traced_once_for_all_calls():
  traces = []

  def traced(params, x, state, ctx):
    traces.append(1)
    return x, state, {"l1": jnp.sum(jnp.abs(x))}

  mixer = attention(D, 4)
  spy = Layer(lambda key: {}, lambda *_: (), traced)
  model = lm(V, D, stack(block(D, mixer, chain(ffn=glu(D, 12), spy=spy)), 30))
  params = filled(model, 0.1)
  chex.clear_trace_counter()
  run = jax.jit(chex.assert_max_traces(lambda p, tokens: model.apply(p, tokens, (), Ctx()), n=1))
  logits, state, aux = run(params, TOKENS)
  run(params, TOKENS[::-1])
  assert len(traces) == 1 and state == () and logits.dtype == jnp.float32 and logits.shape == (B, T, V)
  assert [leaf.shape for leaf in collect(aux, "l1")] == [(30,)]


@pytest.mark.parametrize("tied", [True, False])
def test_how_many_params(tied):
  layers, hidden = 3, 12
  model = lm(V, D, stack(block(D, attention(D, 4, kv_heads=2), glu(D, hidden)), layers), tied)
  params = jax.eval_shape(model.init, jax.random.key(0))
  per_layer = 2 * D * D + 2 * D * (D // 2) + 3 * D * hidden + 2 * D
  assert trees.count_params(params) == layers * per_layer + V * D * (1 if tied else 2) + D
  assert set(params) == {"embed", "body", "norm"} | (set() if tied else {"head"})
  assert params["body"]["mixer"]["layer"]["k"].shape == (layers, D, D // 2)


def test_tied_and_untied_heads():
  body = mlp(D, 12)
  tied, untied = lm(V, D, body), lm(V, D, body, tied=False)
  params = filled(tied)
  want = tied.apply(params, TOKENS, (), Ctx())[0]
  got = untied.apply(params | {"head": params["embed"].T}, TOKENS, (), Ctx())[0]
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_half_precision_is_close_and_logits_are_float32():
  _, params, run = model_of("gqa")
  logits, _ = run(trees.cast(params, jnp.bfloat16), TOKENS, (), Ctx())
  want = logits_of("gqa", TOKENS)
  assert logits.dtype == jnp.float32
  assert np.abs(logits - want).max() < 0.05 * np.abs(want).max()


def test_a_token_beyond_the_vocabulary_spoils_its_row_and_no_other():
  tokens = TOKENS.copy()
  tokens[0, 3] = V
  logits = logits_of("gqa", tokens)
  assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_nll_is_the_log_of_the_softmax():
  rng = np.random.default_rng(0)
  logits, labels = rng.normal(size=(B, T, V)), rng.integers(0, V, (B, T))
  probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  want = -np.log(np.take_along_axis(probs, labels[..., None], -1)[..., 0])
  np.testing.assert_allclose(token_nll(logits, labels), want, rtol=1e-5)
  assert float(nll(logits, labels)) == pytest.approx(want.mean(), rel=1e-5)
  mask = rng.random((B, T)) < 0.5
  unknown = np.where(mask, labels, -100)
  assert float(nll(logits, unknown, mask)) == pytest.approx(want[mask].mean(), rel=1e-5)


def test_nll_of_special_cases():
  labels = jnp.asarray(TOKENS)
  assert float(nll(jnp.zeros((B, T, V)), labels)) == pytest.approx(np.log(V), rel=1e-6)
  assert float(nll(1e4 * jax.nn.one_hot(labels, V), labels)) == 0
  none = jax.value_and_grad(nll)(jnp.zeros((B, T, V)), labels, jnp.zeros((B, T), bool))
  assert float(none[0]) == 0 and not none[1].any()


def test_a_tiny_model_learns_a_sequence_by_heart():
  mixer = attention(16, 2, kv_heads=1)
  model = lm(V, 16, stack(block(16, mixer, glu(16, 32)), 2))
  row = jnp.asarray(np.random.default_rng(3).integers(0, V, (1, 13)), jnp.int32)
  tx = optax.adam(1e-2)

  def loss(params):
    return nll(model.apply(params, row[:, :-1], (), Ctx(train=True))[0], row[:, 1:])

  @jax.jit
  def learn(params):
    def step(carry, _):
      value, gradient = jax.value_and_grad(loss)(carry[0])
      updates, moments = tx.update(gradient, carry[1])
      return (optax.apply_updates(carry[0], updates), moments), value

    return jax.lax.scan(step, (params, tx.init(params)), None, length=150)[1]

  losses = learn(jax.jit(model.init)(jax.random.key(0)))
  assert float(losses[0]) == pytest.approx(np.log(V), abs=0.1) and float(losses[-1]) < 0.02
