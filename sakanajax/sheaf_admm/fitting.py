"""Training and measuring one arm: batches that depend on the step only, the loss, and every score of the tables.

Legend: B batch, K iterations, W window, N agents.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core import data as core_data
from sakanajax.core import mesh as mesh_lib
from sakanajax.core import train
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import model as model_lib
from sakanajax.sheaf_admm.config import Config, data_of, task_of
from sakanajax.sheaf_admm.data import digits, sudoku_symmetry, symmetry
from sakanajax.sheaf_admm.model import Network
from sakanajax.sheaf_admm.tasks import Task

Arrays = dict[str, np.ndarray]


def network_of(cfg: Config) -> tuple[Task, Network]:
  """The task and the network of an arm's config. Raises UserError when the model's sizes do not fit the task."""
  task = task_of(cfg)
  try:
    return task, model_lib.make_network(cfg.model, task)
  except ValueError as error:
    raise UserError(f"config.model: {error}") from error


def as_inputs(cfg: Config, boards: np.ndarray) -> np.ndarray:
  """Boards as the network reads them: digits in [0, 1], the others as they are."""
  return digits.to_float(boards) if cfg.kind == "mnist" else boards


def training_set(splits: dict[str, Arrays]) -> Arrays:
  """All splits whose name begins with "train", one after the other."""
  parts = [arrays for name, arrays in splits.items() if name.startswith("train")]
  return {key: np.concatenate([part[key] for part in parts]) for key in ("inputs", "labels")}


def batches(cfg: Config, arrays: Arrays, seed: int) -> Callable[[int], Arrays]:
  """step -> batch: shuffled epochs, with a random symmetry of each board when the config augments."""
  order = core_data.epoch_batches(len(arrays["labels"]), cfg.train.batch_size, seed)
  box = tuple(data_of(cfg).box) if cfg.kind == "sudoku" else None

  def batch(step: int) -> Arrays:
    rows = order(step)
    inputs, labels = arrays["inputs"][rows], arrays["labels"][rows]
    rng = np.random.default_rng((seed, step, 1))
    if cfg.augment == "dihedral":
      inputs, labels = symmetry.dihedral(inputs, labels, rng.integers(symmetry.order(inputs.shape), size=len(rows)))
    elif cfg.augment == "full":
      inputs, labels = sudoku_symmetry.augment(rng, inputs, labels, box)
    elif cfg.augment == "shift":
      inputs = digits.shift(rng, inputs, 2)
    return {"inputs": as_inputs(cfg, inputs), "labels": labels}

  return batch


def loss_fn(cfg: Config, task: Task, network: Network) -> train.LossFn:
  """Cross-entropy of the last W iterates of all agents, with K drawn uniformly for the step."""
  graph = task.graph(task.board)
  low, high = cfg.iterations.train

  def loss(params, batch, key):
    iterations = jax.random.randint(key, (), low, high + 1)
    logits = network.apply(params, batch["inputs"], graph, iterations, high, cfg.iterations.grad or None)
    return task.loss(logits, batch["inputs"], batch["labels"]), {}

  return loss


def fit(cfg: Config, arrays: Arrays, *, seed: int, workdir, fingerprint: str = "", desc: str = "",
        tensorboard: bool = False) -> train.TrainState:
  """Trains the arm on `arrays` (inputs and labels), resuming from `workdir`; see `core.train.fit`."""
  task, network = network_of(cfg)
  mesh = mesh_lib.make_mesh(cfg.mesh) if cfg.mesh != mesh_lib.MeshConfig() or jax.process_count() > 1 else None
  return train.fit(
      loss_fn(cfg, task, network), network.init(jax.random.key(seed)), batches(cfg, arrays, seed), cfg.train,
      seed=seed, workdir=workdir, mesh=mesh, fingerprint=fingerprint, desc=desc, tensorboard=tensorboard)


class Evaluator:
  """Scores of params on boards; compiles once per board size and serves every K."""

  def __init__(self, cfg: Config):
    self._cfg = cfg
    self._task, self._network = network_of(cfg)
    self._graph = functools.cache(self._task.graph)
    self._run = jax.jit(self._scores, static_argnames=("size",))

  def agents(self, size: tuple[int, int]) -> int:
    """Returns how many agents share a board of this size."""
    return self._graph(tuple(size)).num_agents

  def _scores(self, params, inputs, labels, graph, iterations, stays, size):
    logits = self._network.apply(params, inputs, graph, iterations)
    scores = {"loss": jax.vmap(lambda l, x, y: self._task.loss(l[None, None], x[None], y[None]))(logits[-1], inputs, labels)}
    last = logits[-1]
    if stays is not None:  # those who left vote for nobody: even odds
      last = jnp.where(stays[..., None], last, 0.0)
    return scores | self._task.score(self._task.predict(last, size), inputs, labels)

  def __call__(self, params: Any, inputs: np.ndarray, labels: np.ndarray, iterations: int,
               stays: np.ndarray | None = None) -> dict[str, float]:
    """Mean scores over all examples.

    Args:
      params: of the network.
      inputs: `[n, H, W]` as the network reads them.
      labels: `[n, H, W]` or `[n]`.
      iterations: K.
      stays: `[n, N]` bool, agents that take part; the others lose their edges and their vote.
    """
    size = tuple(inputs.shape[1:])
    graph = self._graph(size)
    batch = min(self._cfg.evaluation.batch, len(inputs))
    totals: dict[str, float] = {}
    for first in range(0, len(inputs), batch):
      rows = np.minimum(np.arange(first, first + batch), len(inputs) - 1)  # the last batch is filled up ...
      present = None if stays is None else stays[rows]
      where = graph if stays is None else _without(graph, ~present)
      scores = self._run(params, inputs[rows], labels[rows], where, jnp.int32(iterations), present, size=size)
      count = min(batch, len(inputs) - first)  # ... and its surplus not counted
      for name, values in jax.device_get(scores).items():
        totals[name] = totals.get(name, 0.0) + float(np.sum(values[:count], dtype=np.float64))
    return {name: total / len(inputs) for name, total in totals.items()}


def _without(graph: graph_lib.Graph, dropped: np.ndarray) -> graph_lib.Graph:
  cut = jax.vmap(lambda gone: graph_lib.drop_agents(graph, gone).neighbours)(jnp.asarray(dropped))
  return graph_lib.Graph(graph.edges, graph.slots, cut)


def measure(cfg: Config, params: Any, splits: dict[str, Arrays], evaluator: Evaluator) -> dict[str, float]:
  """Every score of the task's tables for one set of weights, as {metric: mean over examples}."""
  limit = cfg.evaluation.examples or None
  near, far = cfg.iterations.eval, cfg.iterations.far
  beyond = cfg.evaluation.far_examples or limit
  scores: dict[str, float] = {}
  for name, arrays in splits.items():
    if name.startswith("train"):
      continue
    home = arrays["inputs"].shape[1:] == splits["train"]["inputs"].shape[1:]
    count = limit if home else beyond
    inputs, labels = as_inputs(cfg, arrays["inputs"][:count]), arrays["labels"][:count]
    for key, value in evaluator(params, inputs, labels, near if home else far).items():
      scores[f"{key}_{name}"] = value
  if cfg.kind == "mnist" and "test" in splits:
    test = splits["test"]
    scores["acc_clean"] = scores.pop("acc_test")
    scores |= _corrupted(cfg, params, as_inputs(cfg, test["inputs"][:limit]), test["labels"][:limit], evaluator)
  return scores


def _corrupted(cfg, params, images, labels, evaluator) -> dict[str, float]:
  """Accuracy of a digit network on shifted canvases, under noise and with missing agents."""
  near, far, beyond = cfg.iterations.eval, cfg.iterations.far, cfg.evaluation.far_examples or None
  rng = np.random.default_rng(0)  # the same corruption for every model and seed
  agents = evaluator.agents(images.shape[1:])
  out = {}
  for pad in cfg.evaluation.pads:
    out[f"acc_pad{pad}"] = evaluator(params, digits.pad(images[:beyond], pad), labels[:beyond], far)["acc"]
  for sigma in cfg.evaluation.noises:
    out[f"acc_noise{sigma:g}"] = evaluator(params, digits.noise(rng, images, sigma), labels, near)["acc"]
  for share in cfg.evaluation.drops:
    stays = digits.drop_mask(rng, len(images), agents, share)
    black = digits.drop_pixels(images, stays, 3, 3)
    out[f"acc_drop{round(100 * share)}"] = evaluator(params, black, labels, near)["acc"]
    if cfg.model.kind == "sheaf":
      out[f"acc_drop{round(100 * share)}_removed"] = evaluator(params, black, labels, near, stays)["acc"]
  return out
