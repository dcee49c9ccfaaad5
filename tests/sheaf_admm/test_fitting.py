"""Fitting and measuring: batches of a step, means over examples, and agents that have left."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.core.train import TrainConfig
from sakanajax.sheaf_admm import fitting
from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm.config import Config, Evaluation, Iterations
from tests.sheaf_admm import problems
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

TRAIN = TrainConfig(steps=2, batch_size=4, lr=1e-2, log_every=1)


def config(task="maze", **changes):
  data = {
      "maze": {"splits": {"train": dict(n=8, size=(5, 5), min_path=2, seed=0)}},
      "sudoku": {"box": (2, 2), "splits": {"train": dict(n=8, givens=(6, 9), seed=0, part="train")}},
      "mnist": {"source": "synthetic"},
  }[task]
  return Config(task=task, scale="smoke", seeds=(0,), arms=("sheaf",), data=data, model=problems.TINY, train=TRAIN,
                iterations=Iterations((1, 3), eval=3, far=5), evaluation=Evaluation(batch=3), **changes)


def numbered(count=10, size=(5, 5)):
  """Boards all different, labels that can be told from them."""
  inputs = np.arange(count * size[0] * size[1]).reshape(count, *size) % 251
  return {"inputs": inputs.astype(np.uint8), "labels": (inputs + 1).astype(np.uint8)}


@pytest.mark.parametrize("augment", ["none", "dihedral"])
def test_batches_depend_on_the_step_alone(augment):
  arrays, cfg = numbered(), config(augment=augment)
  batch = fitting.batches(cfg, arrays, seed=3)
  late = batch(7)
  for step in range(3):
    batch(step)
  again, other = fitting.batches(cfg, arrays, seed=3)(7), fitting.batches(cfg, arrays, seed=4)(7)
  for key in ("inputs", "labels"):
    np.testing.assert_array_equal(late[key], again[key])
  assert (late["inputs"] != other["inputs"]).any() and late["inputs"].shape == (4, 5, 5)
  np.testing.assert_array_equal(late["labels"], late["inputs"] + 1)  # moved together
  drawn = np.concatenate([fitting.batches(cfg, arrays, 3)(step)["inputs"] for step in range(5)]).reshape(20, -1)
  known = {tuple(sorted(board.ravel())) for board in arrays["inputs"]}
  assert {tuple(sorted(board)) for board in drawn} == known  # two epochs: every board, turned or not
  plain = {tuple(board.ravel()) for board in arrays["inputs"]}
  assert all(tuple(board) in plain for board in drawn) == (augment == "none")


def test_sudokus_are_augmented_by_all_their_symmetries():
  from sakanajax.sheaf_admm.data import sudoku

  made = sudoku.splits((2, 2), {"train": sudoku.Split(8, (6, 9), 0, "train")})["train"]
  batch = fitting.batches(config("sudoku", augment="full"), made, 0)(1)
  assert (batch["inputs"] != 0).any() and (batch["labels"] != 0).all()
  given = batch["inputs"] != 0
  np.testing.assert_array_equal(batch["inputs"][given], batch["labels"][given])
  for board in batch["labels"]:
    groups = [*board, *board.T, *board.reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)]
    assert all(sorted(group) == [1, 2, 3, 4] for group in groups)


def test_digits_are_read_as_numbers_from_zero_to_one():
  images = np.array([[[0, 51, 255]]], np.uint8)
  np.testing.assert_allclose(fitting.as_inputs(config("mnist"), images), [[[0, 0.2, 1.0]]])
  assert fitting.as_inputs(config(), images) is images


def test_training_set_joins_all_training_splits():
  splits = {"train": numbered(3), "train_long": numbered(2), "test": numbered(4)}
  want = np.concatenate([splits["train"]["labels"], splits["train_long"]["labels"]])
  np.testing.assert_array_equal(fitting.training_set(splits)["labels"], want)


@pytest.fixture(scope="module")
def maze():
  """(cfg, task, network, params) of a tiny maze network."""
  cfg = config()
  task, network = fitting.network_of(cfg)
  return cfg, task, network, problems.random_weights(network)


def test_loss_draws_the_number_of_iterations(maze):
  """The loss of a key is that of the K which the key draws."""
  cfg, task, network, params = maze
  inputs, labels = problems.mazes(4)
  loss = fitting.loss_fn(cfg, task, network)
  value_of = jax.jit(lambda p, key: loss(p, {"inputs": inputs, "labels": labels}, key)[0])
  graph, drawn = task.graph(task.board), set()
  at = jax.jit(lambda k: task.loss(network.apply(params, inputs, graph, k), inputs, labels))
  of_k = {k: float(at(k)) for k in range(4)}
  for seed in range(12):
    value = float(value_of(params, jax.random.key(seed)))
    drawn.add(min(of_k, key=lambda k: abs(of_k[k] - value)))
    assert min(abs(v - value) for v in of_k.values()) < 1e-5
  assert drawn == {1, 2, 3}


def test_training_without_iterations_moves_encoder_and_decoder_only(maze):
  cfg, task, network, params = maze
  loss = fitting.loss_fn(dataclasses.replace(cfg, iterations=Iterations((0, 0))), task, network)
  inputs, labels = problems.mazes(4)
  gradient = jax.jit(jax.grad(lambda p: loss(p, {"inputs": inputs, "labels": labels}, jax.random.key(0))[0]))(params)
  assert np.any(gradient["decoder"]["Dense_0"]["kernel"]) and np.any(gradient["encoder"]["h"]["kernel"])
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient["core"]))


def test_means_weigh_a_short_last_batch_rightly(maze):
  """Seven examples in batches of three."""
  cfg, task, network, params = maze
  inputs, labels = problems.mazes(7)
  got = fitting.Evaluator(cfg)(params, inputs, labels, 3)

  @jax.jit
  def by_hand(params):
    logits = network.apply(params, inputs, task.graph(task.board), 3)[-1]
    loss = jnp.stack([task.loss(logits[None, i : i + 1], inputs[i : i + 1], labels[i : i + 1]) for i in range(7)])
    return {"loss": loss} | task.score(task.predict(logits, (5, 5)), inputs, labels)

  want = {name: float(np.mean(np.asarray(values, np.float64))) for name, values in by_hand(params).items()}
  assert got == pytest.approx(want, abs=1e-5)


def test_one_compilation_serves_every_number_of_iterations(maze):
  cfg, _, _, params = maze
  evaluator = fitting.Evaluator(cfg)
  inputs, labels = problems.mazes(3)
  losses = [evaluator(params, inputs, labels, k)["loss"] for k in (1, 4, 30)]
  assert evaluator._run._cache_size() == 1 and len(set(losses)) == 3


def test_agents_that_left_have_no_influence_and_no_vote():
  """Digits: what a removed agent sees, and what it would have said, changes nothing for the others."""
  cfg = config("mnist")
  cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, z_update="project", objective="lasso"))
  task, network = fitting.network_of(cfg)
  params = problems.random_weights(network)
  rng = np.random.default_rng(1)
  stays = rng.random((8, 81)) > 0.7
  gone = np.repeat(np.repeat((~stays).reshape(8, 9, 9), 3, 1), 3, 2)  # patches do not overlap: 27 x 27 pixels
  mask = np.pad(gone, ((0, 0), (0, 1), (0, 1)))
  images = (0.2 * rng.random(mask.shape) + 4.0 * mask).astype(np.float32)  # many leave, and they alone saw glaring light

  noisy = np.where(mask, rng.random(images.shape), images).astype(np.float32)

  def say(image, stay):
    """Logits of all agents."""
    return network.apply(params, image[None], graph_lib.drop_agents(task.graph(task.board), ~stay), 3)[-1, 0]

  heard = jax.jit(jax.vmap(say))
  logits, others = (np.asarray(heard(seen, stays)) for seen in (images, noisy))
  np.testing.assert_allclose(others[stays], logits[stays], atol=1e-6)
  assert np.abs(others[~stays] - logits[~stays]).max() > 0.1

  evaluator = fitting.Evaluator(cfg)
  probabilities = np.asarray(jax.nn.softmax(logits))
  vote = np.stack([p[s].sum(0) for p, s in zip(probabilities, stays)]).argmax(-1)
  everybody = probabilities.mean(1).argmax(-1)
  assert evaluator(params, images, vote, 3, stays)["acc"] == 1.0  # the majority of those who stay
  assert (vote != everybody).all()  # so their votes would have mattered
  assert evaluator(params, noisy, vote, 3, stays)["acc"] == 1.0


class Spy:
  """An evaluator that notes what it is asked, and scores by the number of its inputs."""

  def __init__(self):
    self.asked = []

  def agents(self, size):
    return (size[0] // 3) * (size[1] // 3)

  def __call__(self, params, inputs, labels, iterations, stays=None):
    assert len(inputs) == len(labels) and (stays is None or len(stays) == len(inputs))
    self.asked.append((inputs.shape, iterations))
    return {"acc": float(len(inputs))}


@pytest.mark.parametrize("far_examples,beyond", [(0, 4), (2, 2)])
def test_larger_boards_have_their_own_iterations_and_examples(far_examples, beyond):
  cfg = config()
  cfg = dataclasses.replace(cfg, evaluation=Evaluation(batch=3, examples=4, far_examples=far_examples))
  splits = {"train": numbered(8), "train_long": numbered(8), "test": numbered(6), "2x": numbered(6, (9, 9))}
  spy = Spy()
  scores = fitting.measure(cfg, None, splits, spy)
  assert spy.asked == [((4, 5, 5), 3), ((beyond, 9, 9), 5)]
  assert scores == {"acc_test": 4.0, "acc_2x": float(beyond)}


def test_digits_are_measured_on_canvases_under_noise_and_with_agents_missing():
  rng = np.random.default_rng(0)
  images = {"inputs": rng.integers(256, size=(6, 28, 28)).astype(np.uint8), "labels": np.arange(6)}
  evaluation = Evaluation(batch=3, examples=5, far_examples=2, pads=(4,), noises=(0.1,), drops=(0.3,))
  cfg, spy = dataclasses.replace(config("mnist"), evaluation=evaluation), Spy()
  scores = fitting.measure(cfg, None, {"train": images, "test": images}, spy)
  near, far = ((5, 28, 28), 3), ((2, 36, 36), 5)
  assert spy.asked == [near, far, near, near, near]
  assert scores == {"acc_clean": 5, "acc_pad4": 2, "acc_noise0.1": 5, "acc_drop30": 5, "acc_drop30_removed": 5}
