"""Text: what a document is, splits that stay, token rows against a slow specification, resuming, and bad input."""

import gzip
import json
import os

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from sakanajax.core import assets, text
from sakanajax.core.errors import UserError


class Bytes:
  """A tokenizer: the bytes of the text, 256 after each document."""

  vocab_size, eos = 257, 256

  def __init__(self, key="bytes", shift=0):
    self.key, self.shift, self.calls = key, shift, 0

  def encode(self, words):
    self.calls += 1
    return [byte ^ self.shift for byte in words.encode()]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


def _texts(*sources, split=None):
  return [document.text for document in text.documents(text.corpus(*sources), split)]


def _lines(path, texts):
  path.write_text("".join(json.dumps({"text": words}) + "\n" for words in texts), encoding="utf-8")
  return path


def _many(count):
  return [f"document number {i}, which says {i * i}" for i in range(count)]


def test_folder_in_a_fixed_order(tmp_path):
  folder = tmp_path / "texts"
  (folder / "sub").mkdir(parents=True)
  (folder / "b.txt").write_bytes("zwei\r\n\r\nzwei b".encode())
  (folder / "a.md").write_bytes(b"\xef\xbb\xbfone")
  (folder / "sub/c.rst.gz").write_bytes(gzip.compress(b"three"))
  (folder / "d.dict.dz").write_bytes(gzip.compress(b"four"))
  _lines(folder / "e.jsonl", ["five", "  ", "six"])
  (folder / "f.jsonl.gz").write_bytes(gzip.compress(b'\n{"text": "seven", "id": 3}'))
  (folder / "empty.txt").write_bytes(b" \n")
  for name in ("image.png", ".hidden.txt", "program.py"):
    (folder / name).write_bytes(b"not this")
  assert _texts(folder) == ["one", "zwei\r\n\r\nzwei b", "four", "five", "six", "seven", "three"]
  assert _texts(folder / "b.txt", str(folder / "a.md")) == ["zwei\r\n\r\nzwei b", "one"]


def test_long_text_is_cut_where_the_rule_says(tmp_path):
  paragraph = "word " * 300  # 1500 bytes
  blank = "\n\n".join([paragraph] * 20)
  (tmp_path / "book.txt").write_text(blank)
  pieces = _texts(tmp_path / "book.txt")
  assert "".join(pieces) == blank and len(pieces) == 7
  assert all(4096 < len(piece) <= 4096 + 1502 and piece.endswith("\n\n") for piece in pieces[:-1])
  for sign, least in (("\n", 14_000), (" ", 16_000), ("", 16_384)):  # no blank line: line ends, spaces, anywhere
    words = sign.join(["x" * 1400 + "y"] * 60) if sign == "\n" else sign.join(["x" * 40] * 2000)
    (tmp_path / "book.txt").write_text(words)
    pieces = _texts(tmp_path / "book.txt")
    assert "".join(pieces) == words and all(piece.endswith(sign) and len(piece) >= least for piece in pieces[:-2])
    assert max(map(len, pieces)) <= 16_384


def test_a_folder_keeps_its_files_whole_up_to_a_limit(tmp_path):
  (tmp_path / "speech.txt").write_text("a line\n\n" * 32_000)  # 256,000 bytes
  assert len(_texts(tmp_path)) == 1 and len(_texts(tmp_path / "speech.txt")) == 63
  (tmp_path / "speech.txt").write_text("a line\n\n" * 33_000)
  assert len(_texts(tmp_path)) == len(_texts(tmp_path / "speech.txt")) == 65


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="é日🎉 \n\rab", max_size=400), st.integers(1, 120))
def test_pieces_are_whole_characters_and_add_up(tmp_path_factory, words, copies):
  path = tmp_path_factory.mktemp("t") / "a.txt"
  raw = (words * copies).encode()
  path.write_bytes(raw)
  documents = list(text._documents(text.corpus(path).files[0]))
  assert "".join(document.text for document in documents).encode() == raw
  assert all(document.replaced == 0 and len(document.text.encode()) <= 16_384 for document in documents)


def test_appending_moves_no_earlier_piece(tmp_path):
  (tmp_path / "a.txt").write_text("some words\nand more\n\n" * 3000)
  before = _texts(tmp_path / "a.txt")
  with (tmp_path / "a.txt").open("a") as file:
    file.write("the end\n\n" * 2000)
  assert _texts(tmp_path / "a.txt")[: len(before) - 1] == before[:-1]


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"caf\xe9 and \xff\xfe, but \xef\xbf\xbd is fine")
  document, = text.documents(text.corpus(tmp_path / "a.txt"))
  assert document.text == "caf\ufffd and \ufffd\ufffd, but \ufffd is fine" and document.replaced == 3
  (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "half a pair: \\ud83d"}')
  documents = list(text.documents(text.corpus(tmp_path / "b.jsonl")))
  assert [d.replaced for d in documents] == [1, 0] and documents[1].text == "half a pair: ?"


