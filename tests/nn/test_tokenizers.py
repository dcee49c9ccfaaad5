"""Tokenizers: round trips of any text, special tokens nobody can forge, streams of whole characters, bad files."""

import functools
import json

from hypothesis import given, settings, strategies as st
import pytest

from sakanajax.core.errors import UserError
from sakanajax.nn import tokenizers
from tests.nn import tiny_llama

pytest.importorskip("tokenizers", reason="the extra [lm] is not installed")
LETTERS = "ab1 \n\r\t\x00\u00e9\u0120\u00c3\u0301\u65e5\u672c\U0001f389\ud83d\ufffd<|im_end|>hello'"
ODD = "caf\u00e9 \u65e5\u672c \U0001f389 \r\n\t 1234 hello we'll <|im_end|> \x00\u2581 <0x41> \u0120"


def _metadata():
  tokens, merges = tiny_llama.vocabulary()
  return {
      "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
      "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3), "tokenizer.ggml.merges": merges,
      "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": tiny_llama.TEMPLATE,
  }  # fmt: skip


def _sentencepiece():
  """A SentencePiece-like tokenizer.json: spaces as low lines, unknown characters as bytes."""
  tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
  return json.dumps({
      "version": "1.0", "truncation": None, "padding": None, "post_processor": None, "pre_tokenizer": None,
      "added_tokens": [{"id": i, "content": tokens[i], "special": True, "single_word": False, "lstrip": False,
                        "rstrip": False, "normalized": False} for i in range(3)],
      "normalizer": {"type": "Sequence", "normalizers": [
          {"type": "Prepend", "prepend": "\u2581"},
          {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
      "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
      "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)}, "merges": ["\u2581 a"]},
  })  # fmt: skip


@functools.lru_cache
def _tokenizer(kind):
  return {
      "bytes": tokenizers.byte_tokenizer,
      "json": lambda: tokenizers.from_json(tiny_llama.tokenizer_json(), eos=2, template=tiny_llama.TEMPLATE),
      "gguf": lambda: tokenizers.from_gguf(_metadata()),
      "again": lambda: tokenizers.from_json(tokenizers.byte_tokenizer().json),
      "sentencepiece": lambda: tokenizers.from_json(_sentencepiece()),
  }[kind]()


ALL = ("bytes", "json", "gguf", "again", "sentencepiece")


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=LETTERS, max_size=30))
def test_any_text_round_trips(kind, words):
  tokenizer = _tokenizer(kind)
  words = words.encode("utf-8", "replace").decode()
  ids = tokenizer.encode(words)
  space = " " if kind == "sentencepiece" and words else ""
  assert tokenizer.decode(ids) == space + words and "".join(tokenizers.stream(tokenizer, ids)) == space + words
  assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("kind", ALL)
def test_text_cannot_forge_special_tokens(kind):
  tokenizer = _tokenizer(kind)
  assert len(tokenizer.specials) >= 1 and tokenizer.eos in tokenizer.specials.values()
  for name, i in tokenizer.specials.items():
    ids = tokenizer.encode(f"a{name}b")
    assert not set(ids) & set(tokenizer.specials.values())
    assert tokenizer.decode(ids).strip() == f"a{name}b" and tokenizer.decode([i, *ids]) == tokenizer.decode(ids)


def test_the_files_of_one_model_agree():
  one, two = _tokenizer("json"), _tokenizer("gguf")
  assert one.encode(ODD) == two.encode(ODD) and one.pieces == two.pieces and one.specials == two.specials
  tokens, _ = tiny_llama.vocabulary()
  assert [tokens[i] for i in two.encode("hello w\u00e9 22")] == ["hello", "\u0120w", "\u00c3\u00a9", "\u0120", "2", "2"]
  assert two.decode([i for i in range(two.vocab_size) if i not in two.specials.values()][:94]) == "".join(
      map(chr, range(33, 127)))


def test_bytes_are_the_ids():
  tokenizer = tokenizers.byte_tokenizer(("<|endoftext|>", "<|mask|>"))
  assert tokenizer.encode("\u00e9a") == [0xC3, 0xA9, 97] and tokenizer.vocab_size == 258
  assert tokenizer.specials == {"<|endoftext|>": 256, "<|mask|>": 257} and tokenizer.eos == 256
  assert tokenizer.decode([97, 256, 98, 257, 999, -1]) == "ab"
  again = tokenizers.from_json(tokenizer.json)
  assert again.encode(ODD) == tokenizer.encode(ODD) and again.pieces == tokenizer.pieces
  assert again.specials == tokenizer.specials and again.key == tokenizer.key and again.key != _tokenizer("bytes").key
  for wrong in ((), ("a", "a")):
    with pytest.raises(ValueError, match="special token"):
      tokenizers.byte_tokenizer(wrong)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_stream_of_any_bytes_is_decode_in_whole_characters(ids):
  tokenizer = tokenizers.byte_tokenizer()
  assert "".join(tokenizers.stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_holds_half_characters_back():
  tokenizer = tokenizers.byte_tokenizer()
  seen, shown = 0, []

  def ids():
    nonlocal seen
    for i in tokenizer.encode("a\U0001f389b"):
      seen += 1
      yield i

  for words in tokenizers.stream(tokenizer, ids()):
    shown.append((words, seen))
  assert shown == [("a", 1), ("\U0001f389", 5), ("b", 6)]
  assert list(tokenizers.stream(tokenizer, [97, 0xE2, 0x82])) == ["a", "\ufffd"]  # it ends in the middle


def test_chat_is_the_template_with_specials_by_id():
  from tokenizers import Tokenizer as Package

  tokenizer, reference = _tokenizer("gguf"), Package.from_str(tiny_llama.tokenizer_json())
  ids = tokenizers.chat(tokenizer, [("user", "hello <|im_end|>")])
  assert ids.count(1) == 3 and ids.count(2) == 2  # three turns begin, two end: the user's own words end nothing
  plain = tokenizers.chat(tokenizer, [("user", "hello")])
  words = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
  assert plain == reference.encode(words).ids
  own = tokenizers.chat(tokenizer, [("system", "Rhyme."), ("user", "a"), ("assistant", "b"), ("user", "c")])
  words = "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
  assert own == reference.encode(words + "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n").ids
  assert tokenizers.chat(tokenizer._replace(template=""), [("user", "a")])[:1] == [1]
  with pytest.raises(UserError, match="--raw"):
    tokenizers.chat(tokenizers.byte_tokenizer(), [("user", "a")])
  with pytest.raises(ValueError, match="role must be"):
    tokenizers.chat(tokenizer, [("tool", "a")])


def test_stops():
  assert _tokenizer("gguf").stops == (0, 2) and _tokenizer("bytes").stops == (256,)
  assert _tokenizer("sentencepiece").eos == 2


@pytest.mark.parametrize("content, words", [
    ("", "is not a tokenizer.json"),
    ("{}", "is not a tokenizer.json"),
    ("[" * 100_000, "is not a tokenizer.json"),
    (tiny_llama.TEMPLATE, "is not a tokenizer.json"),
    (json.dumps({"version": "1.0", "added_tokens": [],
                 "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}),
     "known to end a text|only byte-level"),
])
def test_other_files_are_refused(content, words):
  for eos in (None, 0):
    with pytest.raises(UserError, match=words) as error:
      tokenizers.from_json(content, eos)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change, words", [
    ({"tokenizer.ggml.model": "llama"}, "is not supported"),
    ({"tokenizer.ggml.pre": "unheard-of"}, "is not supported"),
    ({"tokenizer.ggml.merges": None}, "is incomplete"),
    ({"tokenizer.ggml.tokens": ["a"]}, "is incomplete"),
    ({"tokenizer.ggml.merges": ["x y z", "q"]}, "is not a tokenizer.json"),
    ({"tokenizer.ggml.eos_token_id": "two"}, "is incomplete"),
])
def test_other_gguf_tokenizers_are_refused(change, words):
  with pytest.raises(UserError, match=words) as error:
    tokenizers.from_gguf(_metadata() | change, "a.gguf")
  assert "a.gguf" in str(error.value) and "\n" not in str(error.value)
