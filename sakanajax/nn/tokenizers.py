"""Text to token ids and back: bytes, and byte-level or SentencePiece-like BPE read from a model's files.

Every tokenizer is one `Tokenizer`: `encode` treats text as text, so that "<|im_end|>" in a user's words never becomes
the special token; special tokens are put in by their ids (`chat`). Decoding joins the bytes of the pieces, so any text
round trips exactly (SentencePiece-like models put a space before it), and half a character is never shown (`stream`).

The Hugging Face package `tokenizers` (extra [lm]) merges; only this module imports it.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

from sakanajax.core.errors import UserError, first_line

ENDS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>")  # special tokens that end a text
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE = {  # how a GGUF file's text is cut before it is merged, by its name there
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
    "gpt-2": [_BYTES],
    "default": [_BYTES],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
        _BYTES | {"use_regex": False},
    ],
}
_CONTROL, _USER = 3, 4  # types of a token in GGUF


class Tokenizer(NamedTuple):
  """A tokenizer as data and one function."""

  encode: Callable[[str], list[int]]  # without special tokens, neither added nor found in the text
  pieces: tuple[bytes, ...]  # the bytes of each id; none for special tokens
  specials: Mapping[str, int]
  eos: int  # ends a document
  json: str  # content of the tokenizer.json that describes it
  template: str = ""  # chat template of the model's files

  @property
  def vocab_size(self) -> int:
    return len(self.pieces)

  @property
  def key(self) -> str:
    return hashlib.sha256(f"{self.eos} {self.json}".encode()).hexdigest()

  @property
  def stops(self) -> tuple[int, ...]:
    """Returns the ids at which a generated text ends."""
    return tuple(sorted({self.eos, *(self.specials[end] for end in ENDS if end in self.specials)}))

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of the ids; bytes that are not UTF-8 become U+FFFD, special and unknown ids nothing."""
    return b"".join(piece(self, i) for i in ids).decode("utf-8", "replace")


def piece(tokenizer: Tokenizer, i: int) -> bytes:
  """Returns the bytes of one id, none for special ids and those beyond the vocabulary."""
  return tokenizer.pieces[i] if 0 <= i < len(tokenizer.pieces) else b""


def stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
  """Yields the text of the ids as soon as its characters are whole; joined it equals `decode`."""
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  for i in ids:
    if text := decoder.decode(piece(tokenizer, i)):
      yield text
  if rest := decoder.decode(b"", True):
    yield rest


def byte_tokenizer(specials: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
  """Returns the tokenizer whose ids 0..255 are bytes of UTF-8 and whose special tokens follow; the first is the eos.

  Raises:
    ValueError: no special token, or one twice.
  """
  if not specials or len(set(specials)) < len(specials):
    raise ValueError(f"at least one special token, each once; got {list(specials)}")
  ids = {name: 256 + index for index, name in enumerate(specials)}
  vocab = {char: byte for byte, char in _alphabet().items()}
  return Tokenizer(
      encode=lambda text: list(text.encode("utf-8", "replace")),
      pieces=(*(bytes([byte]) for byte in range(256)), *(b"" for _ in specials)),
      specials=ids,
      eos=256,
      json=_bpe_json(vocab, [], ids, {}, "gpt-2"),
  )


def from_json(text: str, eos: int | None = None, template: str = "", name: str = "tokenizer.json") -> Tokenizer:
  """Returns the tokenizer of a tokenizer.json's content.

  Args:
    text: the content.
    eos: the id that ends a document; None: the first of `ENDS` that is a special token.
    template: the model's chat template, from which `chat` takes the default system message.
    name: the file, for messages.

  Raises:
    UserError: content that is not a tokenizer.json, of a kind whose bytes are unknown, or an end that is not known.
  """
  tokenizers = _package()
  try:
    bpe = tokenizers.Tokenizer.from_str(text)
    described = json.loads(text)
  except Exception as error:  # the package raises the base class
    raise UserError(f"{name} is not a tokenizer.json ({first_line(error)[:200]}); replace it") from error
  bpe.encode_special_tokens = True
  bpe.no_truncation()
  bpe.no_padding()
  added = bpe.get_added_tokens_decoder()
  specials = {token.content: i for i, token in sorted(added.items()) if token.special}
  if eos is None:
    eos = next((specials[end] for end in reversed(ENDS) if end in specials), None)
  if eos is None:
    raise UserError(f"{name}: none of its special tokens is known to end a text; set eos_token_id in config.json")
  pieces = _pieces(bpe.get_vocab(with_added_tokens=True), added, _to_bytes(described, name))

  def encode(text: str) -> list[int]:
    return bpe.encode(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).ids

  return Tokenizer(encode, pieces, specials, eos, text, template)


def from_gguf(metadata: Mapping[str, Any], name: str = "the GGUF file") -> Tokenizer:
  """Returns the tokenizer in a GGUF file's metadata.

  Raises:
    UserError: none in it, or one of a kind that is not supported.
  """
  kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
  if kind != "gpt2" or pre not in PRE:
    raise UserError(f"{name}: its tokenizer ({kind}, {pre}) is not supported; use the folder of safetensors and its "
                    "tokenizer.json instead")
  try:
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    types = metadata["tokenizer.ggml.token_type"]
    eos = int(metadata["tokenizer.ggml.eos_token_id"])
    special = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL}
    added = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == _USER}
    text = _bpe_json({token: i for i, token in enumerate(tokens)}, merges, special, added, pre)
  except (KeyError, ValueError, TypeError) as error:
    raise UserError(f"{name}: its tokenizer is incomplete ({first_line(error)[:200]}); replace the file") from error
  return from_json(text, eos, str(metadata.get("tokenizer.chat_template", "")), name)


