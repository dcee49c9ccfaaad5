"""GGUF files: the header read here, strictly, and tensors de-quantised by the package `gguf` (extra [lm]).

    "GGUF", version, number of tensors, number of entries | entries: key, type, value
    | tensors: name, dims, type, offset | data, each tensor at its offset from the next multiple of general.alignment

Numbers are little-endian. A header may come from anywhere, so every length is held against the size of the file before
anything is read or allocated. Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import struct
from typing import Any, BinaryIO, Callable, NamedTuple

import numpy as np

from sakanajax.core.errors import UserError

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}


class Tensor(NamedTuple):
  """One tensor, not yet read."""

  shape: tuple[int, ...]  # as in numpy: the last axis is contiguous
  quantization: int  # the type of ggml
  read: Callable[[], np.ndarray]  # () -> float32 `shape`


class Gguf(NamedTuple):
  """A file's header."""

  metadata: dict[str, Any]  # numbers, strings, bools, lists of strings, arrays
  tensors: dict[str, Tensor]


class _Broken(Exception):
  """What is wrong with the file."""


def is_gguf(path: str | os.PathLike) -> bool:
  """True for a file that begins as GGUF files do."""
  try:
    with open(path, "rb") as file:
      return file.read(4) == b"GGUF"
  except OSError:
    return False


def read(path: str | os.PathLike) -> Gguf:
  """Returns the metadata and the tensors, which are read from the file when asked for.

  Raises:
    UserError: no such file, not a GGUF file, one that is damaged or cut short, or an unknown quantization.
  """
  path = pathlib.Path(path)
  try:
    with path.open("rb") as file:
      size = os.fstat(file.fileno()).st_size
      magic, version, tensors, entries = struct.unpack("<4sIQQ", _take(file, size, 24))
      if magic != b"GGUF" or version not in (2, 3):
        raise _Broken(f"begins with {magic!r}, version {version}, where GGUF 2 or 3 was expected")
      metadata = {_string(file, size): _value(file, size) for _ in range(_fit(file, size, entries, 13))}
      infos = [_info(file, size) for _ in range(_fit(file, size, tensors, 24))]
      begin = _align(file.tell(), metadata.get("general.alignment", 32))
    return Gguf(metadata, {name: _tensor(path, size, name, begin, *info) for name, *info in infos})
  except _Broken as error:
    raise UserError(f"{path} is not a whole GGUF file: {error}; fetch it again") from error
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _take(file: BinaryIO, size: int, length: int) -> bytes:
  return file.read(_fit(file, size, length, 1))


def _fit(file: BinaryIO, size: int, count: int, least: int) -> int:
  """Returns `count` if that many items of at least `least` bytes can still come."""
  if count * least > size - file.tell():
    raise _Broken(f"it ends after {size} bytes, too early")
  return count


def _number(file: BinaryIO, size: int, kind: str) -> Any:
  return np.frombuffer(_take(file, size, np.dtype(kind).itemsize), kind)[0].item()


def _string(file: BinaryIO, size: int) -> str:
  return _take(file, size, _number(file, size, "<u8")).decode("utf-8", "replace")


def _value(file: BinaryIO, size: int) -> Any:
  kind = _number(file, size, "<u4")
  if kind == _STRING:
    return _string(file, size)
  if kind == _ARRAY:
    return _array(file, size)
  if kind not in _SCALARS:
    raise _Broken(f"a value of unknown type {kind}")
  number = _number(file, size, _SCALARS[kind])
  return bool(number) if kind == _BOOL else number


def _array(file: BinaryIO, size: int) -> Any:
  kind, count = _number(file, size, "<u4"), _number(file, size, "<u8")
  if kind == _STRING:
    return [_string(file, size) for _ in range(_fit(file, size, count, 8))]
  if kind not in _SCALARS:
    raise _Broken(f"an array of unknown type {kind}")
  width = np.dtype(_SCALARS[kind]).itemsize
  return np.frombuffer(_take(file, size, count * width), _SCALARS[kind])


def _info(file: BinaryIO, size: int) -> tuple[str, tuple[int, ...], int, int]:
  name, rank = _string(file, size), _number(file, size, "<u4")
  dims = tuple(_number(file, size, "<u8") for _ in range(_fit(file, size, rank, 8)))
  return name, dims[::-1], _number(file, size, "<u4"), _number(file, size, "<u8")


def _align(offset: int, alignment: Any) -> int:
  if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
    raise _Broken(f"general.alignment is {alignment!r}")
  return -(-offset // alignment) * alignment


def _tensor(path, size: int, name: str, begin: int, shape: tuple[int, ...], quantization: int, offset: int) -> Tensor:
  """Returns the tensor after a check that all of it is in the file."""
  package = _package()
  try:
    kind = package.GGMLQuantizationType(quantization)
    block, width = package.GGML_QUANT_SIZES[kind]
  except (ValueError, KeyError) as error:
    raise UserError(f"{path}: tensor {name!r} has the unknown quantization {quantization}; convert it to F32, F16 or "
                    "one of the common ones (Q4_0, Q8_0, Q4_K, ...)") from error
  if not shape or math.prod(shape) < 1 or shape[-1] % block:
    raise _Broken(f"tensor {name!r} has the shape {list(shape)}")
  row = shape[-1] // block * width
  bytes_shape = (*shape[:-1], row)
  if begin + offset + math.prod(bytes_shape) > size:
    raise _Broken(f"tensor {name!r} goes beyond its end")
  return Tensor(shape, quantization, functools.partial(_read, path, name, begin + offset, bytes_shape, kind))


def _read(path: pathlib.Path, name: str, offset: int, shape: tuple[int, ...], kind: Any) -> np.ndarray:
  try:
    raw = np.memmap(path, np.uint8, "r", offset, shape)
    return np.asarray(_package().dequantize(raw, kind), np.float32)
  except NotImplementedError as error:
    raise UserError(f"{path}: the package gguf cannot undo {kind.name} of tensor {name!r}; convert the file") from error
  except (OSError, ValueError) as error:
    raise UserError(f"cannot read {path}: {error}") from error


def _package() -> Any:
  try:
    import gguf  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise UserError("the package gguf is missing; run: pip install 'sakanajax[lm]'") from error
  return gguf
