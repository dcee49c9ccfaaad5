"""Pretrained models: a random Llama through every kind of file against plain numpy, refusals, and SmolLM2 itself."""

import dataclasses
import functools
import json
import os
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.core import assets, text
from sakanajax.core.errors import UserError
from sakanajax.nn import pretrained, sampling, tokenizers, transformer
from sakanajax.nn.layer import Ctx
from tests.nn import tiny_llama

pytest.importorskip("safetensors", reason="the extra [lm] is not installed")
pytest.importorskip("gguf", reason="the extra [lm] is not installed")
IDS = np.random.default_rng(1).integers(0, 259, 17)
UNTIED = tiny_llama.CONFIG | {"tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
  if "smollm2" not in request.fixturenames:
    monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


@functools.lru_cache
def _weights(tied=True):
  return tiny_llama.tensors(tiny_llama.CONFIG if tied else UNTIED)


@functools.lru_cache
def _expected(tied=True):
  return tiny_llama.forward(_weights(tied), IDS, tiny_llama.CONFIG if tied else UNTIED)


@functools.lru_cache
def _forward(layer):
  return jax.jit(lambda params, ids: layer.apply(params, ids, (), Ctx())[0])


def _check(model, expected, tolerance=1e-4):
  with jax.default_matmul_precision("highest"):
    logits = _forward(model.layer)(model.params, IDS[None])[0]
  np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_give_the_logits_of_numpy(tmp_path, tied, shards):
  config = tiny_llama.CONFIG if tied else UNTIED
  folder = tiny_llama.write_folder(tmp_path / "model", _weights(tied), config, shards)
  model = pretrained.load(folder)
  assert model.config == pretrained.LlamaConfig(290, 24, 3, 6, 2, 4, 40, 500.0, 1e-3, tied, 256)
  _check(model, _expected(tied))
  assert model.tokenizer.eos == 2 and model.tokenizer.template == tiny_llama.TEMPLATE
  expected = jax.eval_shape(model.layer.init, jax.random.key(0))
  chex.assert_trees_all_equal_shapes_and_dtypes(model.params, expected)


def test_a_relu_gate_is_read_from_the_config_or_from_who_knows_better(tmp_path):
  config = tiny_llama.CONFIG | {"hidden_act": "relu"}
  expected = tiny_llama.forward(_weights(), IDS, config)
  says_so = pretrained.load(tiny_llama.write_folder(tmp_path / "relu", _weights(), config))
  told = pretrained.load(tiny_llama.write_folder(tmp_path / "silu", _weights()), activation="relu")
  again = pretrained.load(pretrained.save(tmp_path / "again", told.params, told.config))
  for model in (says_so, told, again):
    assert model.config.activation == "relu"
    _check(model, expected)


def test_gguf_gives_the_logits_of_numpy_and_is_kept(tmp_path, cache, monkeypatch):
  path = tiny_llama.write_gguf(tmp_path / "model.gguf", _weights())
  model = pretrained.load(str(path))
  _check(model, _expected())
  assert model.config == pretrained.LlamaConfig(290, 24, 3, 6, 2, 4, 40, 500.0, 1e-3, True, 256)
  monkeypatch.setattr(pretrained.gguf, "read", lambda path: pytest.fail("read again"))
  again = pretrained.load(path)
  chex.assert_trees_all_equal(again.params, model.params)
  words = "hello w\u00e9rld 1234 <|im_end|>"
  assert again.tokenizer.encode(words) == model.tokenizer.encode(words)
  assert again.tokenizer.template == tiny_llama.TEMPLATE and again.layer is model.layer
  assert len(os.listdir(cache / "models")) == 1


def test_untied_gguf(tmp_path):
  _check(pretrained.load(tiny_llama.write_gguf(tmp_path / "a.gguf", _weights(False), UNTIED)), _expected(False))


@pytest.mark.parametrize("tied", [True, False])
def test_save_round_trips(tmp_path, tied):
  config = tiny_llama.CONFIG if tied else UNTIED
  model = pretrained.load(tiny_llama.write_folder(tmp_path / "a", _weights(tied), config))
  for dtype in (np.float32, jnp.bfloat16):
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), model.params)
    folder = pretrained.save(tmp_path / np.dtype(dtype).name, params, model.config, model.tokenizer)
    again = pretrained.load(folder, dtype)
    chex.assert_trees_all_equal(again.params, params)
    assert again.config == model.config and again.tokenizer.encode("hello") == model.tokenizer.encode("hello")
  from safetensors.numpy import load_file

  stored = load_file(tmp_path / "float32" / "model.safetensors")
  chex.assert_trees_all_equal(stored, _weights(tied))  # the very tensors and names of Hugging Face


def test_bfloat16(tmp_path):
  model = pretrained.load(tiny_llama.write_folder(tmp_path / "a", _weights()), jnp.bfloat16)
  assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
  _check(model, _expected(), 0.05)