def chat(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> list[int]:
  """Returns the ids of a conversation in ChatML, up to where the assistant's answer begins.

  Args:
    tokenizer: one with <|im_start|> and <|im_end|>.
    messages: (role, content) pairs; role is system, user or assistant. Unless the first is a system message, the one
      that the model's own template begins with is put before it.

  Raises:
    UserError: the tokenizer has no such tokens.
  """
  try:
    start, end = tokenizer.specials["<|im_start|>"], tokenizer.specials["<|im_end|>"]
  except KeyError as error:
    raise UserError("this model has no <|im_start|> and <|im_end|>, so it cannot chat; use --raw") from error
  if default := re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", tokenizer.template, re.DOTALL):
    if not messages or messages[0][0] != "system":
      messages = [("system", default[1]), *messages]
  ids = []
  for role, content in messages:
    if role not in ("system", "user", "assistant"):
      raise ValueError(f"role must be system, user or assistant, got {role!r}")
    ids += [start, *tokenizer.encode(f"{role}\n{content}"), end, *tokenizer.encode("\n")]
  return [*ids, start, *tokenizer.encode("assistant\n")]


@functools.cache
def _alphabet() -> dict[int, str]:
  """Returns the printable character that stands for each byte in byte-level vocabularies (that of GPT-2)."""
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (byte for byte in range(256) if byte not in printable)
  return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _to_bytes(described: Mapping[str, Any], name: str) -> Callable[[str], bytes]:
  """Returns the function from a token's spelling to its bytes, by the decoder that the tokenizer.json names."""
  decoder = described.get("decoder") or {}
  kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
  if "ByteLevel" in kinds:
    return functools.partial(_respelled, {ord(char): byte for byte, char in _alphabet().items()})
  if "ByteFallback" in kinds or "Metaspace" in kinds:
    return _spoken
  raise UserError(f"{name}: only byte-level and SentencePiece-like tokenizers are supported")


def _respelled(table: Mapping[int, int], token: str) -> bytes:
  """Bytes of a byte-level token: each character stands for a byte, other characters for themselves."""
  if all(ord(char) in table for char in token):
    return token.translate(table).encode("latin-1")
  return b"".join(bytes([table[ord(c)]]) if ord(c) in table else c.encode("utf-8", "replace") for c in token)


def _spoken(token: str) -> bytes:
  """Bytes of a SentencePiece token: <0xE2> is a byte, the low line a space."""
  if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
    return bytes([int(byte[1], 16)])
  return token.replace("\u2581", " ").encode("utf-8", "replace")


def _pieces(vocab: Mapping[str, int], added: Mapping[int, Any], to_bytes: Callable[[str], bytes]) -> tuple[bytes, ...]:
  pieces = [b""] * (max(vocab.values(), default=-1) + 1)
  for token, i in vocab.items():
    if i not in added:
      pieces[i] = to_bytes(token)
    elif not added[i].special:
      pieces[i] = token.encode("utf-8", "replace")
  return tuple(pieces)


def _bpe_json(
    vocab: Mapping[str, int], merges: Sequence[str], specials: Mapping[str, int], added: Mapping[str, int], pre: str
) -> str:
  """Returns the content of a tokenizer.json for byte-level BPE; special ids may lie in the vocabulary or after it."""
  flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
  extra = [(i, token, token in specials) for token, i in (specials | added).items()]
  model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre == "llama-bpe",
           "vocab": dict(vocab), "merges": list(merges)}  # fmt: skip
  return json.dumps({
      "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
      "added_tokens": [{"id": i, "content": token, "special": special, **flags} for i, token, special in sorted(extra)],
      "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE[pre]},
      "decoder": _BYTES,
      "model": model,
  }, ensure_ascii=False)  # fmt: skip


def _package() -> Any:
  try:
    import tokenizers  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise UserError("the package tokenizers is missing; run: pip install 'sakanajax[lm]'") from error
  return tokenizers
