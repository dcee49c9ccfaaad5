"""Where arrays live: one mesh of two axes, `data` (copies) and `fsdp` (slices of the parameters).

The batch is split over both axes; a parameter is split over `fsdp` along one dimension and copied
over `data`. jit does the rest: the same step runs on one device, on many, and on many hosts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sakanajax.core.errors import UserError, first_line

_TINY = 1024  # arrays with fewer elements are copied: slicing them costs more than it saves


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many devices: `data * fsdp` in all. 1 x 1 means one device and no mesh is needed."""

  data: int = 1
  fsdp: int = 1

  def __post_init__(self):
    if self.data < 1 or self.fsdp < 1:
      raise ValueError(f"mesh axes must be at least 1, got data={self.data}, fsdp={self.fsdp}")


def make_mesh(cfg: MeshConfig) -> Mesh:
  """Returns the mesh `("data", "fsdp")`. Raises UserError when there are too few devices."""
  wanted, devices = cfg.data * cfg.fsdp, jax.devices()
  if wanted > len(devices):
    raise UserError(
        f"mesh data={cfg.data} x fsdp={cfg.fsdp} needs {wanted} devices, but there are"
        f" {len(devices)}; lower config.mesh.data or config.mesh.fsdp"
    )
  if jax.process_count() > 1 and wanted != len(devices):
    raise UserError(
        f"mesh data={cfg.data} x fsdp={cfg.fsdp} must use all {len(devices)} devices of the"
        f" {jax.process_count()} processes; set config.mesh so that data * fsdp = {len(devices)}"
    )
  auto = (jax.sharding.AxisType.Auto,) * 2
  return jax.make_mesh(
      (cfg.data, cfg.fsdp), ("data", "fsdp"), axis_types=auto, devices=devices[:wanted]
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a value that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def params_sharding(tree: Any, mesh: Mesh, tiny: int = _TINY) -> Any:
  """Returns a tree of NamedShardings that slices each leaf's largest dimension over `fsdp`.

  Only dimensions that `fsdp` divides qualify (the first of equals wins); a leaf without one, or
  with fewer than `tiny` elements, is replicated. The rule looks at shapes alone, so the
  optimizer's moments and the EMA land like their parameters.
  """
  parts = mesh.shape["fsdp"]

  def one(leaf):
    fitting = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
    if parts == 1 or not fitting or math.prod(leaf.shape) < tiny:
      return replicated(mesh)
    axis = max(fitting, key=lambda a: leaf.shape[a])
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

  return jax.tree.map(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding that splits the leading axis over `data` and `fsdp`."""
  return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def shard_batch(batch: Any, mesh: Mesh) -> Any:
  """Puts a host batch on the mesh, leading axis split over all devices.

  Every process passes the same whole batch and keeps the rows of its own devices. Raises
  UserError when a leading axis does not divide over the mesh.
  """
  sharding = batch_sharding(mesh)

  def one(leaf):
    leaf = np.asarray(leaf)
    if leaf.ndim == 0 or leaf.shape[0] % mesh.size:
      raise UserError(
          f"a batch array of shape {leaf.shape} does not divide over {mesh.size} devices;"
          f" make the batch size a multiple of {mesh.size}"
      )
    return jax.make_array_from_process_local_data(sharding, leaf, leaf.shape)

  return jax.tree.map(one, batch)


def init_distributed(
    coordinator_address: str = "", num_processes: int = 1, process_id: int = 0
) -> None:
  """Joins the processes of a many-host run; does nothing when the address is empty.

  Call it before anything touches a device. Collectives on CPU go through gloo. Raises UserError
  when the coordinator cannot be reached or the process id is out of range.
  """
  if not coordinator_address:
    return
  if not 0 <= process_id < num_processes:
    raise UserError(
        f"process_id {process_id} is out of range for num_processes {num_processes};"
        f" give each process its own id from 0 to {num_processes - 1}"
    )
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(coordinator_address, num_processes, process_id)
  except (RuntimeError, ValueError) as error:
    raise UserError(
        f"cannot join the run at {coordinator_address} as process {process_id} of"
        f" {num_processes}: {first_line(error)}"
    ) from error
