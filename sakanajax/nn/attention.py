"""Attention: multi-head or grouped-query, causal or bidirectional, windowed, packed, padded, cached.

    y = softmax(q k^T / sqrt(d) + mask) v W_o

Which keys a query sees is decided by the order of tokens in the row, never by their positions, which only turn queries
and keys: a key that is not padding, of the same document, not later (causal), less than `window` tokens away.
A query that sees no key gets 0. The softmax is in float32.

Training, prefill and decoding are one code path: without a state, the T tokens at hand are the whole cache.

Legend: B batch, T tokens of this call, S slots of the cache, D model width, H heads, Hk key heads, d head width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from sakanajax.nn.layer import Ctx, Layer, dense, is_empty, kernels
from sakanajax.nn.norms import rms
from sakanajax.nn.positions import Positions, rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values of all tokens so far; slots from `length` on are free."""

  k: jax.Array  # [B, S, Hk, d], turned by their positions
  v: jax.Array  # [B, S, Hk, d]
  segment_ids: jax.Array  # [B, S] int32
  mask: jax.Array  # [B, S] bool, False for padding
  length: jax.Array  # [] int32, tokens written, padding included


def empty_cache(batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any) -> KVCache:
  """A cache with all `slots` free."""
  shape = (batch, slots, kv_heads, head_dim)
  return KVCache(
      k=jnp.zeros(shape, dtype),
      v=jnp.zeros(shape, dtype),
      segment_ids=jnp.zeros((batch, slots), jnp.int32),
      mask=jnp.zeros((batch, slots), bool),
      length=jnp.zeros((), jnp.int32),
  )


def append(cache: KVCache, new: KVCache) -> KVCache:
  """Writes the T tokens of `new` into the next free slots.

  Raises:
    ValueError: T > S. When the free slots don't suffice at run time, `length` exceeds S afterwards.
  """
  if new.k.shape[1] > cache.k.shape[1]:
    raise ValueError(f"{new.k.shape[1]} tokens don't fit in a cache of {cache.k.shape[1]} slots; raise max_len")

  def write(old, add):
    start = (0, cache.length) + (0,) * (old.ndim - 2)
    return jax.lax.dynamic_update_slice(old, add.astype(old.dtype), start)

  names = ("k", "v", "segment_ids", "mask")
  written = {name: write(getattr(cache, name), getattr(new, name)) for name in names}
  return KVCache(**written, length=cache.length + new.length)


