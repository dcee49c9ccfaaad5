"""Shapes: what a layer's arrays must satisfy, and the sizes that tests and benchmarks use.

Legend: M rows (tokens), K input features, N hidden neurons, L output features.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.twell import formats


class Shape(NamedTuple):
  m: int
  k: int
  n: int
  l: int


PUBLISHED = Shape(64 * 2048, 2048, 5632, 2048)  # 0.5B to 2B gated models: 64 sequences of 2048 tokens
PUBLISHED_PLAIN = Shape(64 * 2048, 2048, 8192, 2048)  # their non-gated form
CPU = Shape(256, 2048, 5632, 2048)  # what a laptop serves: one layer of them, 256 tokens
ODD = (  # one row, odd K, N that is no multiple of 256 or of anything, L unlike K
    Shape(1, 7, 256, 7),
    Shape(5, 33, 300, 17),
    Shape(130, 64, 1025, 64),
    Shape(3, 1, 1, 1),
)


def check(
    x: jax.Array, w_gate: jax.Array | None, w_up: jax.Array | None, w_down: jax.Array, n: int | None = None
) -> None:
  """Raises ValueError unless x `[M, K]`, w_gate `[K, N]`, w_up `[N, K]`, w_down `[N, L]` belong together.

  Args:
    x: the input.
    w_gate: the projection that decides which neurons are on; None: they come packed.
    w_up: None for the non-gated form.
    w_down: back to the output.
    n: columns of the packed activations, when there are any.
  """
  shapes = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down, "x": x}
  for name, array in shapes.items():
    if array is not None and array.ndim != 2:
      raise ValueError(f"{name} must have two dimensions, got {array.shape}; flatten the leading ones")
  k, n = x.shape[1], w_down.shape[0] if n is None else n
  wanted = {"w_gate": (k, n), "w_up": (n, k), "w_down": (n, w_down.shape[1])}
  for name, shape in wanted.items():
    if shapes[name] is not None and shapes[name].shape != shape:
      raise ValueError(f"{name} must have shape {shape} for x {x.shape} and {n} neurons, got {shapes[name].shape}")
  if not 0 < n <= formats.MAX_N:
    raise ValueError(f"a layer of 1 to {formats.MAX_N} neurons was expected, got {n}; split it")
