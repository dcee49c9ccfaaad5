"""Assets: each client against a package made here, damage, and every way in which a registry can be out of reach."""

import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

from sakanajax.core import assets
from sakanajax.core.assets import Asset
from sakanajax.core.errors import UserError

CONTENT = b"label,pixel\n5,0\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def _asset(kind, inside="pkg/data/digits.csv", sha256=SHA256):
  return Asset("toy", kind, "toy-package", "1.2", ((inside, sha256),), "MIT", "a toy")


def _wheel(path, inside="pkg/data/digits.csv", content=CONTENT):
  with zipfile.ZipFile(path, "w") as wheel:
    wheel.writestr(inside, content)


def _tgz(path, inside="package/pkg/data/digits.csv"):
  with tarfile.open(path, "w:gz") as archive:
    info = tarfile.TarInfo(inside)
    info.size = len(CONTENT)
    archive.addfile(info, io.BytesIO(CONTENT))


@pytest.fixture
def client(tmp_path, monkeypatch):
  """Registers a toy asset and replaces the clients by a function that makes files in the working folder."""
  calls = []
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path / "cache"))

  def install(asset, behaviour):
    monkeypatch.setitem(assets.ASSETS, "toy", asset)

    def run(command, *, cwd, **options):
      assert options["timeout"] > 0 and options["stdin"] == subprocess.DEVNULL
      calls.append(command)
      code, err = behaviour(command, pathlib.Path(cwd)) or (0, "")
      return subprocess.CompletedProcess(command, code, "", err)

    monkeypatch.setattr(assets.subprocess, "run", run)
    return calls

  return install


def _fetch_deb(command, cwd):
  if command[0] == "apt-get":
    (cwd / "toy-package_1.2_all.deb").write_bytes(b"deb")
  else:
    target = pathlib.Path(command[-1]) / "pkg/data/digits.csv"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)


@pytest.mark.parametrize("kind, behaviour, start", [
    ("pip", lambda command, cwd: _wheel(cwd / "toy.whl"), [sys.executable, "-m", "pip", "download"]),
    ("npm", lambda command, cwd: _tgz(cwd / "toy.tgz"), ["npm", "pack"]),
    ("deb", _fetch_deb, ["apt-get", "download"]),
])
def test_fetch_once_then_from_the_cache(client, tmp_path, kind, behaviour, start):
  calls = client(_asset(kind), behaviour)
  folder = assets.fetch("toy")
  assert folder == tmp_path / "cache" / "toy-1.2" and (folder / "digits.csv").read_bytes() == CONTENT
  assert calls[0][:len(start)] == start and any("toy-package" in word for word in calls[0])
  assert os.listdir(tmp_path / "cache") == ["toy-1.2"]  # no scratch is left
  count = len(calls)
  assert assets.fetch("toy") == folder and len(calls) == count


def test_pip_never_builds_or_installs(client):
  calls = client(_asset("pip"), lambda command, cwd: _wheel(cwd / "toy.whl"))
  assets.fetch("toy")
  assert {"--no-deps", "--only-binary=:all:", "toy-package==1.2"} <= set(calls[0]) and "install" not in calls[0]


def test_damaged_cache_is_fetched_again(client):
  calls = client(_asset("pip"), lambda command, cwd: _wheel(cwd / "toy.whl"))
  file = assets.fetch("toy") / "digits.csv"
  file.write_bytes(b"half")
  assert (assets.fetch("toy") / "digits.csv").read_bytes() == CONTENT and len(calls) == 2


def test_another_process_was_faster(client, tmp_path):
  place = tmp_path / "cache" / "toy-1.2"

  def race(command, cwd):
    _wheel(cwd / "toy.whl")
    place.mkdir()
    (place / "digits.csv").write_bytes(CONTENT)

  client(_asset("pip"), race)
  assert (assets.fetch("toy") / "digits.csv").read_bytes() == CONTENT
  assert os.listdir(place.parent) == ["toy-1.2"]


TEXTS = {
    "data/a.txt": b"one", "data/sub/b.txt": b"two", "data/skip/c.txt": b"three", "data/a.json": b"{}", "x.txt": b"four",
}
TREE = hashlib.sha256(
    "".join(f"{name} {hashlib.sha256(TEXTS['data/' + name]).hexdigest()}\n" for name in ("a.txt", "sub/b.txt")).encode()
).hexdigest()


def _pattern(kind, sha256=TREE):
  return Asset("toy", kind, "toy-package", "1.2", (("data/*.txt", sha256),), "MIT", "a toy", skip="*/skip/*")


def _many(kind, texts=TEXTS):
  """A client that brings a package with these files."""

  def pip(command, cwd):
    with zipfile.ZipFile(cwd / "toy.whl", "w") as wheel:
      wheel.mkdir("data")
      for name, content in reversed(texts.items()):
        wheel.writestr(name, content)

  def npm(command, cwd):
    with tarfile.open(cwd / "toy.tgz", "w:gz") as archive:
      link = tarfile.TarInfo("package/data/link.txt")
      link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
      archive.addfile(link)
      for name, content in texts.items():
        info = tarfile.TarInfo(f"package/{name}")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))

  def deb(command, cwd):
    if command[0] == "apt-get":
      (cwd / "toy-package_1.2_all.deb").write_bytes(b"deb")
      return
    for name, content in texts.items():
      path = pathlib.Path(command[-1]) / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(content)
    (pathlib.Path(command[-1]) / "data/link.txt").symlink_to("a.txt")

  return {"pip": pip, "npm": npm, "deb": deb}[kind]


