"""Packing: the same outputs, on disk and back, models of others, and clear refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.twell import api, cpu
from sakanajax.core.errors import UserError
from sakanajax.nn import pretrained, tokenizers
from sakanajax.nn.layer import collect
from sakanajax.twell import ffn, loss as losses, model as models, sparsify, speed
from tests.twell.helpers import TINY, batch_of, params_of, quick_compilation  # noqa: F401

BATCH = batch_of(padded=2)


def forward(model, params):
  return jax.jit(lambda p: model.apply(p, BATCH["tokens"], (), losses.context(BATCH)))(params)


@pytest.fixture(scope="module")
def trained():
  model = models.language_model(TINY)
  params = params_of(model)
  return params, forward(model, params)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_a_packed_model_is_the_model(trained, implementation):
  if implementation == "cpu" and cpu.unavailable():
    pytest.skip(cpu.unavailable())
  params, (logits, _, aux) = trained
  packed = sparsify.sparsify(params, "relu")
  got, _, report = forward(sparsify.sparse_lm(TINY, implementation=implementation, dense_above=None, ell=24), packed)
  seen = BATCH["segment_ids"] > 0
  np.testing.assert_allclose(np.asarray(got)[seen], np.asarray(logits)[seen], rtol=1e-4, atol=1e-5)
  for name in ("nnz", "active"):
    np.testing.assert_allclose(collect(report, name)[0], collect(aux, name)[0], rtol=1e-6)
  assert not collect(report, "lost")[0].any() and not collect(report, "dense")[0].any()


def test_lost_positives_are_reported_or_replaced(trained):
  params = sparsify.sparsify(trained[0], "relu")
  _, _, report = forward(sparsify.sparse_lm(TINY, implementation="xla", dense_above=None, ell=2), params)
  assert collect(report, "lost")[0].min() > 0
  got, _, report = forward(sparsify.sparse_lm(TINY, implementation="xla", dense_above=0.9, ell=2), params)
  assert not collect(report, "lost")[0].any() and collect(report, "dense")[0].all()
  seen = BATCH["segment_ids"] > 0
  np.testing.assert_allclose(np.asarray(got)[seen], np.asarray(trained[1][0])[seen], rtol=1e-4, atol=1e-5)


def test_plain_layers_and_single_layers_are_packed():
  layer = ffn.relu_mlp(6, 20)
  params, x = params_of(layer), jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 6)), jnp.float32)
  packed = sparsify.sparsify({"a": {"b": params}}, "relu")["a"]["b"]
  assert isinstance(packed, api.Weights) and packed.up is None
  thin = sparsify.packed(implementation="xla", dense_above=None)
  y, _, aux = jax.jit(thin.apply)(packed, x, (), losses.Ctx())
  want, _, report = jax.jit(layer.apply)(params, x, (), losses.Ctx())
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
  assert aux["nnz"] == report["nnz"]


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_other_activations_are_refused_in_one_line(trained, activation):
  with pytest.raises(UserError, match=f"{activation}.*ReLU") as error:
    sparsify.sparsify(trained[0], activation)
  assert "\n" not in str(error.value)


def test_what_cannot_be_packed_is_named():
  with pytest.raises(UserError, match="no feed-forward layer"):
    sparsify.sparsify({"w": jnp.ones(2)}, "relu")
  with pytest.raises(UserError, match="x.y has up_bias"):
    sparsify.sparsify({"x": {"y": {"up": 0, "down": 0, "up_bias": 0}}}, "relu")


@pytest.mark.parametrize("tokenizer", [None, tokenizers.byte_tokenizer()])
def test_saved_and_loaded(trained, tmp_path, tokenizer):
  packed = sparsify.sparsify(trained[0], "relu")
  sparsify.save(tmp_path / "m", packed, TINY, tokenizer)
  found = sparsify.load(tmp_path / "m")
  jax.tree.map(np.testing.assert_array_equal, found.params, packed)
  assert jax.tree.structure(found.params) == jax.tree.structure(packed) and found.cfg == TINY
  assert (found.tokenizer and found.tokenizer.key) == (tokenizer and tokenizer.key)
  assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_that_is_not_ours_is_refused(trained, tmp_path):
  folder = sparsify.save(tmp_path / "m", sparsify.sparsify(trained[0], "relu"), TINY)
  config = json.loads((folder / "config.json").read_text())
  for change, words in (({"format": "other"}, "not a packed model"), ({"version": 9}, "version 9"),
                        ({"model": config["model"] | {"hidden": 25}}, "shape"),
                        ({"model": config["model"] | {"gated": False}}, "up"),
                        ({"model": config["model"] | {"activation": "silu"}}, "'relu', not 'silu'")):
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=words):
      sparsify.load(folder)
  (folder / "config.json").write_text(json.dumps(config))
  whole = (folder / "model.safetensors").read_bytes()
  for damaged in (whole[:200], whole[:-1] + bytes([whole[-1] ^ 1])):
    (folder / "model.safetensors").write_bytes(damaged)
    with pytest.raises(UserError, match="damaged"):
      sparsify.load(folder)
  with pytest.raises(UserError, match="packed already"):
    sparsify.read(folder)


def llama_folder(folder, activation):
  cfg = pretrained.LlamaConfig(vocab=19, dim=8, layers=2, heads=2, kv_heads=1, head_dim=4, hidden=24)
  params = params_of(pretrained.llama(cfg))
  pretrained.save(folder, params, cfg)
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | {"hidden_act": activation}))
  return params


def test_a_relu_model_of_others_is_read_and_packed(tmp_path):
  params = llama_folder(tmp_path / "llama", "relu")
  found = sparsify.read(tmp_path / "llama" / "model.safetensors")
  jax.tree.map(np.testing.assert_allclose, found.params, params)
  assert found.cfg.activation == "relu" and found.cfg.kv_heads == 1
  dense, _, _ = forward(found.layer, found.params)
  model = sparsify.sparse_lm(found.cfg, implementation="xla", dense_above=None)
  packed, _, _ = forward(model, sparsify.sparsify(params, "relu"))
  seen = BATCH["segment_ids"] > 0
  np.testing.assert_allclose(np.asarray(packed)[seen], np.asarray(dense)[seen], rtol=1e-4, atol=1e-5)


def test_a_silu_model_of_others_is_refused_unless_the_user_knows_better(tmp_path):
  params = llama_folder(tmp_path / "llama", "silu")
  with pytest.raises(UserError, match="silu"):
    sparsify.read(tmp_path / "llama")
  jax.tree.map(np.testing.assert_allclose, sparsify.read(tmp_path / "llama", activation="relu").params, params)
  with pytest.raises(UserError, match="config.json"):
    sparsify.read(tmp_path / "nothing")


def test_prediction_in_closed_form():
  curve = speed.Curve((0.001, 0.01, 0.1), (3.0, 2.0, 1.0))
  assert speed.interpolate(curve, 0.01) == pytest.approx(2.0) and speed.interpolate(curve, 0.5) == 1.0
  assert speed.interpolate(curve, 0.0) == 3.0 and speed.interpolate(curve, 10**-1.5) == pytest.approx(1.5)
  got = speed.predict_speedup([10.0, 100.0], 1000, curve)
  assert got["layers"] == pytest.approx([2.0, 1.0]) and got["speedup"] == pytest.approx(2 / (1 / 2 + 1))
  assert speed.predict_speedup([10.0] * 5, 1000, curve)["speedup"] == pytest.approx(2.0)
