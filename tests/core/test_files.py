"""Files are whole or absent."""

import errno
import json
import math
import os
import stat
import subprocess
import sys

import pytest

from sakanajax.core import files
from sakanajax.core.errors import UserError


def test_round_trip_and_parents(tmp_path):
  content = {"b": [1, 2.5, None, True], "a": "é漢🙂"}
  path = files.write_json(tmp_path / "new" / "folder" / "x.json", content)
  assert files.read_json(path) == content
  assert list(json.loads(path.read_text())) == ["b", "a"]  # order is kept for the reader
  assert stat.S_IMODE(path.stat().st_mode) == 0o644
  assert os.listdir(path.parent) == ["x.json"]


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
  path = files.write_text(tmp_path / "x.txt", "old")

  def full(unused):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(UserError, match=r"cannot write .*x\.txt: No space left on device; free some space"):
    files.write_text(path, "new")
  assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.txt"]


def test_nan_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(ValueError):
    files.write_json(tmp_path / "x.json", {"a": math.nan})
  assert not os.listdir(tmp_path)


def test_folder_that_is_a_file(tmp_path):
  (tmp_path / "f").write_text("")
  with pytest.raises(UserError, match="cannot write"):
    files.write_text(tmp_path / "f" / "x", "")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1} {'])
def test_damaged_json_is_named(tmp_path, content):
  path = tmp_path / "x.json"
  path.write_bytes(content)
  with pytest.raises(UserError, match=r"x\.json is not valid JSON"):
    files.read_json(path)


def test_missing_json_is_named(tmp_path):
  with pytest.raises(UserError, match=r"cannot read .*nope\.json: No such file"):
    files.read_json(tmp_path / "nope.json")


def test_digest_is_of_the_content_only():
  assert files.digest({"a": 1, "b": [1, 2]}) == files.digest({"b": [1, 2], "a": 1})
  assert files.digest({"a": 1}) != files.digest({"a": 2}) and files.digest([1, 2]) != files.digest([2, 1])
  # sha256 of '{"a":1}', so that fingerprints stay the same from one version to the next
  assert files.digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_a_killed_writer_leaves_the_old_or_the_new_file(tmp_path):
  path = files.write_text(tmp_path / "x.txt", "a" * 1000)
  program = "import sys\nfrom sakanajax.core import files\nwhile True:\n  files.write_text(sys.argv[1], 'b' * 300000)\n"
  with subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=os.getcwd()) as process:
    while path.read_text()[0] != "b":
      pass
    process.kill()
  assert path.read_text() in ("a" * 1000, "b" * 300000)
