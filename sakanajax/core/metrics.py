"""Scalars over steps: one JSON object a line, and the same to tensorboard when asked."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any, Mapping

from sakanajax.core import files
from sakanajax.core.errors import UserError


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads a metrics file; a last line torn by a kill is left out.

  Raises UserError when the file is missing, or holds a line that is not a JSON object.
  """
  path = pathlib.Path(path)
  try:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error
  except ValueError as error:
    raise UserError(f"{path} is not a text file ({error}); remove it and run again") from error
  records = []
  for number, line in enumerate(lines, 1):
    if not line.endswith("\n"):
      break
    try:
      record = json.loads(line)
    except ValueError:
      record = None
    if not isinstance(record, dict):
      raise UserError(f"{path}, line {number} is not a JSON object; remove the file and run again")
    records.append(record)
  return records


class JsonlWriter:
  """Appends one line of scalars per logged step.

  Opening keeps the lines up to `resume_step` and drops the rest, which the resumed run writes
  again: every step stands in the file once. Each line reaches the operating system at once, so a
  killed process loses none. NaN and infinity are written as null.
  """

  def __init__(self, path: str | os.PathLike, resume_step: int = 0):
    self.path = pathlib.Path(path)
    kept = [r for r in self._existing() if r.get("step", 0) <= resume_step]
    files.write_text(self.path, "".join(_line(record) for record in kept))
    self._file = open(self.path, "a", encoding="utf-8")

  def _existing(self) -> list[dict[str, Any]]:
    return read_jsonl(self.path) if self.path.exists() else []

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Appends `{"step": step, **scalars}`. Raises UserError when the disk refuses it."""
    try:
      self._file.write(_line({"step": step, **scalars}))
      self._file.flush()
    except OSError as error:
      raise UserError(
          f"cannot write {self.path}: {error.strerror or error}; free some space and run again"
      ) from error

  def close(self) -> None:
    self._file.close()

  def __enter__(self) -> JsonlWriter:
    return self

  def __exit__(self, *_) -> None:
    self.close()


class TensorboardWriter:
  """The same scalars as tensorboard events, through tensorboardX; steps past `resume_step` are purged."""

  def __init__(self, folder: str | os.PathLike, resume_step: int = 0):
    try:
      import tensorboardX  # pylint: disable=g-import-not-at-top
    except ImportError as error:
      raise UserError(
          "--tensorboard needs the tensorboardX package; pip install tensorboardX"
      ) from error
    self._writer = tensorboardX.SummaryWriter(str(folder), purge_step=resume_step + 1)

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    for name, value in scalars.items():
      self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()

  def __enter__(self) -> TensorboardWriter:
    return self

  def __exit__(self, *_) -> None:
    self.close()


def _line(record: Mapping[str, Any]) -> str:
  def plain(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value

  return json.dumps({k: plain(v) for k, v in record.items()}, allow_nan=False) + "\n"
