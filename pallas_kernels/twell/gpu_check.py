"""What `make gpu-check` asks of TwELL's GPU kernels: are they right, are they faster than XLA, what do they need.

Numerics first, on small awkward layers whose products are exact in any order (small integers), so that packed words
must equal the reference bit by bit. Then the published sizes: 131,072 tokens, 2048 features, 5632 neurons, bfloat16,
with about 29 and 100 active neurons a row; forward, and a training step with all gradients. Times are medians of runs
that alternate between the sparse and the dense form.

Legend: M rows (tokens), K features, N hidden neurons.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.twell import formats, hybrid, reference, train


class Plan(NamedTuple):
  """What is checked, and with what."""

  m: int
  k: int
  n: int
  active: tuple[int, ...]  # active neurons of a row that are timed
  repeats: int
  real: bool  # False: a dry run, which is short and does not judge times
  triton: Any  # modules with the functions of `reference`
  mosaic: Any
  ops: train.Ops


def plan(dry: bool) -> Plan:
  """The published sizes with the kernels, or tiny ones with the references in their place."""
  if dry:
    return Plan(64, 32, 512, (29,), 2, False, reference, reference, train.XLA)
  from pallas_kernels.twell import pallas_gpu, triton, triton_train

  return Plan(64 * 2048, 2048, 5632, (29, 100), 10, True, triton, pallas_gpu, triton_train.OPS)


def checks(dry: bool) -> dict[str, Callable[[], dict]]:
  """Returns the checks by name."""
  p = plan(dry)
  timed = {f"forward@{n}": functools.partial(forward, p, n) for n in p.active}
  timed |= {f"training@{n}": functools.partial(training, p, n) for n in p.active}
  return {
      "pack": functools.partial(pack, p),
      "ffn_triton": functools.partial(ffn, p, p.triton),
      "ffn_mosaic": functools.partial(ffn, p, p.mosaic),
      "gradients": functools.partial(gradients, p),
      **timed,
      **({} if dry else {"tiles": functools.partial(tiles, p)}),
  }


def _integers(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
  return jax.random.randint(jax.random.key(seed), shape, -4, 5).astype(dtype)


@jax.jit
def _relative(got: jax.Array, wanted: jax.Array) -> jax.Array:
  got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
  return jnp.max(jnp.abs(got - wanted)) / jnp.maximum(jnp.max(jnp.abs(wanted)), 1e-30)


def _error(got: jax.Array, wanted: jax.Array) -> float:
  """Largest difference relative to the largest value; infinite when anything is not a number."""
  error = float(_relative(got, wanted))
  return error if math.isfinite(error) else float("inf")


def pack(p: Plan) -> dict:
  """Packed words against the reference, bit by bit: types, compressions, awkward shapes, NaN and inf."""
  specification = jax.jit(reference.gate_pack, static_argnums=2)
  cases = (  # few: the compilation of each takes seconds
      ((1, 33, 256), jnp.float32, 4),
      ((300, 96, 700), jnp.bfloat16, 8),
      ((129, 64, 513), jnp.bfloat16, 2),
  )
  wrong = 0
  for (m, k, n), dtype, compression in cases if p.real else cases[:1]:
    x, g = _integers(m, (m, k), dtype), _integers(n, (k, n), dtype)
    special = jnp.zeros((4, k), dtype).at[:, 0].set(jnp.array([1, jnp.nan, jnp.inf, -jnp.inf]).astype(dtype))
    got, wanted = (f(x, g, compression).words for f in (p.triton.gate_pack, specification))
    wrong += int(jnp.sum(got != wanted))
    got, wanted = (f(special, g, compression).counts for f in (p.triton.gate_pack, specification))
    wrong += int(jnp.sum(got != wanted))
  return {"passed": wrong == 0, "wrong_words": wrong}


def ffn(p: Plan, module) -> dict:
  """Gated and plain layers against the reference: empty, full and overflowing rows, types, compressions."""
  errors = {}
  for dtype, limit in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)) if p.real else ((jnp.float32, 1e-5),):
    x = _integers(0, (70, 96), dtype).at[0].set(0)
    g, u, d = (_integers(s, (96, 700), dtype) for s in (1, 2, 3))
    g = jnp.where(jnp.arange(700) < 300, g, g - 3)
    for compression in formats.COMPRESSIONS if p.real else (8,):
      packed = reference.gate_pack(x, g, compression)
      gated = _error(module.gated_ffn(x, packed, u.T, d.T), reference.gated_ffn(x, packed, u.T, d.T))
      plain = _error(module.plain_ffn(packed, d.T), reference.plain_ffn(packed, d.T))
      errors[f"{dtype.__name__}@{compression}"] = max(gated, plain) / limit
  return {"passed": max(errors.values()) <= 1, **{f"error_of_limit_{k}": v for k, v in errors.items()}}


def _step(ffn_, dy: jax.Array) -> Callable:
  """Returns the loss and all gradients of a layer whose function gives (y, l1, ...)."""

  def loss(x, g, u, d):
    y, l1 = ffn_(x, g, u, d)[:2]
    return jnp.sum(y.astype(jnp.float32) * dy) + 1e-3 * l1

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


def gradients(p: Plan) -> dict:
  """All gradients against dense autodiff, float32 and bfloat16, long rows in the tail; and twice the same bits."""
  results = {}
  for dtype, limit in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)) if p.real else ((jnp.float32, 1e-5),):
    m, k, n = 96, 64, 512
    x, g, u, d = layer(m, k, n, 20, dtype)
    x = x.at[:4, 0].set(-1)  # four long rows
    dy = jax.random.normal(jax.random.key(7), (m, k))
    sparse = lambda *a: train.sparse_ffn(*a, capacity=hybrid.Capacity(64, 16), ops=p.ops)
    with jax.default_matmul_precision("highest"):
      got, again, wanted = (_step(f, dy)(x, g, u, d) for f in (sparse, sparse, train.dense_ffn))
    errors = [_error(a, b) for a, b in zip(got[1], wanted[1], strict=True)]
    results[f"error_of_limit_{dtype.__name__}"] = max(errors) / limit
    equal = all(bool(jnp.all(a == b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True))
    results[f"deterministic_{dtype.__name__}"] = float(equal)
  passed = all(v <= 1 if "error" in key else v == 1 for key, v in results.items())
  return {"passed": passed, **results}


def layer(m: int, k: int, n: int, active: float, dtype) -> tuple[jax.Array, ...]:
  """Returns x `[M, K]`, w_gate and w_up `[K, N]`, w_down `[N, K]` with about `active` neurons on in each row.

  The first feature is 1 in every row; its gate weights shift all gates down by as many deviations as it takes.
  """
  keys = jax.random.split(jax.random.key(0), 4)
  normal = lambda key, shape: jax.random.normal(key, shape, dtype)
  shift = statistics.NormalDist().inv_cdf(1 - active / n)
  x, g = normal(keys[0], (m, k)), normal(keys[1], (k, n)) / (k - 1) ** 0.5
  x, g = x.at[:, 0].set(1), g.at[0].set(-shift)
  return x.astype(dtype), g.astype(dtype), normal(keys[2], (k, n)) / k**0.5, normal(keys[3], (n, k)) / active**0.5


def seconds(repeats: int, *runs: Callable[[], Any]) -> list[float]:
  """Returns the median seconds of each, run in turns after one run to compile."""
  for f in runs:
    jax.block_until_ready(f())
  taken = [[] for _ in runs]
  for _ in range(repeats):
    for f, times in zip(runs, taken, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(f())
      times.append(time.perf_counter() - start)
  return [statistics.median(times) for times in taken]


def _compile(f: Callable, *args) -> tuple[Callable, int]:
  """Returns the compiled f and the bytes that f(*args) allocates beside its arguments."""
  compiled = jax.jit(f).lower(*args).compile()
  memory = compiled.memory_analysis()
  return compiled, 0 if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes


def forward(p: Plan, active: int) -> dict:
  """The gated layer, packing included, against XLA dense; and the packing gate GEMM against XLA's plain one."""
  x, g, u, d = layer(p.m, p.k, p.n, active, jnp.bfloat16)
  up = jax.block_until_ready(u.T)  # the layout of the sparse form, transposed once when a model is loaded
  layer_ = lambda x, g, up, d: p.triton.gated_ffn(x, p.triton.gate_pack(x, g), up, d)
  dense, dense_bytes = _compile(lambda x, g, u, d: (jax.nn.relu(x @ g) * (x @ u)) @ d, x, g, u, d)
  sparse, sparse_bytes = _compile(layer_, x, g, up, d)
  gemm, pack_ = jax.jit(jnp.matmul), jax.jit(lambda x, g: p.triton.gate_pack(x, g))
  packed, rest = pack_(x, g), jax.jit(lambda *args: p.triton.gated_ffn(*args))
  error, lost = _error(sparse(x, g, up, d), dense(x, g, u, d)), int(formats.overflow(packed))
  dense_s, sparse_s, gemm_s, pack_s, rest_s = seconds(
      p.repeats, lambda: dense(x, g, u, d), lambda: sparse(x, g, up, d), lambda: gemm(x, g), lambda: pack_(x, g),
      lambda: rest(x, packed, up, d),
  )  # fmt: skip
  fast = sparse_s < dense_s or not p.real or active != min(p.active)  # the bar is for the density of trained models
  flops = 2 * p.m * p.k * p.n
  return {
      "passed": bool(error < 2e-2 and lost == 0 and fast),
      "active": float(jnp.mean(formats.nnz(packed))), "lost": lost, "error": error,
      "dense_ms": 1e3 * dense_s, "sparse_ms": 1e3 * sparse_s, "speedup": dense_s / sparse_s,
      "gemm_ms": 1e3 * gemm_s, "pack_ms": 1e3 * pack_s, "rest_ms": 1e3 * rest_s, "pack_of_gemm_rate": gemm_s / pack_s,
      "gemm_tflops": flops / gemm_s / 1e12, "pack_tflops": flops / pack_s / 1e12,
      "dense_bytes": dense_bytes, "sparse_bytes": sparse_bytes,
  }  # fmt: skip


