"""Networks of agents: encode every view, negotiate for K iterations, decode the last iterates.

`make_network` builds a sheaf network or one of the message-passing baselines from a `ModelConfig`; both share
encoders, decoders and the loop, and differ in what one iteration does. A network is a pair of pure functions.

Legend: B batch, N agents, S slots, W window, d_v vertex stalk (or state width), d_e edge stalk (or message width).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Literal, NamedTuple

import jax
import jax.numpy as jnp

from sakanajax.sheaf_admm import admm, cnn, loop, maps as maps_lib, mpnn, sheaf, x_update, z_update
from sakanajax.sheaf_admm.encoders import softplus_inverse
from sakanajax.sheaf_admm.graph import Graph
from sakanajax.sheaf_admm.maps import RestrictionMaps
from sakanajax.sheaf_admm.tasks import Task


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Everything that decides a network's shape and its solver. Paper symbols in brackets."""

  kind: Literal["sheaf", "mpnn", "cnn"] = "sheaf"
  d_v: int = 10  # vertex stalk; state width H of the mpnn; channels of the cnn
  d_e: int = 5  # edge stalk; message width of the mpnn
  hidden: int = 256  # encoder width
  decoder_hidden: int = 256
  objective: Literal["l1box_diag", "lasso", "non_negative"] = "l1box_diag"
  l1: float = 0.0  # lasso's constant weight
  curvature: Literal["learned", "fixed"] = "learned"
  z_update: Literal["prox", "project", "gd"] = "prox"
  gamma: float = 5.0  # weight of the sheaf energy
  epsilon: float = 1e-5  # ridge of the inexact projection
  z_steps: int = 5  # CG steps [T], or gradient steps of gd
  warm_start: bool = False  # prox: start CG at stop_gradient(z_prev)
  rho: float = 0.25  # initial penalty, learned
  relaxation: float = 1.0
  balance: bool = False  # residual balancing of rho, per example
  sharing: Literal["global", "slot"] = "slot"  # one base map, or one per slot (directional on a grid)
  map_init: Literal["orthonormal", "soft_slice", "identity"] = "orthonormal"
  lora_rank: int = 0
  lora_init: Literal["standard", "legacy"] = "standard"
  pool: Literal["max", "mean", "add", "symnorm", "average"] = "max"  # mpnn messages; cnn: max or average
  slot_aware: bool = False  # mpnn: pool per receiving slot
  window: int = 4  # last iterates that the loss averages [w]

  def __post_init__(self):
    for name in ("d_v", "d_e", "hidden", "decoder_hidden", "z_steps", "window"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
    for name in ("gamma", "epsilon", "lora_rank", "l1"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
    if self.rho <= 0:
      raise ValueError(f"rho must be positive, got {self.rho}")
    if not 0 < self.relaxation < 2:
      raise ValueError(f"relaxation must be in (0, 2), got {self.relaxation}")
    if self.map_init == "identity" and self.d_e != self.d_v:
      raise ValueError(f"map_init identity needs d_e = d_v, got {self.d_e} and {self.d_v}")


class Network(NamedTuple):
  """A network of agents as pure functions.

  init: key -> params.
  apply: (params, boards [B, H, W], graph, iterations, capacity, grad_steps) -> logits [W, B, N, ...] of the last
    iterates; `iterations` may be traced, `capacity` is the largest K to be differentiated (see `loop.iterate`).
  trace: (params, boards, graph, iterations) -> (logits [K, B, N, ...], Trace), every iteration; static K.
  """

  init: Callable[[jax.Array], Any]
  apply: Callable[..., jax.Array]
  trace: Callable[..., tuple[jax.Array, Any]] | None = None


class Trace(NamedTuple):
  """How a negotiation went, iteration by iteration."""

  x: jax.Array  # [K, B, N, d_v]
  z: jax.Array  # [K, B, N, d_v]
  primal: jax.Array  # [K, B, N]
  dual: jax.Array  # [K, B, N]
  disagreement: jax.Array  # [K, B, E] ‖(F z)_e‖ of each edge


def make_network(cfg: ModelConfig, task: Task) -> Network:
  """Builds the network of `cfg` for `task`.

  Raises:
    ValueError: when the stalk does not fit the task (Sudoku needs d_v divisible by the board side) or the maps.
  """
  if cfg.kind == "cnn":
    return _convolutional(cfg, task)
  simple = cfg.kind == "mpnn"
  heads = dict(
      d_v=cfg.d_v, d_e=cfg.d_e, slots=task.slots, objective="simple" if simple else cfg.objective,
      rank=0 if simple else cfg.lora_rank, lora_init=cfg.lora_init, curvature=cfg.curvature,
  )
  encoder = task.encoder(cfg.hidden, heads)
  decoder = task.decoder(cfg.decoder_hidden, simple)
  window = 1 if simple else cfg.window
  core = _mpnn_core(cfg, task) if simple else _sheaf_core(cfg, task)

  @jax.jit  # eager, every small operation would be compiled on its own
  def init(key):
    k_encoder, k_decoder, k_core = jax.random.split(key, 3)
    view = task.view(jnp.zeros((1, *task.board), jnp.uint8))
    encoder_params = encoder.init(k_encoder, view)
    encoding = encoder.apply(encoder_params, view)
    return {
        "encoder": encoder_params["params"],
        "decoder": decoder.init(k_decoder, view, encoding.h)["params"],
        "core": core.init(k_core, encoding.h, task.graph(task.board)),
    }

  def decode(params, view, x):
    view = jnp.broadcast_to(view, (*x.shape[:1], *view.shape))
    return decoder.apply({"params": params["decoder"]}, view, x)

  def start(params, boards, graph):
    view = task.view(boards)
    encoding = encoder.apply({"params": params["encoder"]}, view)
    problem, state = core.start(params["core"], encoding, graph)
    return view, problem, state

  def apply(params, boards, graph, iterations, capacity=0, grad_steps=None):
    view, problem, state = start(params, boards, graph)
    x = loop.iterate(
        lambda problem, state: core.step(problem, state)[0], problem, state, iterations,
        read=lambda state: state.x, window=window, capacity=capacity, grad_steps=grad_steps)
    return decode(params, view, x)

  def trace(params, boards, graph, iterations):
    view, problem, state = start(params, boards, graph)
    states, residuals = admm.history(lambda state: core.step(problem, state), state, iterations)
    edges = lambda z: jax.vmap(_disagreement, (problem.axes, 0))(problem, z)
    return decode(params, view, states.x), Trace(
        states.x, states.z, residuals.primal, residuals.dual, jax.lax.map(edges, states.z))

  return Network(init, apply, None if simple else trace)


def _convolutional(cfg: ModelConfig, task: Task) -> Network:
  """The image baseline in the same clothes: one agent that sees everything and does not iterate."""
  net = cnn.CNN(cfg.d_v, cfg.pool)

  def apply(params, boards, graph, iterations, capacity=0, grad_steps=None):
    del graph, iterations, capacity, grad_steps
    return net.apply({"params": params}, boards)[None, :, None]

  return Network(lambda key: net.init(key, jnp.zeros((1, *task.board)))["params"], apply)


class _Core(NamedTuple):
  init: Callable  # (key, h, graph) -> params
  start: Callable  # (params, encoding, graph) -> (problem, state), batched
  step: Callable  # (problem, state) -> (state, residuals), batched


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
  """What a batch of agents negotiates about: constant over the iterations."""

  graph: Graph  # [N, S, D] neighbours, or [B, N, S, D] when examples lost different agents
  maps: RestrictionMaps  # shared, or with a leading B
  objective: x_update.Diagonal  # fields [B, N, d_v]
  rate: jax.Array | None = None  # [] step size of the gradient ablation

  @property
  def axes(self) -> Problem:
    """Which leaves carry the batch axis, for `jax.vmap`."""
    base = None if self.maps.base.ndim == 3 else 0
    factors = None if self.maps.a is None else 0
    graph = Graph(None, None, None if self.graph.neighbours.ndim == 3 else 0)
    return Problem(graph, RestrictionMaps(base, factors, factors), 0, None)


def _disagreement(problem: Problem, z: jax.Array) -> jax.Array:
  return jnp.linalg.norm(sheaf.coboundary(problem.graph, problem.maps, z), axis=-1)


def _sheaf_core(cfg: ModelConfig, task: Task) -> _Core:
  def init(key, h, graph):
    del h, graph
    params = {"rho": jnp.zeros(())}
    if cfg.map_init != "identity":
      slots = task.slots if cfg.sharing == "slot" else 1
      params["maps"] = maps_lib.init_base(key, slots, cfg.d_e, cfg.d_v, cfg.map_init)
    if cfg.z_update == "gd":
      params["rate"] = jnp.zeros(())
    return params

  jax.eval_shape(lambda key: init(key, None, None), jax.random.key(0))  # refuses maps that do not fit the stalk

  def start(params, encoding, graph):
    rate = jax.nn.softplus(params["rate"] + softplus_inverse(0.05)) if cfg.z_update == "gd" else None
    problem = Problem(graph, _maps(cfg, params, encoding), _objective(cfg, encoding), rate)
    rho = jax.nn.softplus(params["rho"] + softplus_inverse(cfg.rho))
    return problem, jax.vmap(admm.init, (0, None))(encoding.h, rho)

  def one_step(problem, state):
    laplacian = lambda z: sheaf.laplacian(problem.graph, problem.maps, z)
    state, residuals = admm.step(state, problem.objective, _z_update(cfg, laplacian, problem.rate), cfg.relaxation)
    return (admm.balance(state, residuals) if cfg.balance else state), residuals

  return _Core(init, start, lambda problem, state: jax.vmap(one_step, (problem.axes, 0))(problem, state))


def _maps(cfg: ModelConfig, params, encoding) -> RestrictionMaps:
  if cfg.map_init == "identity":
    base = maps_lib.init_base(None, 1, cfg.d_e, cfg.d_v, "identity")
  else:
    base = params["maps"]
  return RestrictionMaps(base) if encoding.a is None else maps_lib.modulate(base, encoding.a, encoding.b)


def _objective(cfg: ModelConfig, encoding) -> x_update.Diagonal:
  ones = jnp.ones_like(encoding.h)
  if cfg.objective == "l1box_diag":
    return x_update.Diagonal(encoding.q_diag, encoding.q, encoding.l1, 0.0 * ones, encoding.upper)
  if cfg.objective == "lasso":
    return x_update.Diagonal(encoding.q_diag, encoding.q, cfg.l1 * ones, -jnp.inf * ones, jnp.inf * ones)
  return x_update.Diagonal(encoding.q_diag, encoding.q, 0.0 * ones, 0.0 * ones, jnp.inf * ones)


def _z_update(cfg: ModelConfig, laplacian, rate) -> admm.ZUpdate:
  if cfg.z_update == "project":
    return lambda w, z, rho: z_update.project_cg(laplacian, w, z, rho, epsilon=cfg.epsilon, steps=cfg.z_steps)
  if cfg.z_update == "prox":
    return lambda w, z, rho: z_update.prox_cg(
        laplacian, w, z, rho, gamma=cfg.gamma, steps=cfg.z_steps, warm=cfg.warm_start)
  return lambda w, z, rho: z_update.prox_gd(laplacian, w, z, rho, gamma=cfg.gamma, steps=cfg.z_steps, rate=rate)


class _Hidden(NamedTuple):
  x: jax.Array  # [B, N, H]


def _mpnn_core(cfg: ModelConfig, task: Task) -> _Core:
  types = task.slots if cfg.sharing == "slot" else 1
  layer = mpnn.Round(cfg.d_v, cfg.d_e, types, cfg.pool, cfg.slot_aware)

  def init(key, h, graph):
    return {"round": layer.init(key, h, h, graph)["params"], "beta": jnp.zeros(())}

  def step(problem, state):
    params, context, graph = problem
    return _Hidden(layer.apply({"params": params}, state.x, context, graph)), None

  return _Core(init, lambda params, encoding, graph: ((params["round"], encoding.h, graph), _Hidden(encoding.h)), step)
