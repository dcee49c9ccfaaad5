"""What a fresh clone relies on: setup.cfg, the pinned sets, the licence, and the Makefile with stand-in interpreters."""

from __future__ import annotations

import configparser
import os
import pathlib
import re
import shutil
import subprocess

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12")
MANDATED = {
    "jax", "flax", "optax", "orbax-checkpoint", "chex", "jax-triton", "triton", "numpy", "tensorflow-datasets", "absl-py",
}
BUILD_FILES = ("Makefile", "setup.cfg", "pyproject.toml", "constraints-3.11.txt", "constraints-3.12.txt")
TOOLS = ("sh", "rm", "cp", "cat", "mkdir", "find", "sed", "grep", "cut", "cksum", "uname")

# Answers the questions that the Makefile asks an interpreter, and logs what it is told to do.
FAKE = """#!/bin/sh
case "$1 $2" in
  "-c import sys"*) echo {version}; exit 0;;
  "-c import ensurepip"*) exit {venv};;
esac
echo "$@" >> "$LOG"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
  "-m pip") echo "pip's own words" >&2; exit "${{PIP_EXIT:-0}}";;
esac
"""


def setup() -> configparser.ConfigParser:
  parser = configparser.ConfigParser()
  parser.read(ROOT / "setup.cfg", encoding="utf-8")
  return parser


def requirements() -> list[Requirement]:
  """Everything setup.cfg asks for, extras included."""
  parser = setup()
  blocks = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
  return [Requirement(line) for block in blocks for line in block.splitlines() if line.strip()]


def pins(python: str) -> dict[str, Version]:
  lines = (ROOT / f"constraints-{python}.txt").read_text(encoding="utf-8").splitlines()
  pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
  assert all(len(pair) == 2 for pair in pairs), f"constraints-{python}.txt holds a line that is not name==version"
  names = [canonicalize_name(name) for name, _ in pairs]
  assert names == sorted(set(names)), f"constraints-{python}.txt is not sorted or names a package twice"
  return {name: Version(version) for name, (_, version) in zip(names, pairs)}


