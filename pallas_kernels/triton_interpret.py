"""Runs `@triton.jit` kernels in numpy, program after program, with the interpreter that Triton brings.

Triton's interpreter reads tensors by their address and asks of them what torch tensors answer. `_Host` answers for a
numpy array, so torch is not needed. bfloat16 travels as float32: the interpreter's own bfloat16 rounds wrongly and
its products of bfloat16 are those of the bit patterns. Every array lies between two margins of a known pattern; a
kernel that writes into one is reported, and reads beyond the array get numbers that spoil the result.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np

MARGIN = 4096  # bytes before and behind each array
PATTERN = 0x7D  # as float32 5e36, as uint32 2105376125


class _Host:
  """A numpy array that answers like a torch tensor, as far as the interpreter asks."""

  def __init__(self, array: np.ndarray):
    self.memory = np.full(array.nbytes + 2 * MARGIN, PATTERN, np.uint8)
    self.memory[MARGIN : MARGIN + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

  def data_ptr(self) -> int:
    return self.memory.ctypes.data + MARGIN

  def untyped_storage(self):
    return self

  cpu = new_empty = set_ = copy_ = lambda self, *args, **kwargs: self
  size = stride = storage_offset = lambda self: 0

  def array(self) -> np.ndarray:
    if not (self.memory[:MARGIN] == PATTERN).all() or not (self.memory[MARGIN + self.nbytes :] == PATTERN).all():
      raise IndexError(f"the kernel wrote outside an array of shape {self.shape}")
    return self.memory[MARGIN : MARGIN + self.nbytes].view(self.dtype).reshape(self.shape)


def call(
    args: Sequence, kernel, out_shape: Sequence, grid: tuple[int, ...], zeroed: Sequence[int], constants: dict
) -> list:
  """What `_compat.triton_call` does, in numpy. Raises IndexError when the kernel writes outside its arrays."""
  arrays = [a for a in args if hasattr(a, "shape")]
  wide = [jax.ShapeDtypeStruct(o.shape, _wide(o.dtype)) for o in out_shape]

  def run(*values):
    values = iter(values)
    inputs = [np.asarray(next(values)) if hasattr(a, "shape") else a for a in args]
    return _run(inputs, kernel, wide, grid, zeroed, constants)

  arrays = [a.astype(_wide(a.dtype)) for a in arrays]
  try:
    out = run(*arrays)  # here, if there are numbers: in a callback XLA would have subnormals flushed
  except jax.errors.TracerArrayConversionError:
    out = jax.pure_callback(run, wide, *arrays)
  return [jnp.asarray(o).astype(shape.dtype) for o, shape in zip(out, out_shape, strict=True)]


def _wide(dtype):
  return jnp.float32 if dtype == jnp.bfloat16 else dtype


def _run(
    inputs: list, kernel, out_shape: Sequence, grid: tuple[int, ...], zeroed: Sequence[int], constants: dict
) -> list:
  from triton.runtime import interpreter

  outputs = [_Host(_fresh(o, i in zeroed)) for i, o in enumerate(out_shape)]
  hosts = [_Host(a) if isinstance(a, np.ndarray) else a for a in inputs]
  with _interpreted_library():
    names = list(inspect.signature(kernel.fn).parameters)
    interpreter.GridExecutor(_rewritten(kernel.fn), names, grid)(*hosts, *outputs, **constants)
  for host in hosts:
    if isinstance(host, _Host):
      host.array()
  return [o.array() for o in outputs]


@functools.cache
def _rewritten(fn):
  """The interpreter's form of a function, on a copy of its globals: the rewriting adds names to them."""
  import triton
  import triton.language as tl
  from triton.runtime import interpreter

  known = {**fn.__globals__, "core": tl.core}  # the interpreter patches the modules that it finds there
  if not fn.__module__.startswith("triton."):
    used = {name: known.get(name) for name in fn.__code__.co_names}
    known |= {name: _rewritten(value.fn) for name, value in used.items() if isinstance(value, triton.JITFunction)}
  copy = types.FunctionType(fn.__code__, known, fn.__name__, fn.__defaults__)
  copy.__annotations__, copy.__kwdefaults__, copy.__module__ = fn.__annotations__, fn.__kwdefaults__, fn.__module__
  return interpreter.InterpretedFunction(copy).rewrite()


@contextlib.contextmanager
def _interpreted_library():
  """Inside, Triton's own functions (`tl.sum`, `tl.cdiv`), which are kernels too, run in the interpreter."""
  import triton
  import triton.experimental.gluon  # the interpreter imports it, and it wants the library as it was
  import triton.language as tl
  from triton.runtime import interpreter

  patch = interpreter._patch_lang_tensor

  def patch_tensor(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # numpy 2.4 refuses int(array of one)

  changed = [(interpreter, "_patch_lang_tensor", patch, patch_tensor)]
  for module in (tl, tl.standard):
    for name, value in vars(module).items():
      if isinstance(value, triton.JITFunction) and not name.startswith("_"):
        changed.append((module, name, value, _rewritten(value.fn)))
  try:
    for module, name, _, new in changed:
      setattr(module, name, new)
    yield
  finally:
    for module, name, old, _ in changed:
      setattr(module, name, old)


def _fresh(out, zero: bool) -> np.ndarray:
  """Zeros, or the garbage that memory holds when nobody cleared it."""
  size = int(np.prod(out.shape)) * np.dtype(out.dtype).itemsize
  return np.full(size, 0 if zero else 0xC3, np.uint8).view(out.dtype).reshape(out.shape)
