"""A feed-forward layer to train with: exact gradients, and only active neurons are kept for them (section 3.4).

    P = ReLU(X G),   R = X U^T at P's pattern,   T = P * R,   y = T D,   l1 = sum |T| / M
    dT = (dy D^T at the pattern) + dl1 / M * sign(R),   dR = dT * P,   dU = dT * R
    dX = dR U + dU G^T,   dUp = dR^T X,   dGate = X^T dU,   dDown = T^T dy

The backward pass needs X, P, R and their pattern; T is the product of two of them, so unlike the published kernels we
do not keep it. sign(R) is the sign of T because P > 0 on the pattern. Rows that overflow the ELL part are in the
dense tail and have their exact gradient; rows that overflow the tail are dropped and counted (`Counts.overflow`):
enlarge the capacity (`grown`) and repeat the step.

Four operations do the work; `XLA` is their specification: it makes a dense matrix for the moment of each product, so it
saves memory but no arithmetic. An accelerator brings its own `Ops`.

Legend: M rows (tokens), K input features, N hidden neurons, L output features.
"""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import formats, hybrid
from pallas_kernels.twell.hybrid import Capacity, Hybrid, Pattern


class Ops(NamedTuple):
  """The four products of a training step; a sparse matrix is a `Hybrid` of M rows and N columns."""

  gate: Callable[[jax.Array, jax.Array, Capacity], Hybrid]  # (x [M, K], g [K, N], capacity) -> ReLU(x g) in x's dtype
  sample: Callable[[jax.Array, jax.Array, Pattern], Hybrid]  # (a [M, K], w [N, K], pattern) -> a w^T there, float32
  matmul: Callable[[Hybrid, jax.Array], jax.Array]  # (s, w [N, L]) -> s w, [M, L] float32
  matmul_t: Callable[[Hybrid, jax.Array], jax.Array]  # (s, a [M, L]) -> s^T a, [N, L] float32


class Counts(NamedTuple):
  """What a step has to say beside its result."""

  nnz: jax.Array  # [M] int32 active neurons of each row
  fired: jax.Array  # [N] int32 rows in which each neuron was active
  overflow: jax.Array  # [] int32 rows that found no room and are missing from y: repeat with a larger capacity


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


XLA = Ops(
    gate=lambda x, g, capacity: hybrid.pack(_product(x, g), capacity, x.dtype),
    sample=lambda a, w, pattern: hybrid.sample(_product(a, w.T), pattern),
    matmul=lambda s, w: _product(hybrid.to_dense(s), w),
    matmul_t=lambda s, a: _product(hybrid.to_dense(s).T, a),
)


class _Static(NamedTuple):
  ops: Ops
  capacity: Capacity


def sparse_ffn(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array | None, w_down: jax.Array, *, capacity: Capacity, ops: Ops = XLA
) -> tuple[jax.Array, jax.Array, Counts]:
  """Returns (y, l1, counts) of ReLU(x w_gate) * (x w_up) w_down, differentiable in everything but `counts`.

  Weights have the layout that models keep them in: unlike `reference.py`, w_up is `[K, N]` here.

  Args:
    x: `[M, K]`, float32 or bfloat16; P and R are kept in its type.
    w_gate: `[K, N]`.
    w_up: `[K, N]`; None: the non-gated form ReLU(x w_gate) w_down.
    w_down: `[N, L]`.
    capacity: the room of the hybrid format, static.
    ops: the products.

  Returns:
    y `[M, L]` in x's dtype; l1 `[]` float32, the sum over neurons of |h| (of the product, not the gate), mean over
    rows: divide by N for the form of the paper's equation 2; the counts.

  Raises:
    ValueError: shapes that do not belong together, or N beyond 65,536.
  """
  up_shape = w_gate.shape if w_up is None else w_up.shape
  if x.ndim != 2 or (x.shape[1], w_down.shape[0]) != w_gate.shape or up_shape != w_gate.shape:
    raise ValueError(
        f"x [M, K], w_gate [K, N], w_up [K, N], w_down [N, L] do not belong together: {x.shape}, {w_gate.shape},"
        f" {up_shape}, {w_down.shape}"
    )
  static = _Static(ops, capacity)
  return _plain(static, x, w_gate, w_down) if w_up is None else _gated(static, x, w_gate, w_up, w_down)


def _counts(p: Hybrid) -> Counts:
  pattern = p.pattern
  columns = jnp.where(pattern.used, pattern.columns.astype(jnp.int32), pattern.n)
  fired = jnp.zeros(pattern.n, jnp.int32).at[columns].add(1, mode="drop") + jnp.sum(pattern.tail_on, 0, jnp.int32)
  return Counts(pattern.counts, fired, pattern.overflow)


def _times(a: Hybrid, b: Hybrid, dtype) -> Hybrid:
  return hybrid.zip_values(jnp.multiply, a, b, dtype=dtype)


