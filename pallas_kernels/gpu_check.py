"""`make gpu-check`: every kernel on a GPU, numerics against its reference and time against XLA, into gpu_check.json.

A check is a function without arguments that returns a dict of plain numbers with a bool `passed`; an operation adds
its own to CHECKS. Exit codes: 0 all passed, 1 a check failed, 2 no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import os
import sys

import jax

CHECKS: dict[str, Callable[[], dict]] = {}


def gpu() -> jax.Device | None:
  """Returns the first GPU that jax sees, or None."""
  try:
    return next((d for d in jax.devices() if d.platform == "gpu"), None)
  except RuntimeError:
    return None


def main(path: str = "gpu_check.json") -> int:
  """Runs CHECKS, writes `path` and returns the exit code."""
  device = gpu()
  if device is None:
    print("gpu-check: jax sees no GPU here; run it where one is, with a jax that is built for it", file=sys.stderr)
    return 2
  results = {name: check() for name, check in CHECKS.items()}
  for name, result in results.items():
    print(f"{'ok  ' if result['passed'] else 'FAIL'} {name} {result}")
  report = {"device": device.device_kind, "jax": jax.__version__, "checks": results}
  temporary = f"{path}.tmp"
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(report, file, indent=1)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
  print(f"gpu-check: {len(results)} checks on {device.device_kind}, written to {path}")
  return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
  sys.exit(main())