def visible(start: jax.Array, tokens: int, slots: int, causal: bool, window: int | None) -> jax.Array:
  """Returns bool `[T, S]`: slot s is written and in reach of the token in slot start + t."""
  query, key = start + jnp.arange(tokens)[:, None], jnp.arange(slots)[None, :]
  seen = key <= query if causal else key < start + tokens
  return seen if window is None else seen & (jnp.abs(query - key) < window)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
  """Returns softmax(q k^T / sqrt(d)) v over the valid keys, `[B, T, H, d]` in the dtype of q.

  Args:
    q: `[B, T, H, d]`; each H / Hk heads that follow one another share a key head.
    k: `[B, S, Hk, d]`, never copied to H heads.
    v: `[B, S, Hk, d]`.
    valid: bool `[B or 1, T, S]`; a query without a valid key gets 0 and no gradient.
  """
  batch, tokens, heads, width = q.shape
  kv_heads = k.shape[2]
  lowest = jnp.finfo(jnp.float32).min
  grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
  scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
  valid = valid[:, None, None]
  scores = jnp.where(valid, scores / math.sqrt(width), lowest)
  top = jnp.max(scores, axis=-1, keepdims=True, initial=lowest)
  weights = jnp.where(valid, jnp.exp(scores - jax.lax.stop_gradient(top)), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights / jnp.where(total > 0, total, 1.0)
  y = jnp.einsum("bkgts,bskd->btkgd", weights.astype(q.dtype), v.astype(q.dtype))
  return y.reshape(batch, tokens, heads, width)


def attention(
    dim: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    positions: Positions = rope(),
    causal: bool = True,
    window: int | None = None,
    qk_norm: bool = False,
    init_scale: float = 0.02,
) -> Layer:
  """Self-attention over `x` `[B, T, D]` and, with a state, over all that came before.

  Params: {"q": [D, H d], "k": [D, Hk d], "v": [D, Hk d], "o": [H d, D]}; with `qk_norm` also {"q_norm", "k_norm"},
  scales `[d]` of an RMSNorm of each head; "positions" when the source has params. State: a `KVCache`.

  Args:
    dim: model width D.
    heads: query heads H.
    kv_heads: key heads Hk, a divisor of H; None: H.
    head_dim: width d of a head; None: D / H.
    positions: position source, see `positions`.
    causal: a token sees no later one. Not causal: all tokens of the call and all cached ones.
    window: a token sees less than this many tokens back (itself included), and ahead if not causal; None: all.
    qk_norm: normalise queries and keys before they are turned.
    init_scale: standard deviation of the kernels at first.

  Raises:
    ValueError: sizes that don't divide, or a call of more tokens than the cache has slots. A cache that overflows
      at run time makes the output NaN.
  """
  kv_heads = heads if kv_heads is None else kv_heads
  if kv_heads < 1 or heads % kv_heads:
    raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
  if head_dim is None and dim % heads:
    raise ValueError(f"dim must be a multiple of heads unless head_dim is given, got {dim} and {heads}")
  if window is not None and window < 1:
    raise ValueError(f"window must be at least 1, got {window}")
  width = dim // heads if head_dim is None else head_dim

  def init(key):
    wide, narrow = heads * width, kv_heads * width
    shapes = {"q": (dim, wide), "k": (dim, narrow), "v": (dim, narrow), "o": (wide, dim)}
    k_kernels, k_positions = jax.random.split(key)
    params = kernels(k_kernels, shapes, init_scale)
    if qk_norm:
      params |= {"q_norm": jnp.ones(width), "k_norm": jnp.ones(width)}
    source = positions.init(k_positions)
    return params | ({"positions": source} if jax.tree.leaves(source) else {})

  def init_state(batch, max_len, dtype):
    return empty_cache(batch, max_len, kv_heads, width, dtype)

  def apply(params, x, state, ctx):
    start = jnp.zeros((), jnp.int32) if is_empty(state) else state.length
    q, new = _project(params, x, start, ctx, positions, heads, kv_heads)
    cache = new if is_empty(state) else append(state, new)
    slots = cache.k.shape[1]
    valid = visible(start, x.shape[1], slots, causal, window)[None] & cache.mask[:, None, :]
    valid &= new.segment_ids[:, :, None] == cache.segment_ids[:, None, :]
    y = dense(attend(q, cache.k, cache.v, valid).reshape(*x.shape[:2], -1), params["o"])
    if is_empty(state):
      return y, (), {}
    return jnp.where(cache.length > slots, jnp.nan, y), cache, {}

  return Layer(init, init_state, apply)


def _project(params, x: jax.Array, start: jax.Array, ctx: Ctx, source: Positions, heads: int, kv_heads: int):
  """Returns the queries `[B, T, H, d]` and what the T tokens add to the cache."""
  batch, tokens, _ = x.shape
  q = dense(x, params["q"]).reshape(batch, tokens, heads, -1)
  k = dense(x, params["k"]).reshape(batch, tokens, kv_heads, -1)
  v = dense(x, params["v"]).reshape(batch, tokens, kv_heads, -1)
  if "q_norm" in params:
    q, k = rms(q, params["q_norm"]), rms(k, params["k_norm"])
  where = ctx.positions
  if where is None:
    where = jnp.broadcast_to(start + jnp.arange(tokens), (batch, tokens))
  q, k = source.rotate(params.get("positions", {}), x, q, k, where, ctx)
  segments = jnp.zeros((batch, tokens), jnp.int32) if ctx.segment_ids is None else ctx.segment_ids
  mask = jnp.ones((batch, tokens), bool) if ctx.mask is None else ctx.mask
  return q, KVCache(k, v, segments, mask, jnp.asarray(tokens, jnp.int32))
