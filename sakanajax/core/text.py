"""Text corpora: documents from assets or the user's files, split by document, as rows of tokens that training resumes.

    sources -> files -> documents -> splits -> token ids (memory-mapped) -> rows [n, T] -> step -> batch

A document is a line of a .jsonl file (its "text"), or a text file of a folder. A text file that is a source itself, and
one above 256 kB, is cut into pieces, each a document: a piece ends at the first blank line after 4 kB; where 16 kB have
none, at the last line end, else the last space, else between two characters. Blank documents are left out.

A document's split is a function of its text alone: adding or renaming files moves none, and copies stay together.
Bytes that are not UTF-8 become U+FFFD and are counted. Order: sources as given, files by name, documents as they stand.

Legend: N token ids in all, D documents, B rows, T tokens of a row.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Callable, NamedTuple, Protocol

import numpy as np

from sakanajax.core import assets, data, files
from sakanajax.core.errors import UserError

SPLITS = {"test": 0.05, "valid": 0.05, "train": 0.90}  # shares of documents
ASSETS = ("sotu", "gcide", "linux_doc", "anarchism", "moby_dick")
SUFFIXES = (".txt", ".md", ".rst", ".jsonl")  # of files taken from a folder, each also with .gz; and .dict.dz
_WHOLE, _SHORTEST, _LONGEST = 1 << 18, 1 << 12, 1 << 14  # bytes: longest whole file of a folder; pieces
_BLOCK, _LONGEST_LINE = 1 << 20, 1 << 26
_BLANK = re.compile(rb"\n[ \t\r]*\n")
_FORMAT = 1  # of the cache of token ids


class Encoder(Protocol):
  """What this module asks of a tokenizer; see `sakanajax.nn.tokenizers`."""

  vocab_size: int
  eos: int  # written after each document
  key: str  # equal keys mean equal ids
  encode: Callable[[str], Sequence[int]]


class TextFile(NamedTuple):
  """One file of a corpus."""

  path: pathlib.Path
  name: str  # relative to its source
  alone: bool  # the source is this file


class Corpus(NamedTuple):
  """Files in their order."""

  name: str
  files: tuple[TextFile, ...]


class Document(NamedTuple):
  """A text and where it stands."""

  text: str
  where: str  # file, file:line or file#piece
  replaced: int = 0  # how often bytes that are not UTF-8 became U+FFFD


class Tokens(NamedTuple):
  """The token ids of a split, document after document, each closed by the end-of-document id."""

  ids: np.ndarray  # [N] uint16 or uint32
  starts: np.ndarray  # [D + 1] int64, where documents begin, and N
  replaced: int = 0  # of the corpus, see Document


def corpus(*sources: str | os.PathLike) -> Corpus:
  """Returns the corpus of all sources: names of assets (fetched when missing), files, folders.

  An asset's name wins over a path of that name (write ./gcide for the path). From a folder, files with the endings of
  `SUFFIXES` are taken, at any depth, hidden ones left out. A file may have any ending: .jsonl is read as lines, all
  others as text, .gz and .dz through gzip.

  Raises:
    UserError: no source, an unknown path, a folder without text.
  """
  if not sources:
    raise UserError(f"no text given; assets: {', '.join(ASSETS)}; or name files and folders")
  found = tuple(file for source in sources for file in _files(source))
  return Corpus(" + ".join(str(source) for source in sources), found)


def documents(corpus: Corpus, split: str | None = None) -> Iterator[Document]:
  """Yields the documents of a split (None: of all), reading as it goes.

  Raises:
    UserError: a file that cannot be read, is damaged or not text; a line of a .jsonl file without text.
  """
  if split is not None and split not in SPLITS:
    raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
  for file in corpus.files:
    for document in _documents(file):
      if document.text.strip() and (split is None or split_of(document.text) == split):
        yield document


def split_of(text: str) -> str:
  """Returns the split to which a document belongs, from a hash of its text."""
  digest = hashlib.sha256(b"split\0" + text.encode("utf-8", "surrogatepass")).digest()
  share = int.from_bytes(digest[:8], "big") / 2**64
  for name, width in SPLITS.items():
    share -= width
    if share < 0:
      return name
  return "train"


def tokenize(corpus: Corpus, tokenizer: Encoder, split: str = "train") -> Tokens:
  """Returns the token ids of a split, memory-mapped from a cache that is made at the first call.

  The cache (folder tokens/ of `assets.cache_dir()`) is keyed by the content of all files and the tokenizer's key.

  Raises:
    UserError: bad text (see `documents`), nothing in the split, a full disk.
  """
  key = files.digest({"content": _content(corpus), "tokenizer": tokenizer.key, "format": _FORMAT})[:32]
  place = assets.cache_dir() / "tokens" / key
  found = _read(place, split)
  if found is None:
    _write(corpus, tokenizer, place)
    found = _read(place, split)
  if found is None or len(found.ids) < 2:
    raise UserError(f"{corpus.name}: no document falls into the split {split!r}: a hash of its text decides "
                    "where each goes; give more documents, a hundred are enough")
  return found


def count(tokens: Tokens, length: int) -> int:
  """Returns n, the rows of `length` tokens that hold them all."""
  return max(1, -(-(len(tokens.ids) - 1) // length))


def rows(tokens: Tokens, index: np.ndarray, length: int) -> dict[str, np.ndarray]:
  """Returns the rows number `index` `[B]`: row r holds the ids r T .. r T + T - 1, and predicts those one further on.

  All `[B, T]`: `tokens` int32; `labels` int32, the next ids; `segment_ids` int32, the documents of the row as 1, 2, ...
  and 0 for padding; `positions` int32, from 0 at the document's or the row's beginning; `mask` bool, False where the
  label is padding or belongs to another document.
  """
  begin = np.asarray(index, np.int64)[:, None] * length
  at = begin + np.arange(length + 1)
  inside = at < len(tokens.ids)
  at = np.minimum(at, len(tokens.ids) - 1)
  ids = np.where(inside, tokens.ids[at], 0).astype(np.int32)
  document = np.searchsorted(tokens.starts, at, side="right")
  positions = np.where(inside, at - np.maximum(tokens.starts[document - 1], begin), 0).astype(np.int32)
  segments = np.where(inside, document - document[:, :1] + 1, 0).astype(np.int32)
  mask = inside[:, 1:] & (segments[:, 1:] == segments[:, :-1])
  return {
      "tokens": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": segments[:, :-1], "positions": positions[:, :-1],
      "mask": mask,
  }


def pack(documents: Iterable[Sequence[int]], length: int) -> dict[str, np.ndarray]:
  """Returns all rows `[n, T]` (see `rows`) of documents given as token ids; a long one goes on in the next row."""
  parts = [np.asarray(ids, np.int64) for ids in documents if len(ids)]
  if not parts or length < 1:
    raise ValueError(f"packing needs a token and length >= 1, got {len(parts)} documents and length {length}")
  tokens = Tokens(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))
  return rows(tokens, np.arange(count(tokens, length)), length)


def batches(
    corpus: Corpus, tokenizer: Encoder, batch: int, length: int, seed: int, split: str = "train"
) -> Callable[[int], dict[str, np.ndarray]]:
  """Returns f(step) -> rows `[batch, length]`, a pure function of the step: each row once an epoch, shuffled by `seed`.

  Raises:
    UserError: see `tokenize`.
  """
  return shuffled(tokenize(corpus, tokenizer, split), batch, length, seed)


def shuffled(tokens: Tokens, batch: int, length: int, seed: int) -> Callable[[int], dict[str, np.ndarray]]:
  """Returns what `batches` does, of token ids at hand."""
  index = data.epoch_batches(count(tokens, length), batch, seed)
  return lambda step: rows(tokens, index(step), length)


def _files(source: str | os.PathLike) -> list[TextFile]:
  if source in ASSETS:
    folder = assets.fetch(str(source))
    asset = assets.ASSETS[str(source)]
    found = [path for inside, _ in asset.files for path in assets.paths(asset, folder, inside)]
    return [TextFile(path, path.relative_to(folder).as_posix(), len(found) == 1) for path in found]
  path = pathlib.Path(source).expanduser()
  if path.is_file():
    return [TextFile(path, path.name, True)]
  if not path.is_dir():
    raise UserError(f"there is no text {str(source)!r}: neither a file, nor a folder, nor one of {', '.join(ASSETS)}")
  names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
  taken = [name for name in names if _is_text(name)]
  if not taken:
    raise UserError(f"{path}: no file that ends in {', '.join(SUFFIXES)} (or these with .gz) or .dict.dz")
  return [TextFile(path / name, name, False) for name in taken]


def _is_text(name: str) -> bool:
  hidden = any(part.startswith(".") for part in name.split("/"))
  return not hidden and (name.endswith(".dict.dz") or name.removesuffix(".gz").endswith(SUFFIXES))


@contextlib.contextmanager
def _open(file: TextFile) -> Iterator[BinaryIO]:
  """Opens a file, through gzip where its ending says so; what goes wrong inside is a UserError that names it."""
  opener = gzip.open if file.name.endswith((".gz", ".dz")) else open
  try:
    with opener(file.path, "rb") as stream:
      yield stream
  except (EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise UserError(f"{file.path} is damaged ({error}); replace it") from error
  except OSError as error:
    raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error


def _documents(file: TextFile) -> Iterator[Document]:
  if file.name.removesuffix(".gz").endswith(".jsonl"):
    yield from _lines(file)
    return
  with _open(file) as stream:
    head = stream.read(_WHOLE + 1)
  if b"\0" in head[:8192]:
    raise UserError(f"{file.path} is not text in UTF-8; give .txt or .jsonl, or convert it")
  if len(head) <= _WHOLE and not file.alone:
    yield _document(head.removeprefix(codecs.BOM_UTF8), str(file.path))
    return
  with _open(file) as stream:
    for number, piece in enumerate(_pieces(stream)):
      yield _document(piece if number else piece.removeprefix(codecs.BOM_UTF8), f"{file.path}#{number}")


def _lines(file: TextFile) -> Iterator[Document]:
  """Yields the "text" of each line; blank lines are passed over."""
  with _open(file) as stream:
    number = 0
    while line := stream.readline(_LONGEST_LINE):
      number += 1
      where = f"{file.path}:{number}"
      if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
        raise UserError(f"{where} is longer than {_LONGEST_LINE >> 20} MB; cut it into several documents")
      raw = _document(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, where)
      if raw.text.strip():
        yield raw._replace(text=_text(raw))


def _text(line: Document) -> str:
  try:
    content = json.loads(line.text)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{line.where} is not JSON; each line is an object with a \"text\"") from error
  text = content.get("text") if isinstance(content, dict) else None
  if not isinstance(text, str):
    raise UserError(f"{line.where} has no \"text\"; each line is an object with a string under that name")
  return text.encode("utf-8", "replace").decode("utf-8")  # JSON can spell half a surrogate pair


def _document(raw: bytes, where: str) -> Document:
  text = raw.decode("utf-8", "replace")
  return Document(text, where, text.count("\ufffd") - raw.count("\ufffd".encode()))


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
  """Cuts a text by the rule in the module's docstring, holding about a megabyte of it."""
  held = b""
  while block := stream.read(_BLOCK):
    held, start = held + block, 0
    while len(held) - start >= _LONGEST:
      end = _end(held, start)
      yield held[start:end]
      start = end
    held = held[start:]
  start = 0
  while start < len(held):
    end = _end(held, start)
    yield held[start:end]
    start = end