def training(p: Plan, active: int) -> dict:
  """Loss and all gradients of the gated layer against XLA dense: time and the memory that the step allocates."""
  args = layer(p.m, p.k, p.n, active, jnp.bfloat16)
  dy = jax.random.normal(jax.random.key(9), (p.m, p.k), jnp.bfloat16)
  capacity = hybrid.Capacity(128, p.m // 8)
  sparse = lambda *a: train.sparse_ffn(*a, capacity=capacity, ops=p.ops)
  dense_step, dense_bytes = _compile(_step(train.dense_ffn, dy), *args)
  sparse_step, sparse_bytes = _compile(_step(sparse, dy), *args)
  error = max(_error(a, b) for a, b in zip(sparse_step(*args)[1], dense_step(*args)[1], strict=True))
  dense_s, sparse_s = seconds(p.repeats, lambda: dense_step(*args), lambda: sparse_step(*args))
  kept = [train.backward_bytes(f, *args) for f in (train.dense_ffn, lambda *a: sparse(*a)[:2])]
  return {
      "passed": error < 5e-2,
      "error": error, "dense_ms": 1e3 * dense_s, "sparse_ms": 1e3 * sparse_s, "speedup": dense_s / sparse_s,
      "dense_bytes": dense_bytes, "sparse_bytes": sparse_bytes,
      "dense_kept_bytes": kept[0], "sparse_kept_bytes": kept[1],
  }  # fmt: skip


def tiles(p: Plan) -> dict:
  """Milliseconds of the packing GEMM with other block sizes; what is in `triton.GEMM_TILES` should be the fastest."""
  x, g, *_ = layer(p.m, p.k, p.n, p.active[0], jnp.bfloat16)
  original, group = dict(p.triton.GEMM_TILES), p.triton.GROUP
  found = {}
  try:
    for name, change, rows in (
        ("default", {}, group),
        ("stages3", {"num_stages": 3}, group),
        ("group8", {}, 8),
        ("rows64_warps4", {"BM": 64, "num_warps": 4}, group),
    ):
      p.triton.GEMM_TILES[2], p.triton.GROUP = {**original[2], **change}, rows
      (taken,) = seconds(p.repeats, lambda f=jax.jit(lambda x, g: p.triton.gate_pack(x, g)): f(x, g))
      found[f"{name}_ms"] = 1e3 * taken
  finally:
    p.triton.GEMM_TILES.update(original)
    p.triton.GROUP = group
  return {"passed": True, **found}
