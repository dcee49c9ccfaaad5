"""Data sets on disk as tfds builders in array_record files, in memory as numpy arrays.

No TensorFlow: builders use plain features (Tensor, Scalar, Text, ClassLabel) and are read as data
sources. Batches are indices, a pure function of the step, so a resumed run needs no iterator.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import tempfile
from typing import Any, Callable, Iterator

import numpy as np

from sakanajax.core.errors import UserError, first_line


def default_data_dir() -> pathlib.Path:
  """Returns $SAKANAJAX_DATA, or ~/.cache/sakanajax/data."""
  return pathlib.Path(os.environ.get("SAKANAJAX_DATA") or "~/.cache/sakanajax/data").expanduser()


def prepare(
    builder_cls: Any, data_dir: str | os.PathLike | None = None, **builder_kwargs: Any
) -> Any:
  """Returns a prepared builder, generating its files first if `data_dir` lacks them.

  Args:
    builder_cls: a `tfds.core.GeneratorBasedBuilder`; declare it with `skip_registration=True`
      when its name may be taken. Arguments that change the data must change its `name`, its
      config's name or its version, which together name the folder.
    data_dir: the root folder; default `default_data_dir()`.
    **builder_kwargs: passed to the builder.

  The files are generated in a temporary folder and renamed: a killed preparation leaves nothing
  under the final name, and the next one clears its remains. Processes that want the same data
  at the same time wait for the first of them. Raises UserError when the disk refuses.
  """
  root = pathlib.Path(data_dir).expanduser() if data_dir else default_data_dir()
  make = functools.partial(builder_cls, file_format="array_record", **builder_kwargs)
  try:
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root / f".{builder_cls.name}.lock"):
      builder = make(data_dir=root)
      final = pathlib.Path(builder.data_dir)
      if not (final / "dataset_info.json").exists():
        _generate(make, root, builder_cls.name, final)
        builder = make(data_dir=root)
  except (OSError, RuntimeError) as error:
    if not isinstance(error, OSError) and not _of_the_disk(error):
      raise
    raise UserError(
        f"cannot prepare the data set {builder_cls.name} in {root}: {getattr(error, 'strerror', None) or first_line(error)};"
        " free some space or set SAKANAJAX_DATA to another folder"
    ) from error
  return builder


def to_arrays(builder: Any, split: str) -> dict[str, np.ndarray]:
  """Reads a whole split into memory as {feature: stacked array `[N, ...]`}.

  Texts become object arrays of bytes. Raises UserError when the files are damaged or missing.
  """
  try:
    source = builder.as_data_source(split=split)
    rows = source.__getitems__(range(len(source)))
  except Exception as error:  # whatever the readers below raise, the files are to blame
    raise UserError(
        f"cannot read split {split!r} of {builder.data_dir} ({first_line(error)});"
        " delete that folder and run again"
    ) from error
  if not rows:
    raise UserError(f"split {split!r} of {builder.data_dir} is empty; delete that folder")
  return {name: _stack([row[name] for row in rows]) for name in rows[0]}


def epoch_batches(n: int, batch_size: int, seed: int) -> Callable[[int], np.ndarray]:
  """Returns f(step) -> int64 `[batch_size]`, indices into `n` examples.

  The permutations of epochs 0, 1, 2, ... are laid end to end and cut into batches: every example
  appears once an epoch, and a batch may end one epoch and begin the next. The permutation of
  epoch e is a function of (seed, e) alone.
  """
  if n < 1 or batch_size < 1:
    raise ValueError(f"n and batch_size must be at least 1, got {n} and {batch_size}")

  @functools.lru_cache(maxsize=2)
  def permutation(epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)

  def batch(step: int) -> np.ndarray:
    parts, position, end = [], step * batch_size, (step + 1) * batch_size
    while position < end:
      epoch, offset = divmod(position, n)
      parts.append(permutation(epoch)[offset : offset + end - position])
      position += len(parts[-1])
    return np.concatenate(parts)

  return batch


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
  """Holds an exclusive lock; the system frees it when the process dies, however it dies."""
  import fcntl  # pylint: disable=g-import-not-at-top

  with open(path, "w", encoding="utf-8") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _generate(make: Any, root: pathlib.Path, name: str, final: pathlib.Path) -> None:
  """Generates into a temporary folder under `root` and renames the result to `final`."""
  prefix = f".{name}.partial-"
  for remains in root.glob(f"{prefix}*"):
    shutil.rmtree(remains, ignore_errors=True)
  with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as temporary:
    staged = make(data_dir=temporary)
    staged.download_and_prepare()
    final.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staged.data_dir, final)


def _of_the_disk(error: RuntimeError) -> bool:
  """True for a write that array_record reports without an OSError."""
  return any(words in str(error) for words in ("No space left", "File too large", "quota exceeded", "Read-only file system"))


def _stack(column: list[Any]) -> np.ndarray:
  if isinstance(column[0], (bytes, str)):
    return np.array(column, dtype=object)
  return np.stack([np.asarray(value) for value in column])