def _end(text: bytes, start: int) -> int:
  """Returns where the piece that begins at `start` ends."""
  least, most = start + _SHORTEST, start + _LONGEST
  if found := _BLANK.search(text, least, most):
    return found.end()
  if most > len(text):
    return len(text)
  for sign in (b"\n", b" "):
    at = text.rfind(sign, least, most)
    if at >= 0:
      return at + 1
  end = most
  while most - end < 3 and end < len(text) and text[end] & 0xC0 == 0x80:  # inside a character
    end -= 1
  return end


def _content(corpus: Corpus) -> str:
  """Returns a hash of all that decides the documents and their order."""
  parts = []
  for file in corpus.files:
    try:
      parts.append([file.name, file.alone, files.digest_of_file(file.path)])
    except OSError as error:
      raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error
  return files.digest(parts)


def _read(place: pathlib.Path, split: str) -> Tokens | None:
  """Returns a split from the cache; None when it is not there or damaged."""
  if split not in SPLITS:
    raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
  try:
    meta = json.loads((place / "meta.json").read_text(encoding="utf-8"))
    ids = np.load(place / f"{split}.npy", mmap_mode="r", allow_pickle=False)
    starts = np.load(place / f"{split}.starts.npy", allow_pickle=False)
    whole = len(ids) == meta["ids"][split] == starts[-1]
    return Tokens(ids, starts, meta["replaced"]) if whole else None
  except (OSError, ValueError, EOFError, TypeError, LookupError):
    return None


