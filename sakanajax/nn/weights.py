"""Tensors by name in folders of safetensors (extra [lm]): one file, or shards with an index, as on Hugging Face."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import numpy as np

from sakanajax.core import files
from sakanajax.core.errors import UserError, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights(NamedTuple):
  """The tensors of a folder."""

  names: frozenset[str]
  get: Callable[[str, tuple[int, ...]], np.ndarray]  # (name, shape) -> the tensor; UserError when it is another


def open_folder(folder: pathlib.Path) -> Weights:
  """Returns the tensors of a folder, read when asked for.

  Raises:
    UserError: no safetensors there, a damaged file, an index that names a missing file or one outside the folder.
  """
  if (folder / SINGLE).is_file():
    shards = {name: folder / SINGLE for name in _names(folder / SINGLE)}
  elif (folder / INDEX).is_file():
    shards = _index(folder)
  else:
    raise UserError(f"{folder} has no {SINGLE} and no {INDEX}; give a folder with the weights of a model")
  opened: dict[pathlib.Path, Any] = {}

  def get(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in shards:
      raise UserError(f"{folder}: there is no tensor {name!r}; the weights do not fit config.json")
    path = shards[name]
    with _blamed(path):
      file = opened.get(path) or opened.setdefault(path, _open(path))
      tensor = file.get_tensor(name)
    if tensor.shape != shape:
      raise UserError(f"{path}: tensor {name!r} has the shape {list(tensor.shape)} where config.json asks for "
                      f"{list(shape)}")
    return tensor

  return Weights(frozenset(shards), get)


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes one file, whole or not at all. Raises UserError when the disk refuses."""
  package = _package()
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
      ready = pathlib.Path(scratch) / path.name
      with _blamed(ready):
        package.numpy.save_file(dict(tensors), ready, metadata={"format": "pt"})
      with ready.open("rb") as file:
        os.fsync(file.fileno())
      ready.replace(path)
  except OSError as error:
    raise UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
    ) from error


def _index(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  content = files.read_json(folder / INDEX)
  names = content.get("weight_map") if isinstance(content, dict) else None
  if not isinstance(names, dict) or not names:
    raise UserError(f"{folder / INDEX} has no weight_map; fetch it again")
  for file in names.values():
    if not isinstance(file, str) or pathlib.PurePath(file).name != file or not (folder / file).is_file():
      raise UserError(f"{folder / INDEX} names {file!r}, which is not a file of that folder; fetch it")
  return {name: folder / file for name, file in names.items()}


def _names(path: pathlib.Path) -> list[str]:
  with _blamed(path):
    return list(_open(path).keys())


def _open(path: pathlib.Path) -> Any:
  return _package().safe_open(path, framework="numpy")


@contextlib.contextmanager
def _blamed(path: pathlib.Path):
  try:
    yield
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error
  except _package().SafetensorError as error:
    words = first_line(error)[:120]
    raise UserError(f"{path} is damaged or not safetensors ({words}); fetch it again") from error


def _package() -> Any:
  try:
    import safetensors  # pylint: disable=g-import-not-at-top
    import safetensors.numpy  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise UserError("the package safetensors is missing; run: pip install 'sakanajax[lm]'") from error
  return safetensors