def test_split_is_a_property_of_the_text(tmp_path):
  texts = _many(2000)
  by_split = {split: set(_texts(_lines(tmp_path / "a.jsonl", texts), split=split)) for split in text.SPLITS}
  assert sum(map(len, by_split.values())) == 2000 and set.union(*by_split.values()) == set(texts)
  assert 60 < len(by_split["valid"]) < 140 and 60 < len(by_split["test"]) < 140  # 100 expected, 4 sigma
  more = [f"new {i}" for i in range(50)] + texts[::-1]  # added, and in another order
  for split, found in by_split.items():
    assert set(_texts(_lines(tmp_path / "b.jsonl", more), split=split)) & set(texts) == found
  assert text.split_of("") in text.SPLITS and text.split_of("\ud83d") in text.SPLITS


def _specification(documents, length):
  """Rows by walking over the tokens one by one."""
  flat = [(token, number, place) for number, ids in enumerate(documents) for place, token in enumerate(ids)]
  result = []
  for begin in range(0, max(len(flat) - 1, 1), length):
    row = {"tokens": [], "labels": [], "segment_ids": [], "positions": [], "mask": []}
    for at in range(begin, begin + length):
      here, after = (flat[i] if i < len(flat) else None for i in (at, at + 1))
      row["tokens"].append(here[0] if here else 0)
      row["labels"].append(after[0] if after else 0)
      row["segment_ids"].append(here[1] - flat[begin][1] + 1 if here else 0)
      row["positions"].append(min(here[2], at - begin) if here else 0)
      row["mask"].append(bool(here and after and here[1] == after[1]))
    result.append(row)
  return result


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 12))
def test_pack_is_the_specification(documents, length):
  packed, expected = text.pack(documents, length), _specification(documents, length)
  for name, values in packed.items():
    np.testing.assert_array_equal(values, [row[name] for row in expected], name)
  pairs = sum(len(ids) - 1 for ids in documents)
  assert packed["mask"].sum() == pairs  # every pair of neighbours in a document is predicted exactly once
  assert packed["tokens"].dtype == packed["labels"].dtype == np.int32 and packed["mask"].dtype == bool


@pytest.mark.parametrize("documents, length", [([], 4), ([[]], 4), ([[1, 2]], 0)])
def test_pack_refuses(documents, length):
  with pytest.raises(ValueError, match="packing needs"):
    text.pack(documents, length)


def test_tokenize_once_then_from_the_cache(tmp_path, cache):
  tokenizer, texts = Bytes(), _many(60)
  corpus = text.corpus(_lines(tmp_path / "a.jsonl", texts))
  for split in text.SPLITS:
    tokens = text.tokenize(corpus, tokenizer, split)
    mine = [words for words in texts if text.split_of(words) == split]
    assert bytes(np.asarray(tokens.ids)[tokens.ids != 256].astype(np.uint8)).decode() == "".join(mine)
    assert tokens.ids.dtype == np.uint16 and len(tokens.starts) == len(mine) + 1
    np.testing.assert_array_equal(np.asarray(tokens.ids)[tokens.starts[1:] - 1], 256)
  assert tokenizer.calls == 60 and isinstance(tokens.ids, np.memmap)
  assert not [name for name in os.listdir(cache / "tokens") if name.startswith(".")]
  ids, other = (np.array(text.tokenize(corpus, t).ids) for t in (tokenizer, Bytes("other", shift=1)))
  np.testing.assert_array_equal(other, np.where(ids == 256, 256, ids ^ 1))  # another tokenizer, other ids
  _lines(tmp_path / "a.jsonl", texts[:-1])
  text.tokenize(corpus, tokenizer)
  assert tokenizer.calls == 119  # other content


def test_large_vocabularies_take_four_bytes(tmp_path):
  tokenizer = Bytes()
  tokenizer.vocab_size, tokenizer.eos = 70_000, 69_999
  tokens = text.tokenize(text.corpus(_lines(tmp_path / "a.jsonl", _many(20))), tokenizer)
  assert tokens.ids.dtype == np.uint32 and tokens.ids[-1] == 69_999


@pytest.mark.parametrize("damage", [
    lambda place: (place / "train.npy").write_bytes((place / "train.npy").read_bytes()[:-7]),
    lambda place: (place / "train.npy").write_bytes(b""),
    lambda place: (place / "train.starts.npy").unlink(),
    lambda place: (place / "meta.json").write_text("{"),
    lambda place: (place / "meta.json").write_text("[]"),
])
def test_damaged_cache_is_made_again(tmp_path, cache, damage):
  tokenizer, corpus = Bytes(), text.corpus(_lines(tmp_path / "a.jsonl", _many(30)))
  before = np.array(text.tokenize(corpus, tokenizer).ids)
  place, = (cache / "tokens").iterdir()
  damage(place)
  np.testing.assert_array_equal(text.tokenize(corpus, tokenizer).ids, before)
  assert tokenizer.calls == 60