def test_setup_names_every_mandated_package():
  parser = setup()
  names = {Requirement(line).name for line in parser["options"]["install_requires"].splitlines() if line.strip()}
  assert MANDATED <= names
  assert parser["metadata"]["version"] == "attr: sakanajax.__version__"
  assert parser["metadata"]["license_expression"] == "Apache-2.0"
  assert set(parser["options.extras_require"]) >= {"test", "graph", "tensorboard"}
  assert " #" not in "".join(line for line in (ROOT / "setup.cfg").read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_lie_within_the_ranges(python):
  known = pins(python)
  environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
  for requirement in requirements():
    if requirement.marker is None or requirement.marker.evaluate(environment):
      name = canonicalize_name(requirement.name)
      assert name in known, f"{requirement} has no pin for Python {python}"
      assert known[name] in requirement.specifier, f"{name}=={known[name]} is outside {requirement}"


def test_jax_and_jaxlib_are_pinned_together():
  for python in PYTHONS:
    assert pins(python)["jax"] == pins(python)["jaxlib"]
    assert f"AOT_{python} := jax-cuda12-plugin=={pins(python)['jax']} " in (ROOT / "Makefile").read_text()
    assert "tensorflow" not in pins(python)


def test_licence_is_apache_2():
  text = (ROOT / "LICENSE").read_text(encoding="utf-8")
  words = " ".join(text.split())
  assert words.startswith("Apache License Version 2.0, January 2004 http://www.apache.org/licenses/")
  for number in range(1, 10):
    assert re.search(rf"^ +{number}\. [A-Z]", text, re.MULTILINE)
  assert "END OF TERMS AND CONDITIONS" in words
  assert "The sakanajax authors" in words


def test_ci_runs_the_tests_and_stops_at_the_first_error():
  script = ROOT / ".ci" / "run"
  assert "set -euo pipefail" in script.read_text() and "make test" in script.read_text()
  assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


INSTALL = ("pip", "pip", "pallas_kernels.twell.cpu")  # the project, the compilers for absent devices, the C++ path


class Clone:
  """A bare copy of the build files, with only stand-in interpreters on PATH."""

  def __init__(self, folder: pathlib.Path):
    self.root, self.bin, self.log = folder / "clone", folder / "bin", folder / "log"
    self.root.mkdir()
    self.bin.mkdir()
    for name in BUILD_FILES:
      shutil.copy(ROOT / name, self.root / name)
    for tool in TOOLS:
      (self.bin / tool).symlink_to(shutil.which(tool))

  def python(self, name: str, version: str, venv: bool = True) -> None:
    path = self.bin / name
    path.write_text(FAKE.format(version=version, venv=0 if venv else 1))
    path.chmod(0o755)

  def make(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    """Returns (exit code, stderr, what the interpreters were told to do)."""
    self.log.write_text("")
    done = subprocess.run(
        [shutil.which("make"), *arguments], cwd=self.root, capture_output=True, text=True, check=False,
        env={"PATH": str(self.bin), "HOME": str(self.root), "LOG": str(self.log), **environment})
    return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def clone(tmp_path):
  if not all(shutil.which(tool) for tool in ("make", *TOOLS)):
    pytest.skip("make or one of the tools that it calls is missing")
  return Clone(tmp_path)


def test_another_python_gets_one_line(clone):
  clone.python("python3", "3.9")
  code, errors, calls = clone.make("test")
  assert code != 0 and calls == []
  assert len(errors.splitlines()) == 1
  assert "needs Python 3.11 or 3.12" in errors and "python3=3.9" in errors and "PYTHON=" in errors
  assert not (clone.root / ".venv").exists()


def test_no_python_at_all_gets_one_line(clone):
  code, errors, _ = clone.make("reproduce")
  assert code != 0 and len(errors.splitlines()) == 1 and "python3=none" in errors


def test_python_without_venv_gets_one_line(clone):
  clone.python("python3", "3.12", venv=False)
  code, errors, calls = clone.make("test")
  assert code != 0 and calls == [] and len(errors.splitlines()) == 1
  assert "python3 has no venv" in errors and "python3-venv" in errors


def test_named_python_is_the_only_one_tried(clone):
  clone.python("python3", "3.11")
  clone.python("other", "3.13")
  code, errors, calls = clone.make("test", "PYTHON=other")
  assert code != 0 and calls == [] and "other=3.13" in errors and "python3=" not in errors


def test_next_python_on_the_path_is_taken(clone):
  clone.python("python3", "3.9")
  clone.python("python3.12", "3.12")
  code, _, calls = clone.make("test")
  assert code == 0 and "constraints-3.12.txt" in calls[1]


def test_installs_once_and_again_when_the_pins_change(clone):
  clone.python("python3", "3.11")
  code, _, calls = clone.make("test")
  assert code == 0
  assert [call.split()[1] for call in calls] == ["venv", *INSTALL, "pytest"]
  assert "--constraint constraints-3.11.txt --editable .[test]" in calls[1]
  assert "--no-deps --target .venv/aot jax-cuda12-plugin==0.10.2 libtpu" in calls[2]
  assert calls[-1] == "-m pytest -m not slow and not gpu"
  assert [call.split()[1] for call in clone.make("test")[2]] == ["pytest"]
  later = (clone.root / ".venv" / "installed").stat().st_mtime + 10
  os.utime(clone.root / "constraints-3.11.txt", (later, later))
  assert [call.split()[1] for call in clone.make("test")[2]] == [*INSTALL, "pytest"]


def test_failed_install_says_so_and_is_redone(clone):
  clone.python("python3", "3.11")
  code, errors, calls = clone.make("test", PIP_EXIT="1")
  assert code != 0 and [call.split()[1] for call in calls] == ["venv", "pip"]
  ours = [line for line in errors.splitlines() if line.startswith("sakanajax:")]
  assert len(ours) == 1 and "network" in ours[0] and errors.index(ours[0]) > errors.index("pip's own words")
  (clone.root / ".venv" / "half").write_text("left behind")
  assert [call.split()[1] for call in clone.make("test")[2]] == ["venv", *INSTALL, "pytest"]
  assert not (clone.root / ".venv" / "half").exists()


def test_moved_clone_and_another_python_are_installed_anew(clone):
  clone.python("python3", "3.11")
  clone.python("python3.12", "3.12")
  clone.make("test")
  clone.root = clone.root.rename(clone.root.with_name("moved"))
  assert [call.split()[1] for call in clone.make("test")[2]] == ["venv", *INSTALL, "pytest"]
  calls = clone.make("test", "PYTHON=python3.12")[2]
  assert [call.split()[1] for call in calls] == ["venv", *INSTALL, "pytest"] and "constraints-3.12.txt" in calls[1]
  assert [call.split()[1] for call in clone.make("test")[2]] == ["pytest"]


@pytest.mark.parametrize("arguments,call", [
    (("reproduce",), "-m experiments.reproduce --scale=smoke"),
    (("reproduce", "SCALE=cpu", "ARGS=--only=a,b"), "-m experiments.reproduce --scale=cpu --only=a,b"),
    (("test", "JOBS=2"), "-m pytest -n 2 -m not slow and not gpu"),
    (("test-slow",), "-m pytest -m not gpu"),
    (("bench",), "-m experiments.bench"),
    (("gpu-check",), "-m pallas_kernels.gpu_check"),
])
def test_targets_run_in_a_given_interpreter_without_a_venv(clone, arguments, call):
  clone.python("ready", "3.12")
  code, _, calls = clone.make(*arguments, "PY=ready")
  assert (code, calls) == (0, [call])
  assert not (clone.root / ".venv").exists()


def test_clean_leaves_what_was_computed(clone):
  clone.python("python3", "3.11")
  clone.make("test")
  kept = clone.root / "runs" / "maze" / "result.json"
  kept.parent.mkdir(parents=True)
  kept.write_text("{}")
  (clone.root / "runs" / "__pycache__").mkdir()
  assert clone.make("clean")[0] == 0
  assert kept.exists() and not (clone.root / ".venv").exists() and not (kept.parent.parent / "__pycache__").exists()
