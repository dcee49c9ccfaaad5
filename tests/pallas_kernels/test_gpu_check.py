"""The script that spends time on a GPU, run dry: it must reach its end, keep what it has, and say what failed."""

import json

import pytest

from pallas_kernels import gpu_check
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

LIGHT = {
    "fine": lambda: {"passed": True, "value": float("nan")},
    "broken": lambda: 1 // 0,
    "after": lambda: {"passed": True},
}


def report(path):
  return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow  # twenty seconds of compilation
def test_a_dry_run_reaches_the_end(tmp_path, capsys):
  path = tmp_path / "check.json"
  assert gpu_check.main(["--dry", "--only=twell", f"--path={path}"]) == 0, capsys.readouterr().out
  written = report(path)
  assert written["dry"] and all(check["passed"] for check in written["checks"].values())
  forward, training = (written["checks"][f"twell.{name}@29"] for name in ("forward", "training"))
  assert 20 < forward["active"] < 40 and forward["lost"] == 0 and forward["speedup"] > 0
  assert training["sparse_kept_bytes"] > 0 and training["dense_bytes"] > 0
  assert written["checks"]["twell.gradients"]["deterministic_float32"] == 1
  assert [p.name for p in tmp_path.iterdir()] == ["check.json"]


def test_a_broken_check_fails_alone(tmp_path, monkeypatch):
  monkeypatch.setitem(gpu_check.OPERATIONS, "light", lambda dry: LIGHT)
  path = tmp_path / "check.json"
  assert gpu_check.main(["--dry", "--only=light", f"--path={path}"]) == 1
  checks = report(path)["checks"]
  assert [checks[f"light.{name}"]["passed"] for name in LIGHT] == [True, False, True]
  assert "ZeroDivisionError" in checks["light.broken"]["error"] and checks["light.fine"]["value"] is None


def test_what_was_measured_survives_an_interruption(tmp_path, monkeypatch):
  def stop():
    raise KeyboardInterrupt

  monkeypatch.setitem(gpu_check.OPERATIONS, "light", lambda dry: {"fine": LIGHT["fine"], "stop": stop})
  path = tmp_path / "check.json"
  with pytest.raises(KeyboardInterrupt):
    gpu_check.main(["--dry", "--only=light", f"--path={path}"])
  assert list(report(path)["checks"]) == ["light.fine"]


@pytest.mark.parametrize("argv,word", [(["--only=nothing", "--dry"], "nothing"), (["--only=twell"], "no GPU")])
def test_bad_calls_end_with_two(argv, word, capsys, tmp_path):
  assert gpu_check.main([*argv, f"--path={tmp_path / 'check.json'}"]) == 2
  assert word in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_environment_chooses_operations(tmp_path, monkeypatch):
  monkeypatch.setitem(gpu_check.OPERATIONS, "light", lambda dry: {"fine": LIGHT["fine"]})
  monkeypatch.setenv("ONLY", "light")
  assert gpu_check.main(["--dry", f"--path={tmp_path / 'check.json'}"]) == 0
  assert list(report(tmp_path / "check.json")["checks"]) == ["light.fine"]
