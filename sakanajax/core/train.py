"""The training loop: a pure step, compiled once, and the few things around it.

Read `fit` from top to bottom; everything above it is a pure function that can be used alone.
A run is a function of (params, batch_fn, cfg, seed): the batch and the key of a step depend on
the step's number only, so a run that was killed continues from its last checkpoint to exactly
the numbers that it would have reached without the interruption.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import pathlib
from typing import Any, Callable, Iterator, Literal, Mapping, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sakanajax.core import checkpoint, files, mesh as mesh_lib, metrics, trees
from sakanajax.core.errors import UserError

PyTree = Any
Scalars = Mapping[str, Any]
LossFn = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, Scalars]]  # (params, batch, key)
BatchFn = Callable[[int], PyTree]  # step -> arrays [B, ...]; a pure function of the step
CheckpointFn = Callable[[int, "TrainState"], Scalars | None]
Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """AdamW with warm-up, clipping and an average of the weights.

  Attributes:
    steps: optimizer steps in all.
    batch_size: examples per step, over all devices.
    lr: peak learning rate.
    warmup: steps over which the rate rises linearly from 0.
    schedule: what follows: "constant", or "cosine" down to 0 at the last step.
    weight_decay: decoupled decay, on every parameter.
    b1: decay of Adam's first moment.
    b2: decay of Adam's second moment.
    clip: largest global norm of the gradient; 0 switches clipping off.
    skip: how many steps in a row may be left out because their gradient is not finite, as a long unrolled loop
      sometimes makes it; 0: none, the first one ends the run.
    ema_decay: decay of the average of the weights.
    log_every: steps between two lines of metrics.
    checkpoint_every: steps between two checkpoints.
    keep: how many checkpoints stay on disk.
  """

  steps: int
  batch_size: int
  lr: float
  warmup: int = 0
  schedule: Literal["constant", "cosine"] = "constant"
  weight_decay: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  clip: float = 1.0
  skip: int = 0
  ema_decay: float = 0.999
  log_every: int = 50
  checkpoint_every: int = 500
  keep: int = 2

  def __post_init__(self):
    for name in ("batch_size", "log_every", "checkpoint_every", "keep"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
    for name in ("steps", "warmup", "lr", "weight_decay", "clip", "skip"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
    for name in ("b1", "b2", "ema_decay"):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
    if self.schedule not in ("constant", "cosine"):
      raise ValueError(f"schedule must be 'constant' or 'cosine', got {self.schedule!r}")
    if self.schedule == "cosine" and self.steps and self.warmup >= self.steps:
      raise ValueError(f"warmup {self.warmup} leaves nothing of {self.steps} steps to decay over")


class TrainState(NamedTuple):
  """What a step carries to the next one.

  Attributes:
    step: `[]` int32, how many steps were taken.
    params: the weights.
    opt_state: the optimizer's state.
    ema: like `params`, at least float32: the sum of decay^(t-s) (1-decay) params_s over the steps
      s so far. It starts at 0, so it is biased; read it through `ema_params`.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  ema: PyTree


def make_schedule(cfg: TrainConfig) -> optax.Schedule:
  """Returns step -> learning rate: linear from 0 over `warmup`, then constant or cosine to 0."""
  if cfg.schedule == "cosine":
    after = optax.cosine_decay_schedule(cfg.lr, max(cfg.steps - cfg.warmup, 1))
  else:
    after = optax.constant_schedule(cfg.lr)
  if not cfg.warmup:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, cfg.lr, cfg.warmup), after], [cfg.warmup])


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
  """Returns AdamW (decay on all parameters) behind a clip of the global gradient norm, skipping what is not finite."""
  clip = optax.clip_by_global_norm(cfg.clip) if cfg.clip else optax.identity()
  adamw = optax.adamw(make_schedule(cfg), cfg.b1, cfg.b2, weight_decay=cfg.weight_decay)
  tx = optax.chain(clip, adamw)
  return optax.apply_if_finite(tx, cfg.skip) if cfg.skip else tx


def init_state(params: PyTree, tx: optax.GradientTransformation) -> TrainState:
  """Returns the state before the first step."""
  params = jax.tree.map(jnp.asarray, params)
  ema = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
  return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), ema)


def ema_params(state: TrainState, decay: float) -> PyTree:
  """Returns the debiased average of the weights, ema / (1 - decay^step); at step 0 the weights."""
  started = state.step > 0
  steps = state.step.astype(jnp.float32)
  weight = -jnp.expm1(steps * math.log(decay)) if decay else jnp.ones_like(steps)
  scale = 1.0 / jnp.where(started, weight, 1.0)
  return jax.tree.map(
      lambda e, p: jnp.where(started, e * scale, p.astype(e.dtype)).astype(p.dtype),
      state.ema,
      state.params,
  )


