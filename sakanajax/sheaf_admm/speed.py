"""The sheaf Laplacian of a Sudoku two ways: edge by edge with a scatter, and by slots with two GEMMs.

Times are medians of interleaved runs of one whole forward negotiation (K iterations of T conjugate-gradient
steps), so that the machine's mood falls on both alike; only their ratio is a claim.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.sheaf_admm import admm, maps as maps_lib, sheaf, x_update, z_update
from sakanajax.sheaf_admm.config import Config, task_of
from sakanajax.sheaf_admm.maps import RestrictionMaps

REPEATS = 7


def measure(cfg: Config, seed: int) -> dict[str, float]:
  """Error between the two forms, seconds of each, their ratio, and how often the forward pass was compiled."""
  task = task_of(cfg)
  graph, model, batch = task.graph(task.board), cfg.model, cfg.evaluation.batch
  k_maps, k_state = jax.random.split(jax.random.key(seed))
  maps = RestrictionMaps(maps_lib.init_base(k_maps, task.slots, model.d_e, model.d_v, model.map_init))
  h = jax.random.normal(k_state, (batch, graph.num_agents, model.d_v))
  ends = sheaf.edge_maps(graph, maps)
  forms = {
      "gemm": lambda z: sheaf.laplacian(graph, maps, z),
      "scatter": lambda z: sheaf.laplacian_scatter(graph, ends, z),
  }
  once = {name: jax.jit(jax.vmap(form))(h) for name, form in forms.items()}
  error = jnp.max(jnp.abs(once["gemm"] - once["scatter"])) / jnp.max(jnp.abs(once["scatter"]))
  traces: list[str] = []
  forward = {name: _forward(model, form, traces, name) for name, form in forms.items()}
  seconds = _time(forward, h, cfg.iterations.eval)
  for iterations in (1, 7, cfg.iterations.eval + 13):  # any number of iterations, one compilation
    jax.block_until_ready(forward["gemm"](h, jnp.int32(iterations)))
  return {
      "gemm_error": float(error),
      "gemm_s": seconds["gemm"],
      "scatter_s": seconds["scatter"],
      "gemm_speedup": seconds["scatter"] / seconds["gemm"],
      "compilations": float(traces.count("gemm")),
  }


def _forward(model, laplacian, traces, name):
  def run(h, iterations):
    traces.append(name)  # runs when jax traces, not when the program runs

    def one(h, iterations):
      prox = x_update.non_negative(jnp.ones_like(h), -h)
      update = lambda w, z, rho: z_update.prox_cg(laplacian, w, z, rho, gamma=model.gamma, steps=model.z_steps)
      step = lambda _, state: admm.step(state, prox, update)[0]
      return jax.lax.fori_loop(0, iterations, step, admm.init(h, jnp.float32(model.rho))).x

    return jax.vmap(one, (0, None))(h, iterations)

  return jax.jit(run)


def _time(forward, h, iterations) -> dict[str, float]:
  for run in forward.values():
    jax.block_until_ready(run(h, jnp.int32(iterations)))
  seconds: dict[str, list[float]] = {name: [] for name in forward}
  for _ in range(REPEATS):
    for name, run in forward.items():
      start = time.perf_counter()
      jax.block_until_ready(run(h, jnp.int32(iterations)))
      seconds[name].append(time.perf_counter() - start)
  return {name: float(np.median(values)) for name, values in seconds.items()}
