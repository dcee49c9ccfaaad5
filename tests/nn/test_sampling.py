"""Sampling: supports by enumeration, frequencies, decoding as repeated full passes, stop ids, padding, streaming."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn import sampling
from sakanajax.nn.attention import attention
from sakanajax.nn.ffn import glu
from sakanajax.nn.layer import Ctx, Layer, stack
from sakanajax.nn.transformer import block, lm
from tests.nn.helpers import filled
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

V, D = 13, 8
RNG = np.random.default_rng(0)
PROMPTS = RNG.integers(1, V, (2, 5)).astype(np.int32)
KEY = jax.random.key(4)


@functools.cache
def model():
  layer = lm(V, D, stack(block(D, attention(D, 4, kv_heads=2), glu(D, 12)), 2), tied=False)
  return layer, filled(layer, 1.0, seed=3)


@functools.cache
def forward():
  layer, params = model()
  return jax.jit(lambda tokens: layer.apply(params, tokens, (), Ctx())[0])


def continued(prompt, steps=6):
  """The specification of greedy decoding: the most probable token of a full pass, again and again."""
  tokens = np.zeros((1, 11), np.int32)  # what stands behind is not seen
  tokens[0, : len(prompt)] = prompt
  for t in range(len(prompt), len(prompt) + steps):
    tokens[0, t] = np.argmax(forward()(tokens)[0, t - 1])
  return tokens[0, len(prompt) : len(prompt) + steps].tolist()


def successor(trace=lambda: None) -> Layer:
  """A model that always predicts token + 1 (mod 10)."""

  def apply(params, tokens, state, ctx):
    trace()
    return 50.0 * jax.nn.one_hot((tokens + 1) % 10, 10), state, {}

  return Layer(lambda key: {"unused": jnp.zeros(())}, lambda *_: (), apply)


@functools.cache
def decoder(steps, stop=(), **rule):
  layer, _ = model()
  return jax.jit(lambda params, tokens, mask=None: sampling.decode(
      layer, params, tokens, steps, KEY, mask=mask, stop=stop, **rule))


def decoded(tokens, steps=6, mask=None, stop=(), **rule):
  return jax.device_get(decoder(steps, stop, **rule)(model()[1], tokens, mask))


def support(logits):
  return np.isfinite(np.asarray(logits))


# Drawing one token


def smallest_set(probs, p):
  """The specification of top-p: take the most probable tokens one by one until they add up to p."""
  taken, total = np.zeros(len(probs), bool), 0.0
  for token in np.argsort(-probs, kind="stable"):
    if total >= p:
      break
    taken[token], total = True, total + probs[token]
  return taken


@pytest.mark.parametrize("p", [1e-6, 0.2, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_set_that_reaches_p(p):
  logits = RNG.normal(scale=2, size=(20, 6)).astype(np.float32)
  probs = np.asarray(jax.nn.softmax(jnp.asarray(logits)), np.float64)
  got = sampling.top_p_logits(jnp.asarray(logits), p)
  np.testing.assert_array_equal(support(got), [smallest_set(row, p) for row in probs])
  np.testing.assert_array_equal(np.where(support(got), got, 0), np.where(support(got), logits, 0))
  for row, kept in zip(probs, support(got)):  # no set of fewer tokens reaches p: all subsets are tried
    sums = [row[[i for i in range(6) if subset >> i & 1]].sum() for subset in range(64)]
    assert min(bin(subset).count("1") for subset in range(64) if sums[subset] >= p) == kept.sum()


def test_top_p_with_a_known_answer_and_with_ties():
  logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125]))
  for p, kept in ((0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)):
    assert support(sampling.top_p_logits(logits, p)).tolist() == [True] * kept + [False] * (4 - kept)
  assert support(sampling.top_p_logits(jnp.zeros(4), 0.45)).tolist() == [True, True, False, False]
  banned = jnp.array([-jnp.inf, 0.0, -jnp.inf, 0.0])
  assert support(sampling.top_p_logits(banned, 0.999)).tolist() == [False, True, False, True]


@pytest.mark.parametrize("k", [1, 2, 5, 6, 99])
def test_top_k_keeps_the_k_largest(k):
  logits = RNG.normal(size=(20, 6)).astype(np.float32)
  want = (-logits).argsort(-1).argsort(-1) < k
  np.testing.assert_array_equal(support(sampling.top_k_logits(jnp.asarray(logits), k)), want)
  assert support(sampling.top_k_logits(jnp.zeros(6), k)).tolist() == [i < k for i in range(6)]


@pytest.mark.parametrize("rule", [
    {}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8},
], ids=str)
def test_frequencies_are_the_probabilities(rule):
  logits = np.array([1.0, 0.2, -1.0, 0.5, 2.0, -0.3])
  probs = np.exp(logits / rule.get("temperature", 1.0))
  probs[np.argsort(-probs)[rule.get("top_k", 6) :]] = 0
  probs *= smallest_set(probs / probs.sum(), rule.get("top_p", 1.0))
  probs /= probs.sum()
  n = 20000
  draw = jax.jit(functools.partial(sampling.sample, **rule))
  seen = np.bincount(draw(KEY, jnp.broadcast_to(jnp.asarray(logits), (n, 6))), minlength=6) / n
  assert (np.abs(seen - probs) <= 5 * np.sqrt(probs * (1 - probs) / n)).all()  # also: 0 is never drawn


def test_greedy_is_the_most_probable_and_temperature_leads_to_it():
  logits = jnp.asarray(RNG.normal(size=(50, 6)))
  best = sampling.sample(KEY, logits, temperature=0.0)
  np.testing.assert_array_equal(best, np.argmax(logits, -1))
  for rule in ({"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-9}):
    np.testing.assert_array_equal(sampling.sample(KEY, logits, **rule), best)
  assert best.dtype == jnp.int32


@pytest.mark.parametrize("rule", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
], ids=str)
def test_rules_that_make_no_sense_are_refused(rule):
  with pytest.raises(ValueError, match=f"{next(iter(rule))}={next(iter(rule.values()))}"):
    sampling.sample(KEY, jnp.zeros(3), **rule)


# Whole continuations


def test_greedy_decoding_is_repeated_full_passes():
  got = decoded(PROMPTS, temperature=0.0)
  assert got.tokens.tolist() == [continued(prompt) for prompt in PROMPTS]
  assert got.lengths.tolist() == [6, 6] and all(len(set(row.tolist())) > 2 for row in got.tokens)


def test_sampled_decoding_draws_from_the_model_given_its_own_tokens():
  """Teacher forcing on the drawn tokens, with the same keys, draws them again."""
  rule = {"temperature": 1.3, "top_k": 6, "top_p": 0.9}
  got = decoded(PROMPTS, **rule).tokens
  rows = np.concatenate([PROMPTS, got], 1)
  logits = jnp.concatenate([forward()(rows[:1]), forward()(rows[1:])])
  for t in range(6):
    again = sampling.sample(jax.random.fold_in(KEY, t), logits[:, PROMPTS.shape[1] + t - 1], **rule)
    np.testing.assert_array_equal(again, got[:, t])


def test_prompts_of_different_lengths():
  """Left padding gives every prompt what it gives alone."""
  prompts = [PROMPTS[0, :2].tolist(), PROMPTS[1].tolist(), PROMPTS[0, :3].tolist()]
  tokens, mask = sampling.pad_left(prompts, pad=7)
  together = decoded(tokens, mask=mask, temperature=0.0).tokens
  assert together.tolist() == [continued(prompt) for prompt in prompts]


def test_pad_left():
  tokens, mask = sampling.pad_left([[5], [1, 2, 3]], pad=9, multiple=4)
  assert tokens.tolist() == [[9, 9, 9, 5], [9, 1, 2, 3]]
  assert mask.tolist() == [[False, False, False, True], [False, True, True, True]]
  for bad in ([], [[1], []]):
    with pytest.raises(ValueError, match="at least one token"):
      sampling.pad_left(bad)


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_ids_end_a_row_and_all_rows_end_the_loop(streamed):
  layer, tokens = successor(), jnp.array([[3], [6], [7]])
  options = {"stop": (8, 9), "pad": 0, "temperature": 0.0}
  want = [[4, 5, 6, 7, 8, 0, 0], [7, 8, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0]]
  params = layer.init(KEY)
  if streamed:
    got = np.stack(list(sampling.stream(layer, params, tokens, 7, KEY, **options)), 1)
    np.testing.assert_array_equal(got, np.array(want)[:, :5])  # it ends with the last row
  else:
    got = sampling.decode(layer, params, tokens, 7, KEY, **options)
    np.testing.assert_array_equal(got.tokens, want)
    assert got.lengths.tolist() == [5, 2, 1]


def test_decoding_ends_early():
  """The loop runs as long as its slowest row: the model is called that often, and no more."""
  calls = []
  layer = successor()

  def counted(params, tokens, state, ctx):
    jax.debug.callback(lambda: calls.append(1))
    return layer.apply(params, tokens, state, ctx)

  counting, params = layer._replace(apply=counted), {"w": jnp.zeros(())}
  sampling.decode(counting, params, jnp.array([[3], [6]]), 100, KEY, stop=(9,), temperature=0.0)
  jax.effects_barrier()
  assert len(calls) == 6  # 4 5 6 7 8 9


@pytest.mark.parametrize("steps", [1, 6])
def test_a_stream_yields_what_decoding_returns(steps):
  layer, params = model()
  rule = {"temperature": 1.0, "top_p": 0.95}
  streamed = list(sampling.stream(layer, params, PROMPTS, steps, KEY, max_len=16, **rule))
  assert [token.shape for token in streamed] == [(2,)] * steps
  np.testing.assert_array_equal(np.stack(streamed, 1), decoded(PROMPTS, **rule).tokens[:, :steps])


def test_a_stream_traces_its_step_once_for_all_tokens_and_calls():
  traces = []
  layer = successor(lambda: traces.append(1))
  params = layer.init(KEY)
  for tokens, steps in (([[3]], 20), ([[5]], 9), ([[1, 2]], 5)):
    options = {"max_len": 32, "temperature": 0.0}
    got = np.concatenate(list(sampling.stream(layer, params, jnp.array(tokens), steps, KEY, **options)))
    np.testing.assert_array_equal(got, (tokens[0][-1] + 1 + np.arange(steps)) % 10)
  assert len(traces) == 3  # two shapes of prompts and one step


def test_the_rows_of_a_batch_draw_different_tokens():
  uniform = lambda params, tokens, state, ctx: (jnp.zeros((*tokens.shape, 50)), state, {})
  layer = Layer(lambda key: {}, lambda *_: (), uniform)
  got = sampling.decode(layer, {"w": jnp.zeros(())}, jnp.zeros((2, 1), jnp.int32), 8, KEY).tokens
  assert not np.array_equal(got[0], got[1]) and len(np.unique(got[0])) > 2


@pytest.mark.parametrize("tokens,steps,options,message", [
    (np.zeros((1, 0)), 1, {}, "at least one token"),
    (np.zeros(3), 1, {}, r"must be \[B, P\]"),
    (np.zeros((1, 3)), 0, {}, "steps must be at least 1, got 0"),
    (np.zeros((1, 3)), 1, {"mask": np.ones((1, 2))}, "must have the shape"),
])
def test_bad_prompts_are_refused(tokens, steps, options, message):
  with pytest.raises(ValueError, match=message):
    sampling.decode(successor(), {"w": jnp.zeros(())}, tokens, steps, KEY, **options)
  with pytest.raises(ValueError, match=message):
    next(sampling.stream(successor(), {"w": jnp.zeros(())}, tokens, steps, KEY, **options))


def test_a_stream_needs_room():
  with pytest.raises(ValueError, match="need max_len >= 6, got 5"):
    next(sampling.stream(successor(), {"w": jnp.zeros(())}, np.ones((1, 3), np.int32), 4, KEY, max_len=5))
