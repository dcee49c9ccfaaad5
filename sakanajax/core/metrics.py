"""Scalars over steps: one JSON object a line, tensorboard when asked, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from typing import Any, Mapping

from sakanajax.core import files
from sakanajax.core.errors import Diverged, UserError


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
  """The same scalars as tensorboard events; steps past `resume_step` are purged."""

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


class RunLog:
  """The metrics and the progress bar of one training run; only process 0 shows and writes them.

  `add` keeps each step's metrics on the device; `collect` fetches those since the last time at
  once, which is the only moment when the host waits for the device.
  """

  def __init__(
      self,
      workdir: pathlib.Path,
      start: int,
      steps: int,
      batch_size: int,
      desc: str = "",
      tensorboard: bool = False,
  ):
    import jax  # pylint: disable=g-import-not-at-top
    from tqdm import tqdm  # pylint: disable=g-import-not-at-top

    self._workdir, self._batch_size = workdir, batch_size
    self._window: list[dict[str, Any]] = []
    self._writers = []
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
      if first:
        self._writers.append(stack.enter_context(JsonlWriter(workdir / "metrics.jsonl", start)))
      if first and tensorboard:
        folder = workdir / "tensorboard"
        self._writers.append(stack.enter_context(TensorboardWriter(folder, start)))
      self._bar = stack.enter_context(
          tqdm(
              total=steps, initial=start, desc=desc or None, unit="step", disable=not first,
              dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30.0,
          )
      )  # fmt: skip
      self._stack = stack.pop_all()
    self.restart_clock()

  def __enter__(self) -> RunLog:
    return self

  def __exit__(self, *_) -> None:
    self._stack.close()

  def restart_clock(self) -> None:
    """Begins to time the next interval: what happened since the last `write` is left out."""
    self._since = time.perf_counter()

  def add(self, measured: dict[str, Any]) -> None:
    """Takes one step's metrics, as device scalars."""
    self._window.append(measured)
    self._bar.update()

  def collect(self, step: int) -> dict[str, float]:
    """Returns the means over the interval that ends at `step`, and `samples_per_s`.

    Raises UserError when a loss or a norm in the interval is not finite.
    """
    import jax  # pylint: disable=g-import-not-at-top

    window, self._window = jax.device_get(self._window), []
    rate = len(window) * self._batch_size / (time.perf_counter() - self._since)
    for number, measured in enumerate(window, step - len(window) + 1):
      for name in ("loss", "grad_norm", "param_norm"):
        if not math.isfinite(measured[name]):
          raise Diverged(
              f"{name} is {measured[name]} at step {number} of {self._workdir}; lower the learning"
              f" rate (there {measured['lr']:.3g}) or the gradient clip"
          )
    names = sorted(window[0], key=lambda name: (name != "loss", name))
    means = {name: math.fsum(float(m[name]) for m in window) / len(window) for name in names}
    return {**means, "samples_per_s": round(rate, 1)}

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes one line of scalars and shows the loss beside the bar."""
    scalars = {name: float(value) for name, value in scalars.items()}
    for writer in self._writers:
      writer.write(step, scalars)
    self._bar.set_postfix_str(
        f"loss={scalars['loss']:.4g}, {scalars['samples_per_s']:.0f} samples/s", refresh=False
    )
    self.restart_clock()


def _line(record: Mapping[str, Any]) -> str:
  def plain(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value

  return json.dumps({k: plain(v) for k, v in record.items()}, allow_nan=False) + "\n"
