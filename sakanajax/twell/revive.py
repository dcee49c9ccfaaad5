"""Dead neurons: found by what they did not do, revived by noise (the paper's "dead neuron mitigation").

    for each neuron j that was active for no token of the step, after the optimizer's update:
      W_gate[:, j] <- (1 - rate) W_gate[:, j] + rate * N(0, scale^2)

A neuron that a ReLU kept off for every token has a gradient column that is zero exactly, so the gradient itself says
who is dead and no statistics travel from the model to the optimizer. The published code does not contain this step.

Legend: K input features, N hidden neurons, L layers of a stack.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax

RATE, SCALE = 0.1, 0.02  # the paper's
_FULL = 1 << 30  # a counter stops here, far from the end of int32


class ReviveState(NamedTuple):
  """State of `revive`."""

  inner: Any  # of the wrapped optimizer
  step: jax.Array  # [] int32, updates so far


def revive(
    tx: optax.GradientTransformation,
    seed: int,
    rate: float = RATE,
    scale: float = SCALE,
    names: Sequence[str] = ("gate",),
) -> optax.GradientTransformation:
  """Returns an optimizer that takes `tx`'s steps and mixes noise into the columns of dead neurons.

  Args:
    tx: any optimizer.
    seed: the noise of step t is a function of (seed, t) alone.
    rate: share of the noise in the new column, 0 to 1.
    scale: standard deviation of the noise.
    names: keys of the params whose leaves `[..., K, N]` decide who is active: "gate" of a gated layer, "up" of a plain
    one.

  The update needs the params. Where a gradient of such a leaf is not finite, nothing is revived.
  """
  if not 0 <= rate <= 1 or not 0 <= scale < math.inf:
    raise ValueError(f"rate must be in [0, 1] and scale finite and not negative, got {rate} and {scale}")

  def update(grads, state, params=None, **extra):
    if params is None:
      raise ValueError("revive needs the params: tx.update(grads, state, params)")
    updates, inner = tx.update(grads, state.inner, params, **extra)
    key = jax.random.fold_in(jax.random.key(seed), state.step)

    def one(path, change, grad, weight):
      if _name(path[-1]) not in names:
        return change
      dead = jnp.all(grad == 0, axis=-2, keepdims=True) & jnp.all(jnp.isfinite(grad))
      own = jax.random.fold_in(key, _number(path))
      noise = scale * jax.random.normal(own, weight.shape, weight.dtype)
      return jnp.where(dead, change + rate * (noise - weight - change), change)

    updates = jax.tree_util.tree_map_with_path(one, updates, grads, params)
    return updates, ReviveState(inner, state.step + 1)

  return optax.GradientTransformationExtraArgs(
      lambda params: ReviveState(tx.init(params), jnp.zeros((), jnp.int32)), update)


def _name(entry: Any) -> str:
  return str(getattr(entry, "key", getattr(entry, "name", "")))


def _number(path: Sequence[Any]) -> int:
  """A number of a leaf's path that does not depend on what else the tree holds."""
  number = 0
  for character in jax.tree_util.keystr(tuple(path)).encode():
    number = (number * 257 + character) % (1 << 31)
  return number


# --- bookkeeping: tokens since each neuron was last active ---------------------------------------------------------


def idle_since(idle: jax.Array, fired: jax.Array, tokens: jax.Array | int) -> jax.Array:
  """Returns the counters after a batch: 0 for neurons that fired, else the batch's tokens more. All `[..., N]` int32.

  Args:
    idle: tokens since each neuron was last active, at the batch's beginning; zeros at the very beginning.
    fired: tokens of the batch for which it was active (aux "fired").
    tokens: how many tokens the batch has.
  """
  waited = jnp.minimum(idle, _FULL - tokens) + tokens
  return jnp.where(fired > 0, 0, waited).astype(jnp.int32)


def is_dead(idle: jax.Array, window: int) -> jax.Array:
  """Returns `[..., N]` bool: silent for at least `window` tokens (the paper's: one global batch, about a million)."""
  return idle >= window


def alive(idle: jax.Array, window: int) -> jax.Array:
  """Returns `[...]` float32, each layer's share of neurons that are not dead."""
  return 1.0 - jnp.mean(is_dead(idle, window), axis=-1)
