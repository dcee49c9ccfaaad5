"""What users do with a trained model: see where it is sparse, pack it, and know what that gains on their own text."""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple

from pallas_kernels.twell import cpu
from sakanajax.core import text
from sakanajax.core.errors import UserError
from sakanajax.nn.tokenizers import Tokenizer
from sakanajax.twell import fitting, inspection, inspection_plots, model as models, sparsify, speed, texts
from sakanajax.twell.config import Config
from sakanajax.twell.inspection import Report


class Source(NamedTuple):
  """A trained model, dense, and text to look at."""

  params: Any
  cfg: models.ModelConfig
  tokenizer: Tokenizer
  ids: text.Tokens
  length: int


def inspect(cfg: Config, checkpoint: str, source: str, out: str | os.PathLike) -> list[pathlib.Path]:
  """Writes sparsity.json, layers.png, positions.png and tokens.png into `out`; returns their paths.

  Args:
    cfg: says how many rows are measured at once and in all (`evaluation`), and `hidden_act`.
    checkpoint: a unit's folder, or a folder of safetensors.
    source: text, as `core.text.corpus` takes it; "": the test split of a unit.
    out: folder.
  """
  found = find(cfg, checkpoint, source)
  report = measure(found, cfg.evaluation.batch, cfg.evaluation.rows)
  return [inspection.write(out, report, {"model": checkpoint, "text": source}), *inspection_plots.draw(out, report)]


def pack(cfg: Config, checkpoint: str, source: str, out: str | os.PathLike) -> list[dict]:
  """Saves the packed model into `out`, with sparsity.json; returns rows that predict its speed-up on the text.

  Arguments as for `inspect`. Raises UserError for a model that was not trained with ReLU.
  """
  found = find(cfg, checkpoint, source)
  packed = sparsify.sparsify(found.params, found.cfg.activation)
  report = measure(found, cfg.evaluation.batch, cfg.evaluation.rows)
  extra: dict[str, Any] = {"model": checkpoint, "text": source}
  if (reason := cpu.unavailable()) is None:
    size = found.cfg
    curve = speed.measure_curve(size.dim, size.hidden, size.gated, cfg.speed.rows[0], reps=cfg.speed.reps)
    extra |= {"curve": curve._asdict(), "prediction": speed.predict_speedup(report.nnz_layer, size.hidden, curve)}
  else:
    extra["not_predicted"] = reason
  sparsify.save(out, packed, found.cfg, found.tokenizer)
  inspection.write(out, report, extra)
  return rows(report, extra)


def rows(report: Report, extra: dict[str, Any]) -> list[dict]:
  """One row per layer and one for all."""
  layers = extra.get("prediction", {}).get("layers", [None] * len(report.nnz_layer))
  show = lambda value: "not predicted" if value is None else f"{value:.2f}"
  table = [{"layer": str(i), "non-zeros": float(nnz), "dead %": 100 * dead, "speed-up of the layer": show(gain)}
           for i, (nnz, dead, gain) in enumerate(zip(report.nnz_layer, report.dead_layer, layers))]
  return table + [{"layer": "all", "non-zeros": report.nnz, "dead %": 100 * report.dead,
                   "speed-up of the layer": show(extra.get("prediction", {}).get("speedup"))}]


def find(cfg: Config, checkpoint: str, source: str) -> Source:
  """Loads the model and the text. Raises UserError when either is not there."""
  if not checkpoint:
    raise UserError("give a model with --checkpoint: a unit's folder, or a folder of safetensors of a ReLU model")
  if (pathlib.Path(checkpoint) / "unit.json").is_file():
    trained, params = fitting.load_unit(checkpoint)
    tokenizer, size, data = texts.tokenizer_of(trained.data), trained.model, trained.data
  else:
    model = sparsify.read(checkpoint, cfg.hidden_act)
    if model.tokenizer is None or not source:
      raise UserError(f"{checkpoint} is no trained unit: it needs a tokenizer.json beside it and text with --input")
    params, tokenizer, size, data = model.params, model.tokenizer, model.cfg, cfg.data
  if not source:
    return Source(params, size, tokenizer, texts.tokens(data, tokenizer, "test"), data.length)
  documents = [document.text for document in text.documents(text.corpus(source))]
  return Source(params, size, tokenizer, texts.of_documents(documents, tokenizer), data.length)


def measure(found: Source, batch: int, limit: int) -> Report:
  """The report of at most `limit` rows (0: all) of the text."""
  size = found.cfg
  meter = inspection.Meter(
      models.language_model(size), size.layers, size.hidden, size.vocab, found.length, models.compute_dtype(size))
  stats = meter(found.params, texts.in_order(found.ids, batch, found.length, limit))
  return inspection.report(stats, show=lambda i: found.tokenizer.decode([i]) or f"<{i}>")