def train_step(
    loss_fn: LossFn, tx: optax.GradientTransformation, cfg: TrainConfig
) -> Callable[[TrainState, PyTree, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
  """Returns the pure step (state, batch, key) -> (state, metrics).

  Metrics: what `loss_fn` reports beside `loss`, `lr`, and the global norms `grad_norm` (before
  the clip), `update_norm` (what was added to the weights) and `param_norm` (after it was). Where
  steps may be skipped, `skipped` is 1 for those that were, and their `grad_norm` counts as 0.
  """
  schedule = make_schedule(cfg)

  def step(state: TrainState, batch: PyTree, key: jax.Array):
    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, key)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = jax.tree.map(
        lambda e, p: e + (1.0 - cfg.ema_decay) * (p.astype(e.dtype) - e), state.ema, params
    )
    measured = {
        "loss": loss,
        "lr": schedule(state.step),
        "grad_norm": trees.global_norm(grads),
        "update_norm": trees.global_norm(updates),
        "param_norm": trees.global_norm(params),
    }
    if cfg.skip:
      skipped = ~jnp.isfinite(measured["grad_norm"])
      measured |= {"skipped": skipped, "grad_norm": jnp.where(skipped, 0.0, measured["grad_norm"])}
    if taken := set(aux) & (set(measured) | {"step", "samples_per_s"}):
      raise ValueError(f"loss_fn reports {sorted(taken)}, which the training step itself measures")
    return TrainState(state.step + 1, params, opt_state, ema), {**measured, **aux}

  return step


def fit(
    loss_fn: LossFn,
    params: PyTree,
    batch_fn: BatchFn,
    cfg: TrainConfig,
    *,
    seed: int,
    workdir: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    fingerprint: str = "",
    desc: str = "",
    tensorboard: bool = False,
    on_checkpoint: CheckpointFn | None = None,
    wrap: Wrap = lambda tx: tx,
) -> TrainState:
  """Trains for `cfg.steps` steps, resuming from `workdir/checkpoints` when it can.

  Args:
    loss_fn: (params, batch, key) -> (loss, dict of scalars).
    params: the initial weights; they are copied, not donated.
    batch_fn: step -> pytree of arrays `[B, ...]`, a pure function of the step. It runs one step
      ahead in a thread. On many hosts each returns the same whole batch (see `mesh.shard_batch`).
    cfg: the optimizer and the intervals.
    seed: the step's key is fold_in(key(seed), step).
    workdir: receives checkpoints/, metrics.jsonl and, if asked, tensorboard/.
    mesh: shards the batch and the state (see `core.mesh`); None runs on one device.
    fingerprint: says whose checkpoints these are; default: a digest of `cfg` and `seed`.
    desc: a word before the progress bar.
    tensorboard: also write tensorboard events.
    on_checkpoint: called as (step, state) before a checkpoint is published; the scalars that it
      may return join that step's line in metrics.jsonl. The next step consumes the state's buffers.
    wrap: makes the optimizer that is used from the one that `cfg` describes; it sees gradients before the clip.

  Returns:
    The state after `cfg.steps` steps, at once if a checkpoint holds it.

  Raises:
    UserError: the numbers are no longer finite, a checkpoint is corrupt or another
      configuration's, or the disk is full. The last checkpoint stays in any case.
  """
  workdir = pathlib.Path(workdir)
  fingerprint = fingerprint or files.digest([dataclasses.asdict(cfg), seed])
  meta = {"fingerprint": fingerprint, "train": dataclasses.asdict(cfg), "seed": seed}
  tx = wrap(make_optimizer(cfg))
  folder = workdir / "checkpoints"
  state, start = _first_state(params, tx, mesh, folder, fingerprint, cfg.steps)
  if start >= cfg.steps:
    return state

  put = (lambda batch: mesh_lib.shard_batch(batch, mesh)) if mesh else (lambda batch: batch)
  key = jax.random.key(seed)
  batches = map(put, _prefetch(batch_fn, start, cfg.steps))
  first = next(batches)
  step_fn = _compile(train_step(loss_fn, tx, cfg), state, first, key, mesh)

  with metrics.RunLog(workdir, start, cfg.steps, cfg.batch_size, desc, tensorboard) as log:
    for step, batch in enumerate(itertools.chain([first], batches), start + 1):
      state, measured = step_fn(state, batch, key)
      log.add(measured)
      publish = step % cfg.checkpoint_every == 0 or step == cfg.steps
      if publish or step % cfg.log_every == 0:
        scalars = log.collect(step)
        if publish and on_checkpoint is not None:
          scalars |= on_checkpoint(step, state) or {}
        log.write(step, scalars)
      if publish:
        checkpoint.save(folder, step, state, meta, cfg.keep)
        log.restart_clock()
  return state


def _first_state(params, tx, mesh, folder, fingerprint, steps) -> tuple[TrainState, int]:
  """Returns the state to begin with, on its devices, and the steps it has behind it."""
  make = lambda p: init_state(p, tx)
  if mesh is None:
    state = make(jax.tree.map(jnp.array, params))
  else:
    shardings = mesh_lib.params_sharding(jax.eval_shape(make, params), mesh)
    state = jax.jit(make, out_shardings=shardings)(jax.tree.map(np.asarray, params))
  if (start := checkpoint.latest(folder)) is None:
    return state, 0
  if start > steps:
    raise UserError(
        f"{folder} is at step {start} already, beyond the {steps} asked for; raise the number of"
        " steps or use a fresh folder"
    )
  state, _ = checkpoint.restore(folder, state, start, fingerprint)
  return state, start


def _compile(step, state, batch, key, mesh):
  """Compiles (state, batch, key of the run) -> (state, metrics) once; the state is donated.

  A later batch of another shape is an error (TypeError), never a silent recompilation.
  """
  keyed = lambda state, batch, key: step(state, batch, jax.random.fold_in(key, state.step))
  shardings = None
  if mesh is not None:
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), mesh_lib.replicated(mesh))
  jitted = jax.jit(keyed, donate_argnums=0, out_shardings=shardings)
  return jitted.lower(state, batch, key).compile()


def _prefetch(batch_fn: BatchFn, start: int, stop: int) -> Iterator[PyTree]:
  """Yields batch_fn(start) ... batch_fn(stop - 1), each made in a thread while the last is used."""
  with concurrent.futures.ThreadPoolExecutor(1, "batches") as pool:
    ahead = pool.submit(batch_fn, start)
    for step in range(start, stop):
      batch = ahead.result()
      if step + 1 < stop:
        ahead = pool.submit(batch_fn, step + 1)
      yield batch
