"""`python -m pallas_kernels.twell.bench_cpu`: the layer of a 1.5B model on this CPU, dense XLA against the sparse path.

Each row is the median over `--reps` of the ratio of two calls made one after the other, in alternating order,
float32, packing and counting included. The dense side is XLA with the layouts that are fastest here, found first. The
gate's density is set through a constant feature; active neurons are independent, which real ones are not.

Measure on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import api, cpu, shapes

DENSITIES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


def problem(m: int, k: int, n: int, l: int, density: float, seed: int = 0):
  """Returns (x, w_gate, w_up, w_down) as numpy float32 with about `density` of the gates positive."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((m, k), np.float32)
  x[:, 0] = 1.0
  w_gate = rng.standard_normal((k, n), np.float32) / np.float32(np.sqrt(k))
  w_gate[0] = -statistics.NormalDist().inv_cdf(1 - density)
  w_up, w_down = (rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(k)) for shape in ((k, n), (n, l)))
  return x, w_gate, w_up, w_down


def dense(x, w_gate, w_up, w_down, layout: str):
  """The dense layer; `layout` holds a letter for each weight: n as it is, t transposed in memory."""
  turned = [w if w is None or letter == "n" else w.T for w, letter in zip((w_gate, w_up, w_down), layout)]
  h = jax.nn.relu(x @ turned[0])
  h = h if w_up is None else h * (x @ turned[1])
  return h @ turned[2]


def seconds(call) -> float:
  """Returns the wall time of one finished call."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def paired(first, second, reps: int) -> list[tuple[float, float]]:
  """Returns the seconds of two calls, `reps` times one after the other, in alternating order."""
  out = []
  for rep in range(reps):
    taken = {side: seconds((first, second)[side]) for side in ((0, 1) if rep % 2 == 0 else (1, 0))}
    out.append((taken[0], taken[1]))
  return out


def dense_call(arrays, layout: str):
  """Returns the compiled dense layer as a call without arguments."""
  held = [None if w is None else jnp.asarray(np.ascontiguousarray(w.T) if letter == "t" else w)
          for w, letter in zip(arrays[1:], layout)]
  run, x = jax.jit(dense, static_argnums=4), jnp.asarray(arrays[0])
  return lambda: run(x, *held, layout)


def best_dense(arrays, reps: int):
  """Returns (compiled dense layer without arguments, its layout): the fastest of the layouts."""
  calls = {}
  for layout in map("".join, itertools.product("nt", repeat=3)):
    if arrays[2] is None and layout[1] == "t":
      continue
    calls[layout] = dense_call(arrays, layout)
    jax.block_until_ready(calls[layout]())
  times = {layout: [] for layout in calls}
  for _ in range(reps):
    for layout, call in calls.items():
      times[layout].append(seconds(call))
  layout = min(times, key=lambda name: statistics.median(times[name]))
  return calls[layout], layout


def compare(m: int, density: float, gated: bool, reps: int, dense_above: float | None, shape=shapes.CPU) -> dict:
  """Returns the medians of one row: milliseconds of both sides and their paired ratio."""
  arrays = problem(m, shape.k, shape.n, shape.l, density)
  arrays = arrays if gated else (arrays[0], arrays[1], None, arrays[3])
  reference, layout = best_dense(arrays, max(3, reps // 4))
  layer = api.weights(*(None if w is None else jnp.asarray(w) for w in arrays[1:]))
  x = jnp.asarray(arrays[0])
  run = jax.jit(lambda x, layer: api.ffn(x, layer, implementation="cpu", dense_above=dense_above))
  gate = jax.jit(jnp.matmul)
  y, report = run(x, layer)
  error = float(jnp.max(jnp.abs(y - reference())) / jnp.max(jnp.abs(y)))
  jax.block_until_ready(gate(x, layer.gate))
  pairs = paired(reference, lambda: run(x, layer)[0], reps)
  alone = [seconds(lambda: gate(x, layer.gate)) for _ in range(reps)]
  return {
      "m": m, "gated": gated, "density": round(float(jnp.mean(report.nnz)) / shape.n, 5), "layout": layout,
      "dense_ms": round(1e3 * statistics.median(p[0] for p in pairs), 2),
      "sparse_ms": round(1e3 * statistics.median(p[1] for p in pairs), 2),
      "gate_ms": round(1e3 * statistics.median(alone), 2),
      "speedup": round(statistics.median(p[0] / p[1] for p in pairs), 3),
      "switched": bool(report.dense), "error": error,
  }


def main(argv: list[str] | None = None) -> int:
  """Prints one JSON line for each row."""
  parser = argparse.ArgumentParser(prog="python -m pallas_kernels.twell.bench_cpu", description=__doc__)
  parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
  parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES))
  parser.add_argument("--reps", type=int, default=15)
  parser.add_argument("--dense_above", type=float, default=None, help="density of the switch to dense; default: never")
  parser.add_argument("--form", choices=("gated", "plain", "both"), default="both")
  args = parser.parse_args(argv)
  if reason := cpu.unavailable():
    print(f"bench_cpu: {reason}", file=sys.stderr)
    return 2
  forms = {"gated": [True], "plain": [False], "both": [True, False]}[args.form]
  for m, gated, density in itertools.product(args.rows, forms, args.densities):
    print(json.dumps(compare(m, density, gated, args.reps, args.dense_above)), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
