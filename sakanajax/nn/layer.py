"""The Layer algebra: a layer is three pure functions, and layers compose to layers.

    init:       key -> params
    init_state: (batch, max_len, dtype) -> state
    apply:      (params, x, state, ctx) -> (y, state, aux)

`params` is a plain pytree. `state` is what lives across calls (a cache of keys and values, fast weights); `()` means
none, so a layer that keeps something runs over `x` alone when it is handed `()`, and returns `()`. `aux` is a dict of
what a layer reports beside its output (losses, counts), nested by the names of the combinators; `collect` reads it.

Legend: B batch, T tokens, D features, n layers of a stack.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class Layer(NamedTuple):
  """A model part as pure functions; see the module's docstring."""

  init: Callable[[jax.Array], PyTree]
  init_state: Callable[[int, int, Any], PyTree]
  apply: Callable[[PyTree, jax.Array, PyTree, "Ctx"], tuple[jax.Array, PyTree, dict]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ctx:
  """What a layer may know beside its input."""

  positions: jax.Array | None = None  # [B, T] of each token in its document; None: its index in the row
  segment_ids: jax.Array | None = None  # [B, T] int32, the document of each token; None: one document per row
  mask: jax.Array | None = None  # [B, T] bool, False is padding; None: no padding
  train: bool = dataclasses.field(default=False, metadata={"static": True})
  key: jax.Array | None = None  # for layers that draw; combinators fold a different one for each layer
  step: jax.Array | None = None  # [] int32, training step, for schedules


def fold(ctx: Ctx, index: int | jax.Array) -> Ctx:
  """Returns `ctx` with the key of part number `index`."""
  return ctx if ctx.key is None else dataclasses.replace(ctx, key=jax.random.fold_in(ctx.key, index))


def is_empty(state: PyTree) -> bool:
  """True for `()`, which stands for no state."""
  return isinstance(state, tuple) and not state


def no_state(batch: int, max_len: int, dtype: Any) -> tuple[()]:
  """The `init_state` of a layer that keeps nothing."""
  return ()


def stateless(init: Callable[[jax.Array], PyTree], fn: Callable[[PyTree, jax.Array, Ctx], jax.Array]) -> Layer:
  """A layer from `fn`: (params, x, ctx) -> y, which keeps and reports nothing."""
  return Layer(init, no_state, lambda params, x, state, ctx: (fn(params, x, ctx), state, {}))


def chain(**layers: Layer) -> Layer:
  """Applies the layers in the order given; params, state and aux are dicts by their names.

  The state is `()` when no layer keeps one; names without a report are left out of aux.
  """

  def init(key):
    keys = jax.random.split(key, len(layers))
    return {name: layer.init(k) for (name, layer), k in zip(layers.items(), keys)}

  def init_state(batch, max_len, dtype):
    return _join({name: layer.init_state(batch, max_len, dtype) for name, layer in layers.items()})

  def apply(params, x, state, ctx):
    states, reports = {}, {}
    for index, (name, layer) in enumerate(layers.items()):
      before = () if is_empty(state) else state[name]
      x, states[name], aux = layer.apply(params[name], x, before, fold(ctx, index))
      if aux:
        reports[name] = aux
    return x, _join(states), reports

  return Layer(init, init_state, apply)


def _join(states: dict[str, PyTree]) -> PyTree:
  return () if all(map(is_empty, states.values())) else states


def residual(layer: Layer) -> Layer:
  """y = x + layer(x), with the params, state and aux of `layer`."""

  def apply(params, x, state, ctx):
    y, state, aux = layer.apply(params, x, state, ctx)
    return x + y, state, aux

  return layer._replace(apply=apply)


def stack(layer: Layer, n: int, unroll: int = 1) -> Layer:
  """`n` copies of `layer` with their own params, one after the other; traced once, and compiled once for any `n`.

  Params, state and aux have a leading axis `[n]`. Copy i sees the key fold_in(ctx.key, i). The layer must return
  the shape and dtype that it receives. `unroll` copies are compiled at a time: a few more are faster, by a sixth on a
  CPU for a training step of two layers.
  """
  if n < 1:
    raise ValueError(f"a stack needs at least one layer, got {n}")
  if unroll < 1:
    raise ValueError(f"unroll must be at least 1, got {unroll}")

  def init(key):
    return jax.vmap(layer.init)(jax.random.split(key, n))

  def init_state(batch, max_len, dtype):
    state = layer.init_state(batch, max_len, dtype)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), state)

  def apply(params, x, state, ctx):
    def body(x, part):
      own, before, index = part
      y, after, aux = layer.apply(own, x, before, fold(ctx, index))
      return y, (after, aux)

    y, (state, aux) = jax.lax.scan(body, x, (params, state, jnp.arange(n)), unroll=min(unroll, n))
    return y, state, aux

  return Layer(init, init_state, apply)


def remat(layer: Layer) -> Layer:
  """The same layer, whose backward pass computes the inside once more instead of keeping it."""
  return layer._replace(apply=jax.checkpoint(layer.apply))


def collect(aux: Mapping[str, Any], name: str) -> list[jax.Array]:
  """Returns all leaves under the key `name`, depth first, keys in sorted order (the order of jax's pytrees)."""
  found = []
  for key in sorted(aux):
    if key == name:
      found += jax.tree.leaves(aux[key])
    elif isinstance(aux[key], Mapping):
      found += collect(aux[key], name)
  return found


def kernels(key: jax.Array, shapes: Mapping[str, tuple[int, ...]], scale: float) -> dict[str, jax.Array]:
  """Returns float32 arrays of N(0, scale^2) by name, all from one draw, which compiles faster than one for each."""
  sizes = [math.prod(shape) for shape in shapes.values()]
  numbers = jnp.split(scale * jax.random.normal(key, (sum(sizes),)), list(itertools.accumulate(sizes))[:-1])
  return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), numbers)}


def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x `[..., in]` times kernel `[in, out]`, in the dtype of x.

  The product is of two matrices: XLA's gradients of one with more axes are 2.5 times slower on a CPU.
  """
  y = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
  return y.reshape(*x.shape[:-1], kernel.shape[-1])
