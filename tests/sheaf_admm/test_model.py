"""Networks: two ways to run them agree, batches do not leak, modulation starts at nothing, long runs stay bounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.sheaf_admm import model as model_lib
from sakanajax.sheaf_admm import tasks
from sakanajax.sheaf_admm.model import ModelConfig
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

DIGITS = dict(z_update="project", epsilon=1e-5, objective="lasso", l1=0.01, rho=0.12, sharing="global", lora_init="legacy")
CASES = {  # the three tasks, every solver and option
    "maze": problems.tiny_maze(relaxation=1.6, balance=True, warm_start=True),
    "digits": (dataclasses.replace(problems.TINY, z_steps=2, **DIGITS), tasks.digits((9, 9))),
    "gd": problems.tiny_maze(z_update="gd", objective="non_negative", lora_rank=0, window=8),
    "sudoku": (
        dataclasses.replace(problems.TINY, d_v=8, objective="non_negative", map_init="soft_slice"), tasks.sudoku((2, 2))),
}
STEPS = 6


def boards(task, count=3, seed=0):
  rng = np.random.default_rng(seed)
  if task.board == (9, 9):
    return rng.random((count, 9, 9)).astype(np.float32)
  return rng.integers(1, 5, (count, *task.board)).astype(np.uint8)


@functools.cache
def built(name):
  """(network, params, boards, graph, jitted apply with a run-time K)"""
  cfg, task = CASES[name]
  network = model_lib.make_network(cfg, task)
  params = problems.random_weights(network)
  graph = task.graph(task.board)
  return network, params, boards(task), graph, jax.jit(lambda p, b, k: network.apply(p, b, graph, k))


@pytest.mark.parametrize("name", CASES)
def test_the_run_time_loop_ends_where_the_trace_does(name):
  network, params, inputs, graph, apply = built(name)
  window = CASES[name][0].window
  logits, trace = jax.jit(lambda p, b: network.trace(p, b, graph, STEPS))(params, inputs)
  agents, d_v = graph.num_agents, CASES[name][0].d_v
  assert trace.x.shape == trace.z.shape == (STEPS, 3, agents, d_v) and trace.primal.shape == (STEPS, 3, agents)
  assert trace.disagreement.shape == (STEPS, 3, graph.num_edges)
  programs = set()
  for k in (STEPS, 2):  # one compilation, and a window longer than K begins with the start
    out = np.asarray(apply(params, inputs, k))
    programs.add(apply._cache_size())
    assert out.shape[:3] == (window, 3, agents)
    last = min(window, k)
    np.testing.assert_allclose(out[-last:], logits[k - last : k], atol=2e-4)
  assert len(programs) == 1


def test_no_iterations_decode_the_seed():
  cfg, task = CASES["maze"]
  _, params, inputs, _, apply = built("maze")
  heads = dict(d_v=cfg.d_v, d_e=cfg.d_e, slots=task.slots, objective=cfg.objective, rank=cfg.lora_rank,
               lora_init=cfg.lora_init, curvature=cfg.curvature)

  @jax.jit
  def by_hand(params, inputs):
    view = task.view(inputs)
    h = task.encoder(cfg.hidden, heads).apply({"params": params["encoder"]}, view).h
    return task.decoder(cfg.decoder_hidden, False).apply({"params": params["decoder"]}, view, h)

  for logits in apply(params, inputs, 0):
    np.testing.assert_allclose(logits, by_hand(params, inputs), atol=1e-5)


def test_examples_of_a_batch_do_not_meet():
  _, params, inputs, _, apply = built("digits")
  together = np.asarray(apply(params, inputs, STEPS))
  np.testing.assert_allclose(apply(params, inputs[1:2], STEPS)[:, 0], together[:, 1], atol=1e-5)
  order = [2, 0, 1]
  np.testing.assert_allclose(apply(params, inputs[order], STEPS), together[:, order], atol=1e-5)
  wild = inputs.copy()
  wild[0] = wild[0][::-1, ::-1]
  np.testing.assert_array_equal(np.asarray(apply(params, wild, STEPS))[:, 1:], together[:, 1:])


@functools.cache
def plain_network():
  """(weights, boards) -> logits without modulation."""
  cfg, task = problems.tiny_maze(lora_rank=0, window=1)
  network, graph = model_lib.make_network(cfg, task), task.graph(task.board)
  return jax.jit(lambda p, b: network.apply(p, b, graph, STEPS))


@pytest.mark.parametrize("init,rank", [("standard", 1), ("legacy", 2)], ids=["standard", "legacy"])
def test_modulation_begins_with_the_base_maps(init, rank):
  """At the start F = R, factored or multiplied out: the factors' heads change nothing."""
  cfg, task = problems.tiny_maze(lora_rank=rank, lora_init=init, window=1)
  network = model_lib.make_network(cfg, task)
  params, graph, inputs = jax.jit(network.init)(jax.random.key(1)), task.graph(task.board), boards(task)
  without = jax.tree.map(lambda leaf: leaf, params)
  for head in ("a", "b", "factor_norm"):
    del without["encoder"]["Heads_0"][head]
  run, want = jax.jit(lambda p: network.apply(p, inputs, graph, STEPS)), plain_network()(without, inputs)
  np.testing.assert_allclose(run(params), want, atol=1e-5)
  for head in ("a", "b"):
    params["encoder"]["Heads_0"][head]["bias"] += 1.0
  assert np.abs(run(params) - want).max() > 1e-2  # and it does something later