@pytest.mark.parametrize("kind", ["pip", "npm", "deb"])
def test_pattern_brings_all_files_that_fit(client, tmp_path, kind):
  calls = client(_pattern(kind), _many(kind))
  folder = assets.fetch("toy")
  asset = assets.ASSETS["toy"]
  found = assets.paths(asset, folder, "data/*.txt")
  assert [path.relative_to(folder).as_posix() for path in found] == ["a.txt", "sub/b.txt"]
  assert [path.read_bytes() for path in found] == [b"one", b"two"]
  assert {path.name for path in folder.rglob("*") if path.is_file()} == {"a.txt", "b.txt"}  # no link, nothing skipped
  count = len(calls)
  (folder / "note.md").write_text("a file of the user's own is no damage")
  assert assets.fetch("toy") == folder and len(calls) == count


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "a.txt").write_bytes(b"One"),
    lambda folder: (folder / "a.txt").unlink(),
    lambda folder: (folder / "sub/b.txt").rename(folder / "b.txt"),
    lambda folder: (folder / "more.txt").write_bytes(b""),
])
def test_pattern_notices_any_change(client, damage):
  calls = client(_pattern("pip"), _many("pip"))
  folder = assets.fetch("toy")
  damage(folder)
  assert len(assets.paths(assets.ASSETS["toy"], assets.fetch("toy"), "data/*.txt")) == 2 and len(calls) == 2


@pytest.mark.parametrize("texts, words", [
    ({"data/a.md": b""}, "does not hold data/"),
    ({"data/../../a.txt": b"out"}, "does not hold data/"),
    ({"data/a.txt": b"one"}, "has another content"),
])
def test_pattern_of_another_package(client, tmp_path, texts, words):
  client(_pattern("pip"), _many("pip", texts))
  with pytest.raises(UserError, match=words):
    assets.fetch("toy")
  assert os.listdir(tmp_path) == ["cache"] and os.listdir(tmp_path / "cache") == []


def _missing(command, cwd):
  raise FileNotFoundError(command[0])


def _hangs(command, cwd):
  raise subprocess.TimeoutExpired(command, 1)


@pytest.mark.parametrize("kind, behaviour, parts", [
    ("pip", lambda command, cwd: (1, "warning\nERROR: No matching distribution found for toy-package==1.2\n"),
     ["pip could not fetch toy-package 1.2 (ERROR: No matching distribution", "check the network"]),
    ("npm", _missing, ["npm is not installed"]),
    ("npm", lambda command, cwd: (7, ""), ["npm could not fetch", "(code 7)"]),
    ("deb", lambda command, cwd: (100, "E: Unable to locate package toy-package"), ["Unable to locate", "apt-get update"]),
    ("pip", _hangs, ["took more than"]),
    ("pip", lambda command, cwd: None, ["brought no *.whl"]),
    ("pip", lambda command, cwd: _wheel(cwd / "toy.whl", inside="other.csv"), ["does not hold pkg/data/digits.csv"]),
    ("pip", lambda command, cwd: _wheel(cwd / "toy.whl", content=b"changed"),
     ["digits.csv has another content", SHA256[:12]]),
    ("pip", lambda command, cwd: (cwd / "toy.whl").write_bytes(b"half a zip") and None, ["arrived damaged"]),
    ("npm", lambda command, cwd: (cwd / "toy.tgz").write_bytes(b"half a tar") and None, ["arrived damaged"]),
])
def test_trouble_is_one_line_with_the_remedy(client, tmp_path, kind, behaviour, parts):
  client(_asset(kind), behaviour)
  with pytest.raises(UserError) as error:
    assets.fetch("toy")
  text = str(error.value)
  assert text.startswith("asset toy: ") and "\n" not in text and "--config.data.source=" in text
  assert all(part in text for part in parts), text
  assert os.listdir(tmp_path / "cache") == []  # nothing half-written


def test_unknown_asset():
  with pytest.raises(UserError, match="there is no asset 'imagenet'; assets: mnist, fashion_mnist"):
    assets.fetch("imagenet")


def test_cache_that_cannot_be_written(client, tmp_path, monkeypatch):
  client(_asset("pip"), lambda command, cwd: _wheel(cwd / "toy.whl"))
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path / "file"))
  with pytest.raises(UserError, match="SAKANAJAX_CACHE"):
    assets.fetch("toy")


def test_registry_is_well_formed():
  for name, asset in assets.ASSETS.items():
    assert name == asset.name and asset.kind in ("pip", "npm", "deb") and asset.version and asset.licence and asset.note
    names = [pathlib.PurePosixPath(inside).name for inside, _ in asset.files]
    assert len(set(names)) == len(names) > 0 and (not asset.skip or "*" in asset.skip)
    assert all(len(sha256) == 64 and int(sha256, 16) for _, sha256 in asset.files)


def test_default_cache(monkeypatch):
  monkeypatch.delenv("SAKANAJAX_CACHE", raising=False)
  assert assets.cache_dir() == pathlib.Path.home() / ".cache" / "sakanajax"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(assets.ASSETS))
def test_real_asset(name, tmp_path, monkeypatch):
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path))
  try:
    folder = assets.fetch(name)
  except UserError as error:
    if "has another content" in str(error) or "does not hold" in str(error):
      raise
    pytest.skip(f"out of reach: {error}")
  asset = assets.ASSETS[name]
  found = [path for inside, _ in asset.files for path in assets.paths(asset, folder, inside)]
  assert set(found) == {path for path in folder.rglob("*") if path.is_file()} and len(found) >= len(asset.files)
