"""Where a model is sparse: active neurons by layer, by position in the document, by token; and which are dead.

`Meter` runs one jitted pass over batches and adds up counts on the device; `report` makes plain numbers of them.

Legend: L layers, N hidden neurons of a layer, V vocabulary, B rows, T tokens of a row.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core import files, trees
from sakanajax.nn.layer import Layer, collect
from sakanajax.nn.transformer import token_nll
from sakanajax.twell import loss as losses
from sakanajax.twell import revive

PyTree = Any
FIELDS = ("tokens", "labels", "mask", "segment_ids", "positions")  # of a batch


class Stats(NamedTuple):
  """Sums over the tokens seen; padding is no token."""

  tokens: jax.Array  # [] float32
  labels: jax.Array  # [] float32, tokens with a label
  nll: jax.Array  # [] float32, summed over labels
  layer: jax.Array  # [L] float32, active neurons
  positions: jax.Array  # [T] float32, tokens at each position of their document (or row, when it began before)
  at_position: jax.Array  # [L, T] float32, active neurons there
  ids: jax.Array  # [V] float32, occurrences of each token id
  at_id: jax.Array  # [V] float32, active neurons of these, mean over layers
  fired: jax.Array  # [L, N] float32, tokens for which each neuron was active
  idle: jax.Array  # [L, N] int32, tokens since it was last active
  lost: jax.Array  # [] float32, what a sparse form had no room for


class Report(NamedTuple):
  """What the sums say; a dict of it is JSON."""

  ce: float  # nats per label
  tokens: int
  nnz: float  # mean over layers
  sparsity: float  # 1 - nnz / N
  nnz_layer: list[float]  # [L]
  dead: float  # share of neurons that no token of the window activated, mean over layers
  dead_layer: list[float]  # [L]
  nnz_position: list[float | None]  # [T], mean over layers; None where no token stands
  first_position_ratio: float  # non-zeros at position 0 over those in the second half of the row
  most: list[dict]  # tokens with most active neurons: {"token", "nnz", "count"}
  least: list[dict]
  lost: int


def empty(layers: int, hidden: int, vocab: int, length: int) -> Stats:
  """Returns the sums before the first token."""
  scalar = lambda: jnp.zeros(())  # each its own buffer: the sums are donated
  return Stats(
      scalar(), scalar(), scalar(), jnp.zeros(layers), jnp.zeros(length), jnp.zeros((layers, length)), jnp.zeros(vocab),
      jnp.zeros(vocab), jnp.zeros((layers, hidden)), jnp.zeros((layers, hidden), jnp.int32), scalar())


def add(model: Layer, stats: Stats, params: PyTree, batch: Mapping[str, jax.Array]) -> Stats:
  """Returns the sums with a batch of `core.text` rows; the model's feed-forward layers report as `ffn` does."""
  ctx = losses.context(batch)
  logits, _, aux = model.apply(params, batch["tokens"], (), ctx)
  by_layer = lambda leaf, width: leaf.reshape(-1, *leaf.shape[leaf.ndim - width :])
  rows = lambda name, width: jnp.concatenate([by_layer(leaf, width) for leaf in collect(aux, name)])
  active, fired = rows("active", 2).astype(jnp.float32), rows("fired", 1)  # [L, B, T] and [L, N]
  seen, labelled = ctx.mask.astype(jnp.float32), batch["mask"].astype(jnp.float32)
  places, ids = batch["positions"].reshape(-1), batch["tokens"].reshape(-1)
  by = lambda keys, values, size: jnp.zeros(size).at[keys].add(values.reshape(-1))
  length, vocab, count = stats.positions.shape[0], stats.ids.shape[0], jnp.sum(seen)
  labels = jnp.where(batch["mask"], batch["labels"], 0)
  return Stats(
      tokens=stats.tokens + count,
      labels=stats.labels + jnp.sum(labelled),
      nll=stats.nll + jnp.sum(token_nll(logits, labels) * labelled),
      layer=stats.layer + jnp.sum(active, axis=(1, 2)),
      positions=stats.positions + by(places, seen, length),
      at_position=stats.at_position + jax.vmap(lambda one: by(places, one, length))(active),
      ids=stats.ids + by(ids, seen, vocab),
      at_id=stats.at_id + by(ids, jnp.mean(active, axis=0), vocab),
      fired=stats.fired + fired,
      idle=revive.idle_since(stats.idle, fired, count.astype(jnp.int32)),
      lost=stats.lost + sum(jnp.sum(leaf) for leaf in collect(aux, "overflow")).astype(jnp.float32),
  )


