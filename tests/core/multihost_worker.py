"""Trains a toy regression in a process of its own, so that a test can kill it or start several.

python multihost_worker.py WORKDIR [--steps=N] [--kill_at=STEP] [--kill_in_save=STEP] [--fsize=BYTES]
    [--coordinator=HOST:PORT --processes=N --process=I --devices=N --data=N --fsdp=N]
"""

import argparse
import os
import pathlib
import resource
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # pylint: disable=wrong-import-position
import jax.numpy as jnp  # pylint: disable=wrong-import-position
import numpy as np  # pylint: disable=wrong-import-position

from sakanajax.core import mesh as mesh_lib  # pylint: disable=wrong-import-position
from sakanajax.core import train  # pylint: disable=wrong-import-position
from sakanajax.core.errors import UserError  # pylint: disable=wrong-import-position

BATCH, INPUTS, HIDDEN = 16, 8, 256  # w is [8, 256]: large enough to be sliced


def loss_fn(params, batch, key):
  """Squared error of a two-layer net under noisy inputs: it needs the step's key."""
  x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
  error = jnp.tanh(x @ params["w"]) @ params["v"] - batch["y"]
  return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}


def batch_fn(step):
  rng = np.random.default_rng([7, step])
  x = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
  return {"x": x, "y": np.sin(x.sum(1))}


def init_params():
  rng = np.random.default_rng(0)
  w = rng.normal(size=(INPUTS, HIDDEN)) / np.sqrt(INPUTS)
  return {"w": w.astype(np.float32), "v": np.zeros(HIDDEN, np.float32)}


def config(steps, **changes):
  return train.TrainConfig(
      **{"steps": steps, "batch_size": BATCH, "lr": 1e-2, "warmup": 2, "weight_decay": 0.01,
         "ema_decay": 0.9, "log_every": 3, "checkpoint_every": 4, **changes}
  )


def run(workdir, steps, batches=batch_fn, mesh=None, **changes):
  """Trains the toy; the fingerprint leaves `steps` out, so that a longer run continues a shorter."""
  return train.fit(
      loss_fn, init_params(), batches, config(steps, **changes),
      seed=1, workdir=workdir, mesh=mesh, fingerprint="toy",
  )


def die():
  os.kill(os.getpid(), signal.SIGKILL)


def main(argv=None):
  parser = argparse.ArgumentParser()
  parser.add_argument("workdir")
  parser.add_argument("--coordinator", default="")
  for name in ("steps", "kill_at", "kill_in_save", "fsize", "processes", "process", "devices", "data", "fsdp"):
    parser.add_argument(f"--{name}", type=int, default=0)
  args = parser.parse_args(argv)
  jax.config.update("jax_num_cpu_devices", args.devices or 1)
  mesh_lib.init_distributed(args.coordinator, args.processes, args.process)
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(args.data, args.fsdp)) if args.data else None
  if args.fsize:
    resource.setrlimit(resource.RLIMIT_FSIZE, (args.fsize, args.fsize))
  if args.kill_in_save:
    replace = os.replace
    os.replace = lambda a, b: die() if str(b).endswith(f"/{args.kill_in_save}") else replace(a, b)

  def batches(step):
    if args.kill_at and step == args.kill_at:
      die()
    return batch_fn(step)

  try:
    state = run(args.workdir, args.steps, batches, mesh)
  except UserError as error:
    print(error)
    raise SystemExit(2) from error
  if args.coordinator:
    from jax.experimental import multihost_utils  # pylint: disable=g-import-not-at-top

    state = multihost_utils.process_allgather(state, tiled=True)
  if jax.process_index() == 0:
    np.savez(pathlib.Path(args.workdir) / "final.npz", step=state.step, **{
        f"{part}.{name}": leaf
        for part, tree in (("params", state.params), ("ema", state.ema))
        for name, leaf in tree.items()
    })


if __name__ == "__main__":
  main()
