"""Training and measuring one arm.

Legend: L layers, N hidden neurons.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from sakanajax.core import checkpoint as checkpoint_lib
from sakanajax.core import config as config_lib
from sakanajax.core import files
from sakanajax.core import mesh as mesh_lib
from sakanajax.core import train
from sakanajax.core.errors import Diverged, UserError
from sakanajax.nn import ffn as nn_ffn
from sakanajax.nn.layer import Layer, collect
from sakanajax.nn.transformer import nll
from sakanajax.twell import comparisons, inspection, model as models, revive, texts
from sakanajax.twell import loss as losses
from sakanajax.twell.config import Config
from sakanajax.twell.ffn import Room
from sakanajax.twell.inspection import Meter, Report


def model_of(cfg: Config) -> Layer:
  """The language model of a config."""
  return models.language_model(cfg.model)


def loss_fn(cfg: Config) -> train.LossFn:
  """The loss of a config."""
  return losses.lm_loss(model_of(cfg), cfg.penalty, models.compute_dtype(cfg.model))


def wrap_of(cfg: Config, seed: int) -> train.Wrap:
  """What the config does to the optimizer."""
  if not cfg.revival.rate:
    return lambda tx: tx
  names = ("gate",) if cfg.model.gated else ("up",)
  return lambda tx: revive.revive(tx, seed, cfg.revival.rate, cfg.revival.scale, names)


def fit(cfg: Config, *, seed: int, workdir, fingerprint: str = "", desc: str = "", tensorboard: bool = False
        ) -> train.TrainState:
  """Trains the arm, resuming from `workdir`; see `core.train.fit`.

  All splits are read first, so that an empty one is not found after the training.

  When the hybrid form has no room for a step's rows, the run goes back to its last checkpoint and repeats the steps
  since then with twice the tail, until the tail holds all rows; then what still is not finite is the model's own fault.
  """
  tokenizer = texts.tokenizer_of(cfg.data)
  check_vocabulary(cfg, tokenizer.vocab_size)
  ids, *_ = [texts.tokens(cfg.data, tokenizer, split) for split in ("train", "valid", "test")]
  batch_fn = texts.batches(ids, cfg.train.batch_size, cfg.data.length, seed)
  params = jax.jit(model_of(cfg).init)(jax.random.key(seed))
  mesh = mesh_lib.make_mesh(cfg.mesh) if cfg.mesh != mesh_lib.MeshConfig() or jax.process_count() > 1 else None
  room = cfg.model.room
  while True:
    roomy = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, room=room))
    try:
      return train.fit(
          loss_fn(roomy), params, batch_fn, cfg.train, seed=seed, workdir=workdir, mesh=mesh, fingerprint=fingerprint,
          desc=desc, tensorboard=tensorboard, wrap=wrap_of(cfg, seed))
    except Diverged:
      if cfg.model.form != "hybrid" or room.tail >= 1:
        raise
      room = Room(room.ell, min(1.0, 2 * room.tail or 0.125))
      logging.getLogger(__name__).warning(
          "rows found no room, or the loss is not finite; back to the last checkpoint, with a tail for %g of the rows",
          room.tail)


def check_vocabulary(cfg: Config, size: int) -> None:
  """Raises UserError when the tokenizer has ids that the model lacks."""
  if size > cfg.model.vocab:
    raise UserError(f"the tokenizer has {size} ids, the model {cfg.model.vocab}; set config.model.vocab={size}")


class Evaluator:
  """Scores of params on splits; compiled once."""

  def __init__(self, cfg: Config):
    self._cfg = cfg
    self._tokenizer = texts.tokenizer_of(cfg.data)
    size, dtype = cfg.model, models.compute_dtype(cfg.model)
    self._meter = Meter(model_of(cfg), size.layers, size.hidden, size.vocab, cfg.data.length, dtype)
    self._rows = functools.cache(self._load)

  def _load(self, split: str) -> list[dict]:
    ids = texts.tokens(self._cfg.data, self._tokenizer, split)
    return texts.in_order(ids, self._cfg.evaluation.batch, self._cfg.data.length, self._cfg.evaluation.rows)

  def report(self, params: Any, split: str) -> Report:
    """The whole report of a split."""
    show = lambda i: self._tokenizer.decode([i]) or f"<{i}>"
    return inspection.report(self._meter(params, self._rows(split)), self._cfg.evaluation.window, show)

  def __call__(self, params: Any) -> dict[str, float]:
    """Every score of validation and test, as {key_split: value}."""
    scores: dict[str, float] = {}
    for split in ("valid", "test"):
      scores |= {f"{key}_{split}": value for key, value in scalars(self.report(params, split)).items()}
    return scores

  def loss(self, params: Any, split: str) -> float:
    """Cross-entropy of a split."""
    return self.report(params, split).ce

  def imposed(self, params: Any) -> dict[str, float]:
    """Cross-entropy on test of the same weights under top-k and threshold, {ce_topk@k, ce_threshold@k: value}.

    Each layer's threshold is calibrated on the first rows of the validation split, layer after layer, in the model
    whose earlier layers are selected already.
    """
    out: dict[str, float] = {}
    for k in self._cfg.evaluation.imposed:
      out[f"ce_topk@{k}"] = self._selected(params, [lambda h, k=k: comparisons.top_k(h, k)] * self._cfg.model.layers)[0]
      rules = [lambda h, t=t: comparisons.threshold(h, t) for t in self._thresholds(params, k)]
      out[f"ce_threshold@{k}"], out[f"nnz_threshold@{k}"] = self._selected(params, rules)
    return out

  def _selected(self, params: Any, rules: list) -> tuple[float, float]:
    """(cross-entropy, non-zeros per token and layer) on test, with a rule for each layer."""
    model = self._unrolled(rules)

    def one(params, batch):
      logits, _, aux = model.apply(params, batch["tokens"], (), losses.context(batch))
      return nll(logits, batch["labels"], batch["mask"]), jnp.mean(jnp.stack(collect(aux, "nnz")))

    run, rows = jax.jit(one), self._rows("test")
    weights = [float(row["mask"].sum()) for row in rows]
    values = [jax.device_get(run(params, row)) for row in rows]
    mean = lambda i: math.fsum(w * float(v[i]) for w, v in zip(weights, values)) / math.fsum(weights)
    return mean(0), mean(1)

  def _thresholds(self, params: Any, nnz: int) -> list[float]:
    """A threshold for each layer."""
    found = []

    def rule(h):
      found.append(comparisons.calibrate(h.reshape(-1, h.shape[-1]), nnz))
      return comparisons.threshold(h, found[-1])

    model, batch = self._unrolled([rule] * self._cfg.model.layers), self._rows("valid")[0]

    def run(params):
      found.clear()
      model.apply(params, batch["tokens"], (), losses.context(batch))
      return jnp.stack(found)

    return jax.jit(run)(params).tolist()

  def _unrolled(self, rules: list) -> Layer:
    """The model with a rule for each layer."""
    cfg = self._cfg.model
    blocks = [models.block_of(cfg, comparisons.selected(rule, cfg.activation, cfg.gated)) for rule in rules]

    def apply(params, x, state, ctx):
      reports = {}
      for i, block in enumerate(blocks):
        x, _, reports[f"{i}"] = block.apply(jax.tree.map(lambda leaf, i=i: leaf[i], params), x, (), ctx)
      return x, (), reports

    return models.language_model(cfg, body=Layer(lambda key: (), lambda *_: (), apply))


def scalars(report: Report) -> dict[str, float]:
  """The numbers of a report that a unit keeps."""
  keys = ("ce", "nnz", "sparsity", "dead", "first_position_ratio", "tokens")
  out = {key: float(getattr(report, key)) for key in keys}
  out |= {f"nnz_layer{i}": value for i, value in enumerate(report.nnz_layer)}
  return out | {f"dead_layer{i}": value for i, value in enumerate(report.dead_layer)}


def load_unit(folder: str | pathlib.Path) -> tuple[Config, Any]:
  """Returns (config, averaged weights) of a trained unit's folder. Raises UserError when it is none."""
  place = pathlib.Path(folder)
  if not (place / "unit.json").is_file():
    raise UserError(f"{place} is not a trained unit; give a folder such as runs/twell/units/c0/seed_0")
  unit = files.read_json(place / "unit.json")
  if not isinstance(unit, dict) or unit.get("experiment") != "twell" or not isinstance(unit.get("config"), dict):
    raise UserError(f"{place} was not trained by experiments.twell; give a folder of its runs")
  cfg = config_lib.from_config(Config, unit["config"] | {"seeds": (0,), "arms": ()}, f"{place / 'unit.json'}: config")
  make = lambda key: train.init_state(model_of(cfg).init(key), wrap_of(cfg, 0)(train.make_optimizer(cfg.train)))
  state, _ = checkpoint_lib.restore(place / "checkpoints", jax.eval_shape(make, jax.random.key(0)))
  return cfg, jax.jit(train.ema_params, static_argnums=1)(state, cfg.train.ema_decay)


def dense_model(cfg: models.ModelConfig) -> Layer:
  """The model without any report: what XLA computes when nobody asks about sparsity."""
  make = nn_ffn.glu if cfg.gated else nn_ffn.mlp
  return models.language_model(cfg, make(cfg.dim, cfg.hidden, cfg.activation))