def test_own_model_with_a_byte_tokenizer(tmp_path):
  cfg = pretrained.LlamaConfig(vocab=257, dim=8, layers=2, heads=2, kv_heads=1, head_dim=4, hidden=8)
  rng, shapes = np.random.default_rng(0), jax.eval_shape(pretrained.llama(cfg).init, jax.random.key(0))
  params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
  tokenizer = tokenizers.byte_tokenizer()
  model = pretrained.load(pretrained.save(tmp_path / "own", params, cfg, tokenizer) / "model.safetensors")
  chex.assert_trees_all_equal(model.params, params)
  assert model.tokenizer.encode("caf\u00e9") == tokenizer.encode("caf\u00e9") and model.tokenizer.eos == 256
  bare = pretrained.load(pretrained.save(tmp_path / "bare", params, cfg))
  assert bare.tokenizer is None


def test_decoding_with_the_cache_is_teacher_forcing(tmp_path):
  model = pretrained.load(tiny_llama.write_folder(tmp_path / "a", _weights()))
  drawn = [int(t[0]) for t in sampling.stream(
      model.layer, model.params, IDS[None], 6, jax.random.key(0), temperature=0.0)]
  logits = tiny_llama.forward(_weights(), [*IDS, *drawn])
  assert drawn == list(np.argmax(logits[len(IDS) - 1 : -1], axis=-1))


@pytest.mark.parametrize("change, words", [
    ({"model_type": "gpt2"}, "'gpt2' is not llama"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": "24"}, "config.json"),
    ({"hidden_size": 1 << 40}, "dim must be a positive whole number"),
    ({"num_hidden_layers": 0}, "layers must be a positive"),
    ({"num_key_value_heads": 4}, "do not fit together"),
    ({"rms_norm_eps": float("nan")}, "norm_eps must be positive"),
    ({"vocab_size": 300}, r"shape \[290, 24\] where config.json asks for \[300, 24\]"),
    ({"vocab_size": 250}, "they do not belong together"),
    ({"num_hidden_layers": 4}, "there is no tensor 'model.layers.3"),
    ({"num_hidden_layers": 2}, "tensor 'model.layers.2.*' has no place in a Llama"),
    ({"tie_word_embeddings": False}, "no tensor 'lm_head.weight'"),
])
def test_config_that_differs_is_refused(tmp_path, change, words):
  folder = tiny_llama.write_folder(tmp_path / "a", _weights(), tiny_llama.CONFIG | change)
  with pytest.raises(UserError, match=words) as error:
    pretrained.load(folder)
  assert "\n" not in str(error.value)


def test_newer_spelling_of_the_rotary_base(tmp_path):
  config = {k: v for k, v in tiny_llama.CONFIG.items() if k != "rope_theta"}
  config |= {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_scaling": None}
  assert pretrained.load(tiny_llama.write_folder(tmp_path / "a", _weights(), config)).config.theta == 500.0


def _cut(name, keep):
  def damage(folder):
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])

  return damage


def _add(name):
  return lambda folder: tiny_llama.write_folder(folder, _weights() | {name: np.zeros(24, np.float32)})


def _index(content):
  def damage(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))

  return damage


@pytest.mark.parametrize("damage, words", [
    (_cut("model.safetensors", -5), "damaged or not safetensors"),
    (_cut("model.safetensors", 40), "damaged or not safetensors"),
    (_cut("model.safetensors", 0), "damaged or not safetensors"),
    (_cut("config.json", 30), "not valid JSON"),
    (_cut("tokenizer.json", 100), "is not a tokenizer.json"),
    (lambda folder: (folder / "config.json").write_text("[]"), "is not llama"),
    (lambda folder: (folder / "config.json").unlink(), "cannot read"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    (_add("model.layers.0.self_attn.q_proj.bias"), "q_proj.bias' has no place"),
    (_add("model.layers.0.self_attn.q_norm.weight"), "q_norm.weight' has no place"),
    (_index({"weight_map": {"a": "../model.safetensors"}}), "not a file of that folder"),
    (_index({"weight_map": {"a": "missing.safetensors"}}), "not a file of that folder"),
    (_index({"weight_map": []}), "has no weight_map"),
])
def test_damaged_folder_is_one_line(tmp_path, damage, words):
  folder = tiny_llama.write_folder(tmp_path / "a", _weights())
  damage(folder)
  with pytest.raises(UserError, match=words) as error:
    pretrained.load(folder)
  assert "\n" not in str(error.value)


def test_not_a_model(tmp_path):
  (tmp_path / "notes.txt").write_text("words")
  for source, words in ((tmp_path / "absent", "there is no model"), (tmp_path / "notes.txt", "neither a GGUF file")):
    with pytest.raises(UserError, match=words):
      pretrained.load(source)


def _scaled(writer):
  writer.add_rope_scaling_type(__import__("gguf").RopeScalingType.YARN)


@pytest.mark.parametrize("weights, change, words", [
    (lambda w: w, _scaled, "scaled rotary positions"),
    (lambda w: w, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32)), "scaled rotary"),
    (lambda w: w, lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(24, np.float32)), "no place in a"),
    (lambda w: {k: v for k, v in w.items() if "layers.1.mlp.up" not in k}, lambda writer: None, "blk.1.ffn_up.weight"),
    (lambda w: w | {"model.norm.weight": np.ones(23, np.float32)}, lambda writer: None, r"\[24\] expected, .* \[23\]"),
    (lambda w: {k: v for k, v in w.items() if "embed" not in k}, lambda writer: None, "not a whole Llama"),
])
def test_foreign_gguf_is_one_line(tmp_path, cache, weights, change, words):
  path = tiny_llama.write_gguf(tmp_path / "a.gguf", weights(_weights()), change=change)
  with pytest.raises(UserError, match=words) as error:
    pretrained.load(path)
  assert "\n" not in str(error.value) and not list(cache.rglob("config.json"))


