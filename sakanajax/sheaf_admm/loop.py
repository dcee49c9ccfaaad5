"""A loop with a run-time number of iterations that can still be differentiated.

`jax.lax.scan` needs a static length, and masking the surplus costs the full length every time; a
`while_loop` has no reverse mode. `iterate` runs exactly K iterations forward, keeps their starting states,
and backward runs exactly K (or the last few) iterations again, pulling the cotangent through each. So one
compilation serves every K, memory is one state per iteration whatever happens inside it, and gradients are
those of full unrolling, to the last rounding.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Step = Callable[[PyTree, PyTree], PyTree]  # (problem, state) -> state


def iterate(
    step: Step, problem: PyTree, state: PyTree, iterations: jax.Array | int, *,
    read: Callable[[PyTree], jax.Array], window: int, capacity: int, grad_steps: int | None = None,
) -> jax.Array:
  """Applies `step` K times and returns `read(state)` of the last `window` iterates, oldest first.

  Args:
    step: (problem, state) -> state, pure; whatever needs a gradient comes in through `problem` or `state`.
    problem: constants of the loop; integer leaves are allowed.
    state: where it starts. With K < window its reading fills the first places.
    iterations: K >= 0, static or traced. K > capacity differentiates the last `capacity` iterations only.
    read: state -> array.
    window: W >= 1.
    capacity: the most iterations whose states are kept for the backward pass.
    grad_steps: truncated unrolling: only the last `grad_steps` iterations carry gradient (the forward pass is
      the same). None: all of them.

  Returns:
    `[W, ...]`
  """
  leaves, tree = jax.tree.flatten((problem, state))
  smooth = tuple(bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)) for leaf in leaves)
  fixed = [jnp.asarray(leaf) for leaf, is_smooth in zip(leaves, smooth) if not is_smooth]
  moving = [jnp.asarray(leaf) for leaf, is_smooth in zip(leaves, smooth) if is_smooth]
  depth = capacity if grad_steps is None else min(grad_steps, capacity)
  static = _Static(step, read, window, depth, tree, smooth)
  return _iterate(static, moving, fixed, jnp.asarray(iterations, jnp.int32))


class _Static:
  """What the loop knows at trace time."""

  def __init__(self, step, read, window, depth, tree, smooth):
    self.step, self.read, self.window, self.depth = step, read, window, depth
    self.tree, self.smooth = tree, smooth

  def join(self, moving, fixed):
    moving, fixed = iter(moving), iter(fixed)
    return jax.tree.unflatten(self.tree, [next(moving if smooth else fixed) for smooth in self.smooth])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _iterate(static: _Static, moving, fixed, iterations):
  problem, state = static.join(moving, fixed)

  def body(_, carry):
    state, seen = carry
    state = static.step(problem, state)
    return state, _push(seen, static.read(state))

  return jax.lax.fori_loop(0, iterations, body, (state, _fill(static, state)))[1]


def _fill(static, state):
  first = static.read(state)
  return jnp.broadcast_to(first, (static.window, *first.shape))


def _push(seen, newest):
  return jnp.concatenate([seen[1:], newest[None]])


def _forward(static, moving, fixed, iterations):
  problem, state = static.join(moving, fixed)
  places = max(1, static.depth)  # at depth 0 one place is written and never read
  kept = jax.tree.map(lambda leaf: jnp.zeros((places, *leaf.shape), leaf.dtype), state)

  def body(index, carry):
    state, seen, kept = carry
    place = index % places  # a ring: the last `depth` starting states survive
    kept = jax.tree.map(lambda ring, leaf: jax.lax.dynamic_update_index_in_dim(ring, leaf, place, 0), kept, state)
    state = static.step(problem, state)
    return state, _push(seen, static.read(state)), kept

  _, seen, kept = jax.lax.fori_loop(0, iterations, body, (state, _fill(static, state), kept))
  return seen, (moving, fixed, iterations, kept)


def _backward(static, saved, cotangent):
  moving, fixed, iterations, kept = saved
  problem, start = static.join(moving, fixed)
  window, depth = static.window, static.depth
  zero = lambda tree: jax.tree.map(jnp.zeros_like, _smooth_leaves(tree))

  def pull(state, d_state, index):
    """Cotangents of (problem, state) before iteration `index`, given that of the state after it."""
    place = index - iterations + window  # where the iterate after this one stands in the window
    arrived = jax.lax.dynamic_index_in_dim(cotangent, jnp.maximum(place, 0), keepdims=False)
    arrived = jnp.where(place >= 0, arrived, 0.0)

    def reading(problem_leaves, state_leaves):
      after = static.step(_with_leaves(problem, problem_leaves), _with_leaves(state, state_leaves))
      return _smooth_leaves(after), static.read(after)

    _, back = jax.vjp(reading, _smooth_leaves(problem), _smooth_leaves(state))
    return back((d_state, arrived))

  def body(count, carry):
    d_problem, d_state = carry
    index = iterations - 1 - count
    state = jax.tree.map(lambda ring: jax.lax.dynamic_index_in_dim(ring, index % max(1, depth), keepdims=False), kept)
    more, d_state = pull(state, d_state, index)
    return jax.tree.map(jnp.add, d_problem, more), d_state

  back_steps = jnp.minimum(iterations, depth)
  d_problem, d_state = jax.lax.fori_loop(0, back_steps, body, (zero(problem), zero(start)))

  # The start is reached only when no iteration was cut off; it also fills the places before the first iterate.
  reached = iterations <= depth
  unfilled = (jnp.arange(window) < window - iterations).reshape(-1, *[1] * (cotangent.ndim - 1))
  _, back = jax.vjp(lambda leaves: static.read(_with_leaves(start, leaves)), _smooth_leaves(start))
  (from_window,) = back(jnp.sum(jnp.where(unfilled, cotangent, 0.0), 0))
  d_state = jax.tree.map(lambda d, w: jnp.where(reached, d, 0.0) + w, d_state, from_window)
  return d_problem + d_state, [_no_gradient(leaf) for leaf in fixed], _no_gradient(iterations)


def _is_smooth(leaf):
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _smooth_leaves(tree):
  return [leaf for leaf in jax.tree.leaves(tree) if _is_smooth(leaf)]


def _with_leaves(tree, smooth_leaves):
  leaves, structure = jax.tree.flatten(tree)
  following = iter(smooth_leaves)
  return jax.tree.unflatten(structure, [next(following) if _is_smooth(leaf) else leaf for leaf in leaves])


def _no_gradient(leaf):
  return np.zeros(leaf.shape, jax.dtypes.float0)


_iterate.defvjp(_forward, _backward)
