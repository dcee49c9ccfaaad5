"""Llama-family models from files: GGUF, or folders as Hugging Face writes them (config.json, *.safetensors).

    x <- x + attention(rms(x));  x <- x + swiglu(rms(x));  logits = rms(x) head        (arXiv 2302.13971, 2307.09288)

with grouped queries, rotary positions (half-split), no biases, tied or untied head. What differs from that is refused,
never guessed. A GGUF file is de-quantised once into such a folder in the cache (models/ of `assets.cache_dir()`), keyed
by its sha256, so that the second load is quick. It keeps the rows of q and k interleaved for its form of the rotation;
they are put back in order.

Legend: V vocabulary, D width, N hidden width, n layers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core import assets, files
from sakanajax.core.errors import UserError
from sakanajax.nn import gguf, tokenizers, weights
from sakanajax.nn.attention import attention
from sakanajax.nn.ffn import glu
from sakanajax.nn.layer import Layer, stack
from sakanajax.nn.norms import rms_norm
from sakanajax.nn.positions import rope
from sakanajax.nn.tokenizers import Tokenizer
from sakanajax.nn.transformer import block, lm

PyTree = Any
Get = Callable[[str, tuple[int, ...]], np.ndarray]  # (name in safetensors, shape) -> the tensor

# path in the params of a block -> (name in safetensors, name in GGUF); kernels of two axes are transposed on the way
_BLOCK = {
    ("mixer", "norm", "scale"): ("input_layernorm", "attn_norm"),
    ("mixer", "layer", "q"): ("self_attn.q_proj", "attn_q"),
    ("mixer", "layer", "k"): ("self_attn.k_proj", "attn_k"),
    ("mixer", "layer", "v"): ("self_attn.v_proj", "attn_v"),
    ("mixer", "layer", "o"): ("self_attn.o_proj", "attn_output"),
    ("ffn", "norm", "scale"): ("post_attention_layernorm", "ffn_norm"),
    ("ffn", "layer", "gate"): ("mlp.gate_proj", "ffn_gate"),
    ("ffn", "layer", "up"): ("mlp.up_proj", "ffn_up"),
    ("ffn", "layer", "down"): ("mlp.down_proj", "ffn_down"),
}
ACTIVATIONS = ("silu", "relu")
_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
  """Sizes of a Llama.

  Attributes:
    vocab: V, rows of the embedding.
    dim: width D.
    layers: n.
    heads: query heads.
    kv_heads: key heads, a divisor of `heads`.
    head_dim: width of a head, even.
    hidden: width N of the feed-forward layers.
    theta: base of the rotary positions.
    norm_eps: of the RMSNorms.
    tied: the head is the embedding.
    context: tokens it was trained to see at once.
    activation: of the gate, one of ACTIVATIONS.
  """

  vocab: int
  dim: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  hidden: int
  theta: float = 10_000.0
  norm_eps: float = 1e-5
  tied: bool = True
  context: int = 2048
  activation: str = "silu"

  def __post_init__(self):
    if self.activation not in ACTIVATIONS:
      raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
    for field in ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "hidden", "context"):
      value = getattr(self, field)
      if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        raise ValueError(f"{field} must be a positive whole number, got {value!r}")
    for field in ("theta", "norm_eps"):
      if not isinstance(getattr(self, field), (int, float)) or not 0 < getattr(self, field) < float("inf"):
        raise ValueError(f"{field} must be positive, got {getattr(self, field)!r}")
    if self.heads % self.kv_heads or self.head_dim % 2:
      raise ValueError(f"{self.heads} heads, {self.kv_heads} key heads and width {self.head_dim} do not fit together")


class Pretrained(NamedTuple):
  """A model that is ready to run."""

  layer: Layer  # tokens [B, T] -> logits [B, T, V]
  params: PyTree  # those of `llama(config)`, on the device
  tokenizer: Tokenizer | None  # None: the folder has no tokenizer.json
  config: LlamaConfig


@functools.lru_cache(maxsize=32)  # the same layer for equal configs, so that compiled programs are found again
def llama(cfg: LlamaConfig) -> Layer:
  """Returns the language model of a config; params {"embed", "body", "norm", ("head")}, the body's with axis `[n]`."""
  norm = functools.partial(rms_norm, eps=cfg.norm_eps)
  mixer = attention(cfg.dim, cfg.heads, cfg.kv_heads, cfg.head_dim, positions=rope(cfg.theta))
  body = stack(block(cfg.dim, mixer, glu(cfg.dim, cfg.hidden, cfg.activation), norm), cfg.layers)
  return lm(cfg.vocab, cfg.dim, body, cfg.tied, norm)


