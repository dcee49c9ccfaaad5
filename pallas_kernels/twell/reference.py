"""The specification of the sparse feed-forward layer: decode, then dense arithmetic in float32.

Every other implementation (`xla`, `cpu`, `triton`, `pallas_tpu`, `pallas_gpu`) has these signatures and is held against
these functions. The up projection is neuron-major, `[N, K]` as the down projection is: a neuron is then one
contiguous row in both, which is what a kernel that visits only the active neurons must read.

    gated      y = (ReLU(x G) * (x U^T)) D          non-gated  y = ReLU(x G) D

A gate that is NaN or inf does what it does in the dense layer. Weights are taken to be finite: dense arithmetic turns
the 0 of a neuron that is off times an inf of its weights into NaN, while a kernel that does not read them cannot.

Legend: M rows (tokens), K input features, N hidden neurons, L output features (K in a transformer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.twell import formats
from pallas_kernels.twell.formats import Ell, Packed


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
  """a `[M, K]` times b `[K, N]` with float32 products and sums."""
  return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def gate_pack(x: jax.Array, w_gate: jax.Array, compression: int = 8) -> Packed:
  """Returns the packed ReLU(x G): x `[M, K]`, w_gate `[K, N]`."""
  return formats.pack(matmul(x, w_gate), compression)


def gate_ell(x: jax.Array, w_gate: jax.Array, capacity: int) -> Ell:
  """Returns ReLU(x G) in ELL with float32 values: the exact path."""
  return formats.to_ell(matmul(x, w_gate), capacity)


def gated_ffn(x: jax.Array, packed: Packed | Ell, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
  """Returns y `[M, L]` in x's dtype: x `[M, K]`, packed ReLU(x G), w_up `[N, K]`, w_down `[N, L]`."""
  gate, on = formats.decode(packed)
  return matmul(jnp.where(on, gate * matmul(x, w_up.T), 0.0), w_down).astype(x.dtype)


def plain_ffn(packed: Packed | Ell, w_down: jax.Array) -> jax.Array:
  """Returns y `[M, L]` in w_down's dtype: packed ReLU(x G), w_down `[N, L]`."""
  return matmul(formats.decode(packed)[0], w_down).astype(w_down.dtype)


def dense_ffn(x: jax.Array, w_gate: jax.Array, w_up: jax.Array | None, w_down: jax.Array) -> jax.Array:
  """Returns the same layer without any sparsity: y `[M, L]` in x's dtype; w_up None is the non-gated form."""
  hidden = jax.nn.relu(matmul(x, w_gate))
  hidden = hidden if w_up is None else hidden * matmul(x, w_up.T)
  return matmul(hidden, w_down).astype(x.dtype)
