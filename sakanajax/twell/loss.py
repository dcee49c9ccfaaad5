"""The loss: cross-entropy plus the L1 penalty that makes neurons quiet (equation 2), with its warm-up schedule.

    loss = CE + c(step) * mean over layers of l1
    form "sum":   l1 = mean over tokens of the sum over the N neurons of |h|       (the released code; default)
    form "mean":  the same, divided by N                                           (the paper's equation 2)

A coefficient of one form is N times that of the other: published ones (2e-5, ...) are of the form "sum".

Legend: B batch, T tokens, L layers, N hidden neurons of a layer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Mapping

import jax
import jax.numpy as jnp

from sakanajax.core import train, trees
from sakanajax.nn.layer import Ctx, Layer, collect
from sakanajax.nn.transformer import nll


@dataclasses.dataclass(frozen=True)
class Penalty:
  """The L1 term.

  Attributes:
    coefficient: c, at the end of the schedule.
    form: what c multiplies, see the module's docstring.
    start: the step up to which c is 0; the last one before `end` if they are equal.
    end: the step from which c is whole; in between it rises linearly. start = end = 0: whole from the first step.
  """

  coefficient: float = 0.0
  form: Literal["sum", "mean"] = "sum"
  start: int = 0
  end: int = 0

  def __post_init__(self):
    if not 0 <= self.coefficient < math.inf:
      raise ValueError(f"coefficient must be finite and not negative, got {self.coefficient}")
    if self.form not in ("sum", "mean"):
      raise ValueError(f"form must be 'sum' or 'mean', got {self.form!r}")
    if not 0 <= self.start <= self.end:
      raise ValueError(f"the warm-up needs 0 <= start <= end, got {self.start} and {self.end}")

  @property
  def scheduled(self) -> bool:
    """Whether c depends on the step."""
    return self.end > 0


def coefficient(penalty: Penalty, step: jax.Array | int) -> jax.Array:
  """Returns c at a step, `[]` float32: 0 up to `start`, linear to the coefficient at `end`, then constant."""
  if not penalty.scheduled:
    return jnp.float32(penalty.coefficient)
  step = jnp.asarray(step, jnp.float32)
  past = (step - penalty.start) / max(penalty.end - penalty.start, 1)
  return penalty.coefficient * jnp.where(step >= penalty.end, 1.0, jnp.maximum(past, 0.0))


def l1_term(penalty: Penalty, aux: Mapping[str, Any]) -> jax.Array:
  """Returns the mean over all layers that report "l1", in the penalty's form, `[]`; 0 when none does."""
  l1, fired = collect(aux, "l1"), collect(aux, "fired")
  if not l1:
    return jnp.zeros(())
  if penalty.form == "mean":
    l1 = [leaf / units.shape[-1] for leaf, units in zip(l1, fired)]
  return jnp.mean(jnp.concatenate([jnp.ravel(leaf) for leaf in l1]))


def context(batch: Mapping[str, jax.Array], train: bool = False) -> Ctx:
  """What layers may know of a batch of `core.text` rows; tokens of segment 0 are padding."""
  segments = batch["segment_ids"]
  return Ctx(positions=batch["positions"], segment_ids=segments, mask=segments > 0, train=train)


def lm_loss(model: Layer, penalty: Penalty = Penalty(), dtype: Any = jnp.float32) -> train.LossFn:
  """Returns the loss of a language model for `core.train.fit`: (params, batch, key) -> (loss, scalars).

  A batch is one of `core.text` (all `[B, T]`): tokens, labels, mask of labels, segment_ids, positions; and, when the
  penalty has a schedule, step `[B]` int32, the number of the step in every row. The model computes in `dtype`.

  Scalars: ce, l1 (in the penalty's form), nnz (mean over layers), alive (share of neurons that fired in this batch),
  overflow (rows that found no room). Where any did, the loss is NaN: the step must not be taken.
  """

  def loss(params, batch, key):
    del key
    logits, _, aux = model.apply(trees.cast(params, dtype), batch["tokens"], (), context(batch, train=True))
    ce, l1 = nll(logits, batch["labels"], batch["mask"]), l1_term(penalty, aux)
    step = jnp.max(batch["step"]) if penalty.scheduled else 0
    overflow = sum(jnp.sum(leaf) for leaf in collect(aux, "overflow"))
    total = (ce + coefficient(penalty, step) * l1) * jnp.where(overflow > 0, jnp.nan, 1.0)
    return total, {"ce": ce, "l1": l1, "overflow": overflow, **_activity(aux)}

  return loss


def _activity(aux: Mapping[str, Any]) -> dict[str, jax.Array]:
  flat = lambda name: jnp.concatenate([jnp.ravel(leaf) for leaf in collect(aux, name)])
  return {"nnz": jnp.mean(flat("nnz")), "alive": jnp.mean(flat("fired") > 0)} if collect(aux, "fired") else {}
