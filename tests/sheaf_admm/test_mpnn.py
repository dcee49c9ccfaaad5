"""Message passing: pooling against a walk over the edges, equivariance, and what each form can tell apart."""

import functools

import jax
import numpy as np
import pytest

from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import mpnn
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

GRAPH = problems.random_multigraph(4, agents=6, slots=3, edges=9)


def pooled_by_hand(graph, messages, how, slot_aware):
  """Every edge delivers two messages; then each receiver (or each of its slots) pools what it got."""
  agents, slots, width = messages.shape
  inbox = {(n, s): [] for n in range(agents) for s in range(slots)}
  degree = np.bincount(np.asarray(graph.edges).ravel(), minlength=agents)
  for (u, v), (s, t) in zip(graph.edges.tolist(), graph.slots.tolist()):
    weight = (degree[u] * degree[v]) ** -0.5 if how == "symnorm" else 1.0
    inbox[u, s].append(weight * messages[v, t])
    inbox[v, t].append(weight * messages[u, s])
  pool = {"max": np.max, "mean": np.mean, "add": np.sum, "symnorm": np.sum}[how]
  one = lambda received: pool(received, axis=0) if received else np.zeros(width)
  if slot_aware:
    return np.stack([np.concatenate([one(inbox[n, s]) for s in range(slots)]) for n in range(agents)])
  return np.stack([one(sum((inbox[n, s] for s in range(slots)), [])) for n in range(agents)])


@pytest.mark.parametrize("slot_aware", [False, True], ids=["published", "slot_aware"])
@pytest.mark.parametrize("how", ["max", "mean", "add", "symnorm"])
def test_pooling_is_a_walk_over_the_edges(how, slot_aware):
  messages = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32) - 1.0
  pool = jax.jit(lambda graph, m: mpnn.aggregate(graph, m, how, slot_aware))
  np.testing.assert_allclose(pool(GRAPH, messages), pooled_by_hand(GRAPH, messages, how, slot_aware), atol=1e-5)


@pytest.mark.parametrize("how", ["max", "mean", "add", "symnorm"])
def test_no_message_is_zero_and_has_no_gradient(how):
  graph = graph_lib.make_graph([(0, 1)], None, 3)  # agent 2 is alone
  messages = np.full((3, 1, 2), -7.0, np.float32)
  total = lambda m: (mpnn.aggregate(graph, m, how, False)[2] ** 2).sum()
  with jax.debug_nans(True):
    value, gradient = jax.jit(jax.value_and_grad(total))(messages)
  assert value == 0.0 and not np.any(gradient)


@functools.cache
def layer(slot_aware=False, types=3):
  """(params, jitted apply, state, context) of one round on GRAPH."""
  module = mpnn.Round(width=4, message=2, types=types, slot_aware=slot_aware)
  state, context = np.random.default_rng(1).normal(size=(2, 2, 6, 4)).astype(np.float32)
  params = problems.random_weights(module, state, context, GRAPH)
  return params, jax.jit(module.apply), state, context


@pytest.mark.parametrize("slot_aware", [False, True], ids=["published", "slot_aware"])
def test_renaming_agents_renames_the_result(slot_aware):
  params, apply, state, context = layer(slot_aware)
  order = np.random.default_rng(2).permutation(6)
  renamed = [np.zeros_like(a) for a in (state, context)]
  for new, old in zip(renamed, (state, context)):
    new[:, order] = old
  out = apply(params, *renamed, problems.permute(GRAPH, order))
  np.testing.assert_allclose(np.asarray(out)[:, order], apply(params, state, context, GRAPH), atol=1e-5)


def test_a_round_by_hand():
  params, apply, state, context = layer()
  p = jax.device_get(params["params"])
  sigmoid = lambda y: 1 / (1 + np.exp(-y))
  dense = lambda y, name: y @ p[name]["kernel"] + p[name].get("bias", 0.0)
  rms = lambda y, name: y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p[name]["scale"]
  for h, seen, got in zip(state, context, apply(params, state, context, GRAPH)):
    sent = np.einsum("nh,shm->nsm", h, p["kernel"]) + p["bias"]
    received = dense(pooled_by_hand(GRAPH, sent, "max", False), "Dense_0")
    inputs = np.concatenate([rms(received, "norm_received"), rms(seen, "norm_context")], -1)
    gates = rms(np.concatenate([h, inputs], -1), "norm_gates")
    reset, update = sigmoid(dense(gates, "reset")), sigmoid(dense(gates, "update"))
    candidate = rms(np.concatenate([reset * h, inputs], -1), "norm_candidate")
    candidate = np.tanh(dense(candidate, "candidate"))
    np.testing.assert_allclose(got, (1 - update) * candidate + update * h, atol=1e-5)


def test_only_the_slot_aware_form_knows_where_a_message_arrives():
  """Agent 0 hears 1 on slot 0 and 2 on slot 1, or the other way round."""
  arrivals = [graph_lib.make_graph([(0, 1), (0, 2)], [(s, 0), (1 - s, 0)], 3, 2) for s in (0, 1)]
  messages = np.random.default_rng(3).normal(size=(3, 2, 2)).astype(np.float32)
  for slot_aware in (False, True):
    pool = jax.jit(lambda graph, messages, aware=slot_aware: mpnn.aggregate(graph, messages, "max", aware)[0])
    same = np.allclose(*(pool(graph, messages) for graph in arrivals))
    assert same != slot_aware


def test_one_kernel_for_all_slots():
  params, apply, state, context = layer(types=1)
  assert params["params"]["kernel"].shape == (1, 4, 2)
  flat = graph_lib.make_graph(GRAPH.edges, None, 6)  # so slots do not matter
  np.testing.assert_allclose(apply(params, state, context, GRAPH), apply(params, state, context, flat), atol=1e-5)