class Meter:
  """Measures params of one model; compiled once for all of them."""

  def __init__(self, model: Layer, layers: int, hidden: int, vocab: int, length: int, dtype: Any = jnp.float32):
    self._sizes = (layers, hidden, vocab, length)
    cast = lambda params: trees.cast(params, dtype)
    self._add = jax.jit(lambda stats, params, batch: add(model, stats, cast(params), batch), donate_argnums=0)

  def __call__(self, params: PyTree, batches: Iterable[Mapping[str, np.ndarray]]) -> Stats:
    """Returns the sums over all batches, on the host."""
    stats = empty(*self._sizes)
    for batch in batches:
      stats = self._add(stats, params, {name: batch[name] for name in FIELDS})
    return jax.device_get(stats)


def report(
    stats: Stats, window: int = 0, show: Callable[[int], str] = str, top: int = 12, least_count: int = 5
) -> Report:
  """Returns the report of sums on the host.

  Args:
    stats: what `Meter` returned.
    window: tokens of silence from which a neuron is dead; 0: all tokens seen.
    show: token id -> its text.
    top: how many of the most and least active tokens to list.
    least_count: tokens that occur less often are left out there.
  """
  tokens, hidden = float(stats.tokens), stats.fired.shape[1]
  layer = np.asarray(stats.layer, float) / max(tokens, 1)
  dead = np.mean(np.asarray(revive.is_dead(stats.idle, min(window or int(tokens), int(tokens)))), axis=1)
  counts = np.asarray(stats.positions, float)
  position = np.where(counts > 0, np.mean(stats.at_position, axis=0) / np.maximum(counts, 1), np.nan)
  most, least = _tokens(stats, show, top, least_count)
  return Report(
      ce=float(stats.nll) / max(float(stats.labels), 1), tokens=int(tokens), nnz=float(layer.mean()),
      sparsity=1.0 - float(layer.mean()) / hidden, nnz_layer=layer.tolist(), dead=float(dead.mean()),
      dead_layer=dead.tolist(), nnz_position=[None if math.isnan(value) else float(value) for value in position],
      first_position_ratio=first_position_ratio(position, counts), most=most, least=least, lost=int(stats.lost))


def first_position_ratio(position: np.ndarray, counts: np.ndarray) -> float:
  """Non-zeros at position 0 over their mean for tokens of the second half of the positions; NaN without such tokens."""
  late = slice(len(position) // 2, None)
  weight = float(np.sum(counts[late]))
  if not counts[0] or not weight:
    return math.nan
  later = float(np.nansum(np.where(counts[late] > 0, position[late], 0) * counts[late])) / weight
  return float(position[0]) / later if later > 0 else math.nan


def _tokens(stats: Stats, show: Callable[[int], str], top: int, least_count: int) -> tuple[list[dict], list[dict]]:
  counts = np.asarray(stats.ids)
  often = np.flatnonzero(counts >= least_count)
  mean = np.asarray(stats.at_id, float)[often] / np.maximum(counts[often], 1)
  order = np.argsort(-mean, kind="stable")
  row = lambda i: {"token": show(int(often[i])), "nnz": round(float(mean[i]), 3), "count": int(counts[often[i]])}
  return [row(i) for i in order[:top]], [row(i) for i in order[::-1][:top]]


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
  """Pearson's correlation of two equally long lists; NaN when either is constant."""
  x, y = (np.asarray(values, float) - np.mean(values) for values in (x, y))
  scale = math.sqrt(float(x @ x) * float(y @ y))
  return float(x @ y) / scale if scale > 0 else math.nan


def write(folder: str | os.PathLike, result: Report, extra: Mapping[str, Any] | None = None) -> pathlib.Path:
  """Writes sparsity.json: the report and what else is to be said of it."""
  content = {**result._asdict(), **(extra or {})}
  plain = json.loads(json.dumps(content), parse_constant=lambda name: None)  # NaN -> null
  return files.write_json(pathlib.Path(folder) / "sparsity.json", plain)
