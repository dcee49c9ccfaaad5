"""Files that are either whole or absent: write to a temporary name, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

from sakanajax.core.errors import UserError


def write_bytes(path: str | os.PathLike, content: bytes) -> pathlib.Path:
  """Writes `content` atomically. Raises UserError when the disk or the folder refuses it."""
  path = pathlib.Path(path)
  temporary = None
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
  except OSError as error:
    if temporary is not None and os.path.exists(temporary):
      os.unlink(temporary)
    raise UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
    ) from error
  return path


def write_text(path: str | os.PathLike, content: str) -> pathlib.Path:
  """Writes UTF-8 text atomically (see `write_bytes`)."""
  return write_bytes(path, content.encode("utf-8"))


def write_json(path: str | os.PathLike, content: Any) -> pathlib.Path:
  """Writes indented JSON atomically; NaN and infinity are refused with ValueError."""
  return write_text(path, json.dumps(content, indent=1, sort_keys=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
  """Reads a JSON file. Raises UserError naming the file when it is missing or is not JSON."""
  path = pathlib.Path(path)
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error
  except ValueError as error:
    raise UserError(f"{path} is not valid JSON ({error}); remove it and run again") from error


def digest(content: Any) -> str:
  """Returns the sha256 of the canonical JSON form of `content` (key order does not matter)."""
  text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def digest_of_file(path: str | os.PathLike) -> str:
  """Returns the sha256 of a file's bytes, read in pieces. Raises OSError."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