def test_config_is_hashable_and_checked():
  cfg = pretrained.LlamaConfig(290, 24, 3, 6, 2, 4, 40)
  assert pretrained.llama(cfg) is pretrained.llama(dataclasses.replace(cfg))
  for wrong in ({"head_dim": 3}, {"kv_heads": 4}, {"theta": 0.0}, {"layers": True}):
    with pytest.raises(ValueError):
      dataclasses.replace(cfg, **wrong)


# SmolLM2 itself.


@pytest.fixture(scope="module")
def smollm2():
  try:
    assets.fetch("smollm2")
  except UserError as error:
    pytest.skip(f"out of reach: {error}")
  return pretrained.load("smollm2")


def _nll(model, ids):
  logits = _forward(model.layer)(model.params, np.asarray(ids)[None])
  return float(transformer.nll(logits[:, :-1], jnp.asarray(ids)[None, 1:]))


@pytest.mark.slow
def test_smollm2_equals_the_reference(smollm2):
  cases = json.loads((pathlib.Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())["cases"]
  for case in cases:
    assert smollm2.tokenizer.encode(case["text"]) == case["ids"]
    assert smollm2.tokenizer.decode(case["ids"]) == case["text"]
    assert abs(_nll(smollm2, case["ids"]) - case["nll"]) < 0.01
    logits = _forward(smollm2.layer)(smollm2.params, np.asarray(case["ids"])[None])[0, -1]
    assert list(jax.lax.top_k(logits, 5)[1]) == case["top5_last"]


@pytest.mark.slow
@pytest.mark.parametrize("asset, file, part, nll, bits", [
    ("sotu", "1981_jimmy_carter_d.txt", slice(5000, 9000), 3.281, 0.914),
    ("moby_dick", "chapter_3.txt", slice(3000, 9000), 4.683, 1.613),
])
def test_smollm2_on_real_text(smollm2, asset, file, part, nll, bits):
  words = (assets.fetch(asset) / file).read_text(encoding="utf-8")[part]
  ids = smollm2.tokenizer.encode(words)[:512]
  mine = _nll(smollm2, ids)
  assert abs(mine - nll) < 0.02
  assert abs(mine * (len(ids) - 1) / np.log(2) / len(smollm2.tokenizer.decode(ids[1:]).encode()) - bits) < 0.02


@pytest.mark.slow
def test_smollm2_answers_and_the_cache_is_teacher_forcing(smollm2):
  ids = tokenizers.chat(smollm2.tokenizer, [("user", "What is the capital of Japan?")])
  drawn = [int(t[0]) for t in sampling.stream(
      smollm2.layer, smollm2.params, np.asarray([ids], np.int32), 24, jax.random.key(0),
      stop=smollm2.tokenizer.stops, temperature=0.0)]
  assert "Tokyo" in smollm2.tokenizer.decode(drawn) and drawn[-1] in smollm2.tokenizer.stops
  logits = _forward(smollm2.layer)(smollm2.params, np.asarray([ids + drawn]))[0]
  assert drawn == list(np.argmax(logits[len(ids) - 1 : -1], axis=-1))


@pytest.mark.slow
def test_rows_of_real_text_feed_the_model(smollm2):
  corpus = text.corpus("moby_dick")
  tokens = text.tokenize(corpus, smollm2.tokenizer, "valid")
  row = text.rows(tokens, np.arange(1), 256)
  ctx = Ctx(positions=jnp.asarray(row["positions"]), segment_ids=jnp.asarray(row["segment_ids"]))
  logits = jax.jit(lambda params: smollm2.layer.apply(params, row["tokens"], (), ctx)[0])(smollm2.params)
  assert 3.0 < float(transformer.nll(logits, row["labels"], row["mask"])) < 5.5