def _write(corpus: Corpus, tokenizer: Encoder, place: pathlib.Path) -> None:
  """Encodes all splits in one pass and puts them in place at once."""
  try:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokens-", dir=place.parent) as scratch:
      ready = pathlib.Path(scratch) / "ready"
      ready.mkdir()
      meta = _encode(corpus, tokenizer, ready)
      files.write_json(ready / "meta.json", meta)
      shutil.rmtree(place, ignore_errors=True)
      with contextlib.suppress(FileExistsError):  # another process was faster
        _rename(ready, place)
  except OSError as error:
    raise UserError(f"cannot keep token ids in {place.parent}: {error.strerror or error}; free some space or set "
                    "SAKANAJAX_CACHE to another folder") from error


def _rename(ready: pathlib.Path, place: pathlib.Path) -> None:
  try:
    ready.rename(place)
  except OSError as error:
    raise FileExistsError(place) if (place / "meta.json").is_file() else error


def _encode(corpus: Corpus, tokenizer: Encoder, folder: pathlib.Path) -> dict[str, Any]:
  dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
  starts, replaced = {split: [0] for split in SPLITS}, 0
  with contextlib.ExitStack() as stack:
    out = {split: stack.enter_context((folder / f"{split}.npy").open("wb+")) for split in SPLITS}
    for file in out.values():
      _header(file, 0, dtype)
    for document in documents(corpus):
      split = split_of(document.text)
      ids = np.asarray([*tokenizer.encode(document.text), tokenizer.eos], dtype)
      out[split].write(ids.tobytes())
      starts[split].append(starts[split][-1] + len(ids))
      replaced += document.replaced
    for split, file in out.items():
      _header(file, starts[split][-1], dtype)
  if not any(len(begins) > 1 for begins in starts.values()):
    raise UserError(f"{corpus.name}: there is no text in it")
  for split, begins in starts.items():
    np.save(folder / f"{split}.starts.npy", np.asarray(begins, np.int64))
  return {"corpus": corpus.name, "tokenizer": tokenizer.key, "replaced": replaced,
          "ids": {split: begins[-1] for split, begins in starts.items()}}


def _header(file: BinaryIO, length: int, dtype: Any) -> None:
  """Writes a .npy header; numpy leaves room in it, so that the final length can be written over the first, 0."""
  file.seek(0)
  header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
  np.lib.format.write_array_header_1_0(file, header)
  file.flush()
  os.fsync(file.fileno())
