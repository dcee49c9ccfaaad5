"""The loss: normalisations, the schedule in closed form, padding, and a step that must not be taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.transformer import token_nll
from sakanajax.twell import ffn, loss as losses, model as models
from sakanajax.twell.loss import Penalty
from tests.twell.helpers import TINY, batch_of, params_of, quick_compilation  # noqa: F401


@pytest.fixture(scope="module")
def tiny():
  model = models.language_model(TINY)
  return model, params_of(model)


def test_loss_is_cross_entropy_plus_the_penalty_in_both_forms(tiny):
  model, params = tiny
  batch = batch_of(padded=2)
  logits, _, aux = jax.jit(model.apply)(params, batch["tokens"], (), losses.context(batch))
  ce = np.asarray(token_nll(logits, batch["labels"]))[batch["mask"]].mean()
  layers = np.asarray(aux["body"]["ffn"]["layer"]["l1"] if "body" in aux else aux["ffn"]["layer"]["l1"])
  assert layers.shape == (2,)
  for form, l1 in (("sum", layers.mean()), ("mean", layers.mean() / TINY.hidden)):
    total, scalars = jax.jit(losses.lm_loss(model, Penalty(0.25, form)))(params, batch, jax.random.key(0))
    np.testing.assert_allclose(scalars["ce"], ce, rtol=1e-5)
    np.testing.assert_allclose(scalars["l1"], l1, rtol=1e-5)
    np.testing.assert_allclose(total, ce + 0.25 * l1, rtol=1e-5)
    assert 0 < scalars["nnz"] < TINY.hidden and 0 < scalars["alive"] <= 1 and scalars["overflow"] == 0


@pytest.mark.parametrize("start,end,steps,want", [
    (0, 0, (0, 1, 10**6), (2.0, 2.0, 2.0)),
    (10, 30, (0, 10, 15, 20, 30, 99), (0.0, 0.0, 0.5, 1.0, 2.0, 2.0)),
    (0, 4, (0, 1, 4, 5), (0.0, 0.5, 2.0, 2.0)),
    (5, 5, (4, 5, 6), (0.0, 2.0, 2.0)),
])
def test_the_schedule_in_closed_form(start, end, steps, want):
  got = [float(losses.coefficient(Penalty(2.0, start=start, end=end), jnp.int32(step))) for step in steps]
  assert got == pytest.approx(want)


def test_a_scheduled_penalty_reads_the_step_of_the_batch(tiny):
  model, params = tiny
  loss = jax.jit(losses.lm_loss(model, Penalty(2.0, start=10, end=30)))
  at = lambda step: loss(params, batch_of() | {"step": np.full(2, step, np.int32)}, None)
  (early, scalars), (half, _), (late, _) = at(3), at(20), at(50)
  np.testing.assert_allclose([early, half, late], scalars["ce"] + np.array([0, 1, 2]) * scalars["l1"], rtol=1e-5)


def test_where_rows_found_no_room_the_loss_and_its_gradient_are_nan(tiny):
  _, params = tiny
  cramped = models.language_model(TINY, ffn.reglu(TINY.dim, TINY.hidden, "hybrid", ffn.Room(ell=1, tail=0.0)))
  gradient = jax.jit(jax.value_and_grad(losses.lm_loss(cramped), has_aux=True))
  (total, scalars), grads = gradient(params, batch_of(), None)
  assert scalars["overflow"] > 0 and np.isnan(total) and np.isnan(grads["embed"]).any()


@pytest.mark.parametrize("wrong", [
    dict(coefficient=-1.0), dict(coefficient=float("nan")), dict(form="product"), dict(start=5, end=2), dict(start=-1)])
def test_bad_penalties_are_refused(wrong):
  with pytest.raises(ValueError):
    Penalty(**wrong)