def test_batches_depend_on_the_step_alone(tmp_path):
  corpus = text.corpus(_lines(tmp_path / "a.jsonl", _many(200)))
  one, two = (text.batches(corpus, Bytes(), 4, 32, seed=1) for _ in range(2))
  tokens = text.tokenize(corpus, Bytes())
  n = text.count(tokens, 32)
  rows = text.rows(tokens, np.arange(n), 32)
  for step in (7, 0, 100):  # in any order, again and in another process
    for name, values in one(step).items():
      assert values.shape == (4, 32)
      np.testing.assert_array_equal(values, two(step)[name])
  epoch = np.concatenate([one(step)["tokens"] for step in range(-(-n // 4))])[:n]
  assert sorted(map(tuple, epoch)) == sorted(map(tuple, rows["tokens"]))  # each row once
  other = text.batches(corpus, Bytes(), 4, 32, seed=2)(0)["tokens"]
  assert not np.array_equal(one(0)["tokens"], other)
  valid = text.batches(corpus, Bytes(), 2, 32, seed=1, split="valid")(0)
  assert valid["tokens"].shape == (2, 32)


def _gz(path, content):
  path.write_bytes(content)
  return path


@pytest.mark.parametrize("make, words", [
    (lambda folder: folder / "absent", "neither a file, nor a folder, nor one of sotu"),
    (lambda folder: folder, "no file that ends in .txt"),
    (lambda folder: _gz(folder / "a.txt", b" \n\n"), "there is no text in it"),
    (lambda folder: _gz(folder / "a.txt", b"MZ\0\0binary"), "is not text"),
    (lambda folder: _gz(folder / "a.txt.gz", gzip.compress(b"some words")[:-9]), "is damaged"),
    (lambda folder: _gz(folder / "a.txt.gz", b"plain"), "is damaged"),
    (lambda folder: _gz(folder / "a.jsonl", b'{"text": "a"}\n{"words": "b"}\n'), r"a\.jsonl:2 has no \"text\""),
    (lambda folder: _gz(folder / "a.jsonl", b'{"text": 3}'), r"a\.jsonl:1 has no"),
    (lambda folder: _gz(folder / "a.jsonl", b"[" * 100_000), r"a\.jsonl:1 is not JSON"),
    (lambda folder: _gz(folder / "a.jsonl", b'\n\n{"text": "a"'), r"a\.jsonl:3 is not JSON"),
    (lambda folder: _gz(folder / "a.txt", b"one document"), "no document falls into the split"),
])
def test_bad_input_is_one_line(tmp_path, make, words):
  folder = tmp_path / "in"
  folder.mkdir()
  with pytest.raises(UserError, match=words) as error:
    source = make(folder)
    for split in ("train", "valid"):
      text.tokenize(text.corpus(source), Bytes(), split)
  assert "\n" not in str(error.value)


def test_a_line_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(text, "_LONGEST_LINE", 1000)
  with pytest.raises(UserError, match="a.jsonl:2 is longer than"):
    _texts(_lines(tmp_path / "a.jsonl", ["short", "x" * 2000]))
  with pytest.raises(UserError, match="no text given"):
    text.corpus()


def test_full_disk(tmp_path, monkeypatch):
  corpus = text.corpus(_lines(tmp_path / "a.jsonl", _many(30)))
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path / "file"))
  with pytest.raises(UserError, match="SAKANAJAX_CACHE"):
    text.tokenize(corpus, Bytes())


def test_names_of_assets_are_real():
  assert set(text.ASSETS) <= set(assets.ASSETS)


@pytest.mark.slow
@pytest.mark.parametrize("name, documents, millions", [
    ("sotu", 233, (10.5, 11)), ("moby_dick", 135, (1.1, 1.3)), ("anarchism", 757, (11, 12)),
    ("linux_doc", 2908, (21, 22)), ("gcide", 9447, (39, 41)),
])
def test_real_corpora(name, documents, millions, monkeypatch):
  monkeypatch.delenv("SAKANAJAX_CACHE")
  try:
    corpus = text.corpus(name)
  except UserError as error:
    pytest.skip(f"out of reach: {error}")
  found = list(text.documents(corpus))
  assert len(found) == documents and sum(document.replaced for document in found) <= 3
  assert millions[0] < sum(len(document.text) for document in found) / 1e6 < millions[1]
  assert all(any(text.split_of(document.text) == split for document in found) for split in text.SPLITS)
