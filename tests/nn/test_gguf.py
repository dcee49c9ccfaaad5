"""GGUF: what the package writes is read, and no damaged header does harm."""

import struct

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from sakanajax.core.errors import UserError
from sakanajax.nn import gguf
from tests.nn import tiny_llama

package = pytest.importorskip("gguf", reason="the extra [lm] is not installed")


def _write(path, tensors=(), alignment=None, **fields):
  writer = package.GGUFWriter(path, "llama")
  if alignment:
    writer.add_custom_alignment(alignment)
  for name, (kind, value) in fields.items():
    getattr(writer, f"add_{kind}")(name, value)
  for name, array, raw in tensors:
    writer.add_tensor(name, array, raw_dtype=raw)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors(tmp_path, alignment):
  rng = np.random.default_rng(0)
  plain, half = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(2, 4, 3)).astype(np.float16)
  path = _write(
      tmp_path / "a.gguf", [("plain", plain, None), ("half", half, None)], alignment,
      words=("string", "caf\u00e9"), many=("array", ["a", "", "\U0001f389"]), numbers=("array", [1, -2, 3]),
      yes=("bool", True), small=("int8", -3), large=("uint64", 2**63), float=("float32", 0.5), double=("float64", 0.1),
      reals=("array", [0.5, 2.0]),
  )
  model = gguf.read(path)
  meta = model.metadata
  assert (meta["words"], meta["many"], meta["yes"], meta["small"], meta["large"]) == (
      "caf\u00e9", ["a", "", "\U0001f389"], True, -3, 2**63)
  assert list(meta["numbers"]) == [1, -2, 3] and list(meta["reals"]) == [0.5, 2.0]
  assert meta["float"] == 0.5 and meta["double"] == 0.1 and meta["general.architecture"] == "llama"
  np.testing.assert_array_equal(model.tensors["plain"].read(), plain)
  np.testing.assert_array_equal(model.tensors["half"].read(), half.astype(np.float32))
  assert model.tensors["half"].shape == (2, 4, 3) and model.tensors["half"].read().dtype == np.float32


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "BF16"])
def test_quantized_tensors_are_those_of_the_formula(tmp_path, kind):
  kind = package.GGMLQuantizationType[kind]
  weights = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
  raw = package.quantize(weights, kind)
  tensor = gguf.read(_write(tmp_path / "a.gguf", [("w", raw, kind)])).tensors["w"]
  array = tensor.read()
  assert tensor.shape == array.shape == (4, 64)
  step = np.ptp(weights.reshape(4, -1, 32), axis=-1).max() / {"Q8_0": 120, "Q5_1": 31, "BF16": 256}.get(kind.name, 15)
  assert np.abs(array - weights).max() < 1.2 * step
  if kind.name == "Q4_1":  # two halves, d and m, then 16 bytes of which the low nibbles come first
    blocks = raw.reshape(4, 2, 20)
    d, m = np.moveaxis(blocks[..., :4].copy().view(np.float16), -1, 0)[..., None].astype(np.float32)
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    np.testing.assert_array_equal(array, (d * codes + m).reshape(4, 64))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  path = tmp_path_factory.mktemp("gguf") / "a.gguf"
  return tiny_llama.write_gguf(path, tiny_llama.tensors()).read_bytes()


def _survives(path, content):
  path.write_bytes(content)
  try:
    model = gguf.read(path)
    for tensor in model.tensors.values():
      tensor.read()
    return True
  except UserError as error:
    assert "\n" not in str(error)
    return False


def test_cut_anywhere_is_noticed(whole, tmp_path):
  cuts = sorted({*range(0, 200, 7), *np.random.default_rng(0).integers(0, len(whole), 60).tolist(), len(whole) - 33})
  assert not any(_survives(tmp_path / "a.gguf", whole[:cut]) for cut in cuts)
  assert _survives(tmp_path / "a.gguf", whole)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 12_000), st.binary(min_size=1, max_size=8))
def test_damage_is_an_error_or_read_but_never_a_crash(whole, tmp_path_factory, at, junk):
  path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
  _survives(path, whole[:at] + junk + whole[at + len(junk):])


def _head(entries=0, tensors=0, body=b""):
  return struct.pack("<4sIQQ", b"GGUF", 3, tensors, entries) + body


def _entry(kind, value):
  return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


def _tensor(dims, kind, offset):
  return struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize("content, words", [
    (b"", "too early"),
    (b"GGML" + bytes(40), "begins with b'GGML'"),
    (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "where GGUF 2 or 3 was expected"),
    (_head(entries=2**62), "too early"),
    (_head(tensors=2**62), "too early"),
    (_head(1, body=_entry(9, struct.pack("<IQ", 4, 2**62))), "too early"),
    (_head(1, body=_entry(9, struct.pack("<IQ", 8, 2**62))), "too early"),
    (_head(1, body=_entry(8, struct.pack("<Q", 2**63))), "too early"),
    (_head(1, body=_entry(9, struct.pack("<IQ", 9, 1))), "array of unknown type 9"),
    (_head(1, body=_entry(77, b"")), "unknown type 77"),
    (_head(0, 1, _tensor((4,), 0, 0) + bytes(8)), "goes beyond its end"),
    (_head(0, 1, _tensor((2**62, 2**62), 0, 0)), "goes beyond its end"),
    (_head(0, 1, _tensor((4,), 0, 2**63)), "goes beyond its end"),
    (_head(0, 1, _tensor((33,), 8, 0) + bytes(99)), "has the shape"),
    (_head(0, 1, _tensor((0,), 0, 0)), "has the shape"),
    (_head(0, 1, _tensor((4,), 999, 0)), "unknown quantization 999"),
    (_head(0, 1, struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**31)), "too early"),
])
def test_hostile_headers(tmp_path, content, words):
  path = tmp_path / "a.gguf"
  path.write_bytes(content)
  with pytest.raises(UserError, match=words) as error:
    gguf.read(path)
  assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_alignment_and_missing_files(tmp_path):
  key = b"general.alignment"
  path = tmp_path / "a.gguf"
  path.write_bytes(_head(1, body=struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 0)))
  with pytest.raises(UserError, match="general.alignment is 0"):
    gguf.read(path)
  with pytest.raises(UserError, match="cannot read"):
    gguf.read(tmp_path / "absent.gguf")
  assert gguf.is_gguf(path) and not gguf.is_gguf(tmp_path / "absent.gguf") and not gguf.is_gguf(__file__)
