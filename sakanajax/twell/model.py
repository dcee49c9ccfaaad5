"""The language models of the paper from one config: ReLU-gated or plain, trainable or packed for inference.

    x <- x + attention(rms(x));  x <- x + ffn(rms(x));  logits = rms(x) embed^T

`language_model` takes the feed-forward layer as an argument, so that the same params run as trained (`ffn.reglu`), with
a form per layer (`switch.body`), packed (`sparsify.packed`) or under another rule of sparsity (`comparisons`).

Legend: V vocabulary, D width, N hidden width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.twell import formats
from sakanajax.nn import layer as layers
from sakanajax.nn.attention import attention
from sakanajax.nn.layer import Layer
from sakanajax.nn.norms import rms_norm
from sakanajax.nn.positions import rope
from sakanajax.nn.pretrained import LlamaConfig
from sakanajax.nn.transformer import block, lm
from sakanajax.twell import ffn


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and forms.

  Attributes:
    vocab: V.
    dim: D.
    hidden: N.
    layers: how many.
    heads: query heads.
    kv_heads: key heads, a divisor of `heads`; 0: as many.
    head_dim: width of a head; 0: D / heads.
    gated: ReLU-gated, or plain.
    activation: "relu"; the others are dense baselines.
    form: how the feed-forward layers train, see `ffn`.
    room: of the hybrid form.
    theta: base of the rotary positions.
    norm_eps: of the RMSNorms.
    tied: the head is the embedding.
    remat: compute the inside of blocks once more in the backward pass, instead of keeping it.
    unroll: layers that are compiled at a time, see `nn.layer.stack`; changes nothing but time.
    dtype: of the computation; weights are float32.
  """

  vocab: int = 257
  dim: int = 128
  hidden: int = 1024
  layers: int = 2
  heads: int = 4
  kv_heads: int = 0
  head_dim: int = 0
  gated: bool = True
  activation: Literal["relu", "silu", "gelu"] = "relu"
  form: Literal["dense", "hybrid"] = "dense"
  room: ffn.Room = ffn.Room()
  theta: float = 10_000.0
  norm_eps: float = 1e-5
  tied: bool = True
  remat: bool = False
  unroll: int = 1
  dtype: Literal["float32", "bfloat16"] = "float32"

  def __post_init__(self):
    for name in ("vocab", "dim", "hidden", "layers", "heads", "unroll"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
    for name in ("kv_heads", "head_dim"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
    if self.heads % (self.kv_heads or self.heads) or (not self.head_dim and self.dim % self.heads):
      raise ValueError(f"heads {self.heads} must divide dim {self.dim} and be a multiple of kv_heads {self.kv_heads}")
    width = self.head_dim or self.dim // self.heads
    if width % 2:
      raise ValueError(f"heads must have an even width for rotary positions, got {width}")
    if self.form == "hybrid" and self.hidden > formats.MAX_N:
      raise ValueError(f"form 'hybrid' holds up to {formats.MAX_N} neurons, hidden is {self.hidden}; use form 'dense'")
    if self.form == "hybrid" and self.activation != "relu":
      raise ValueError(f"form 'hybrid' stores what a ReLU leaves, not {self.activation!r}; use form 'dense'")


def feed_forward(cfg: ModelConfig, form: str | None = None) -> Layer:
  """The feed-forward layer of a config, or another form of it."""
  make = ffn.reglu if cfg.gated else ffn.relu_mlp
  return make(cfg.dim, cfg.hidden, form or cfg.form, cfg.room, cfg.activation)


def block_of(cfg: ModelConfig, ff: Layer) -> Layer:
  """One block: attention, then `ff`."""
  mixer = attention(cfg.dim, cfg.heads, cfg.kv_heads or None, cfg.head_dim or None, positions=rope(cfg.theta))
  made = block(cfg.dim, mixer, ff, functools.partial(rms_norm, eps=cfg.norm_eps))
  return layers.remat(made) if cfg.remat else made


def language_model(cfg: ModelConfig, ff: Layer | None = None, body: Layer | None = None) -> Layer:
  """Tokens `[B, T]` -> logits `[B, T, V]`; params {"embed", "body", "norm", ("head")}.

  Args:
    cfg: the sizes.
    ff: the feed-forward layer of every block; None: the config's.
    body: the blocks; None: a stack of them.
  """
  body = body or layers.stack(block_of(cfg, ff or feed_forward(cfg)), cfg.layers, cfg.unroll)
  return lm(cfg.vocab, cfg.dim, body, cfg.tied, functools.partial(rms_norm, eps=cfg.norm_eps))


def of_llama(cfg: LlamaConfig) -> ModelConfig:
  """The config of a Llama-family model; its params have the layout of ours."""
  return ModelConfig(
      vocab=cfg.vocab, dim=cfg.dim, hidden=cfg.hidden, layers=cfg.layers, heads=cfg.heads, kv_heads=cfg.kv_heads,
      head_dim=cfg.head_dim, activation=cfg.activation, theta=cfg.theta, norm_eps=cfg.norm_eps, tied=cfg.tied)


def compute_dtype(cfg: ModelConfig):
  """The dtype of the computation."""
  return jnp.dtype(cfg.dtype)