def test_gradients_are_those_of_scan():
  """Through the hand-written backward pass of the loop and through plain reverse mode, for every weight."""
  network, params, inputs, graph, _ = built("maze")
  window = CASES["maze"][0].window
  looped = lambda p, k: network.apply(p, inputs, graph, k, 8)
  scanned = lambda p: network.trace(p, inputs, graph, STEPS)[0][-window:]
  slope = lambda run: jax.jit(jax.grad(lambda p, *k: jnp.sum(jnp.sin(run(p, *k)))))
  got, want = slope(looped)(params, STEPS), slope(scanned)(params)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-3), got, want)
  idle = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(want) if not np.any(leaf)]
  assert all("upper" in name for name in idle), idle  # every weight takes part, but for bounds that nobody hits


@pytest.mark.parametrize("z_update", ["prox", "project"])
def test_gradients_are_finite_when_everybody_agrees(z_update):
  """Blank boards, identity maps: views, seeds and states are equal, so every residual is exactly zero."""
  cfg, task = problems.tiny_maze(map_init="identity", d_e=4, lora_rank=0, z_update=z_update)
  network = model_lib.make_network(cfg, task)
  params, graph = problems.random_weights(network), task.graph(task.board)
  blank = np.full((1, 5, 5), 2, np.uint8)
  total = lambda p, k: jnp.sum(jnp.sin(network.apply(p, blank, graph, k, 4)))
  with jax.debug_nans(True):
    gradient = jax.jit(jax.grad(total))(params, 4)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", ["maze", "digits"])
def test_residuals_stay_bounded_for_three_hundred_iterations(name):
  """Untrained, modulated, with the solver of the paper's maze (soft) and digits (hard, five steps)."""
  if name == "maze":
    task = tasks.maze((11, 11))
    cfg = ModelConfig(d_v=10, d_e=5, hidden=8, decoder_hidden=8, gamma=5.0, z_steps=5, lora_rank=4)
  else:
    task = tasks.digits((28, 28))
    cfg = ModelConfig(d_v=16, d_e=12, hidden=8, decoder_hidden=8, z_steps=5, lora_rank=2, **DIGITS)
  network = model_lib.make_network(cfg, task)
  rng = np.random.default_rng(0)
  inputs = rng.integers(1, 5, (1, 11, 11)) if name == "maze" else rng.random((1, 28, 28)).astype(np.float32)
  params, graph = problems.random_weights(network), task.graph(task.board)
  logits, trace = jax.jit(lambda p: network.trace(p, inputs, graph, 300))(params)
  assert np.isfinite(logits).all()
  for residual in (trace.primal, trace.dual):
    size = np.linalg.norm(np.asarray(residual)[:, 0], axis=-1)
    assert size[200:].max() <= 0.1 * size[:20].max(), size
  assert np.abs(trace.x).max() < 100


def test_weights_serve_boards_of_any_size():
  cfg, task = CASES["maze"]
  network, params, *_ = built("maze")
  larger = boards(tasks.maze((7, 11)))
  logits = jax.jit(lambda p, b: network.apply(p, b, task.graph((7, 11)), 3))(params, larger)
  assert logits.shape == (cfg.window, 3, 15, 9, 6) and np.isfinite(logits).all()


def test_boards_and_graphs_of_different_sizes_are_refused():
  network, params, inputs, graph, _ = built("maze")
  with pytest.raises((TypeError, ValueError)):
    jax.eval_shape(lambda p: network.apply(p, np.ones((1, 9, 9), np.uint8), graph, 2), params)
  network, params, _, graph, _ = built("sudoku")
  with pytest.raises(ValueError, match="9x9 boards"):
    jax.eval_shape(lambda p: network.apply(p, np.ones((1, 9, 9), np.uint8), graph, 2), params)


def test_message_passing_network():
  cfg, task = problems.tiny_maze(kind="mpnn", d_v=6, d_e=3)
  network = model_lib.make_network(cfg, task)
  params, graph, inputs = problems.random_weights(network), task.graph(task.board), boards(task)
  apply = jax.jit(lambda p, b, k: network.apply(p, b, graph, k))
  assert network.trace is None
  once, twice = apply(params, inputs, 1), apply(params, inputs, 2)
  assert once.shape == (1, 3, 4, 9, 6) and np.abs(once - twice).max() > 1e-4 and apply._cache_size() == 1
  np.testing.assert_allclose(apply(params, inputs[1:2], 2)[:, 0], twice[:, 1], atol=1e-5)


@pytest.mark.parametrize("pool", ["average", "max"])
def test_convolutional_network_does_not_iterate(pool):
  cfg, task = ModelConfig(kind="cnn", d_v=2, pool=pool), tasks.digits((9, 9))
  network = model_lib.make_network(cfg, task)
  params, images = problems.random_weights(network), boards(task)
  apply = jax.jit(lambda p, b, k: network.apply(p, b, None, k))
  few, many = apply(params, images, 0), apply(params, images, 9)
  assert few.shape == (1, 3, 1, 10)
  np.testing.assert_array_equal(few, many)


def test_stalks_that_do_not_fit_the_task():
  for changes, message in ((dict(d_v=10), "multiple of 4"), (dict(d_v=4, d_e=2, map_init="soft_slice"), "soft_slice")):
    with pytest.raises(ValueError, match=message):
      model_lib.make_network(dataclasses.replace(problems.TINY, **changes), tasks.sudoku((2, 2)))
