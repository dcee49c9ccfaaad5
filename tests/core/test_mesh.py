import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.core import mesh as mesh_lib
from sakanajax.core import metrics, train
from sakanajax.core.errors import UserError
from tests.core import multihost_worker as toy

MESHES = [(4, 1), (2, 2), (1, 4)]

needs_four = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


def make(data, fsdp):
  return mesh_lib.make_mesh(mesh_lib.MeshConfig(data, fsdp))


def test_bad_meshes_are_refused():
  with pytest.raises(ValueError, match="data=0"):
    mesh_lib.MeshConfig(data=0)
  many = len(jax.devices()) + 1
  with pytest.raises(UserError, match=f"needs {many} devices.*lower config.mesh"):
    make(many, 1)


def test_a_mesh_may_use_fewer_devices_than_there_are():
  mesh = make(1, 1)
  assert mesh.axis_names == ("data", "fsdp") and mesh.size == 1


@needs_four
def test_params_are_sliced_by_their_largest_fitting_dimension():
  spec = lambda shape, data=2, fsdp=2: mesh_lib.params_sharding(
      jax.ShapeDtypeStruct(shape, jnp.float32), make(data, fsdp)
  ).spec
  assert spec((8, 256)) == jax.P(None, "fsdp")
  assert spec((256, 8)) == jax.P("fsdp")
  assert spec((64, 64)) == jax.P("fsdp")  # the first of equals
  assert spec((1001, 64)) == jax.P(None, "fsdp")  # 1001 is odd
  assert spec((1001, 33)) == jax.P()  # nothing fits
  assert spec((8, 8)) == jax.P()  # tiny
  assert spec(()) == jax.P()
  assert spec((8, 256), 4, 1) == jax.P()


@needs_four
def test_batches_are_split_over_all_devices():
  batch = {"x": np.arange(24.0).reshape(8, 3), "y": np.arange(8)}
  sharded = mesh_lib.shard_batch(batch, make(2, 2))
  np.testing.assert_array_equal(sharded["x"], batch["x"])
  assert {s.data.shape for s in sharded["x"].addressable_shards} == {(2, 3)}
  with pytest.raises(UserError, match=r"shape \(6,\).*multiple of 4"):
    mesh_lib.shard_batch(np.zeros(6), make(2, 2))
  with pytest.raises(UserError, match=r"shape \(\)"):
    mesh_lib.shard_batch(np.float32(1), make(2, 2))


@needs_four
@pytest.mark.parametrize("data, fsdp", MESHES)
def test_the_sharded_step_equals_the_single_device_step(tmp_path, data, fsdp):
  single = toy.run(tmp_path / "single", 5)
  sharded = toy.run(tmp_path / "sharded", 5, mesh=make(data, fsdp))
  chex.assert_trees_all_close(jax.device_get(single), jax.device_get(sharded), rtol=2e-5, atol=1e-6)
  lines = [metrics.read_jsonl(tmp_path / n / "metrics.jsonl") for n in ("single", "sharded")]
  for a, b in zip(*lines, strict=True):
    assert [a[k] for k in ("step", "loss", "mae")] == pytest.approx(
        [b[k] for k in ("step", "loss", "mae")], rel=1e-5)
  moments = [x for x in jax.tree.leaves(sharded.opt_state) if x.shape == (8, 256)]
  for leaf in (sharded.params["w"], sharded.ema["w"], *moments):
    assert {s.data.shape for s in leaf.addressable_shards} == {(8, 256 // fsdp)}
    assert len(leaf.addressable_shards) == 4
  assert len(moments) == 2


@needs_four
def test_a_run_may_change_its_mesh_between_checkpoints(tmp_path):
  toy.run(tmp_path / "moved", 4, mesh=make(1, 4))
  toy.run(tmp_path / "moved", 8, mesh=make(2, 2))
  moved = toy.run(tmp_path / "moved", 10)
  chex.assert_trees_all_close(
      jax.device_get(moved), jax.device_get(toy.run(tmp_path / "still", 10)), rtol=5e-5, atol=2e-6)


@needs_four
def test_resuming_on_a_mesh_is_exact(tmp_path):
  mesh = make(2, 2)
  toy.run(tmp_path / "a", 4, mesh=mesh)
  resumed, whole = toy.run(tmp_path / "a", 8, mesh=mesh), toy.run(tmp_path / "b", 8, mesh=mesh)
  jax.tree.map(np.testing.assert_array_equal, resumed, whole)
  assert resumed.params["w"].sharding == whole.params["w"].sharding


@needs_four
def test_a_batch_that_does_not_divide_is_refused_before_training(tmp_path):
  odd = lambda step: jax.tree.map(lambda x: x[:15], toy.batch_fn(step))
  with pytest.raises(UserError, match="does not divide over 4 devices"):
    toy.run(tmp_path, 4, odd, mesh=make(4, 1))


def test_one_process_needs_no_coordinator():
  mesh_lib.init_distributed("")
  with pytest.raises(UserError, match="process_id 2 is out of range"):
    mesh_lib.init_distributed("localhost:1", 2, 2)


def free_port():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def two_processes(folder, steps, data, fsdp):
  shared = [f"--steps={steps}", f"--coordinator=localhost:{free_port()}", "--processes=2",
            "--devices=2", f"--data={data}", f"--fsdp={fsdp}"]  # fmt: skip
  processes = [
      subprocess.Popen(
          [sys.executable, toy.__file__, str(folder), *shared, f"--process={i}"],
          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
      for i in range(2)
  ]  # fmt: skip
  try:
    outputs = [p.communicate(timeout=300)[0] for p in processes]
  finally:
    for p in processes:
      p.kill()
  for p, output in zip(processes, outputs):
    assert p.returncode == 0, output
  return outputs


@pytest.mark.slow
def test_two_processes_train_together_and_resume(tmp_path):
  """Four devices on two processes over gloo reach what one device does, across a restart."""
  folder = tmp_path / "two"
  first, second = two_processes(folder, 6, 2, 2)
  assert "6/6" in first and "step/s" not in second  # one progress bar
  two_processes(folder, 10, 1, 4)
  state = toy.run(tmp_path / "one", 10)
  final = np.load(folder / "final.npz")
  assert final["step"] == 10
  for name in ("w", "v"):
    np.testing.assert_allclose(final[f"params.{name}"], state.params[name], rtol=5e-5, atol=2e-6)
    np.testing.assert_allclose(final[f"ema.{name}"], state.ema[name], rtol=5e-5, atol=2e-6)
  lines = metrics.read_jsonl(folder / "metrics.jsonl")
  assert [r["step"] for r in lines] == [3, 4, 6, 8, 9, 10]
  # Its checkpoints are everybody's: one process picks the run up.
  moved = toy.run(folder, 12)
  assert isinstance(moved, train.TrainState) and int(moved.step) == 12
