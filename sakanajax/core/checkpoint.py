"""Checkpoints that are whole or absent, and that refuse to be mistaken for another run's.

A checkpoint is the orbax folder `DIR/<step>/` with our `meta.json` inside. It is written under
another name and published by one rename, so whatever stands under a number is complete.
`meta.json` holds the caller's meta (fingerprint, config), the shape and dtype of every leaf and
the length and checksum of every file; `restore` compares them all before it loads anything.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import zlib
from typing import Any, Mapping

import jax
import numpy as np

from sakanajax.core import files
from sakanajax.core.errors import UserError

_META = "meta.json"
_PARTIAL = ".partial"  # DIR/<step>.partial: being written, or being deleted
# How a disk refuses: as an OSError of ours, or as text in the errors of orbax and tensorstore.
_REFUSALS = {
    number: os.strerror(number)
    for number in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
        errno.EIO, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG,
    )
}


def save(
    folder: str | os.PathLike, step: int, tree: Any, meta: Mapping[str, Any], keep: int = 2
) -> pathlib.Path:
  """Writes `tree` as `folder/<step>/`, then deletes all but the newest `keep` checkpoints.

  Every process of a many-host run calls it, on a folder they all see. An existing checkpoint of
  this step is replaced. Raises UserError when the disk refuses; earlier checkpoints stay intact.
  """
  ocp = _import_orbax()
  folder = pathlib.Path(folder).absolute()
  partial, final = folder / f"{step}{_PARTIAL}", folder / str(step)
  try:
    _on_first_process("prepare", lambda: _sweep(folder))
    ocp.save(partial, jax.tree.map(_storable, tree))
    _on_first_process("publish", lambda: _publish(partial, final, tree, {"step": step, **meta}))
    _on_first_process("prune", lambda: _prune(folder, keep))
  except Exception as error:
    reason = _disk_reason(error)
    if reason is None:
      raise
    if jax.process_index() == 0:
      with contextlib.suppress(OSError):
        _sweep(folder)
    raise UserError(
        f"cannot write checkpoint {final}: {reason}; free some space or choose another folder"
    ) from error
  return final


def latest(folder: str | os.PathLike) -> int | None:
  """Returns the newest complete checkpoint's step, or None when there is none."""
  return max(_steps(pathlib.Path(folder)), default=None)


def restore(
    folder: str | os.PathLike,
    template: Any,
    step: int | None = None,
    fingerprint: str | None = None,
) -> tuple[Any, dict[str, Any]]:
  """Loads a checkpoint (the newest unless `step` is given) as (tree, meta).

  `template` has the tree, shapes, dtypes and shardings wanted, as arrays or ShapeDtypeStructs
  (without a sharding: one device); where it has a numpy array, a numpy array is returned.
  Raises UserError, naming the folder and the remedy, when there is no such checkpoint, when a
  file in it is damaged or missing, and when it belongs to another configuration (`fingerprint`)
  or to another model (tree, shapes, dtypes).
  """
  ocp = _import_orbax()
  folder = pathlib.Path(folder).absolute()
  steps = _steps(folder)
  if not steps:
    raise UserError(f"no checkpoint in {folder}; train first, or name another folder")
  step = max(steps) if step is None else step
  if step not in steps:
    raise UserError(f"no checkpoint of step {step} in {folder}; there are {sorted(steps)}")
  path = folder / str(step)
  meta = _read_meta(path, fingerprint, template)
  stored = ocp.load(path, jax.tree.map(_abstract, template))
  return jax.tree.map(_refill, template, stored), meta


def _steps(folder: pathlib.Path) -> set[int]:
  if not folder.is_dir():
    return set()
  return {int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()}


def _publish(partial: pathlib.Path, final: pathlib.Path, tree: Any, meta: dict[str, Any]) -> None:
  """Seals the folder with its meta and gives it its final name."""
  written = sorted(p for p in partial.rglob("*") if p.is_file())
  sums = {str(p.relative_to(partial)): _checksum(p) for p in written}
  files.write_json(partial / _META, {**meta, "tree": _describe(tree), "files": sums})
  if final.exists():
    _discard(final)
  os.replace(partial, final)
  _fsync_folder(final.parent)


def _prune(folder: pathlib.Path, keep: int) -> None:
  for step in sorted(_steps(folder))[: -max(keep, 1)]:
    _discard(folder / str(step))


def _sweep(folder: pathlib.Path) -> None:
  """Clears what a killed process left half-written."""
  folder.mkdir(parents=True, exist_ok=True)
  for path in folder.glob(f"*{_PARTIAL}*"):
    shutil.rmtree(path, ignore_errors=True)


