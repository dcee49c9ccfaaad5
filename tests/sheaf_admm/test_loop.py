"""The run-time loop against plain Python: values, gradients, truncation, one trace for every K."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.sheaf_admm import loop
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

RNG = np.random.default_rng(0)
PROBLEM = {"w": RNG.normal(size=(3, 3)), "b": RNG.normal(size=3), "roll": np.int32(1), "unused": np.ones(2)}
STATE = {"x": RNG.normal(size=3), "age": np.int32(0)}
WEIGHT = RNG.normal(size=(10, 3))


def step(problem, state):
  """Nonlinear, with integers in the problem and in the state."""
  x = jnp.tanh(problem["w"] @ jnp.roll(state["x"], problem["roll"]) + problem["b"] / (1 + state["age"]))
  return {"x": x, "age": state["age"] + 1}


def read(state):
  return state["x"] * (2 + state["age"])


def cast(tree, dtype):
  return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype if np.asarray(leaf).dtype.kind == "f" else None), tree)


def unrolled(problem, state, iterations, window, keep=None):
  """The specification: a Python loop. All but the last `keep` iterations are without gradient."""
  seen = [read(state)] * window
  for k in range(iterations):
    after = step(problem, state)
    if keep is not None and k < iterations - keep:
      after = jax.tree.map(jax.lax.stop_gradient, after)
    state = after
    seen = seen[1:] + [read(state)]
  return jnp.stack(seen)


def iterated(problem, state, iterations, window, capacity=8, grad_steps=None):
  return loop.iterate(
      step, problem, state, iterations, read=read, window=window, capacity=capacity, grad_steps=grad_steps)


def gradients(run, window, jit=True):
  """(problem's w, b, unused, state's x) -> value of a nonlinear functional of the window, and its gradient."""

  def total(moving, *args):
    w, b, unused, x = moving
    seen = run({"w": w, "b": b, "roll": PROBLEM["roll"], "unused": unused}, {"x": x, "age": STATE["age"]}, *args)
    return jnp.sum(jnp.sin(seen) * WEIGHT[:window].astype(seen.dtype)), seen

  slope = jax.value_and_grad(total, has_aux=True)
  return jax.jit(slope) if jit else slope


def moving(dtype=np.float32):
  return tuple(np.asarray(leaf, dtype) for leaf in (PROBLEM["w"], PROBLEM["b"], PROBLEM["unused"], STATE["x"]))


def assert_alike(got, want, atol=1e-5):
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=atol), got, want)


@functools.cache
def fast(window):
  """The gradient with a run-time K."""
  return gradients(lambda p, s, k: iterated(p, s, k, window), window)


@pytest.mark.parametrize(
    "window,iterations", [(4, 0), (4, 1), (4, 2), (4, 5), (4, 8), (1, 0), (1, 2), (1, 8), (10, 1), (10, 8)]
)
def test_values_and_gradients_are_those_of_full_unrolling(window, iterations):
  spec = gradients(lambda p, s: unrolled(p, s, iterations, window), window, jit=False)
  assert_alike(fast(window)(moving(), iterations), spec(moving()))


@pytest.mark.parametrize("iterations", [2, 8])
def test_values_and_gradients_are_those_of_scan(iterations):
  def scanned(problem, state):
    seen = jax.lax.scan(lambda s, _: (step(problem, s),) * 2, state, None, length=iterations)[1]
    return jax.vmap(read)(seen)[-2:]

  known = gradients(lambda p, s: iterated(p, s, iterations, 2), 2)  # K may be a Python number
  assert_alike(known(moving()), gradients(scanned, 2)(moving()))


@pytest.mark.parametrize(
    "iterations,grad_steps,capacity", [(5, 2, 8), (5, None, 3), (5, 4, 2), (8, 1, 8), (2, 4, 8), (5, 0, 8)]
)
def test_truncated_unrolling_stops_gradients_after_the_first_iterations(iterations, grad_steps, capacity):
  window, keep = 2, min(capacity, capacity if grad_steps is None else grad_steps)
  truncated = gradients(lambda p, s, k: iterated(p, s, k, window, capacity, grad_steps), window)
  spec = gradients(lambda p, s: unrolled(p, s, iterations, window, keep), window, jit=False)
  assert_alike(truncated(moving(), iterations), spec(moving()))


def test_no_capacity_and_no_iterations():
  """The ablation K = 0 trains too."""
  none = gradients(lambda p, s, k: iterated(p, s, k, 3, capacity=0), 3)
  spec = gradients(lambda p, s: unrolled(p, s, 0, 3), 3, jit=False)
  assert_alike(none(moving(), 0), spec(moving()))


def test_one_trace_serves_every_number_of_iterations():
  traces = []

  def counted(problem, state):
    traces.append(1)
    return step(problem, state)

  @jax.jit
  def run(x, iterations):
    return loop.iterate(
        counted, cast(PROBLEM, jnp.float32), {"x": x, "age": 0}, iterations, read=read, window=2, capacity=0)

  x = np.asarray(STATE["x"], np.float32)
  first = run(x, 3)
  before = len(traces)
  others = [run(x, k) for k in (0, 1, 40)]
  assert len(traces) == before and run._cache_size() == 1
  np.testing.assert_array_equal(first, run(x, 3))
  assert all(o.shape == first.shape and np.isfinite(o).all() for o in others)


def test_vmap_over_states_and_over_iterations():
  run = lambda x, k: iterated(cast(PROBLEM, jnp.float32), {"x": x, "age": 0}, k, 2)
  slope = jax.grad(lambda x, k: jnp.sum(jnp.sin(run(x, k))))
  xs, ks = RNG.normal(size=(3, 3)).astype(np.float32), np.array([0, 3, 8])
  together = jax.jit(lambda xs, ks: (jax.vmap(run)(xs, ks), jax.vmap(slope)(xs, ks), jax.vmap(run, (0, None))(xs, 3)))
  one = jax.jit(lambda x, k: (run(x, k), slope(x, k), run(x, 3)))
  values, slopes, shared = together(xs, ks)
  for i in range(3):
    assert_alike((values[i], slopes[i], shared[i]), one(xs[i], ks[i]))


@pytest.mark.parametrize("iterations", [1, 6])
def test_finite_differences(iterations):
  with jax.enable_x64(True):
    at = moving(np.float64)
    gradient = fast(4)(at, iterations)[1]
    rng = np.random.default_rng(1)
    for _ in range(3):
      along = tuple(rng.normal(size=leaf.shape) for leaf in at)
      ahead, behind = (fast(4)(tuple(a + h * d for a, d in zip(at, along)), iterations)[0][0] for h in (1e-5, -1e-5))
      slope = sum(np.vdot(g, d) for g, d in zip(gradient, along))
      assert float(ahead - behind) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_memory_is_one_state_per_kept_iteration():
  """The forward pass keeps `capacity` states and nothing of what happens inside a step."""

  def wide(problem, state):  # 1,000 numbers inside, 3 outside
    return {"x": jnp.tanh(jnp.outer(state["x"], jnp.ones(1000)) @ jnp.full((1000, 3), 1e-3)).sum(0) + problem["b"]}

  def total(b):
    run = functools.partial(loop.iterate, wide, {"b": b}, {"x": jnp.ones(3)}, 50, read=lambda s: s["x"])
    return jnp.sum(run(window=1, capacity=50))

  used = jax.jit(jax.grad(total)).lower(jnp.ones(3)).compile().memory_analysis().temp_size_in_bytes
  assert used < 50 * 3 * 4 + 4 * 3 * 1000 * 4
