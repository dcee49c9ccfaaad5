"""Wall time of the feed-forward layer, dense against each sparse way, packing included; what a model will gain.

Every number is the median over `reps` of the ratio of two calls made one after the other in alternating order, in one
process, so that the machine's mood falls on both alike. The dense side is XLA with the layout of weights that is
fastest here. The gate's density is set through a constant feature of random inputs.

Legend: M rows (tokens), K input features, N hidden neurons, L output features.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import api, bench_cpu, convert, cpu, formats, train, xla
from pallas_kernels.twell.hybrid import Capacity
from pallas_kernels.twell.shapes import Shape
from sakanajax.core.errors import UserError

Arrays = tuple[Any, Any, Any, Any]  # x [M, K], w_gate [K, N], w_up [K, N] or None, w_down [N, L]
Call = Callable[[], Any]


class Times(NamedTuple):
  """Medians of one comparison."""

  dense_ms: float
  other_ms: float
  speedup: float  # median of dense / other, pair by pair


class Curve(NamedTuple):
  """Speed-up of one layer by density, measured here."""

  density: tuple[float, ...]  # rising
  speedup: tuple[float, ...]


def arrays_of(shape: Shape, density: float, gated: bool, seed: int, dtype: Any = jnp.float32) -> Arrays:
  """Returns random arrays whose gate has about `density` positives."""
  x, w_gate, w_up, w_down = bench_cpu.problem(shape.m, shape.k, shape.n, shape.l, density, seed)
  cast = lambda array: array if dtype == jnp.float32 else array.astype(jnp.dtype(dtype))
  return cast(x), cast(w_gate), cast(w_up) if gated else None, cast(w_down)


def best_layout(arrays: Arrays, reps: int) -> str:
  """Returns the layout with which XLA's dense layer is fastest (a letter for each weight, see `bench_cpu.dense`)."""
  return bench_cpu.best_dense(arrays, reps)[1]


def sparse_call(
    arrays: Arrays, dense_above: float | None, implementation: api.Implementation | None = None
) -> tuple[Call, api.Report]:
  """Returns (`api.ffn` as a call without arguments, the report of one run)."""
  layer = api.weights(*(None if w is None else jnp.asarray(w) for w in arrays[1:]))
  x = jnp.asarray(arrays[0])
  run = jax.jit(lambda x, layer: api.ffn(x, layer, implementation=implementation, dense_above=dense_above))
  return lambda: run(x, layer)[0], run(x, layer)[1]


def pairs(dense: Call, other: Call, reps: int) -> Times:
  """Times two calls against each other."""
  for call in (dense, other):
    jax.block_until_ready(call())
  rows, median = bench_cpu.paired(dense, other, reps), statistics.median
  return Times(1e3 * median(a for a, _ in rows), 1e3 * median(b for _, b in rows), median(a / b for a, b in rows))


def check_machine() -> None:
  """Raises UserError on a CPU without the C++ path: there is nothing fast to time."""
  if jax.default_backend() == "cpu" and (reason := cpu.unavailable()):
    raise UserError(f"the sparse layer cannot be timed here: {reason}")


# --- the other ways ------------------------------------------------------------------------------------------------


def alternatives(arrays: Arrays, nnz_max: int) -> dict[str, Callable[[], Any]]:
  """Returns the other sparse ways of computing the same layer as calls; each includes what makes its format.

  Args:
    arrays: gated or plain.
    nnz_max: entries of the fullest row, the room of ELL and BCSR.

  Ways: `ell` (a row of ELL needs the whole row, then gathers weights: `xla.py`), `packed` (TwELL words in bfloat16
  through C++, CPU only), `bcsr` (jax.experimental.sparse; plain form only, as it has no sampled product).
  """
  x, w_gate, w_down = (jnp.asarray(arrays[i]) for i in (0, 1, 3))
  w_up = None if arrays[2] is None else jnp.asarray(np.ascontiguousarray(arrays[2].T))
  room = max(1, nnz_max)

  def ell(x, w_gate, w_up, w_down):
    sparse = xla.gate_ell(x, w_gate, room)
    return xla.plain_ffn(sparse, w_down) if w_up is None else xla.gated_ffn(x, sparse, w_up, w_down)

  def packed(x, w_gate, w_up, w_down):
    sparse = cpu.gate_pack(x, w_gate)
    return cpu.plain_ffn(sparse, w_down) if w_up is None else cpu.gated_ffn(x, sparse, w_up, w_down)

  def bcsr(x, w_gate, w_up, w_down):
    sparse = xla.gate_ell(x, w_gate, room)
    return convert.to_bcsr(sparse, room * x.shape[0]) @ w_down

  ways = {"ell": ell} | ({"packed": packed} if jax.default_backend() == "cpu" and x.dtype == jnp.float32 else {})
  ways |= {"bcsr": bcsr} if w_up is None else {}
  bind = lambda way: functools.partial(jax.jit(way), x, w_gate, w_up, w_down)
  return {name: bind(way) for name, way in ways.items()}


