"""The algebra: combinators against plain Python, keys, states, reports, one trace for any depth."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.layer import Ctx, Layer, chain, collect, dense, fold, is_empty
from sakanajax.nn.layer import kernels, remat, residual, stack, stateless
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)


def counting(scale: float = 1.0) -> Layer:
  """y = tanh(x W + noise(key) + times called before); reports its input's mean; its state counts the calls."""

  def apply(params, x, state, ctx):
    y = dense(x, params["w"])
    if ctx.key is not None:
      y = y + scale * jax.random.normal(ctx.key, y.shape)
    aux = {"mean": jnp.mean(x)}
    if is_empty(state):
      return jnp.tanh(y), (), aux
    return jnp.tanh(y + state["calls"][:, None, None]), {"calls": state["calls"] + 1}, aux

  init_state = lambda batch, max_len, dtype: {"calls": jnp.zeros(batch, dtype)}
  return Layer(lambda key: kernels(key, {"w": (4, 4)}, 1.0), init_state, apply)


def doubling() -> Layer:
  return stateless(lambda key: {}, lambda params, x, ctx: 2 * x)


def test_chain_applies_in_the_order_given_and_nests_by_name():
  layer = chain(second_by_alphabet=counting(), a_first_by_alphabet=doubling())
  params = layer.init(jax.random.key(0))
  assert set(params) == {"second_by_alphabet", "a_first_by_alphabet"}
  y, state, aux = layer.apply(params, X, (), Ctx())
  w = params["second_by_alphabet"]["w"]
  np.testing.assert_allclose(y, 2 * np.tanh(np.asarray(X) @ w), rtol=1e-5)
  assert state == () and set(aux) == {"second_by_alphabet"}
  np.testing.assert_allclose(aux["second_by_alphabet"]["mean"], X.mean(), rtol=1e-5)


def test_chain_keeps_the_state_of_those_that_have_one():
  layer = chain(count=counting(), double=doubling())
  state = layer.init_state(2, 8, jnp.float32)
  assert state["double"] == ()
  params = layer.init(jax.random.key(0))
  for calls in (1, 2):
    _, state, _ = layer.apply(params, X, state, Ctx())
    np.testing.assert_array_equal(state["count"]["calls"], [calls, calls])
  assert chain(a=doubling(), b=doubling()).init_state(2, 8, jnp.float32) == ()


def test_parts_of_a_chain_draw_different_numbers_and_have_different_params():
  layer = chain(a=counting(), b=counting())
  params = layer.init(jax.random.key(0))
  assert not np.allclose(params["a"]["w"], params["b"]["w"])
  params = jax.tree.map(jnp.zeros_like, params)  # what is left is the noise
  ctx = Ctx(key=jax.random.key(1))
  noise = [counting().apply(params[n], X, (), fold(ctx, i))[0] for i, n in enumerate("ab")]
  assert not np.allclose(noise[0], noise[1])
  np.testing.assert_allclose(layer.apply(params, X, (), ctx)[0], noise[1], rtol=1e-6)


def test_residual_adds_the_input():
  layer = counting()
  params = layer.init(jax.random.key(0))
  y, _, aux = residual(layer).apply(params, X, (), Ctx())
  np.testing.assert_allclose(y, X + layer.apply(params, X, (), Ctx())[0], rtol=1e-6)
  assert set(aux) == {"mean"}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, 9])
