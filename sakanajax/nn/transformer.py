"""Transformers from the algebra: blocks, language models and their loss.

    block(D, mixer, ffn):  x <- x + mixer(norm(x));  x <- x + ffn(norm(x))
    lm(V, D, body):        logits = norm(body(embed[tokens])) embed^T

A language model is an expression:

    lm(256, 64, stack(block(64, attention(64, heads=4), glu(64, 256)), 4))

With `attention(causal=False)` it is bidirectional (masked diffusion, encoders). Unlike layers are chained.

Legend: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Callable

import jax
import jax.numpy as jnp

from sakanajax.nn.layer import Layer, chain, kernels, residual
from sakanajax.nn.norms import rms_norm

Norm = Callable[[int], Layer]


def pre_norm(dim: int, layer: Layer, norm: Norm = rms_norm) -> Layer:
  """x + layer(norm(x)); params {"norm", "layer"}."""
  return residual(chain(norm=norm(dim), layer=layer))


def block(dim: int, mixer: Layer, ffn: Layer, norm: Norm = rms_norm) -> Layer:
  """A token mixer, then a feed-forward layer, both pre-normed; params {"mixer", "ffn"}, each {"norm", "layer"}."""
  return chain(mixer=pre_norm(dim, mixer, norm), ffn=pre_norm(dim, ffn, norm))


def lm(vocab: int, dim: int, body: Layer, tied: bool = True, norm: Norm = rms_norm, init_scale: float = 0.02) -> Layer:
  """Tokens `[B, T]` int32 -> logits `[B, T, V]` float32; state and aux are those of `body`.

  Params: {"embed": [V, D], "body", "norm"} and, if not tied, {"head": [D, V]}. The activations have the dtype of
  `embed`. A token id beyond the vocabulary gives NaN.
  """
  final = norm(dim)

  def init(key):
    k_ends, k_body, k_norm = jax.random.split(key, 3)
    shapes = {"embed": (vocab, dim)} | ({} if tied else {"head": (dim, vocab)})
    return kernels(k_ends, shapes, init_scale) | {"body": body.init(k_body), "norm": final.init(k_norm)}

  def apply(params, tokens, state, ctx):
    x = jnp.take(params["embed"], tokens, axis=0, mode="fill")
    x, state, aux = body.apply(params["body"], x, state, ctx)
    x, _, _ = final.apply(params["norm"], x, (), ctx)
    equation, head = ("md,vd->mv", params["embed"]) if tied else ("md,dv->mv", params["head"])
    flat = x.reshape(-1, dim)  # two matrices, see `layer.dense`
    logits = jnp.einsum(equation, flat, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return logits.reshape(*tokens.shape, vocab), state, aux

  return Layer(init, body.init_state, apply)


def token_nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log p(label), in nats, of each token: logits `[..., V]`, labels `[...]` int -> `[...]` float32."""
  logits = logits.astype(jnp.float32)
  chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - chosen


def nll(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """Mean -log p(label) in nats over the tokens where `mask` holds (all without one); 0 if there are none.

  Where the mask is False the label may be anything. Shapes as in `token_nll`, mask `[...]` bool.
  """
  if mask is None:
    return jnp.mean(token_nll(logits, labels))
  losses = jnp.where(mask, token_nll(logits, jnp.where(mask, labels, 0)), 0.0)
  return jnp.sum(losses) / jnp.maximum(jnp.sum(mask), 1)