def _cotangent(static: _Static, dy, dl1, w_down, signs: Hybrid) -> Hybrid:
  """Returns dT in float32: (dy D^T) at the pattern plus dl1 / M times the signs."""
  from_y = static.ops.sample(dy, w_down, signs.pattern)
  rate = dl1 / dy.shape[0]
  return hybrid.zip_values(lambda d, s: d + rate * jnp.sign(s), from_y, signs, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(static, x, w_gate, w_up, w_down):
  return _gated_forward(static, x, w_gate, w_up, w_down)[0]


def _gated_forward(static, x, w_gate, w_up, w_down):
  p = static.ops.gate(x, w_gate, static.capacity)
  r = static.ops.sample(x, w_up.T, p.pattern)
  r = Hybrid(p.pattern, r.ell.astype(x.dtype), r.tail.astype(x.dtype))
  t = _times(p, r, x.dtype)
  y = static.ops.matmul(t, w_down).astype(x.dtype)
  l1 = hybrid.total(jnp.abs, t) / x.shape[0]
  return (y, l1, _counts(p)), (x, p, (r.ell, r.tail), w_gate, w_up, w_down)


def _gated_backward(static, saved, cotangents):
  x, p, (r_ell, r_tail), w_gate, w_up, w_down = saved
  dy, dl1, _ = cotangents
  ops, dtype = static.ops, x.dtype
  r = Hybrid(p.pattern, r_ell, r_tail)
  dt = _cotangent(static, dy, dl1, w_down, r)
  dr, du, t = _times(dt, p, dtype), _times(dt, r, dtype), _times(p, r, dtype)
  dx = ops.matmul(dr, w_up.T) + ops.matmul(du, w_gate.T)
  return (
      dx.astype(dtype),
      ops.matmul_t(du, x).T.astype(w_gate.dtype),
      ops.matmul_t(dr, x).T.astype(w_up.dtype),
      ops.matmul_t(t, dy).astype(w_down.dtype),
  )


_gated.defvjp(_gated_forward, _gated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain(static, x, w_gate, w_down):
  return _plain_forward(static, x, w_gate, w_down)[0]


def _plain_forward(static, x, w_gate, w_down):
  p = static.ops.gate(x, w_gate, static.capacity)
  y = static.ops.matmul(p, w_down).astype(x.dtype)
  return (y, hybrid.total(jnp.abs, p) / x.shape[0], _counts(p)), (x, p, w_gate, w_down)


def _plain_backward(static, saved, cotangents):
  x, p, w_gate, w_down = saved
  dy, dl1, _ = cotangents
  ones = Hybrid(p.pattern, p.pattern.used.astype(jnp.float32), p.pattern.tail_on.astype(jnp.float32))
  dp = _cotangent(static, dy, dl1, w_down, ones)
  dp = Hybrid(p.pattern, dp.ell.astype(x.dtype), dp.tail.astype(x.dtype))
  return (
      static.ops.matmul(dp, w_gate.T).astype(x.dtype),
      static.ops.matmul_t(dp, x).T.astype(w_gate.dtype),
      static.ops.matmul_t(p, dy).astype(w_down.dtype),
  )


_plain.defvjp(_plain_forward, _plain_backward)


def dense_ffn(x, w_gate, w_up, w_down):
  """Returns (y, l1) of the same layer as XLA differentiates it: the baseline of memory, the oracle of gradients."""
  h = jax.nn.relu(x @ w_gate)
  h = h if w_up is None else h * (x @ w_up)
  return h @ w_down, jnp.sum(jnp.abs(h.astype(jnp.float32))) / x.shape[0]


def lean_dense_ffn(x, w_gate, w_up, w_down):
  """`dense_ffn` that keeps its projections alone, and computes what is elementwise once more: the leanest dense one."""
  return jax.checkpoint(dense_ffn, policy=jax.checkpoint_policies.dots_saveable)(x, w_gate, w_up, w_down)


def grown(capacity: Capacity, counts: Counts) -> Capacity:
  """Returns a capacity that would have held this step (concrete counts): a tail of twice the long rows, at most M."""
  long_rows = int(np.sum(np.asarray(counts.nnz) > capacity.ell))
  return Capacity(capacity.ell, max(capacity.tail, min(2 * long_rows, len(counts.nnz))))


def backward_bytes(fn: Callable, *args) -> int:
  """Returns the bytes that `jax.vjp(fn, *args)` keeps until the backward pass, beside the arguments themselves.

  They are read from the traced program: every array that the backward function closes over, once, unless it is an
  argument (weights and the layer's input exist anyway). Nothing is computed, so args may be ShapeDtypeStructs.
  """
  closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fn, *a)[1]))(*args)
  inputs = {id(var) for var in closed.jaxpr.invars + closed.jaxpr.constvars}
  kept = {id(var): var.aval for var in closed.jaxpr.outvars if id(var) not in inputs and not hasattr(var, "val")}
  return sum(aval.size * aval.dtype.itemsize for aval in kept.values())
