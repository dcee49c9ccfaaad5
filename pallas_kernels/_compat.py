"""What differs between versions and machines: one way to launch kernels, and compilation without the device.

Kernels can be compiled where no GPU or TPU is: Triton to PTX for compute capability 9.0, Mosaic GPU to the module
that an H200 gets, Mosaic TPU to the program of a v5e. That needs two packages that a CPU installation of jax lacks,
and which change how jax starts when they lie among the others (messages on stderr, a search for a TPU). So they are
kept apart, in the folder `aot` of the virtual environment (or $SAKANAJAX_AOT), and put on the path only here:

    pip install --no-deps --target .venv/aot jax-cuda12-plugin==<version of jax> libtpu==<version that jax[tpu] names>

On a machine with a GPU or a TPU the ordinary installation of jax has all of it and the folder is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

import jax

H200_CAPABILITY = 90
H200_SHARED_BYTES = 232_448  # what one block may ask for on compute capability 9.0
REMEDY = 'pip install --no-deps --target "{aot}" {package} (pallas_kernels/_compat.py says why apart)'


def aot_folder() -> pathlib.Path:
  """The folder with the packages that only ahead-of-time compilation needs; it need not exist."""
  return pathlib.Path(os.environ.get("SAKANAJAX_AOT") or pathlib.Path(sys.prefix) / "aot")


def use_aot_folder() -> None:
  """Puts the folder at the end of the path, so that an ordinary installation goes first."""
  folder = str(aot_folder())
  if os.path.isdir(folder) and folder not in sys.path:
    sys.path.append(folder)
    importlib.invalidate_caches()


def has_gpu() -> bool:
  """True when this process computes on a GPU."""
  return jax.default_backend() == "gpu"


@functools.cache
def jax_triton():
  """Imports jax_triton, on a machine without CUDA too. Raises NotImplementedError with the remedy when it cannot."""
  try:
    return importlib.import_module("jax_triton")
  except ImportError:
    use_aot_folder()
    import jaxlib.gpu_triton  # looked for the CUDA plugin when jax was imported: let it look again

    importlib.reload(jaxlib.gpu_triton)
    for name in [name for name in sys.modules if name.split(".")[0] == "jax_triton"]:
      del sys.modules[name]  # what the failed attempt left behind
    try:
      return importlib.import_module("jax_triton")
    except ImportError as error:
      remedy = REMEDY.format(aot=aot_folder(), package=f"jax-cuda12-plugin=={jax.__version__}")
      message = f"Triton kernels need jax-triton and the CUDA plugin of jax ({error}): {remedy}"
      raise NotImplementedError(message) from error


def triton_call(
    *args,
    kernel,
    out_shape,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    zeroed: Sequence[int] = (),
    interpret: bool = False,
    **constants,
):
  """Launches a `@triton.jit` kernel on arrays and scalars (in the kernel's order) that fills `out_shape`, a list.

  `zeroed` lists outputs that are cleared before the launch; `constants` are the kernel's constexpr arguments. With
  `interpret` the programs run one after the other in numpy (`triton_interpret`). Without a GPU it compiles for an H200.
  """
  if interpret:
    from pallas_kernels import triton_interpret

    return triton_interpret.call(args, kernel, out_shape, grid, zeroed, constants)
  jt = jax_triton()
  renamed = "out_type" in inspect.signature(jt.triton_call).parameters  # from jax-triton 0.4 on
  return jt.triton_call(
      *args,
      kernel=kernel,
      grid=grid,
      num_warps=num_warps,
      num_stages=num_stages,
      zeroed_outputs=tuple(zeroed),
      compute_capability=None if has_gpu() else H200_CAPABILITY,
      **{"out_type" if renamed else "out_shape": out_shape},
      **constants,
  )


class Compiled(NamedTuple):
  """One Triton kernel as compiled for an H200."""

  name: str
  ptx: str
  shared_bytes: int  # shared memory that a block asks for
  registers: int  # per thread
  spill_bytes: int  # stack that a thread needs because registers ran out (stores)


def compile_triton(f: Callable, *args) -> list[Compiled]:
  """Lowers f(*args) for CUDA and assembles each Triton kernel in it with ptxas; args may be ShapeDtypeStructs.

  Raises what Triton or ptxas raise, and ValueError when a kernel wants more shared memory than there is.
  """
  jax_triton()
  library = importlib.import_module("jax_triton.triton_lib")
  found, original = [], library.compile_ttir_to_ptx_inplace

  def record(*call_args, **call_kwargs):
    result = original(*call_args, **call_kwargs)
    found.append(result)
    return result

  library._COMPILED_KERNEL_CACHE.clear()
  library.compile_ttir_to_ptx_inplace = record
  try:
    jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
  finally:
    library.compile_ttir_to_ptx_inplace = original
  return [_assemble(result.name, result.binary, result.shared_mem_bytes) for result in found]


def _assemble(name: str, ptx: str, shared_bytes: int) -> Compiled:
  import triton

  if shared_bytes > H200_SHARED_BYTES:
    raise ValueError(f"{name} asks for {shared_bytes} bytes of shared memory; an H200 has {H200_SHARED_BYTES}")
  ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
  command = [str(ptxas), "-v", "--gpu-name", "sm_90a", "-o", os.devnull, "-"]
  done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
  if done.returncode:
    raise ValueError(f"ptxas refuses {name}: {done.stderr[-2000:]}")
  number = lambda pattern: int(re.search(pattern, done.stderr).group(1))
  return Compiled(name, ptx, shared_bytes, number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"))


def lower_for_h200(f: Callable, *args) -> str:
  """Lowers f(*args), Mosaic GPU kernels included, as for an H200 and returns the module's text."""
  use_aot_folder()
  from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

  device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
  with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def gpu_interpreter() -> Any:
  """Returns the parameters with which `plgpu.kernel` runs on a CPU, its grid included."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  if hasattr(plgpu, "InterpretGPUParams"):  # from jax 0.11 on
    return plgpu.InterpretGPUParams()
  return importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params").InterpretGPUParams()


@functools.cache
def tpu_topology(name: str = "v5e:2x2"):
  """Describes TPUs that are not here, for ahead-of-time compilation. Raises NotImplementedError without libtpu."""
  use_aot_folder()
  for variable, value in {  # nothing here is a TPU: ask no metadata server, take no lock, keep no log
      "TPU_SKIP_MDS_QUERY": "1",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_ACCELERATOR_TYPE": "v5litepod-4",
      "TPU_LOG_DIR": "disabled",
  }.items():
    os.environ.setdefault(variable, value)
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(name, platform="tpu")
  except Exception as error:  # jax raises several kinds, by version
    remedy = REMEDY.format(aot=aot_folder(), package="libtpu==0.0.42 (jax 0.10.2) or libtpu==0.0.48 (jax 0.11.2)")
    raise NotImplementedError(f"compiling for a TPU needs libtpu ({error}): {remedy}") from error


def compile_for_tpu(f: Callable, *args, topology: str = "v5e:2x2") -> Any:
  """Compiles f(*args) for one chip of `topology` and returns the executable, which cannot run here."""
  sharding = jax.sharding.SingleDeviceSharding(tpu_topology(topology).devices[0])
  place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
  cached = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)  # what is there cannot be loaded without a TPU
  try:
    return jax.jit(f).lower(*jax.tree.map(place, args)).compile()
  finally:
    jax.config.update("jax_enable_compilation_cache", cached)
