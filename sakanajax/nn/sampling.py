"""Sampling from a language model: drawing one token, decoding in one program, streaming token by token.

    temperature T: p ~ softmax(logits / T), 0 is greedy
    top-k:         only the k most probable tokens
    top-p:         only the smallest set of most probable tokens whose probabilities add up to p (arXiv 1904.09751)

Prompts of different lengths share a batch by padding on the left (`pad_left`): the last column then holds the last
token of every prompt, padding is masked, and positions count from a prompt's first token. So a padded prompt gives
what it gives alone. The t-th token is drawn with fold_in(key, t); `decode` and `stream` draw the same tokens.

Legend: B batch, P longest prompt, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.nn.layer import Ctx, Layer

PyTree = Any


class Decoded(NamedTuple):
  """What `decode` returns."""

  tokens: jax.Array  # [B, steps] int32, `pad` after a row's end
  lengths: jax.Array  # [B] int32, tokens drawn, the stop id included


class _Progress(NamedTuple):
  """Where decoding stands."""

  state: PyTree  # the model's memory of all tokens but the last
  token: jax.Array  # [B] int32, the last token drawn
  position: jax.Array  # [B] int32, its position
  done: jax.Array  # [B] bool, the row has met a stop id
  count: jax.Array  # [] int32, tokens drawn


def top_k_logits(logits: jax.Array, k: int) -> jax.Array:
  """Returns `[..., V]` with -inf for all but the k largest; of equal ones the first stay."""
  _, kept = jax.lax.top_k(logits, min(k, logits.shape[-1]))
  keep = jnp.put_along_axis(jnp.zeros(logits.shape, bool), kept, True, axis=-1, inplace=False)
  return jnp.where(keep, logits, -jnp.inf)


def top_p_logits(logits: jax.Array, p: float) -> jax.Array:
  """Returns `[..., V]` with -inf outside the smallest set of most probable tokens whose probability reaches p."""
  order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
  probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
  before = jnp.cumsum(probs, axis=-1) - probs
  keep = jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, before < p, axis=-1, inplace=False)
  return jnp.where(keep, logits, -jnp.inf)


def sample(
    key: jax.Array, logits: jax.Array, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> jax.Array:
  """Draws a token from logits `[..., V]` -> `[...]` int32: temperature first, then top-k, then top-p of what is left.

  Raises:
    ValueError: temperature < 0, top_k < 1, or top_p outside (0, 1].
  """
  if not temperature >= 0 or (top_k is not None and top_k < 1) or not 0 < top_p <= 1:
    raise ValueError(
        "sampling needs temperature >= 0, top_k >= 1 and 0 < top_p <= 1, got "
        f"temperature={temperature}, top_k={top_k}, top_p={top_p}"
    )
  if temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits.astype(jnp.float32) / temperature
  if top_k is not None:
    logits = top_k_logits(logits, top_k)
  if top_p < 1:
    logits = top_p_logits(logits, top_p)
  return jax.random.categorical(key, logits).astype(jnp.int32)


def pad_left(prompts: Sequence[Sequence[int]], pad: int = 0, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens `[B, P]` int32 and mask `[B, P]` bool; P is a multiple of `multiple`, so that few shapes occur."""
  if not prompts or not all(len(prompt) for prompt in prompts):
    raise ValueError("every prompt needs at least one token; begin with the tokenizer's first special token")
  width = -(-max(map(len, prompts)) // multiple) * multiple
  tokens, mask = np.full((len(prompts), width), pad, np.int32), np.zeros((len(prompts), width), bool)
  for row, prompt in enumerate(prompts):
    tokens[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, True
  return tokens, mask


def decode(
    layer: Layer,
    params: PyTree,
    tokens: jax.Array,
    steps: int,
    key: jax.Array,
    *,
    mask: jax.Array | None = None,
    stop: tuple[int, ...] = (),
    pad: int = 0,
    dtype: Any = None,
    **rule: float,
) -> Decoded:
  """Continues prompts by up to `steps` tokens: one prefill, then a loop that ends when all rows have met a stop id.

  A pure function to be called under jit (`layer`, `steps`, `stop` and the numbers of the rule are static).

  Args:
    layer: a language model, tokens -> logits, see `transformer.lm`.
    params: its params.
    tokens: prompts `[B, P]` int32, padded on the left.
    steps: most tokens to draw, at least 1.
    key: of all draws.
    mask: `[B, P]` bool, False where a prompt is padded; None: nowhere.
    stop: token ids that end a row.
    pad: the token after a row's end.
    dtype: of the cache; None: that of the params.
    **rule: temperature, top_k and top_p of `sample`.
  """
  _check(tokens, mask, steps)
  mask = jnp.ones(tokens.shape, bool) if mask is None else mask
  step = functools.partial(_advance, layer, stop, pad, rule)
  first = _start(layer, stop, rule, tokens.shape[1] + steps - 1, dtype or _dtype(params), params, tokens, mask, key)
  drawn = jnp.full((tokens.shape[0], steps), pad, jnp.int32).at[:, 0].set(first.token)

  def running(carry):
    progress, _, _ = carry
    return (progress.count < steps) & ~jnp.all(progress.done)

  def body(carry):
    before, drawn, lengths = carry
    after = step(params, before, key)
    return after, drawn.at[:, before.count].set(after.token), lengths + ~before.done

  ones = jnp.ones(tokens.shape[0], jnp.int32)
  _, drawn, lengths = jax.lax.while_loop(running, body, (first, drawn, ones))
  return Decoded(drawn, lengths)


def stream(
    layer: Layer,
    params: PyTree,
    tokens: jax.Array,
    steps: int,
    key: jax.Array,
    *,
    mask: jax.Array | None = None,
    stop: tuple[int, ...] = (),
    pad: int = 0,
    max_len: int | None = None,
    dtype: Any = None,
    **rule: float,
) -> Iterator[np.ndarray]:
  """Yields the tokens of `decode` as they are drawn, `[B]` int32 each, until all rows have met a stop id.

  The prefill compiles once per shape of `tokens`, the step once per batch and `max_len` (slots of the cache, by
  default P + steps - 1; give a constant one to reuse the step). The state is donated from step to step. Errors in the
  arguments are raised at the first token.
  """
  _check(tokens, mask, steps)
  max_len = tokens.shape[1] + steps - 1 if max_len is None else max_len
  if max_len < tokens.shape[1] + steps - 1:
    raise ValueError(f"{tokens.shape[1]} + {steps} tokens need max_len >= {tokens.shape[1] + steps - 1}, got {max_len}")
  mask = jnp.ones(tokens.shape, bool) if mask is None else mask
  dtype = jnp.dtype(dtype or _dtype(params))
  start, step = _compiled(layer, tuple(stop), pad, tuple(sorted(rule.items())), max_len, dtype)
  progress = start(params, tokens, mask, key)
  for count in range(1, steps + 1):
    done = bool(progress.done.all())
    yield np.array(progress.token)  # a copy: the next step takes over the buffer
    if done or count == steps:
      return
    progress = step(params, progress, key)


@functools.lru_cache(maxsize=16)
def _compiled(layer: Layer, stop: tuple[int, ...], pad: int, rule: tuple, max_len: int, dtype: Any):
  """The two programs of `stream`, kept so that a second call doesn't trace again."""
  start = jax.jit(functools.partial(_start, layer, stop, dict(rule), max_len, dtype))
  return start, jax.jit(functools.partial(_advance, layer, stop, pad, dict(rule)), donate_argnums=1)


def _start(layer, stop, rule, max_len, dtype, params, tokens, mask, key) -> _Progress:
  """Reads the prompts and draws the first token."""
  positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
  state = layer.init_state(tokens.shape[0], max_len, dtype)
  logits, state, _ = layer.apply(params, tokens, state, Ctx(positions=positions, mask=mask))
  token = sample(jax.random.fold_in(key, 0), logits[:, -1], **rule)
  return _Progress(state, token, positions[:, -1] + 1, _is_in(token, stop), jnp.ones((), jnp.int32))


def _advance(layer, stop, pad, rule, params, progress: _Progress, key) -> _Progress:
  """Reads the last token and draws the next; rows that are done read and draw padding."""
  ctx = Ctx(positions=progress.position[:, None], mask=~progress.done[:, None])
  logits, state, _ = layer.apply(params, progress.token[:, None], progress.state, ctx)
  token = sample(jax.random.fold_in(key, progress.count), logits[:, -1], **rule)
  token = jnp.where(progress.done, pad, token)
  return _Progress(
      state, token, progress.position + 1, progress.done | _is_in(token, stop), progress.count + 1
  )


def _is_in(token: jax.Array, stop: tuple[int, ...]) -> jax.Array:
  return jnp.isin(token, jnp.asarray(stop, jnp.int32))


def _dtype(params: PyTree) -> Any:
  return jnp.result_type(*(leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)))


def _check(tokens, mask, steps: int) -> None:
  if jnp.ndim(tokens) != 2 or 0 in jnp.shape(tokens):
    raise ValueError(f"prompts must be [B, P] with at least one token each, got shape {jnp.shape(tokens)}")
  if mask is not None and jnp.shape(mask) != jnp.shape(tokens):
    raise ValueError(f"mask {jnp.shape(mask)} must have the shape {jnp.shape(tokens)} of the prompts")
  if steps < 1:
    raise ValueError(f"steps must be at least 1, got {steps}")
