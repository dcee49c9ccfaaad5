"""One training step of a maze network on four devices, two ways, equals that on one."""

import dataclasses

import jax
import numpy as np
import pytest

from sakanajax.core import mesh as mesh_lib
from sakanajax.core import train
from sakanajax.sheaf_admm import fitting
from sakanajax.sheaf_admm.config import Config, Iterations
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

CFG = Config(
    task="maze", scale="smoke", seeds=(0,), arms=("sheaf",),
    model=dataclasses.replace(problems.TINY, lora_rank=0, window=1, objective="non_negative"),
    data={"splits": {"train": dict(n=8, size=(5, 5), min_path=2, seed=0)}}, iterations=Iterations((1, 3)),
    train=train.TrainConfig(steps=2, batch_size=8, lr=1e-2, weight_decay=0.1))


@pytest.fixture(scope="module")
def step():
  """(the step, its state before, its batch, what one device makes of them)"""
  task, network = fitting.network_of(CFG)
  tx = train.make_optimizer(CFG.train)
  params = problems.random_weights(network)
  state = jax.jit(lambda p: train.init_state(p, tx))(params)
  inputs, labels = problems.mazes(8)
  batch = {"inputs": inputs, "labels": labels}
  run = train.train_step(fitting.loss_fn(CFG, task, network), tx, CFG.train)
  return run, jax.device_get(state), batch, jax.device_get(jax.jit(run)(state, batch, jax.random.key(5)))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four (simulated) devices")
@pytest.mark.parametrize("data,fsdp", [(4, 1), (2, 2)])
def test_sharded_step_equals_the_single_device_step(step, data, fsdp):
  run, state, batch, (want_state, want_metrics) = step
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(data, fsdp))
  shardings = mesh_lib.params_sharding(state, mesh, tiny=1)
  split = [s for s in jax.tree.leaves(shardings.params) if "fsdp" in s.spec]
  assert bool(split) == (fsdp > 1)
  sharded = jax.jit(run, out_shardings=(shardings, mesh_lib.replicated(mesh)))
  after, metrics = sharded(jax.device_put(state, shardings), mesh_lib.shard_batch(batch, mesh), jax.random.key(5))
  assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(after))
  close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, jax.device_get(after), want_state)
  jax.tree.map(close, dict(jax.device_get(metrics)), dict(want_metrics))
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want_state.params, state.params)
  assert max(jax.tree.leaves(moved)) > 1e-3  # the step was not empty
