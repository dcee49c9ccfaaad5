"""What the models read: a corpus of `core.text` or made-up text, as token ids of a split, and batches of them.

The made-up text is for tests and smoke runs: sentences of invented words with a small grammar, a function of its seed.
It has structure to learn (spelling, agreement of endings), and nothing is fetched.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import numpy as np

from sakanajax.core import text
from sakanajax.core.errors import UserError
from sakanajax.nn import tokenizers
from sakanajax.nn.tokenizers import Tokenizer

SYNTHETIC = "synthetic"


@dataclasses.dataclass(frozen=True)
class Data:
  """Where the text comes from.

  Attributes:
    source: "synthetic", or what `core.text.corpus` takes: an asset, a file, a folder; several are joined by commas.
    tokenizer: "bytes", or the path of a tokenizer.json.
    length: T, tokens of a row.
    documents: of the synthetic text.
  """

  source: str = SYNTHETIC
  tokenizer: str = "bytes"
  length: int = 128
  documents: int = 400

  def __post_init__(self):
    if self.length < 2 or self.documents < 1 or not self.source:
      raise ValueError(f"length must be at least 2, documents at least 1 and source named, got {self}")


def tokenizer_of(data: Data) -> Tokenizer:
  """Returns the tokenizer. Raises UserError when its file cannot be read."""
  if data.tokenizer == "bytes":
    return tokenizers.byte_tokenizer()
  try:
    with open(data.tokenizer, encoding="utf-8") as file:
      return tokenizers.from_json(file.read(), name=data.tokenizer)
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"cannot read the tokenizer {data.tokenizer}: {error}; give 'bytes' or a tokenizer.json") from error


def tokens(data: Data, tokenizer: Tokenizer, split: str) -> text.Tokens:
  """Returns the token ids of a split: train, valid or test. Raises UserError as `core.text.tokenize` does."""
  if data.source != SYNTHETIC:
    return text.tokenize(text.corpus(*[part.strip() for part in data.source.split(",")]), tokenizer, split)
  return of_documents([doc for doc in synthetic(data.documents) if text.split_of(doc) == split], tokenizer)


def of_documents(documents: list[str], tokenizer: Tokenizer) -> text.Tokens:
  """Returns the ids of documents held in memory. Raises UserError when there are none."""
  parts = [np.asarray([*tokenizer.encode(document), tokenizer.eos], np.uint32) for document in documents if document]
  if not parts:
    raise UserError("there is no text to read; give a longer one")
  return text.Tokens(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


def batches(ids: text.Tokens, batch: int, length: int, seed: int) -> Callable[[int], dict[str, np.ndarray]]:
  """Returns step -> rows `[B, T]` of shuffled epochs, and `step` `[B]` int32 for schedules."""
  rows = text.shuffled(ids, batch, length, seed)
  return lambda step: rows(step) | {"step": np.full(batch, step, np.int32)}


def in_order(ids: text.Tokens, batch: int, length: int, limit: int = 0) -> list[dict[str, np.ndarray]]:
  """Returns all rows once, the first `limit` of them if that is not 0; the last batch is filled up with padding."""
  count = text.count(ids, length)
  count = min(count, limit) if limit else count
  starts = range(0, count, batch)
  rows = [text.rows(ids, np.arange(start, start + batch), length) for start in starts]
  surplus = -count % batch
  if surplus:
    for name, leaf in rows[-1].items():
      leaf = leaf.copy()
      leaf[batch - surplus :] = 0
      rows[-1][name] = leaf
  return rows


def synthetic(count: int, seed: int = 0) -> list[str]:
  """Returns documents of a made-up language: nouns and verbs agree by their endings, and topics repeat."""
  rng = np.random.default_rng(seed)
  syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
  word = lambda: "".join(rng.choice(syllables, rng.integers(1, 4)))
  nouns, verbs = [word() for _ in range(60)], [word() for _ in range(30)]

  def sentence(topic: list[str]) -> str:
    plural = rng.random() < 0.4
    subject, verb, other = rng.choice(topic), rng.choice(verbs), rng.choice(nouns)
    return f"{'les' if plural else 'le'} {subject}{'s' if plural else ''} {verb}{'nt' if plural else 't'} {other}."

  def document() -> str:
    topic = list(rng.choice(nouns, 4))
    return " ".join(sentence(topic) for _ in range(rng.integers(6, 20)))

  return [document() for _ in range(count)]
