"""What an arm costs before it is trained: parameters, FLOPs, memory, time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core import train, trees
from sakanajax.sheaf_admm import fitting
from sakanajax.sheaf_admm.config import Config
from sakanajax.sheaf_admm.config import of_arm as arm_config

RATE = 5e9  # FLOP/s of one laptop core on this kind of code, for the estimate of the time


def of_arm(cfg: Config, arm: str) -> dict:
  """One row of `--dry_run`: nothing runs; XLA's cost analysis counts one iteration, times the mean K.

  XLA counts the body of a loop once, so the loop is measured as the difference between the forward pass and
  one without iterations; a training step is taken as four forward passes (the backward pass recomputes).
  """
  cfg = arm_config(cfg, arm)
  task, network = fitting.network_of(cfg)
  params = jax.eval_shape(network.init, jax.random.key(0))
  dtype = np.float32 if cfg.kind == "mnist" else np.uint8
  boards = jax.ShapeDtypeStruct((cfg.train.batch_size, *task.board), dtype)
  graph = task.graph(task.board)
  forward = lambda params, boards, k: network.apply(params, boards, graph, k)
  flops = {k: _flops(lambda p, b, k=k: forward(p, b, k), params, boards) for k in (0, 1)}
  body = _flops(lambda p, b: forward(p, b, jnp.int32(b.shape[0])), params, boards) - flops[0]
  mean_k = sum(cfg.iterations.train) / 2
  step = 4.0 * (flops[0] + mean_k * max(body, 0.0))
  state = jax.eval_shape(lambda p: train.init_state(p, train.make_optimizer(cfg.train)), params)
  kept = 3 * np.prod([cfg.train.batch_size, graph.num_agents, cfg.model.d_v]) * 4 * cfg.iterations.train[1]
  return {
      "arm": arm, "params": trees.count_params(params), "steps": cfg.train.steps,
      "GFLOP/step": round(step / 1e9, 3), "state MB": round(trees.tree_bytes(state) / 2**20, 1),
      "iterates MB": round(float(kept) / 2**20, 1), "minutes": round(step * cfg.train.steps / RATE / 60, 1),
  }


def _flops(fn, *args) -> float:
  analysis = jax.jit(fn).lower(*args).compile().cost_analysis()
  analysis = analysis[0] if isinstance(analysis, list) else analysis
  return float(analysis.get("flops", 0.0))
