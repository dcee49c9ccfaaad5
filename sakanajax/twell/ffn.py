"""Feed-forward layers whose zeros are worth something: ReLU-gated, plain, dense or stored sparsely.

    gated      h = ReLU(x W_gate) * (x W_up),   y = h W_down        (`reglu`)
    plain      h = ReLU(x W_up),                y = h W_down        (`relu_mlp`)

Params are those of `nn.ffn.glu` and `nn.ffn.mlp` without biases, so that a trained model can be read either way. Two
forms compute the same outputs and gradients: "dense" is XLA's, "hybrid" keeps only the active neurons for the backward
pass (`pallas_kernels.twell.train.sparse_ffn`).

Both report, in aux:

    l1         []      sum over neurons of |h|, mean over tokens: of the product, not of the gate
    nnz        []      active neurons, mean over tokens
    active     [B, T]  int32, active neurons of each token; 0 for padding
    fired      [N]     int32, tokens for which each neuron was active
    overflow   []      int32, rows that the hybrid form had no room for and that are missing from y; 0 in the dense form

Overflow means: enlarge the room and repeat the step. `loss.lm_loss` makes such a loss NaN, `fitting.fit` repeats.

Padding (ctx.mask is False) enters as zeros, which activate nothing: it gives 0 and counts nowhere.

Legend: B batch, T tokens, M = B T rows, D model width, N hidden width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.twell import train as kernels
from pallas_kernels.twell.hybrid import Capacity
from sakanajax.nn import ffn
from sakanajax.nn.layer import Ctx, Layer, dense, no_state

Form = Literal["dense", "hybrid"]
FORMS = ("dense", "hybrid")


@dataclasses.dataclass(frozen=True)
class Room:
  """How much the hybrid form can hold; the published sizes are the default.

  Attributes:
    ell: active neurons of a row outside the tail.
    tail: share of the rows that may have more.
  """

  ell: int = 128
  tail: float = 0.125

  def __post_init__(self):
    if self.ell < 1 or not 0 <= self.tail <= 1:
      raise ValueError(f"ell must be at least 1 and tail a share of the rows, got {self.ell} and {self.tail}")

  def capacity(self, rows: int, hidden: int) -> Capacity:
    """The room for `rows` rows of `hidden` neurons."""
    return Capacity(min(self.ell, hidden), math.ceil(self.tail * rows))


def reglu(
    dim: int,
    hidden: int,
    form: Form = "dense",
    room: Room = Room(),
    activation: str = "relu",
    init_scale: float = 0.02,
) -> Layer:
  """The gated layer; params {"gate": [D, N], "up": [D, N], "down": [N, D]}.

  Args:
    dim: D.
    hidden: N.
    form: how it is computed.
    room: of the hybrid form.
    activation: "relu"; "silu" and "gelu" are the dense baselines.
    init_scale: standard deviation of the kernels at first.

  Raises:
    ValueError: an unknown form or activation, or a hybrid form of anything but ReLU.
  """
  return _layer(ffn.glu(dim, hidden, activation, init_scale=init_scale), "gate", form, room, activation)


def relu_mlp(
    dim: int,
    hidden: int,
    form: Form = "dense",
    room: Room = Room(),
    activation: str = "relu",
    init_scale: float = 0.02,
) -> Layer:
  """The plain layer; params {"up": [D, N], "down": [N, D]}. Arguments and errors as for `reglu`."""
  return _layer(ffn.mlp(dim, hidden, activation, init_scale=init_scale), "up", form, room, activation)


def _layer(plain: Layer, gate: str, form: Form, room: Room, activation: str) -> Layer:
  """A reporting form of `plain`; `gate` names the projection whose activation decides."""
  if form not in FORMS:
    raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
  if form == "hybrid" and activation != "relu":
    raise ValueError(f"the hybrid form stores what a ReLU leaves; {activation!r} leaves no zeros, use form='dense'")
  act = ffn.ACTIVATIONS[activation]

  def apply(params, x, state, ctx):
    if ctx.mask is not None:
      x = jnp.where(ctx.mask[..., None], x, 0)
    if form == "dense":
      y, aux = _dense(params, x, ctx, gate, act)
    else:
      y, aux = _hybrid(params, x, ctx, gate, room)
    return y, (), aux

  return Layer(plain.init, no_state, apply)


def _dense(params, x: jax.Array, ctx: Ctx, gate: str, act) -> tuple[jax.Array, dict]:
  h = act(dense(x, params[gate]))
  on = h != 0  # a NaN is active, as in `pallas_kernels.twell.formats.active`
  h = h * dense(x, params["up"]) if gate == "gate" else h
  active = jnp.sum(on, axis=-1, dtype=jnp.int32)
  l1 = jnp.sum(jnp.abs(h.astype(jnp.float32)))
  fired = jnp.sum(on, axis=tuple(range(on.ndim - 1)), dtype=jnp.int32)
  return dense(h, params["down"]), _report(l1, active, fired, jnp.zeros((), jnp.int32), ctx)


def _hybrid(params, x: jax.Array, ctx: Ctx, gate: str, room: Room) -> tuple[jax.Array, dict]:
  flat = x.reshape(-1, x.shape[-1])
  weights = {name: leaf.astype(x.dtype) for name, leaf in params.items()}
  y, l1, counts = kernels.sparse_ffn(
      flat, weights[gate], weights["up"] if gate == "gate" else None, weights["down"],
      capacity=room.capacity(flat.shape[0], weights["down"].shape[0]),
  )
  active = counts.nnz.reshape(x.shape[:-1])
  return y.reshape(*x.shape[:-1], -1), _report(l1 * flat.shape[0], active, counts.fired, counts.overflow, ctx)


def _report(l1: jax.Array, active: jax.Array, fired: jax.Array, overflow: jax.Array, ctx: Ctx) -> dict:
  """`l1` is the sum over all tokens."""
  tokens = active.size if ctx.mask is None else jnp.maximum(jnp.sum(ctx.mask), 1)
  nnz = jnp.sum(active, dtype=jnp.float32) / tokens
  return {"l1": l1 / tokens, "nnz": nnz, "active": active, "fired": fired, "overflow": overflow}
