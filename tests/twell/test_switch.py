"""The switch: its timing against a loop that spells it out, and a mixed body against one stack."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.layer import Ctx, Layer, is_empty, stack
from sakanajax.twell import ffn, loss as losses, model as models, switch
from sakanajax.twell.switch import Group, Rule
from tests.twell.helpers import TINY, batch_of, params_of, quick_compilation  # noqa: F401


def test_decisions_use_what_was_measured_before_the_period_began():
  rule, state, plans = Rule(cutoff=50, period=4), switch.initial(2), []
  for step in range(13):
    state = switch.before(rule, state, step)
    plans.append(state.plan)
    state = switch.after(state, step, (100 - 10 * step, 49 if step < 8 else 51))
  dense, sparse = "dense", "hybrid"
  assert plans[0:4] == [(dense, dense)] * 4  # nothing measured yet
  assert plans[4:8] == [(dense, sparse)] * 4  # step 3 measured 70 and 49
  assert plans[8:12] == [(sparse, sparse)] * 4  # step 7 measured 30 and 49
  assert plans[12] == (sparse, dense)  # step 11 measured 51


def test_a_repeated_step_counts_once_and_a_nan_stays_dense():
  state = switch.after(switch.initial(1), 3, (10.0,))
  assert switch.after(state, 3, (99.0,)) == state and switch.after(state, 2, (99.0,)) == state
  assert switch.after(state, 4, (99.0,)).nnz == (99.0,)
  assert switch.plan_of(Rule(), (float("nan"), 49.9, 50.0)) == ("dense", "hybrid", "dense")
  with pytest.raises(ValueError, match="2 measurements for 1"):
    switch.after(state, 5, (1.0, 2.0))


def test_groups_are_runs_of_equal_forms():
  assert switch.groups(tuple("aabba")) == (Group("a", 0, 2), Group("b", 2, 4), Group("a", 4, 5))
  assert switch.groups(()) == ()


def test_a_mixed_model_is_the_dense_model_gradients_and_report_included():
  cfg = models.ModelConfig(vocab=19, dim=8, hidden=24, layers=3, heads=2, room=ffn.Room(ell=10, tail=1.0))
  blocks = lambda form: models.block_of(cfg, models.feed_forward(cfg, form))
  plan = ("dense", "hybrid", "hybrid")
  plain, mixed = models.language_model(cfg), models.language_model(cfg, body=switch.body(blocks, plan))
  params, batch = params_of(plain), batch_of(padded=1)
  results = [
      jax.jit(jax.value_and_grad(losses.lm_loss(model, losses.Penalty(0.1)), has_aux=True))(params, batch, None)
      for model in (plain, mixed)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)
  shapes = [jax.eval_shape(model.init, jax.random.key(0)) for model in (plain, mixed)]
  assert shapes[0] == shapes[1]


def test_state_and_keys_are_those_of_one_stack():
  def apply(params, x, state, ctx):
    return x + params + jax.random.uniform(ctx.key) + (0 if is_empty(state) else state), state, {"seen": x}

  layer = Layer(lambda key: jax.random.normal(key), lambda b, t, dtype: jnp.ones((b,), dtype), apply)
  whole, parts = stack(layer, 4), switch.body({"a": layer, "b": layer}, ("a", "b", "b", "a"))
  params, x, ctx = jnp.arange(4.0), jnp.zeros(2), Ctx(key=jax.random.key(2))
  run = lambda model, state: jax.jit(model.apply)(params, x, state, ctx)
  for state in ((), jnp.ones((4, 2))):
    jax.tree.map(np.testing.assert_allclose, run(whole, state), run(parts, state))


def test_a_plan_is_compiled_once():
  @jax.jit
  @chex.assert_max_traces(n=1)
  def sparse(params, tokens):
    model = models.language_model(TINY, body=switch.body(
        lambda form: models.block_of(TINY, models.feed_forward(TINY, form)), ("hybrid", "hybrid")))
    return model.apply(params, tokens, (), Ctx())[0]

  params = params_of(models.language_model(TINY))
  for seed in range(3):
    sparse(params, batch_of(seed=seed)["tokens"])


def test_bad_rules_are_refused():
  with pytest.raises(ValueError, match="period"):
    Rule(period=0)
  with pytest.raises(ValueError, match="at least one"):
    switch.body({}, ())
