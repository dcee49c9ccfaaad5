"""result.json: what one run measured, what was expected of it, and where it ran.

The file is a JSON object with the keys of `SCHEMA`. `metrics` and `baselines` map a key to one number per seed (null
where the number was not finite); `expect` maps a key to [lo, hi], either of which may be null. A result passes when every
expected key was measured and the mean over its seeds lies within its bar; an empty `expect` never passes.
"""

from __future__ import annotations

import importlib.metadata
import math
import numbers
import os
import pathlib
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sakanajax.core import files
from sakanajax.core.errors import UserError

SCHEMA = {
    "experiment": str, "task": str, "scale": str, "config": dict, "seeds": list, "metrics": dict, "baselines": dict,
    "expect": dict, "passed": bool, "environment": dict, "wall_s": (int, float), "peak_rss_mb": (int, float),
}
_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "ml_collections")


def build(
    experiment: str,
    task: str,
    scale: str,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    metrics: Mapping[str, Sequence[float]],
    baselines: Mapping[str, Sequence[float]],
    expect: Mapping[str, Sequence[float | None]],
    wall_s: float,
    peak_rss_mb: float | None = None,
) -> dict[str, Any]:
  """Returns the result of one run as a JSON-able dict that `validate` accepts.

  Args:
    metrics, baselines: key -> one number per seed; a key may have fewer seeds than `seeds`.
    expect: key -> (lo | None, hi | None), held against the mean over the seeds of that key.
    wall_s: seconds spent, summed over units. peak_rss_mb: MiB; of this process when None.
  """
  result = {
      "experiment": experiment,
      "task": task,
      "scale": scale,
      "config": dict(config),
      "seeds": [int(seed) for seed in seeds],
      "metrics": {key: _numbers(values) for key, values in metrics.items()},
      "baselines": {key: _numbers(values) for key, values in baselines.items()},
      "expect": {key: [None if end is None else float(end) for end in bar] for key, bar in expect.items()},
      "passed": False,
      "environment": environment(),
      "wall_s": round(float(wall_s), 2),
      "peak_rss_mb": round(peak_rss() if peak_rss_mb is None else float(peak_rss_mb), 1),
  }
  result["passed"] = bool(expect) and not missed(result)
  return validate(result)


def values(result: Mapping[str, Any], key: str) -> list[float]:
  """Returns the numbers of `key`, one per seed (NaN where null), [] when it was not measured."""
  found = result["metrics"].get(key, result["baselines"].get(key, []))
  return [math.nan if value is None else float(value) for value in found]


def mean(result: Mapping[str, Any], key: str) -> float:
  """Returns the mean over seeds of `key`; NaN when it was not measured or any seed is not finite."""
  found = values(result, key)
  return sum(found) / len(found) if found else math.nan


def spread(result: Mapping[str, Any], key: str) -> float | None:
  """Returns the sample standard deviation over seeds of `key`; None with fewer than two seeds."""
  found = values(result, key)
  if len(found) < 2:
    return None
  centre = sum(found) / len(found)
  return math.sqrt(sum((value - centre) ** 2 for value in found) / (len(found) - 1))


def within(value: float, bar: Sequence[float | None]) -> bool:
  """Returns lo <= value <= hi, None being no bound; NaN is never within."""
  low, high = bar
  return not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)


def missed(result: Mapping[str, Any]) -> list[str]:
  """Returns the expected keys that were not measured or whose mean lies outside its bar."""
  return [key for key, bar in result["expect"].items() if not within(mean(result, key), bar)]


def show_bar(bar: Sequence[float | None] | None) -> str:
  """Returns a bar in words: '>= 0.97', '<= 0.5', '0.2 .. 0.4', or '' when there is none."""
  low, high = bar or (None, None)
  if low is not None and high is not None:
    return f"{low:g} .. {high:g}"
  return f">= {low:g}" if low is not None else f"<= {high:g}" if high is not None else ""


def show_mean(result: Mapping[str, Any], key: str) -> str:
  """Returns 'mean ± spread' of `key` in four digits (all digits from 10,000 on), a single seed without the spread."""
  if not values(result, key):
    return "not measured"
  centre, deviation = mean(result, key), spread(result, key)
  large = math.isfinite(centre) and abs(centre) >= 10_000  # a count: every digit
  text = f"{centre:,.0f}" if large else f"{centre:.4g}"
  return text if deviation is None else f"{text} ± {deviation:,.0f}" if large else f"{text} ± {deviation:.2g}"


def validate(result: Any, name: str = "result") -> dict[str, Any]:
  """Returns `result` when it fits the schema; raises UserError naming `name` and the first thing that does not."""
  if not isinstance(result, dict):
    raise UserError(f"{name}: not a result (expected a JSON object)")
  for key, kind in SCHEMA.items():
    if key not in result:
      raise UserError(f"{name}: not a result (key {key!r} is missing)")
    value = result[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
      raise UserError(f"{name}: not a result (key {key!r} holds {type(value).__name__})")
  for section in ("metrics", "baselines"):
    for key, row in result[section].items():
      if not isinstance(row, list) or not all(value is None or _is_number(value) for value in row):
        raise UserError(f"{name}: not a result ({section}.{key} must be a list with one number or null per seed)")
  for key, bar in result["expect"].items():
    if not isinstance(bar, list) or len(bar) != 2 or not all(end is None or _is_number(end) for end in bar):
      raise UserError(f"{name}: not a result (expect.{key} must be [lo, hi], either may be null)")
  if not all(isinstance(seed, int) for seed in result["seeds"]):
    raise UserError(f"{name}: not a result (seeds must be integers)")
  if result["passed"] != (bool(result["expect"]) and not missed(result)):
    raise UserError(f"{name}: not a result (passed={result['passed']} contradicts its own numbers); run it again")
  return result


def write(path: str | os.PathLike, result: Mapping[str, Any]) -> pathlib.Path:
  """Writes a valid result atomically."""
  return files.write_json(path, validate(dict(result), str(path)))


def load(path: str | os.PathLike) -> dict[str, Any]:
  """Reads and validates a result; raises UserError naming the file."""
  return validate(files.read_json(path), str(path))


def environment() -> dict[str, Any]:
  """Returns versions and hardware, without host names or paths. Starts the jax backend."""
  import jax  # here, not above: reading results needs no jax

  devices = jax.devices()
  return {
      "python": platform.python_version(),
      "platform": f"{platform.system()} {platform.machine()}",
      "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
      "device": devices[0].device_kind,
      "devices": len(devices),
      "versions": {name: version for name in _PACKAGES if (version := _version(name))},
      "commit": _commit(),
  }


def peak_rss() -> float:
  """Returns the peak resident memory of this process in MiB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit() -> str | None:
  """Returns the short commit of the source tree, with '+' when it has changes, or None outside a checkout."""
  root = pathlib.Path(__file__).resolve().parents[2]
  if not (root / ".git").exists():
    return None
  command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip() or None if done.returncode == 0 else None


def _numbers(row: Sequence[float]) -> list[float | None]:
  return [float(value) if value is not None and math.isfinite(value) else None for value in row]


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)
