"""The timing tasks: one layer over densities and sizes (`ffn`), and a whole trained model (`lm`).

Keys: `d005` is a density of 0.005, `d3` of 0.3; a size other than the first is `m1_d005`.

Legend: M rows (tokens), N hidden neurons, L layers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import bench_cpu
from pallas_kernels.twell.hybrid import Capacity
from pallas_kernels.twell.shapes import Shape
from sakanajax.nn.layer import collect
from sakanajax.twell import fitting, inspection, loss as losses, model as models, sparsify, speed, texts
from sakanajax.twell.config import Config

MEMORY_ROWS = 4096  # of the shapes that the saved bytes are computed for; nothing runs


def name_of(density: float) -> str:
  """0.005 -> "d005"."""
  return "d" + f"{density:.6f}".rstrip("0").split(".")[1]


def layer(cfg: Config, gated: bool, seed: int) -> dict[str, float]:
  """Times one form over densities and sizes: speed-ups, milliseconds, the switch to dense, Pearson's correlation."""
  speed.check_machine()
  own, dtype = cfg.speed, jnp.dtype(cfg.speed.dtype)
  form, out, first = "gated" if gated else "plain", {}, own.rows[0]
  points: list[tuple[float, float]] = []
  for m in own.rows:
    shape, layout = Shape(m, own.dim, own.hidden, own.dim), ""
    for density in own.densities:
      arrays = speed.arrays_of(shape, density, gated, seed, dtype)
      layout = layout or speed.best_layout(arrays, max(3, own.reps // 4))
      dense = bench_cpu.dense_call(arrays, layout)
      call, report = speed.sparse_call(arrays, None)
      times, name = speed.pairs(dense, call, own.reps), name_of(density) if m == first else f"m{m}_{name_of(density)}"
      out |= {f"speedup_{form}_{name}": times.speedup, f"dense_ms_{form}_{name}": times.dense_ms,
              f"sparse_ms_{form}_{name}": times.other_ms, f"error_{form}_{name}": _error(dense(), call())}
      if m == first:
        points.append((float(jnp.mean(report.nnz)), times.speedup))
      if m == first and density == max(own.densities):
        out |= _switched(arrays, dense, own, f"{form}_{name}")
  out[f"pearson_nnz_speedup_{form}"] = inspection.pearson(*zip(*points))
  return out | ({"pearson_nnz_speedup": out[f"pearson_nnz_speedup_{form}"]} | memory(cfg) if gated else {})


def _switched(arrays: speed.Arrays, dense: speed.Call, own: Any, name: str) -> dict[str, float]:
  """The same layer with the automatic switch to dense arithmetic."""
  call, report = speed.sparse_call(arrays, own.dense_above)
  times = speed.pairs(dense, call, own.reps)
  return {f"switched_{name}": float(report.dense), f"speedup_switched_{name}": times.speedup}


def _error(want: jax.Array, got: jax.Array) -> float:
  """Largest difference over the largest value."""
  want, got = want.astype(jnp.float32), got.astype(jnp.float32)
  return float(jnp.max(jnp.abs(want - got)) / jnp.max(jnp.abs(want)))


def memory(cfg: Config) -> dict[str, float]:
  """Bytes kept for the backward pass at the published capacity, bfloat16, from the traced program; keys of `speed`."""
  rows = max(cfg.speed.rows[0], MEMORY_ROWS if cfg.scale != "smoke" else 0)
  shape = Shape(rows, cfg.speed.dim, cfg.speed.hidden, cfg.speed.dim)
  return speed.backward_bytes(shape, Capacity(min(128, cfg.speed.hidden), -(-rows // 8)))


def others(cfg: Config, seed: int) -> dict[str, float]:
  """Times ELL, packed words, BCSR, top-k and threshold against the same dense layer; the first of the sizes."""
  speed.check_machine()
  own, dtype, out = cfg.speed, jnp.dtype(cfg.speed.dtype), {}
  shape = Shape(own.rows[0], own.dim, own.hidden, own.dim)
  for density in own.other_densities:
    for gated in (True, False):
      form = "gated" if gated else "plain"
      arrays = speed.arrays_of(shape, density, gated, seed, dtype)
      _, report = speed.sparse_call(arrays, None)
      dense = bench_cpu.dense_call(arrays, speed.best_layout(arrays, max(3, own.reps // 4)))
      ways = speed.alternatives(arrays, int(jnp.max(report.nnz)))
      if gated:  # a dense model's gates: half of them positive
        ways |= speed.imposed(speed.arrays_of(shape, 0.5, gated, seed, dtype), density)
      for way, call in ways.items():
        out[f"speedup_{form}_{name_of(density)}_{way}"] = speed.pairs(dense, call, own.reps).speedup
  return out


def whole_model(cfg: Config, unit_seed: int, context: Any) -> dict[str, float]:
  """Times the forward pass of a trained model, dense against packed, on its test text.

  The model is that of `cfg.checkpoint`, or one that is trained here with the config's own settings.
  """
  speed.check_machine()
  if cfg.checkpoint:
    trained, params = fitting.load_unit(cfg.checkpoint)
  else:
    trained, state = cfg, fitting.fit(
        cfg, seed=unit_seed, workdir=context.workdir, fingerprint=context.fingerprint, desc=context.desc)
    params = fitting.train.ema_params(state, cfg.train.ema_decay)
  report = fitting.Evaluator(trained).report(params, "test")
  dense = fitting.dense_model(trained.model)
  sparse, packed = sparsify.sparse_lm(trained.model), sparsify.sparsify(params, trained.model.activation)
  out = {"ce": report.ce, "nnz": report.nnz, "sparsity": report.sparsity}
  for i, rows in enumerate(cfg.speed.rows):
    batch, ways = _rows(trained, rows), {}
    for name, model, weights in (("dense", dense, params), ("sparse", sparse, packed)):
      run = jax.jit(lambda p, b, model=model: model.apply(p, b["tokens"], (), losses.context(b))[::2])
      ways[name] = functools.partial(run, weights, batch)
    out |= _compare(ways, cfg.speed.reps, "" if i == 0 else f"_b{rows}")
  return out | _predicted(trained, report, cfg.speed)


def _rows(cfg: Config, rows: int) -> dict[str, jax.Array]:
  """The first rows of the test split, repeated where it has fewer."""
  ids = texts.tokens(cfg.data, texts.tokenizer_of(cfg.data), "test")
  index = np.arange(rows) % texts.text.count(ids, cfg.data.length)
  return jax.tree.map(jnp.asarray, texts.text.rows(ids, index, cfg.data.length))


def _compare(ways: dict, reps: int, suffix: str) -> dict[str, float]:
  logits, aux = ways["sparse"]()
  times = speed.pairs(lambda: ways["dense"]()[0], lambda: ways["sparse"]()[0], reps)
  return {
      f"speedup_forward{suffix}": times.speedup,
      f"dense_ms{suffix}": times.dense_ms,
      f"sparse_ms{suffix}": times.other_ms,
      f"logits_error{suffix}": _error(ways["dense"]()[0], logits),
      f"switched_layers{suffix}": float(jnp.mean(jnp.concatenate([leaf.ravel() for leaf in collect(aux, "dense")]))),
  }


def _predicted(cfg: Config, report: inspection.Report, own: Any) -> dict[str, float]:
  size: models.ModelConfig = cfg.model
  curve = speed.measure_curve(
      size.dim, size.hidden, size.gated, own.rows[0] * cfg.data.length, own.densities, max(3, own.reps // 2))
  return {"predicted_ffn_speedup": speed.predict_speedup(report.nnz_layer, size.hidden, curve)["speedup"]}
