"""The CPU path: the gate product by XLA, everything after it by `cpu.cc`, which visits only active neurons.

`python -m pallas_kernels.twell.cpu` compiles cpu.cc (10 to 20 s) into a cache folder; otherwise the first use does.
Without a C++ compiler `unavailable()` says so and `api` uses the pure-XLA path instead.

Two front ends share one kernel. `ffn` hands it the float32 activations as the gate product leaves them: exact, nothing
can overflow, and as fast as it gets. `gate_pack`, `gated_ffn` and `plain_ffn` are `reference.py`'s operations on
TwELL words.

Legend: M rows (tokens), K input features, N hidden neurons, L output features.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import shlex
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import formats, shapes
from pallas_kernels.twell.formats import Packed

SOURCE = pathlib.Path(__file__).with_name("cpu.cc")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w")
HANDLERS = ("TwellDenseGated", "TwellDensePlain", "TwellPackedGated", "TwellPackedPlain", "TwellPack")
TIMEOUT_S = 600


def compiler() -> str | None:
  """Returns the C++ compiler to use: $CXX, else the first of c++, g++ and clang++ that exists; None without one.

  $CXX may hold options, as in "g++ -m64"; then they are part of what is returned.
  """
  names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
  return next((name for name in names if shlex.split(name) and shutil.which(shlex.split(name)[0])), None)


def cache_folder() -> pathlib.Path:
  """Returns where compiled libraries are kept: $SAKANAJAX_CACHE/native, by default ~/.cache/sakanajax/native."""
  return pathlib.Path(os.environ.get("SAKANAJAX_CACHE") or "~/.cache/sakanajax").expanduser() / "native"


def _processor() -> str:
  """Returns what `-march=native` depends on."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(named)}))
  except OSError:
    return f"{platform.machine()} {platform.processor()}"


def library(cxx: str) -> pathlib.Path:
  """Returns the library's path, named by a digest of everything that shapes it."""
  version = subprocess.run([*shlex.split(cxx), "--version"], capture_output=True, text=True, check=False).stdout
  include = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api"
  headers = "".join(path.read_text(encoding="utf-8") for path in sorted(include.glob("*.h")))
  parts = (SOURCE.read_text(encoding="utf-8"), headers, " ".join(FLAGS), version, _processor())
  return cache_folder() / f"twell-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.so"


def build() -> pathlib.Path:
  """Returns the library, compiled from cpu.cc unless it was before. Raises RuntimeError, one line, if it can't be."""
  cxx = compiler()
  if cxx is None:
    raise RuntimeError("no C++ compiler (looked for $CXX, c++, g++, clang++); install one, for example g++")
  try:
    path = library(cxx)
    if _intact(path):
      return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
      made = _compile(cxx, pathlib.Path(folder) / path.name)
      seal = pathlib.Path(folder) / "seal"
      seal.write_text(_digest(made), encoding="utf-8")
      os.replace(made, path)
      os.replace(seal, path.with_suffix(".sha256"))
  except (OSError, subprocess.SubprocessError) as error:
    raise RuntimeError(f"cannot compile {SOURCE.name} with {cxx}: {error}") from error
  return path


def _digest(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()


def _intact(path: pathlib.Path) -> bool:
  """Whether the library is as it was built: loading a damaged one would kill the process."""
  seal = path.with_suffix(".sha256")
  return path.exists() and seal.exists() and seal.read_text(encoding="utf-8") == _digest(path)


def _compile(cxx: str, path: pathlib.Path) -> pathlib.Path:
  for native in (["-march=native"], ["-mcpu=native"], []):  # not every compiler knows every processor
    command = [*shlex.split(cxx), *FLAGS, *native, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode == 0:
      return path
  lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no output"]
  raise RuntimeError(f"cannot compile {SOURCE.name} with {cxx}: {lines[0].strip()}")


@functools.cache
def unavailable() -> str | None:
  """Makes the C++ operations known to XLA. Returns None when they are, else the reason in one line."""
  try:
    loaded = ctypes.CDLL(str(build()))
    for name in HANDLERS:
      jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
  except (RuntimeError, OSError, AttributeError) as error:
    return str(error)
  return None


def _call(name: str, shape: tuple[int, ...], dtype, *args: jax.Array, **attributes) -> jax.Array:
  if reason := unavailable():
    raise NotImplementedError(f"the C++ path of TwELL is not available: {reason}")
  for array in args:
    if array.dtype not in (jnp.float32, jnp.uint32):
      raise NotImplementedError(f"the C++ path of TwELL computes in float32, got {array.dtype}; use 'xla'")
  call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype), vmap_method="sequential")
  return call(*args, **attributes)


def ffn(h: jax.Array, x: jax.Array, w_up: jax.Array | None, w_down: jax.Array) -> jax.Array:
  """Returns y `[M, L]` of h `[M, N]`, the gate product before its ReLU.

  x `[M, K]`, w_up `[N, K]` or None, w_down `[N, L]`, all float32. Raises NotImplementedError for other types or without
  the library, ValueError for shapes that do not fit.
  """
  shapes.check(x, None, w_up, w_down, h.shape[1])
  shape = (h.shape[0], w_down.shape[1])
  if w_up is None:
    return _call("TwellDensePlain", shape, jnp.float32, h, w_down)
  if x.shape[0] != h.shape[0]:
    raise ValueError(f"x has {x.shape[0]} rows and its gate product {h.shape[0]}")
  return _call("TwellDenseGated", shape, jnp.float32, x, h, w_up, w_down)


def pack(h: jax.Array, compression: int = 8) -> Packed:
  """`formats.pack` of float32 h `[M, N]`, about a hundred times faster than XLA's scatter."""
  words = (h.shape[0], formats.packed_width(h.shape[1], compression))
  width = np.int64(formats.width(compression))
  return Packed(_call("TwellPack", words, jnp.uint32, h, width=width), h.shape[1], compression)


def gate_pack(x: jax.Array, w_gate: jax.Array, compression: int = 8) -> Packed:
  """See `reference.gate_pack`."""
  return pack(x @ w_gate, compression)


def gated_ffn(x: jax.Array, packed: Packed, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
  """See `reference.gated_ffn`."""
  shapes.check(x, None, w_up, w_down, packed.n)
  _check_words(packed, x.shape[0])
  width = np.int64(formats.width(packed.compression))
  shape = (x.shape[0], w_down.shape[1])
  return _call("TwellPackedGated", shape, jnp.float32, x, packed.words, w_up, w_down, width=width)


def plain_ffn(packed: Packed, w_down: jax.Array) -> jax.Array:
  """See `reference.plain_ffn`."""
  _check_words(packed, packed.words.shape[0])
  if w_down.ndim != 2 or w_down.shape[0] != packed.n:
    raise ValueError(f"w_down must have shape ({packed.n}, L), got {w_down.shape}")
  width = np.int64(formats.width(packed.compression))
  shape = (packed.words.shape[0], w_down.shape[1])
  return _call("TwellPackedPlain", shape, jnp.float32, packed.words, w_down, width=width)


def _check_words(packed: Packed, rows: int) -> None:
  wanted = (rows, formats.packed_width(packed.n, packed.compression))
  if packed.words.shape != wanted:
    raise ValueError(f"the packed words must have shape {wanted}, got {packed.words.shape}")


def main() -> int:
  """Compiles the library; 0 if it is there afterwards. Called when sakanajax is installed."""
  try:
    print(f"twell: {build()}")
  except RuntimeError as error:
    print(f"twell: {error}; sparse layers on this CPU will use XLA, which is slower", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
