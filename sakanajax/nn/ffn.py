"""Feed-forward layers: gated and plain.

    glu: y = (act(x W_gate) * (x W_up)) W_down       act = silu: SwiGLU, relu: ReGLU, gelu: GEGLU
    mlp: y = act(x W_up) W_down

Kernels are `[in, out]`, N(0, init_scale^2) at first; biases (`gate_bias`, ...) are off by default, and start at 0.

Legend: D model width, N hidden width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sakanajax.nn.layer import Layer, dense, kernels, stateless

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def glu(dim: int, hidden: int, activation: str = "silu", bias: bool = False, init_scale: float = 0.02) -> Layer:
  """Gated linear unit (Shazeer, arXiv 2002.05202); params {"gate": [D, N], "up": [D, N], "down": [N, D]}."""
  act = _activation(activation)

  def apply(params, x, ctx):
    h = act(_affine(params, "gate", x)) * _affine(params, "up", x)
    return _affine(params, "down", h)

  return stateless(_init({"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}, bias, init_scale), apply)


def mlp(dim: int, hidden: int, activation: str = "gelu", bias: bool = False, init_scale: float = 0.02) -> Layer:
  """One hidden layer; params {"up": [D, N], "down": [N, D]}."""
  act = _activation(activation)

  def apply(params, x, ctx):
    return _affine(params, "down", act(_affine(params, "up", x)))

  return stateless(_init({"up": (dim, hidden), "down": (hidden, dim)}, bias, init_scale), apply)


def _activation(name: str):
  if name not in ACTIVATIONS:
    raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
  return ACTIVATIONS[name]


def _init(shapes: dict[str, tuple[int, int]], bias: bool, scale: float):
  def init(key):
    biases = {f"{name}_bias": jnp.zeros(shape[1]) for name, shape in shapes.items()} if bias else {}
    return kernels(key, shapes, scale) | biases

  return init


def _affine(params, name: str, x: jax.Array) -> jax.Array:
  y = dense(x, params[name])
  bias = params.get(f"{name}_bias")
  return y if bias is None else y + bias.astype(y.dtype)
