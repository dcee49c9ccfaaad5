"""The front door: `ffn`, a feed-forward layer that skips the neurons whose gate is off, on whatever machine this is.

    weights = api.weights(w_gate, w_up, w_down)     # once; w_up None: the non-gated form
    y, report = api.ffn(x, weights)

The result is always whole. The gate decides at run time, inside jit too, whether the rest is computed sparsely: where
the density is above `dense_above`, or a positive found no slot, the dense layer is computed instead and the report
says so. Called outside jit it first tries again with more room (compression 8, 4, 2; more ELL slots) and warns.

    implementation   activations             machines
    "cpu"            float32, exact          C++ (cpu.py)
    "xla"            ELL, float32, exact     any; few rows
    "reference"      TwELL, bfloat16         any; the specification
    "triton"         TwELL, bfloat16         NVIDIA GPUs
    "gpu"            TwELL, bfloat16         NVIDIA GPUs, Mosaic
    "tpu"            TwELL, bfloat16         TPUs
    "dense"          none                    any

To train with what is sparse, use `train.sparse_ffn`; the gradient of `ffn` exists, and is that of the dense layer.

Legend: M rows (tokens, all leading axes of x), K input features, N hidden neurons, L output features.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Literal, NamedTuple
import warnings

import jax
import jax.numpy as jnp

from pallas_kernels.twell import cpu, formats, reference, shapes, xla

Implementation = Literal["cpu", "xla", "reference", "triton", "gpu", "tpu", "dense"]
IMPLEMENTATIONS = ("cpu", "xla", "reference", "triton", "gpu", "tpu", "dense")
_PLATFORM = {"cpu": "cpu", "triton": "gpu", "gpu": "gpu", "tpu": "tpu"}  # the others run anywhere
DENSE_ABOVE = 0.2  # density from which dense arithmetic is faster


class Weights(NamedTuple):
  """One layer. Up and down are neuron-major: the rows of a neuron are contiguous in both."""

  gate: jax.Array  # [K, N] the projection whose ReLU decides
  up: jax.Array | None  # [N, K]; None: the non-gated form
  down: jax.Array  # [N, L]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
  """What a call did."""

  nnz: jax.Array  # [...] int32 active neurons of each row
  lost: jax.Array  # [] int32 positives without a slot; they are missing from y only if `dense_above` was None
  dense: jax.Array  # [] bool: the dense layer was computed
  implementation: str = dataclasses.field(metadata={"static": True})
  room: int = dataclasses.field(metadata={"static": True})  # the compression, or the ELL slots; 0: unlimited


class _Config(NamedTuple):
  implementation: str
  room: int
  dense_above: float | None


class _Form(NamedTuple):
  """An implementation: what the gate leaves behind, and what is made of it."""

  gate: Callable[[jax.Array, Weights], Any]  # (x, weights) -> activations
  counts: Callable[[Any], tuple[jax.Array, jax.Array]]  # activations -> (nnz [M], lost [])
  sparse: Callable[[Any, jax.Array, Weights], jax.Array]  # (activations, x, weights) -> y
  dense: Callable[[Any, jax.Array, Weights], jax.Array]


def weights(w_gate: jax.Array, w_up: jax.Array | None, w_down: jax.Array) -> Weights:
  """Returns the layer from matrices as models keep them: w_gate `[K, N]`, w_up `[K, N]` or None, w_down `[N, L]`."""
  return Weights(w_gate, None if w_up is None else jnp.asarray(w_up).T, w_down)


def ffn(
    x: jax.Array, layer: Weights, *, implementation: Implementation | None = None, compression: int = 8, ell: int = 128,
    dense_above: float | None = DENSE_ABOVE,
) -> tuple[jax.Array, Report]:
  """Returns ReLU(x gate) * (x up^T) down and a report.

  Args:
    x: `[..., K]` float32 or bfloat16.
    layer: see `weights`.
    implementation: None chooses by platform, type and number of rows.
    compression: C of TwELL, 8, 4 or 2: 31, 63 or 127 slots for 256 neurons.
    ell: slots of a row of "xla".
    dense_above: density from which the dense layer is computed; None never computes it inside jit, so that
      `report.lost` must be read, and outside only where no room is enough.

  Returns:
    y `[..., L]` in x's dtype.

  Raises:
    NotImplementedError: the implementation named cannot do this here.
    ValueError: shapes or types that do not fit, N beyond 65,536, or an unknown implementation, compression or room.
  """
  flat = x.reshape(-1, x.shape[-1])
  shapes.check(flat, layer.gate, layer.up, layer.down)
  formats.packed_width(layer.down.shape[0], compression)
  if implementation not in (None, *IMPLEMENTATIONS):
    raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
  if ell < 1:
    raise ValueError(f"ell must be at least 1, got {ell}")
  types = {array.dtype for array in jax.tree.leaves((flat, layer))}
  if not types <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
    raise ValueError(f"x and weights must be float32 or bfloat16, got {', '.join(sorted(map(str, types)))}; cast them")
  name = implementation or choose(jnp.result_type(*types), flat.shape[0], len(types) == 1)
  needed = _PLATFORM.get(name, platform := jax.default_backend())
  if needed != platform:
    raise NotImplementedError(f"implementation {name!r} needs a {needed}, this is a {platform}; None chooses what fits")
  room = {"cpu": 0, "dense": 0, "xla": min(ell, layer.down.shape[0])}.get(name, compression)
  y, report = _grow(_Config(name, room, dense_above), flat, layer)
  report = dataclasses.replace(report, nnz=report.nnz.reshape(x.shape[:-1]))
  return y.reshape(*x.shape[:-1], y.shape[-1]), report


def choose(dtype, rows: int, uniform: bool = True) -> str:
  """Returns the implementation for this platform; `uniform`: x and the weights have one type.

  Warns once when a CPU has no C++ path.
  """
  platform = jax.default_backend()
  if platform == "gpu":
    return "triton" if _triton_here() else "dense"
  if platform == "tpu":
    return "tpu"
  if dtype == jnp.float32 and uniform:
    if (reason := cpu.unavailable()) is None:
      return "cpu"
    _warn_no_compiler(reason)
  return "xla" if rows <= xla.MAX_ROWS else "dense"


@functools.cache
def _triton_here() -> bool:
  try:
    import jax_triton  # pylint: disable=import-outside-toplevel,unused-import
  except ImportError:
    return False
  return True


@functools.cache
def _warn_no_compiler(reason: str) -> None:
  warnings.warn(f"sparse layers on this CPU use XLA, which is slower: {reason}", stacklevel=4)


def _grow(config: _Config, x: jax.Array, layer: Weights) -> tuple[jax.Array, Report]:
  """Runs the layer; with concrete results, again with more room as long as positives are lost, and warns."""
  first = None
  while True:
    y, report = _run(config, x, layer)
    try:
      tight = bool(report.lost > 0)
    except jax.errors.ConcretizationTypeError:
      return y, report  # inside jit: the report says what was lost; the dense branch, if allowed, has replaced it
    if not tight or (config.dense_above is not None and _density(report.nnz, layer) > config.dense_above):
      break
    first = first or f"twell: {int(report.lost)} positives found no slot in {_room(config)}"
    if (larger := _larger(config, layer)) is None:
      y, report = _run(_Config("dense", 0, None), x, layer)
      break
    config = larger
  if first:
    used = "no room is enough; computed densely" if report.dense else f"{_room(config)} was used: start with it"
    warnings.warn(f"{first}; {used}", stacklevel=3)
  return y, report


def _larger(config: _Config, layer: Weights) -> _Config | None:
  if config.implementation == "xla":
    n = layer.down.shape[0]
    return config._replace(room=min(2 * config.room, n)) if config.room < n else None
  return config._replace(room=config.room // 2) if config.room > min(formats.COMPRESSIONS) else None


def _room(config: _Config) -> str:
  return f"ell={config.room}" if config.implementation == "xla" else f"compression={config.room}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once(config: _Config, x: jax.Array, layer: Weights) -> tuple[jax.Array, Report]:
  form = _form(config)
  activations = form.gate(x, layer)
  nnz, lost = form.counts(activations)
  report = functools.partial(Report, nnz, lost, implementation=config.implementation, room=config.room)
  if config.implementation == "dense":
    return form.dense(activations, x, layer), report(jnp.array(True))
  if config.dense_above is None:
    return form.sparse(activations, x, layer), report(jnp.array(False))
  dense = (_density(nnz, layer) > config.dense_above) | (lost > 0)
  return jax.lax.cond(dense, form.dense, form.sparse, activations, x, layer), report(dense)


def _density(nnz: jax.Array, layer: Weights) -> jax.Array:
  return jnp.mean(nnz.astype(jnp.float32)) / layer.down.shape[0]


def _forward(config, x, layer):
  return _once(config, x, layer), (x, layer)


def _backward(_, saved, cotangents):
  """The gradient of the dense layer, computed anew from the input: nothing else was kept."""
  return jax.vjp(lambda x, layer: _dense_rest(x @ layer.gate, x, layer), *saved)[1](cotangents[0])


_once.defvjp(_forward, _backward)
_run = jax.jit(_once, static_argnums=0)


def _dense_rest(h: jax.Array, x: jax.Array, layer: Weights) -> jax.Array:
  """Returns the dense layer from its gate product h `[M, N]`."""
  hidden = jax.nn.relu(h).astype(x.dtype)
  hidden = hidden if layer.up is None else hidden * (x @ layer.up.T)
  return (hidden @ layer.down).astype(x.dtype)


def _form(config: _Config) -> _Form:
  product = lambda x, layer: jnp.matmul(x, layer.gate, preferred_element_type=jnp.float32)
  count = lambda h: (jnp.sum(formats.active(h), 1, jnp.int32), jnp.zeros((), jnp.int32))
  if config.implementation == "cpu":
    return _Form(product, count, lambda h, x, layer: cpu.ffn(h, x, layer.up, layer.down), _dense_rest)
  if config.implementation == "dense":
    return _Form(product, count, _dense_rest, _dense_rest)
  module = _module(config.implementation)
  if config.implementation == "xla":
    gate = lambda x, layer: module.gate_ell(x, layer.gate, config.room)
  else:
    gate = lambda x, layer: module.gate_pack(x, layer.gate, config.room)
  return _Form(
      gate,
      lambda sparse: (formats.nnz(sparse), formats.overflow(sparse)),
      lambda sparse, x, layer: (
          module.plain_ffn(sparse, layer.down) if layer.up is None
          else module.gated_ffn(x, sparse, layer.up, layer.down)
      ),
      lambda sparse, x, layer: _dense_rest(x @ layer.gate, x, layer),
  )


def _module(name: str):
  """Returns the module of an implementation, imported when it is wanted."""
  # pylint: disable=import-outside-toplevel
  if name == "triton":
    from pallas_kernels.twell import triton as module
  elif name == "gpu":
    from pallas_kernels.twell import pallas_gpu as module
  elif name == "tpu":
    from pallas_kernels.twell import pallas_tpu as module
  else:
    module = {"xla": xla, "reference": reference}[name]
  return module
