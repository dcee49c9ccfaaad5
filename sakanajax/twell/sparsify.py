"""From a trained ReLU model to its packed-inference form, and back from disk.

`sparsify` re-lays the feed-forward weights so that a neuron's numbers are contiguous
(`pallas_kernels.twell.api.weights`); `packed` is the Layer that runs them and visits only active neurons; `sparse_lm`
is the whole model. Nothing is pruned and nothing approximated: the outputs are the dense model's.

    layer, params = sparse_lm(cfg), sparsify(params, "relu")
    save(folder, params, cfg, tokenizer);  load(folder)

Models of others are read from folders as Hugging Face writes them (`read`); they must have been trained with ReLU.

Legend: B batch, T tokens, D model width, N hidden neurons, L layers.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, Iterator, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import api
from sakanajax.core import config as config_lib
from sakanajax.core import files
from sakanajax.core.errors import UserError
from sakanajax.nn import pretrained, tokenizers, weights
from sakanajax.nn.layer import Layer, no_state
from sakanajax.nn.tokenizers import Tokenizer
from sakanajax.twell import model as models
from sakanajax.twell.model import ModelConfig

PyTree = Any
FORMAT, VERSION = "sakanajax.twell", 1
_GATED, _PLAIN = {"gate", "up", "down"}, {"up", "down"}


class Model(NamedTuple):
  """A model that is ready to run."""

  layer: Layer  # tokens [B, T] -> logits [B, T, V]
  params: PyTree
  cfg: ModelConfig
  tokenizer: Tokenizer | None


def packed(
    implementation: api.Implementation | None = None, dense_above: float | None = api.DENSE_ABOVE, ell: int = 128
) -> Layer:
  """The feed-forward layer of packed params (`api.Weights`, gated or plain); see `api.ffn` for the arguments.

  Reports nnz `[]` (mean over tokens), active `[B, T]`, lost `[]` (positives without a slot that are missing from the
  output) and dense `[]` (1 where the layer was computed densely). It has no init: its params come from `sparsify`.
  """

  def init(key):
    raise NotImplementedError("packed params are made by sparsify() from a trained model")

  def apply(params, x, state, ctx):
    if ctx.mask is not None:
      x = jnp.where(ctx.mask[..., None], x, 0)
    layer = jax.tree.map(lambda leaf: leaf.astype(x.dtype), params)
    y, report = api.ffn(x, layer, implementation=implementation, dense_above=dense_above, ell=ell)
    tokens = report.nnz.size if ctx.mask is None else jnp.maximum(jnp.sum(ctx.mask), 1)
    nnz = jnp.sum(report.nnz, dtype=jnp.float32) / tokens
    lost = jnp.where(report.dense, 0, report.lost)
    return y, (), {"nnz": nnz, "active": report.nnz, "lost": lost, "dense": report.dense.astype(jnp.float32)}

  return Layer(init, no_state, apply)


def sparse_lm(cfg: ModelConfig, **options: Any) -> Layer:
  """The language model of packed params; `options` are those of `packed`."""
  return models.language_model(cfg, packed(**options))


def sparsify(params: PyTree, activation: str) -> PyTree:
  """Returns the params with every feed-forward layer packed, stacked ones too; all else stays.

  Args:
    params: nested dicts, as of `nn.transformer.lm`. A dict {"gate", "up", "down"} is a gated layer, {"up", "down"} a
    plain one. activation: what the model was trained with; params do not say.

  Raises:
    UserError: not ReLU, biases, or no feed-forward layer at all.
  """
  if activation != "relu":
    raise UserError(
        f"a {activation!r} model has no zeros to skip; only ReLU models are packed: train one with configs/twell.py")
  found: list[str] = []
  new = _walk(params, "", found)
  if not found:
    raise UserError("these params hold no feed-forward layer (gate, up, down); give those of a language model")
  return new


def _walk(tree: PyTree, path: str, found: list[str]) -> PyTree:
  if not isinstance(tree, dict):
    return tree
  if _PLAIN <= set(tree) <= _GATED:
    found.append(path)
    turn = lambda leaf: jnp.swapaxes(leaf, -1, -2)
    return api.Weights(tree["gate"], turn(tree["up"]), tree["down"]) if "gate" in tree else api.Weights(
        tree["up"], None, tree["down"])
  if _PLAIN <= set(tree):
    raise UserError(f"the feed-forward layer {path or 'given'} has {', '.join(sorted(set(tree) - _GATED))}; "
                    "only layers without biases are packed")
  return {name: _walk(leaf, f"{path}.{name}".strip("."), found) for name, leaf in tree.items()}


def save(
    folder: str | os.PathLike, params: PyTree, cfg: ModelConfig, tokenizer: Tokenizer | None = None
) -> pathlib.Path:
  """Writes packed params: model.safetensors, tokenizer.json and, last, config.json; each whole or not at all."""
  folder = pathlib.Path(folder)
  weights.write(folder / weights.SINGLE, {name: np.asarray(leaf) for name, leaf in _named(params)})
  digest = _digest(folder / weights.SINGLE)
  if tokenizer is not None and not _is_bytes(tokenizer):
    files.write_text(folder / "tokenizer.json", tokenizer.json)
  described = None
  if tokenizer is not None:
    kind = "bytes" if _is_bytes(tokenizer) else "tokenizer.json"
    described = {"kind": kind, "eos": tokenizer.eos, "template": tokenizer.template}
  files.write_json(folder / "config.json", {
      "format": FORMAT, "version": VERSION, "model": config_lib.to_dict(cfg), "tokenizer": described, "sha256": digest})
  return folder


def load(folder: str | os.PathLike, **options: Any) -> Model:
  """Loads what `save` wrote; `options` are those of `packed`. Raises UserError for anything else or damaged."""
  folder = pathlib.Path(folder)
  content = files.read_json(folder / "config.json")
  if not isinstance(content, dict) or content.get("format") != FORMAT:
    raise UserError(f"{folder} is not a packed model; make one with --mode=sparsify, or use read() for a dense one")
  if content.get("version") != VERSION:
    raise UserError(f"{folder} has format version {content.get('version')!r}, not {VERSION}; pack the model again")
  cfg = config_lib.from_config(ModelConfig, content.get("model"), f"{folder / 'config.json'}: model")
  if cfg.activation != "relu":
    raise UserError(f"{folder / 'config.json'}: a packed model has activation 'relu', not {cfg.activation!r}")
  if content.get("sha256") != _digest(folder / weights.SINGLE):
    raise UserError(f"{folder / weights.SINGLE} is damaged or not that of its config.json; pack the model again")
  shapes = jax.eval_shape(lambda: sparsify(models.language_model(cfg).init(jax.random.key(0)), "relu"))
  stored = weights.open_folder(folder)
  wanted = {name for name, _ in _named(shapes)}
  if wanted != set(stored.names):
    raise UserError(f"{folder}: config.json does not describe the tensors of {weights.SINGLE}: "
                    f"{', '.join(sorted(wanted ^ set(stored.names)))}; pack the model again")
  leaves = [jnp.asarray(stored.get(name, leaf.shape)) for name, leaf in _named(shapes)]
  params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  return Model(sparse_lm(cfg, **options), params, cfg, _tokenizer(folder, content.get("tokenizer")))


def read(source: str | os.PathLike, activation: str = "") -> Model:
  """Loads a dense ReLU model from a folder with config.json and safetensors, with our training layout of its params.

  Args:
    source: the folder, or the path of its model.safetensors.
    activation: overrides `hidden_act` of its config.json, which the released SparseLM checkpoints leave at "silu"
      although they were trained with ReLU.

  Raises:
    UserError: no such model, not a Llama, or not ReLU.
  """
  folder = pathlib.Path(source).expanduser()
  folder = folder.parent if folder.suffix == ".safetensors" else folder
  content = files.read_json(folder / "config.json")
  if isinstance(content, dict) and content.get("format") == FORMAT:
    raise UserError(f"{folder} is packed already; give the model that it was made from, or use load()")
  said = activation or (content.get("hidden_act", "silu") if isinstance(content, dict) else "silu")
  if said != "relu":
    raise UserError(f"{folder}: hidden_act {said!r} leaves no zeros to skip; give a model that was trained with ReLU "
                    "(--config.hidden_act=relu if config.json is wrong about it)")
  loaded = pretrained.load(folder, activation="relu")
  cfg = models.of_llama(loaded.config)
  return Model(models.language_model(cfg), loaded.params, cfg, loaded.tokenizer)


def _named(tree: PyTree) -> Iterator[tuple[str, Any]]:
  """Yields ("body.ffn.layer.gate", leaf) in the order of jax's pytrees."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    yield ".".join(str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path), leaf


def _digest(path: pathlib.Path) -> str:
  try:
    return files.digest_of_file(path)
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}; pack the model again") from error


def _is_bytes(tokenizer: Tokenizer) -> bool:
  return tokenizer.key == tokenizers.byte_tokenizer().key


def _tokenizer(folder: pathlib.Path, described: Any) -> Tokenizer | None:
  if not isinstance(described, dict):
    return None
  if described.get("kind") == "bytes":
    return tokenizers.byte_tokenizer()
  path = folder / "tokenizer.json"
  try:
    return tokenizers.from_json(
        path.read_text(encoding="utf-8"), described.get("eos"), described.get("template") or "", str(path))
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"cannot read {path}: {error}") from error

