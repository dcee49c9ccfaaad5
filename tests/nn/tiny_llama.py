"""A small random Llama as named tensors, its forward pass in plain numpy, and writers of its files."""

import json

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 290, "hidden_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 40,
    "rms_norm_eps": 1e-3, "rope_theta": 500.0, "tie_word_embeddings": True, "max_position_embeddings": 256,
    "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{{ messages }}"




def tensors(config=CONFIG, seed=0):
  """Returns {name in safetensors: array} of random weights, large enough that every part matters."""
  rng = np.random.default_rng(seed)
  dim, hidden, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
  wide, narrow = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
  shapes = {"model.embed_tokens": (vocab, dim), "model.norm": (dim,)}
  if not config["tie_word_embeddings"]:
    shapes["lm_head"] = (vocab, dim)
  for i in range(config["num_hidden_layers"]):
    layer = {"input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (wide, dim),
             "self_attn.k_proj": (narrow, dim), "self_attn.v_proj": (narrow, dim), "self_attn.o_proj": (dim, wide),
             "mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}  # fmt: skip
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
  return {
      f"{name}.weight": (rng.normal(size=shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 4) + (len(shape) == 1))
      .astype(np.float32) for name, shape in shapes.items()
  }  # fmt: skip


def forward(weights, ids, config=CONFIG):
  """Returns the logits `[T, V]` of one text in float64, head by head and token by token."""
  w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in weights.items()}
  d, group = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

  def turn(x):  # [T, d] in complex numbers: (first half, second half) as (real, imaginary)
    z = x[:, : d // 2] + 1j * x[:, d // 2 :]
    z = z * np.exp(1j * np.arange(len(x))[:, None] * config["rope_theta"] ** (-2 * np.arange(d // 2) / d))
    return np.concatenate([z.real, z.imag], axis=1)

  x = w["model.embed_tokens"][np.asarray(ids)]
  for i in range(config["num_hidden_layers"]):
    part = {name: w[f"model.layers.{i}.{name}"] for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")}
    h = norm(x, w[f"model.layers.{i}.input_layernorm"])
    q, k, v = (h @ part[f"self_attn.{name}_proj"].T for name in "qkv")
    mixed = np.zeros((len(ids), config["num_attention_heads"] * d))
    for head in range(config["num_attention_heads"]):
      own, shared = slice(head * d, head * d + d), slice(head // group * d, head // group * d + d)
      queries, keys = turn(q[:, own]), turn(k[:, shared])
      for t in range(len(ids)):
        chances = np.exp(keys[: t + 1] @ queries[t] / d**0.5)
        mixed[t, own] = chances / chances.sum() @ v[: t + 1, shared]
    x = x + mixed @ w[f"model.layers.{i}.self_attn.o_proj"].T
    h = norm(x, w[f"model.layers.{i}.post_attention_layernorm"])
    gate = h @ part["mlp.gate_proj"].T
    gate = np.maximum(gate, 0) if config["hidden_act"] == "relu" else gate / (1 + np.exp(-gate))
    x = x + (gate * (h @ part["mlp.up_proj"].T)) @ w[f"model.layers.{i}.mlp.down_proj"].T
  return norm(x, w["model.norm"]) @ w.get("lm_head", w["model.embed_tokens"]).T


def vocabulary():
  """Returns the tokens of a small byte-level BPE and its merges: specials, bytes, then what the merges make."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  alphabet = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
  merges = ["h e", "l l", "he ll", "hell o", "\u0120 w", "\u00c3 \u00a9"]
  return [*SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in merges)], merges


def tokenizer_json():
  """Returns a tokenizer.json as the package `tokenizers` itself writes it."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  tokens, merges = vocabulary()
  bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split()) for merge in merges]))
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
  bpe.decoder = decoders.ByteLevel()
  bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
  return bpe.to_str()


def write_folder(folder, weights, config=CONFIG, shards=1):
  """Writes a folder as Hugging Face does, in one file or in shards with an index."""
  from safetensors.numpy import save_file

  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  (folder / "tokenizer.json").write_text(tokenizer_json())
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
  if shards == 1:
    save_file(weights, folder / "model.safetensors")
    return folder
  index = {}
  for shard in range(shards):
    name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
    part = dict(list(weights.items())[shard::shards])
    save_file(part, folder / name)
    index |= dict.fromkeys(part, name)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
  return folder


def write_gguf(path, weights, config=CONFIG, quantize=lambda array: (array, None), change=lambda writer: None):
  """Writes a GGUF file with the package `gguf`; q and k are interleaved as its rotary form wants them."""
  import gguf

  names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
           "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
           "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_rope_freq_base(config["rope_theta"])
  writer.add_rope_dimension_count(config["head_dim"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  tokens, merges = vocabulary()
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  writer.add_token_list(tokens)
  writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
  writer.add_token_merges(merges)
  writer.add_eos_token_id(config["eos_token_id"])
  writer.add_chat_template(TEMPLATE)
  for name, array in weights.items():
    parts = name.removesuffix(".weight").split(".", 3)
    to = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(".".join(parts[:2]))
    to = to or f"blk.{parts[2]}.{names[parts[3]]}"
    if to.endswith(("attn_q", "attn_k")):
      heads = array.shape[0] // config["head_dim"]
      array = np.stack([row for head in np.split(array, heads) for pair in zip(*np.split(head, 2)) for row in pair])
    writer.add_tensor(f"{to}.weight", *quantize(array)[:1], raw_dtype=quantize(array)[1])
  change(writer)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path