def _discard(path: pathlib.Path) -> None:
  """Deletes a checkpoint so that no half of it ever stands under its number."""
  doomed = path.with_name(f"{path.name}.old{_PARTIAL}")
  shutil.rmtree(doomed, ignore_errors=True)
  os.replace(path, doomed)
  shutil.rmtree(doomed, ignore_errors=True)


def _read_meta(path: pathlib.Path, fingerprint: str | None, template: Any) -> dict[str, Any]:
  """Returns the caller's meta after every check that needs no orbax."""
  try:
    meta = files.read_json(path / _META)
    sums, saved = meta.pop("files"), meta.pop("tree")
    damaged = [name for name, value in sums.items() if _checksum(path / name) != value]
  except (UserError, OSError, KeyError, AttributeError, TypeError) as error:
    raise _corrupt(path, "files are missing or unreadable") from error
  if damaged:
    raise _corrupt(path, f"{damaged[0]} is damaged")
  if fingerprint is not None and meta.get("fingerprint") != fingerprint:
    raise UserError(
        f"checkpoint {path} was written by another configuration; use a fresh folder, restore"
        " the configuration it was made with, or delete it"
    )
  wanted = _describe(template)
  if saved != wanted:
    raise UserError(
        f"checkpoint {path} holds another model ({_difference(saved, wanted)}); use a fresh"
        " folder, or the configuration it was made with"
    )
  return meta


def _difference(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
  """Names the first leaf in which two descriptions differ."""
  name = next(n for n in [*wanted, *saved] if saved.get(n) != wanted.get(n))
  there, here = saved.get(name, "nothing"), wanted.get(name, "nothing")
  return f"{name}: the checkpoint has {there}, this run wants {here}"


def _corrupt(path: pathlib.Path, what: str) -> UserError:
  older = sorted(s for s in _steps(path.parent) if s < int(path.name))
  then = f"the run resumes from step {older[-1]}" if older else "the run starts over"
  return UserError(f"checkpoint {path} is corrupt ({what}); delete that folder and {then}")


def _describe(tree: Any) -> dict[str, str]:
  """Returns {path of the leaf: "dtype[shape]"}."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
      jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
  }


def _storable(leaf: Any) -> Any:
  """Leaves out arrays without elements, which orbax cannot store; their shape is in the meta."""
  return None if 0 in leaf.shape else leaf


def _abstract(leaf: Any) -> Any:
  if isinstance(leaf, np.ndarray) or 0 in leaf.shape:
    return _storable(leaf)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))


def _sharding(leaf: Any) -> Any:
  return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _refill(leaf: Any, stored: Any) -> Any:
  if stored is not None:
    return stored
  zeros = np.zeros(leaf.shape, leaf.dtype)
  return zeros if isinstance(leaf, np.ndarray) else jax.device_put(zeros, _sharding(leaf))


def _checksum(path: pathlib.Path) -> list[int]:
  """Returns [length, crc32] of a file."""
  length = crc = 0
  with open(path, "rb") as file:
    while block := file.read(1 << 20):
      length, crc = length + len(block), zlib.crc32(block, crc)
  return [length, crc]


def _import_orbax() -> Any:
  """Imports orbax and keeps it from logging the tracebacks of errors that it also raises.

  Its threads log whenever they come to it, so the filter stays for good.
  """
  import orbax.checkpoint.experimental.v1 as ocp  # pylint: disable=g-import-not-at-top

  logging.getLogger("absl").addFilter(_not_an_error_of_orbax)
  return ocp


def _not_an_error_of_orbax(record: logging.LogRecord) -> bool:
  return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _fsync_folder(folder: pathlib.Path) -> None:
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _on_first_process(name: str, action: Any) -> None:
  """Runs `action` on process 0; all processes wait for it, and fail together if it fails."""
  if jax.process_count() == 1:
    action()
    return
  from jax.experimental import multihost_utils  # pylint: disable=g-import-not-at-top

  failure = None
  if jax.process_index() == 0:
    try:
      action()
    except Exception as error:  # pylint: disable=broad-exception-caught
      failure = error
  failed = multihost_utils.broadcast_one_to_all(np.int32(failure is not None))
  if failure is not None:
    raise failure
  if failed:
    raise OSError(errno.EIO, f"process 0 could not {name} the checkpoint")


def _disk_reason(error: BaseException | None) -> str | None:
  """Returns why the disk refused, or None when `error` is something else."""
  while error is not None:
    if isinstance(error, OSError) and error.errno in _REFUSALS:
      return _REFUSALS[error.errno]
    for reason in _REFUSALS.values():
      if reason in str(error):
        return reason
    error = error.__cause__ or error.__context__
  return None
