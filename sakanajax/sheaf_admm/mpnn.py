"""The message-passing baseline: a recurrent directional gated graph network (section 5).

Every round, each slot of an agent sends one linear message of the agent's state, messages are pooled, and a
GRU with normalised inputs updates the state. Two ways to pool:

  published   all messages that reach an agent go through one max / mean / add / symnorm. The kernel depends
              on the sender's slot only, so a Sudoku row cannot tell which of its cells a message is about.
  slot-aware  messages are pooled per receiving slot and concatenated: what a fair benchmark must also try.

Legend: N agents, S slots, H state width, M message width; leading batch axes are free.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sakanajax.sheaf_admm.encoders import EPSILON
from sakanajax.sheaf_admm.graph import Graph


def aggregate(graph: Graph, messages: jax.Array, how: str, slot_aware: bool) -> jax.Array:
  """Pools messages `[N, S, M]` (one per sending slot) at the receivers; no message gives 0.

  Returns `[N, M]`, or `[N, S·M]` when slot-aware. `how` is max, mean, add or symnorm (the sum over
  1 / sqrt(degree_u degree_v)).
  """
  agents, slots, width = messages.shape
  own = jnp.arange(agents * slots, dtype=jnp.int32).reshape(agents, slots, 1)
  valid = graph.neighbours != own  # [N, S, D]
  received = messages.reshape(-1, width)[graph.neighbours]  # [N, S, D, M]
  axes = (2,) if slot_aware else (1, 2)
  if how == "max":
    pooled = jnp.max(jnp.where(valid[..., None], received, -jnp.inf), axis=axes)
    pooled = jnp.where(jnp.isneginf(pooled), 0.0, pooled)
  else:
    count = jnp.sum(valid, axis=(1, 2))  # [N]
    weight = valid.astype(messages.dtype)
    if how == "symnorm":
      weight = weight * jax.lax.rsqrt(jnp.maximum(1.0, count[:, None, None] * count[graph.neighbours // slots]))
    pooled = jnp.sum(received * weight[..., None], axis=axes)
    if how == "mean":
      pooled = pooled / jnp.maximum(1, jnp.sum(valid, axis=axes))[..., None]
  return pooled.reshape(agents, -1)


class Round(nn.Module):
  """One round: state and context `[..., N, H]` -> state."""

  width: int
  message: int
  types: int  # S, or 1 when all slots send through one kernel
  pool: str = "max"
  slot_aware: bool = False

  @nn.compact
  def __call__(self, state, context, graph):
    bound = (6.0 / (self.width * (self.message + self.width))) ** 0.5
    uniform = lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    kernel = self.param("kernel", uniform, (self.types, self.width, self.message))
    bias = self.param("bias", nn.initializers.zeros, (self.types, self.message))
    flat = state @ jnp.swapaxes(kernel, 0, 1).reshape(self.width, -1) + bias.reshape(-1)
    sent = flat.reshape(*flat.shape[:-1], self.types, self.message)
    sent = jnp.broadcast_to(sent, (*sent.shape[:-2], graph.num_slots, self.message))
    pool = lambda messages: aggregate(graph, messages, self.pool, self.slot_aware)
    for _ in range(sent.ndim - 3):
      pool = jax.vmap(pool)
    received = nn.Dense(self.width, use_bias=False)(pool(sent))
    norm = lambda name: nn.RMSNorm(epsilon=EPSILON, name=name)
    inputs = jnp.concatenate([norm("norm_received")(received), norm("norm_context")(context)], -1)
    gates = norm("norm_gates")(jnp.concatenate([state, inputs], -1))
    reset = nn.sigmoid(nn.Dense(self.width, name="reset")(gates))
    update = nn.sigmoid(nn.Dense(self.width, name="update")(gates))
    candidate = norm("norm_candidate")(jnp.concatenate([reset * state, inputs], -1))
    candidate = jnp.tanh(nn.Dense(self.width, name="candidate")(candidate))
    return (1.0 - update) * candidate + update * state