def imposed(arrays: Arrays, density: float) -> dict[str, Callable[[], Any]]:
  """Returns imposed sparsity of a SiLU-gated layer as calls: a threshold on the gate, and the k largest |h|.

  The threshold (calibrated for `density`) is known before the up projection, so both other products are sparse, through
  the same C++ as ours. The k largest of the product need both projections in full, and save the last one only.
  """
  x, w_gate, w_down = (jnp.asarray(arrays[i]) for i in (0, 1, 3))
  up_rows = jnp.asarray(np.ascontiguousarray(arrays[2].T))
  up = jnp.asarray(arrays[2])
  n = w_gate.shape[1]
  t = float(jnp.quantile(jnp.abs(jax.nn.silu(x @ w_gate)), 1 - density))
  k = max(1, round(density * n))

  def threshold(x, w_gate, up_rows, w_down):
    h = jax.nn.silu(x @ w_gate)
    return cpu.ffn(jnp.where(jnp.abs(h) > t, h, 0), x, up_rows, w_down)

  def top_k(x, w_gate, up, w_down):
    h = jax.nn.silu(x @ w_gate) * (x @ up)
    _, index = jax.lax.top_k(jnp.abs(h), k)
    counts = jnp.full(h.shape[0], k, jnp.int32)
    return xla.plain_ffn(formats.Ell(jnp.take_along_axis(h, index, 1), index.astype(jnp.uint32), counts, n), w_down)

  calls = {"topk": functools.partial(jax.jit(top_k), x, w_gate, up, w_down)}
  if jax.default_backend() == "cpu" and t > 0.2785:  # below it SiLU's dip would be kept, which the C++ reads as off
    calls["threshold"] = functools.partial(jax.jit(threshold), x, w_gate, up_rows, w_down)
  return calls


# --- memory --------------------------------------------------------------------------------------------------------


def backward_bytes(shape: Shape, room: Capacity, dtype: Any = jnp.bfloat16) -> dict[str, float]:
  """Returns the bytes that the gated layer keeps for its backward pass, dense, hybrid and their ratio; nothing runs.

  `backward_bytes_dense` is the leanest dense layer, which keeps its two projections alone; `backward_bytes_autodiff` is
  what XLA's differentiation keeps if nothing is told to it.
  """
  make = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
  args = (make(shape.m, shape.k), make(shape.k, shape.n), make(shape.k, shape.n), make(shape.n, shape.l))
  dense, plain = (train.backward_bytes(f, *args) for f in (train.lean_dense_ffn, train.dense_ffn))
  hybrid = train.backward_bytes(lambda *a: train.sparse_ffn(*a, capacity=room)[:2], *args)
  sizes = {"backward_bytes_dense": float(dense), "backward_bytes_hybrid": float(hybrid),
           "backward_bytes_autodiff": float(plain)}
  return sizes | {"backward_bytes_ratio": dense / hybrid}


# --- prediction ----------------------------------------------------------------------------------------------------


def measure_curve(
    dim: int, hidden: int, gated: bool = True, rows: int = 256, densities: Sequence[float] = (0.001, 0.01, 0.05, 0.2),
    reps: int = 9, dense_above: float | None = api.DENSE_ABOVE,
) -> Curve:
  """Returns the speed-up of one layer of this size on this machine. Raises UserError where there is no sparse path."""
  check_machine()
  shape, layout, points = Shape(rows, dim, hidden, dim), "", []
  for density in sorted(densities):
    arrays = arrays_of(shape, density, gated, seed=0)
    layout = layout or best_layout(arrays, 3)
    call, report = sparse_call(arrays, dense_above)
    dense = bench_cpu.dense_call(arrays, layout)
    points.append((float(jnp.mean(report.nnz)) / hidden, pairs(dense, call, reps).speedup))
  return Curve(*zip(*sorted(points)))


def interpolate(curve: Curve, density: float) -> float:
  """Returns the speed-up at a density, linear in its logarithm; beyond the ends, that of the end."""
  tiny = 1e-6
  where = np.log(np.maximum(curve.density, tiny))
  return float(np.interp(math.log(max(density, tiny)), where, curve.speedup))


def predict_speedup(nnz: Sequence[float], hidden: int, curve: Curve) -> dict[str, Any]:
  """Predicts the speed-up of a model's feed-forward layers from the non-zeros of the user's own text.

  Args:
    nnz: `[L]` active neurons per token of each layer (`inspection.Report.nnz_layer`).
    hidden: N.
    curve: of this machine (`measure_curve`).

  Returns:
    {"speedup": of all layers together, L / sum of 1 / s; "layers": [L] of each; "density": [L]}.
  """
  if not len(nnz):
    raise ValueError("no layer was measured")
  layers = [interpolate(curve, n / hidden) for n in nnz]
  return {"speedup": len(layers) / sum(1 / s for s in layers), "layers": layers, "density": [n / hidden for n in nnz]}