def load(source: str | os.PathLike, dtype: Any = jnp.float32, activation: str = "") -> Pretrained:
  """Loads a model.

  Args:
    source: the name of an asset ("smollm2", fetched when missing), a .gguf file, a folder with config.json and
      model.safetensors (or shards with their model.safetensors.index.json), or the path of that model.safetensors.
    dtype: of the params and so of the activations.
    activation: overrides `hidden_act` of config.json, for folders that say it wrongly.

  Raises:
    UserError: nothing there, a damaged or foreign file, an architecture that is not exactly Llama's.
  """
  folder = _folder(source)
  cfg, content = _read_config(folder, activation)
  stored = weights.open_folder(folder)
  expected = {name for name, _ in _tensor_names(cfg)}
  strange = sorted(name for name in stored.names - expected - {_HEAD} if not name.endswith("rotary_emb.inv_freq"))
  if strange:
    raise UserError(f"{folder}: tensor {strange[0]!r} has no place in a Llama; give a model of that family")
  tokenizer = _read_tokenizer(folder, content)
  if tokenizer is not None and tokenizer.vocab_size > cfg.vocab:
    raise UserError(f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {cfg.vocab}; "
                    "they do not belong together")
  return Pretrained(llama(cfg), _params(stored.get, cfg, np.dtype(dtype)), tokenizer, cfg)


def save(
    folder: str | os.PathLike, params: PyTree, cfg: LlamaConfig, tokenizer: Tokenizer | None = None
) -> pathlib.Path:
  """Writes config.json, model.safetensors and, with a tokenizer, its files, as Hugging Face lays them out.

  Each file is written whole or not at all, config.json last. Raises UserError when the disk refuses.
  """
  folder = pathlib.Path(folder)
  weights.write(folder / weights.SINGLE, dict(_named(params, cfg)))
  if tokenizer is not None:
    files.write_text(folder / "tokenizer.json", tokenizer.json)
    files.write_json(folder / "tokenizer_config.json", {"chat_template": tokenizer.template})
  files.write_json(folder / "config.json", _config_json(cfg, str(params["embed"].dtype), tokenizer))
  return folder


def _folder(source: str | os.PathLike) -> pathlib.Path:
  """Returns the folder in the layout of Hugging Face that stands for the source."""
  if source == "smollm2":
    asset = assets.ASSETS["smollm2"]
    return _from_gguf(assets.paths(asset, assets.fetch("smollm2"), asset.files[0][0])[0])
  path = pathlib.Path(source).expanduser()
  if path.is_dir():
    return path
  if not path.is_file():
    raise UserError(f"there is no model {str(source)!r}: neither smollm2, nor a .gguf file, nor a folder")
  if gguf.is_gguf(path):
    return _from_gguf(path)
  if path.suffix == ".safetensors":
    return path.parent
  raise UserError(f"{path} is neither a GGUF file nor .safetensors; give one, or a folder with config.json")


def _from_gguf(path: pathlib.Path) -> pathlib.Path:
  """De-quantises the file into the cache, unless that was done before, and returns the folder."""
  try:
    folder = assets.cache_dir() / "models" / files.digest_of_file(path)[:32]
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error
  if not (folder / "config.json").is_file():
    model = gguf.read(path)
    cfg = _gguf_config(model, path)
    tokenizer = tokenizers.from_gguf(model.metadata, str(path))
    get = _gguf_tensor(model, cfg, path)
    save(folder, _params(get, cfg, np.dtype(np.float32), put=np.asarray), cfg, tokenizer)
  return folder


