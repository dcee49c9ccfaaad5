"""Dense or sparse, layer by layer: each layer runs in the form that its own measured sparsity makes faster.

Early in training, and in some layers for good, too many neurons fire for a sparse form to pay. As in the released code,
a layer starts dense; every `period` steps each layer whose last measured number of non-zeros lies below `cutoff` turns
sparse, the others dense. The decision of a period uses what was measured before it began, and a step that is repeated
(gradient checkpointing, a retry with more room) counts once.

A plan is a tuple of forms, one for each layer. It is static: a function that takes it as a static argument is compiled
once for each plan that occurs. `body` runs equal neighbours as one scan over a slice of the same stacked params.

Legend: L layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.nn.layer import Layer, fold, is_empty, stack

DENSE, SPARSE = "dense", "hybrid"
Plan = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
  """When a layer changes its form.

  Attributes:
    cutoff: a layer with fewer non-zeros per token than this is sparse.
    period: steps between two decisions.
    sparse: what the sparse form is called.
  """

  cutoff: float = 50.0
  period: int = 20
  sparse: str = SPARSE

  def __post_init__(self):
    if self.period < 1 or self.cutoff < 0:
      raise ValueError(f"period must be at least 1 and cutoff not negative, got {self.period} and {self.cutoff}")


class State(NamedTuple):
  """What the switch knows, on the host."""

  plan: Plan  # [L]
  nnz: tuple[float, ...]  # [L] of the last step measured; empty before the first
  step: int  # the last step measured; -1 before the first


class Group(NamedTuple):
  """Neighbours of one form: layers start .. stop - 1."""

  form: str
  start: int
  stop: int


def initial(layers: int) -> State:
  """All layers dense, nothing measured."""
  return State((DENSE,) * layers, (), -1)


def before(rule: Rule, state: State, step: int) -> State:
  """Returns the state whose plan holds for `step`: at a multiple of the period, decided from the last measurement."""
  if step % rule.period or not state.nnz:
    return state
  return state._replace(plan=plan_of(rule, state.nnz))


def after(state: State, step: int, nnz: Sequence[float]) -> State:
  """Returns the state that has seen the non-zeros `[L]` of `step`; a step seen before changes nothing."""
  if step <= state.step:
    return state
  if len(nnz) != len(state.plan):
    raise ValueError(f"{len(nnz)} measurements for {len(state.plan)} layers")
  return State(state.plan, tuple(float(n) for n in np.asarray(nnz)), step)


def plan_of(rule: Rule, nnz: Sequence[float]) -> Plan:
  """Returns the plan for measured non-zeros; a NaN stays dense."""
  return tuple(rule.sparse if n < rule.cutoff else DENSE for n in nnz)


def groups(plan: Plan) -> tuple[Group, ...]:
  """Returns runs of equal forms."""
  runs, start = [], 0
  for form, members in itertools.groupby(plan):
    stop = start + len(list(members))
    runs.append(Group(form, start, stop))
    start = stop
  return tuple(runs)


def body(blocks: Mapping[str, Layer] | Callable[[str], Layer], plan: Plan) -> Layer:
  """Returns the layers of a plan, one after the other; params, state, aux and keys as those of `stack(block, L)`.

  Args:
    blocks: form -> block. All forms have the same params, state and aux.
    plan: `[L]`.

  Raises:
    ValueError: an empty plan.
  """
  if not plan:
    raise ValueError("a plan needs at least one layer")
  block = blocks if callable(blocks) else blocks.__getitem__
  parts = [(group, block(group.form)) for group in groups(plan)]
  whole = stack(parts[0][1], len(plan))

  def apply(params, x, state, ctx):
    states, reports = [], []
    for group, layer in parts:
      cut = lambda tree, group=group: jax.tree.map(lambda leaf: leaf[group.start : group.stop], tree)

      def one(x, part, layer=layer):
        own, before, index = part
        y, after, aux = layer.apply(own, x, before, fold(ctx, index))
        return y, (after, aux)

      numbers = jnp.arange(group.start, group.stop)
      x, (new, aux) = jax.lax.scan(one, x, (cut(params), () if is_empty(state) else cut(state), numbers))
      states.append(new)
      reports.append(aux)
    join = lambda *leaves: jnp.concatenate(leaves)
    return x, jax.tree.map(join, *states), jax.tree.map(join, *reports)

  return whole._replace(apply=apply)