def test_stack_is_the_unrolled_chain(with_state, unroll):
  n, one = 5, residual(chain(inner=counting(), double=doubling()))
  layer, ctx = stack(one, n, unroll), Ctx(key=jax.random.key(3))
  params = layer.init(jax.random.key(0))
  state = layer.init_state(2, 8, jnp.float32) if with_state else ()
  for _ in range(2):
    want, want_states, want_aux = X, [], []
    for i in range(n):
      pick = lambda tree: jax.tree.map(lambda leaf: leaf[i], tree)
      want, after, aux = one.apply(pick(params), want, pick(state), fold(ctx, i))
      want_states.append(after)
      want_aux.append(aux)
    got, state, aux = layer.apply(params, X, state, ctx)
    together = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    chex.assert_trees_all_close((got, aux), (want, together(want_aux)), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(state, together(want_states) if with_state else ())


def test_layers_of_a_stack_start_differently():
  params = stack(counting(), 3).init(jax.random.key(0))
  assert params["w"].shape == (3, 4, 4) and not np.allclose(params["w"][0], params["w"][1])


def test_thirty_layers_are_one_trace_and_one_program_of_the_size_of_one():
  traces = []

  def counted(params, x, ctx):
    traces.append(1)
    return jnp.tanh(dense(x, params["w"]))

  one = stateless(lambda key: kernels(key, {"w": (4, 4)}, 1.0), counted)
  sizes = {}
  for n in (1, 30):
    layer = stack(one, n)
    params = layer.init(jax.random.key(0))
    run = jax.jit(chex.assert_max_traces(lambda p, x: layer.apply(p, x, (), Ctx())[0], n=1))
    traces.clear()
    chex.clear_trace_counter()
    jax.block_until_ready([run(params, X), run(params, 2 * X)])
    assert len(traces) == 1
    sizes[n] = len(run.lower(params, X).as_text().splitlines())
  assert sizes[1] == sizes[30]


def test_remat_gives_the_same_gradient_and_keeps_less():
  layer = chain(a=counting(), b=counting(), c=counting())
  params = layer.init(jax.random.key(0))

  def kept(layer):
    y, back = jax.vjp(lambda p: layer.apply(p, X, (), Ctx())[0], params)
    return back(jnp.ones_like(y))[0], sum(leaf.size for leaf in jax.tree.leaves(back))

  (plain, plain_size), (again, again_size) = kept(layer), kept(remat(layer))
  chex.assert_trees_all_close(plain, again, rtol=1e-5)
  assert again_size < plain_size


def test_collect_finds_every_leaf_depth_first():
  aux = {"b": {"l1": 1, "x": {"l1": 2}}, "a": {"c": {"l1": {"p": 3, "q": 4}}}, "l1": 5, "nnz": 6}
  assert collect(aux, "l1") == [3, 4, 1, 2, 5]
  assert collect(aux, "missing") == [] and collect({}, "l1") == []


def test_collect_gives_the_same_order_inside_and_outside_jit():
  aux = {"z": {"l1": jnp.ones(2)}, "a": {"l1": jnp.zeros(3)}}
  for found in (collect(aux, "l1"), collect(jax.jit(lambda a: a)(aux), "l1")):
    assert [leaf.shape for leaf in found] == [(3,), (2,)]


def test_ctx_goes_through_jit_with_train_static():
  @jax.jit
  def run(ctx):
    assert isinstance(ctx.train, bool)
    return ctx.mask if ctx.train else ~ctx.mask

  mask = jnp.array([[True, False]])
  np.testing.assert_array_equal(run(Ctx(mask=mask, train=True)), mask)
  np.testing.assert_array_equal(run(Ctx(mask=mask)), ~mask)


def test_kernels_are_independent_normal_numbers():
  got = kernels(jax.random.key(0), {"a": (50, 40), "b": (2000,), "c": (40, 50)}, 0.1)
  assert {name: leaf.shape for name, leaf in got.items()} == {"a": (50, 40), "b": (2000,), "c": (40, 50)}
  rows = np.stack([np.ravel(leaf) for leaf in got.values()])
  np.testing.assert_allclose(np.cov(rows), 0.01 * np.eye(3), atol=1e-3)
  assert abs(rows.mean()) < 5e-3 and rows.dtype == np.float32


def test_an_empty_stack_is_refused():
  with pytest.raises(ValueError, match="at least one layer, got 0"):
    stack(counting(), 0)
  with pytest.raises(ValueError, match="unroll must be at least 1, got 0"):
    stack(counting(), 2, unroll=0)