def _gguf_config(model: gguf.Gguf, path: pathlib.Path) -> LlamaConfig:
  meta = model.metadata
  if (kind := meta.get("general.architecture")) != "llama":
    raise UserError(f"{path}: architecture {kind!r} is not llama; give a Llama-family model")
  if meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in model.tensors:
    raise UserError(f"{path}: scaled rotary positions are not supported; give a model without them")
  try:
    heads, dim = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return LlamaConfig(
        vocab=model.tensors["token_embd.weight"].shape[0],
        dim=dim,
        layers=meta["llama.block_count"],
        heads=heads,
        kv_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=meta.get("llama.rope.dimension_count", dim // heads),
        hidden=meta["llama.feed_forward_length"],
        theta=meta.get("llama.rope.freq_base", 10_000.0),
        norm_eps=_decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        tied="output.weight" not in model.tensors,
        context=meta["llama.context_length"],
    )
  except (KeyError, TypeError, ZeroDivisionError, ValueError, IndexError) as error:
    raise UserError(f"{path}: not a whole Llama ({type(error).__name__}: {error}); replace the file") from error


def _decimal(x: float) -> float:
  """Undoes the trip through float32: 9.99999974e-06 -> 1e-05."""
  return float(str(np.float32(x)))


def _gguf_tensor(model: gguf.Gguf, cfg: LlamaConfig, path: pathlib.Path) -> Get:
  """Returns (name in safetensors, shape) -> the tensor as Hugging Face holds it."""
  names = dict(_tensor_names(cfg))
  strange = sorted(set(model.tensors) - set(names.values()))
  if strange:
    raise UserError(f"{path}: tensor {strange[0]!r} has no place in a Llama; give a model of that family")

  def get(name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = model.tensors.get(names[name])
    if tensor is None or tensor.shape != shape:
      raise UserError(f"{path}: tensor {names[name]!r} of shape {list(shape)} expected, found "
                      f"{tensor and list(tensor.shape)}; replace the file")
    array = tensor.read()
    if name.endswith(("q_proj.weight", "k_proj.weight")):
      array = half_split(array, shape[0] // cfg.head_dim)
    return array

  return get


def _tensor_names(cfg: LlamaConfig) -> Iterator[tuple[str, str]]:
  """Yields (name in safetensors, name in GGUF) of all tensors."""
  yield _EMBED, "token_embd.weight"
  yield _NORM, "output_norm.weight"
  if not cfg.tied:
    yield _HEAD, "output.weight"
  for i in range(cfg.layers):
    for name, other in _BLOCK.values():
      yield f"model.layers.{i}.{name}.weight", f"blk.{i}.{other}.weight"


def half_split(kernel: np.ndarray, heads: int) -> np.ndarray:
  """Returns the rows `[heads d, in]` of q or k in half-split order: row 2 i + j of a head becomes row i + j d/2."""
  rows, width = kernel.shape
  return kernel.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _params(get: Get, cfg: LlamaConfig, dtype: np.dtype, put: Callable = jnp.asarray) -> PyTree:
  """Builds the params from (name, shape) -> tensor, one stacked leaf at a time."""
  shapes = jax.eval_shape(lambda: llama(cfg).init(jax.random.key(0)))

  def stacked(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
    leaf = np.empty(shape, dtype)
    stored = shape[1:][::-1]
    for i in range(cfg.layers):
      leaf[i] = get(f"model.layers.{i}.{_BLOCK[path][0]}.weight", stored).T
    return put(leaf)

  body: dict[str, Any] = {}
  for path in _BLOCK:
    part, kind, name = path
    leaf = stacked(path, shapes["body"][part][kind][name].shape)
    body.setdefault(part, {}).setdefault(kind, {})[name] = leaf
  params = {
      "embed": put(get(_EMBED, (cfg.vocab, cfg.dim)).astype(dtype)),
      "body": body,
      "norm": {"scale": put(get(_NORM, (cfg.dim,)).astype(dtype))},
  }
  return params if cfg.tied else params | {"head": put(get(_HEAD, (cfg.vocab, cfg.dim)).T.astype(dtype))}


def _named(params: PyTree, cfg: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, tensor) as Hugging Face has them; the inverse of `_params`."""
  yield _EMBED, np.asarray(params["embed"])
  yield _NORM, np.asarray(params["norm"]["scale"])
  if not cfg.tied:
    yield _HEAD, np.ascontiguousarray(np.asarray(params["head"]).T)
  for (part, kind, leaf), (name, _) in _BLOCK.items():
    stacked = np.asarray(params["body"][part][kind][leaf])
    for i in range(cfg.layers):
      yield f"model.layers.{i}.{name}.weight", np.ascontiguousarray(stacked[i].T)


def _read_config(folder: pathlib.Path, activation: str = "") -> tuple[LlamaConfig, dict[str, Any]]:
  """Returns the sizes in config.json and its whole content; refuses what this module does not compute."""
  path = folder / "config.json"
  content = files.read_json(path)
  if not isinstance(content, dict) or content.get("model_type") != "llama":
    kind = content.get("model_type") if isinstance(content, dict) else None
    raise UserError(f"{path}: model_type {kind!r} is not llama; give a Llama-family model")
  activation = activation or content.get("hidden_act", "silu")
  rope_content = content.get("rope_parameters") or content.get("rope_scaling") or {}
  refused = {
      "hidden_act": activation not in ACTIVATIONS,
      "attention_bias": bool(content.get("attention_bias")),
      "mlp_bias": bool(content.get("mlp_bias")),
      "rope_scaling": not isinstance(rope_content, dict) or rope_content.get("rope_type", "default") != "default"
                      or "type" in rope_content,
      "quantization_config": bool(content.get("quantization_config")),
  }
  for key in (key for key, wrong in refused.items() if wrong):
    raise UserError(f"{path}: {key} = {content.get(key)!r} is not supported; give a plain Llama in floating point")
  try:
    heads, dim = content["num_attention_heads"], content["hidden_size"]
    cfg = LlamaConfig(
        vocab=content["vocab_size"],
        dim=dim,
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        head_dim=content.get("head_dim") or dim // heads,
        hidden=content["intermediate_size"],
        theta=float(content.get("rope_theta") or rope_content.get("rope_theta", 10_000.0)),
        norm_eps=float(content.get("rms_norm_eps", 1e-6)),
        tied=bool(content.get("tie_word_embeddings", False)),
        context=content.get("max_position_embeddings", 2048),
        activation=activation,
    )
  except KeyError as error:
    raise UserError(f"{path} has no {error}; replace it") from error
  except (TypeError, ValueError, ZeroDivisionError) as error:
    raise UserError(f"{path}: {error}; replace it") from error
  return cfg, content


def _config_json(cfg: LlamaConfig, dtype: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
  return {
      "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype,
      "vocab_size": cfg.vocab, "hidden_size": cfg.dim, "num_hidden_layers": cfg.layers,
      "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim,
      "intermediate_size": cfg.hidden, "hidden_act": cfg.activation, "rope_theta": cfg.theta,
      "rms_norm_eps": cfg.norm_eps, "tie_word_embeddings": cfg.tied, "max_position_embeddings": cfg.context,
      "attention_bias": False, "mlp_bias": False, "bos_token_id": None,
      "eos_token_id": None if tokenizer is None else tokenizer.eos,
  }  # fmt: skip


def _read_tokenizer(folder: pathlib.Path, content: dict[str, Any]) -> Tokenizer | None:
  path = folder / "tokenizer.json"
  if not path.is_file():
    return None
  eos = content.get("eos_token_id")
  eos = eos[0] if isinstance(eos, list) and eos else eos
  settings = files.read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
  template = settings.get("chat_template") if isinstance(settings, dict) else None
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, ValueError) as error:
    raise UserError(f"cannot read {path}: {error}") from error
  return tokenizers.from_json(
      text, eos if isinstance(eos, int) else None, template if isinstance(template, str) else "", str(path)
  )
