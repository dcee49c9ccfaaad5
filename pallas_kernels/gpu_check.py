"""`make gpu-check`: every kernel on a GPU, numerics against its reference and time against XLA, into gpu_check.json.

    python -m pallas_kernels.gpu_check [--only=twell] [--dry] [--path=gpu_check.json]   (or ONLY=twell)

An operation adds a function to OPERATIONS; it takes `dry` and returns its checks by name. A check takes nothing and
returns a dict of plain numbers with a bool `passed`; one that raises has failed, and the others still run. The file
is written anew after each check, so that what was measured survives an interruption. `--dry` needs no GPU: tiny
shapes, references in the place of kernels, only to see that the script itself works. Exit codes: 0 all passed, 1 a
check failed, 2 no GPU or an unknown operation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
import math
import os
import sys
import time

import jax

Check = Callable[[], dict]


def _twell(dry: bool) -> dict[str, Check]:
  from pallas_kernels.twell import gpu_check

  return gpu_check.checks(dry)


OPERATIONS: dict[str, Callable[[bool], dict[str, Check]]] = {"twell": _twell}


def gpu() -> jax.Device | None:
  """Returns the first GPU that jax sees, or None."""
  try:
    return next((d for d in jax.devices() if d.platform == "gpu"), None)
  except RuntimeError:
    return None


def run(check: Check) -> dict:
  """Returns what `check` returns and its seconds; an exception becomes a failure that says what happened."""
  start = time.perf_counter()
  try:
    result = check()
  except Exception as error:  # one broken kernel must not hide the measurements of the others
    result = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
  return {**result, "seconds": round(time.perf_counter() - start, 2)}


def _plain(value):
  """JSON has no NaN and no infinity: they become null."""
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: str, report: dict) -> None:
  temporary = f"{path}.tmp"
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(_plain(report), file, indent=1, allow_nan=False)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def main(argv: list[str] | None = None) -> int:
  """Runs the checks, writes the file and returns the exit code."""
  parser = argparse.ArgumentParser(prog="gpu-check", description="checks and times the kernels on a GPU")
  parser.add_argument("--only", default=os.environ.get("ONLY", ""), help=f"operations of {', '.join(OPERATIONS)}")
  parser.add_argument("--dry", action="store_true", help="tiny shapes and references instead of kernels; needs no GPU")
  parser.add_argument("--path", default="gpu_check.json")
  flags = parser.parse_args(argv)
  names = [name for name in flags.only.split(",") if name] or list(OPERATIONS)
  if unknown := [name for name in names if name not in OPERATIONS]:
    print(f"gpu-check: no operation {unknown[0]!r}; there are: {', '.join(OPERATIONS)}", file=sys.stderr)
    return 2
  if (device := gpu()) is None and not flags.dry:
    print("gpu-check: jax sees no GPU here; run it where one is, with a jax that is built for it", file=sys.stderr)
    return 2
  kind = device.device_kind if device is not None else "none"
  report = {"device": kind, "dry": flags.dry, "jax": jax.__version__, "checks": {}}
  for operation in names:
    for name, check in OPERATIONS[operation](flags.dry).items():
      result = report["checks"][f"{operation}.{name}"] = run(check)
      print(f"{'ok  ' if result['passed'] else 'FAIL'} {operation}.{name} {result}", flush=True)
      _write(flags.path, report)
  passed = all(result["passed"] for result in report["checks"].values())
  print(f"gpu-check: {len(report['checks'])} checks on {kind}, written to {flags.path}")
  return 0 if passed else 1


if __name__ == "__main__":
  sys.exit(main())
