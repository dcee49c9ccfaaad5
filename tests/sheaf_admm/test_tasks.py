"""Tasks: losses that count the right cells, merged predictions and scores by hand."""

import jax
import numpy as np
import pytest

from sakanajax.sheaf_admm import tasks, views
from tests.sheaf_admm import problems

WALL, EMPTY, START, GOAL, PATH = 1, 2, 3, 4, 5


def cross_entropy(logits, label):
  return np.log(np.exp(logits).sum()) - logits[label]


def test_maze_loss_counts_cells_on_the_board_only():
  task = tasks.maze((6, 6))  # agents at 1, 3, 5: the last ones look over the edge
  layout = views.patch_layout(6, 6, 3, 2)
  boards, labels = problems.mazes(2, size=(6, 6))
  logits = np.random.default_rng(0).normal(size=(2, 2, 9, 9, 6)).astype(np.float32)
  want = np.mean([
      cross_entropy(logits[w, b, n, p].astype(np.float64), labels[b].ravel()[layout.cells[n, p]])
      for w in range(2) for b in range(2) for n in range(9) for p in range(9) if layout.inside[n, p]
  ])
  value, gradient = jax.jit(jax.value_and_grad(lambda l: task.loss(l, boards, labels)))(logits)
  assert float(value) == pytest.approx(want, rel=1e-5)
  assert not np.any(np.asarray(gradient)[:, :, ~layout.inside]) and (np.abs(gradient).sum(-1)[:, :, layout.inside] > 0).all()


def test_a_maze_is_solved_by_its_path_alone():
  label = [[1] * 5, [1, START, PATH, PATH, 1], [1, 1, 1, PATH, 1], [1, EMPTY, 1, GOAL, 1], [1] * 5]
  label = np.tile(np.array(label, np.uint8), (4, 1, 1))
  prediction = label.copy()
  prediction[1][(prediction[1] == START) | (prediction[1] == GOAL)] = EMPTY  # cells off the path are not compared
  prediction[2, 2, 3] = EMPTY  # a gap
  prediction[3, 3, 1] = PATH  # a detour
  scores = tasks.as_numpy(tasks.maze((5, 5)).score(prediction, label, label))
  np.testing.assert_array_equal(scores["solved"], [1, 1, 0, 0])
  np.testing.assert_allclose(scores["cell_acc"], [1, 23 / 25, 24 / 25, 24 / 25])
  assert scores["solved"].dtype == np.float32


def test_mazes_merge_logits_where_patches_overlap():
  task, layout = tasks.maze((5, 5)), views.patch_layout(5, 5, 3, 2)
  logits = np.zeros((1, 4, 9, 6), np.float32)
  logits[..., WALL] = 1.0
  middle = [np.flatnonzero(layout.cells[n] == 12)[0] for n in range(4)]  # all four agents see the middle
  logits[0, 0, middle[0], PATH] = 9.0  # one is sure, three are not: the mean of PATH wins 9 / 4 to 1
  prediction = np.asarray(jax.jit(lambda logits: task.predict(logits, (5, 5)))(logits))
  assert prediction.shape == (1, 5, 5) and prediction[0, 2, 2] == PATH and (prediction != WALL).sum() == 1


def test_walls_stand_outside_a_maze():
  view = np.asarray(jax.jit(tasks.maze((6, 6)).view)(np.full((1, 6, 6), EMPTY, np.uint8))).reshape(9, 9, 6)
  inside = views.patch_layout(6, 6, 3, 2).inside
  assert (view[inside].argmax(-1) == EMPTY).all() and (view[~inside].argmax(-1) == WALL).all() and (view.sum(-1) == 1).all()


def test_sudoku_scores_by_hand():
  label = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]], np.uint8)
  puzzle = label.copy()
  puzzle[0, :3] = 0
  full = label.copy()
  predictions = np.stack([label, label, label, label])
  predictions[1, 0, 0] = 4  # an empty cell wrong
  predictions[2, 3, 3] = 2  # a given wrong: not solved, completion unharmed
  inputs = np.stack([puzzle, puzzle, puzzle, full])
  scores = tasks.sudoku((2, 2)).score(predictions, inputs, np.stack([label] * 4))
  np.testing.assert_array_equal(scores["solved"], [1, 0, 0, 1])
  np.testing.assert_allclose(scores["cell_acc"], [1, 15 / 16, 15 / 16, 1])
  np.testing.assert_allclose(scores["empty_acc"], [1, 2 / 3, 1, 0])  # nothing to fill: 0 of 0 counts as none


def test_sudoku_loss_is_the_mean_over_all_views():
  task, layout = tasks.sudoku((2, 2)), views.sudoku_layout((2, 2))
  rng = np.random.default_rng(1)
  labels = rng.integers(1, 5, (2, 4, 4))
  logits = rng.normal(size=(1, 2, 12, 4, 5)).astype(np.float32)
  want = np.mean([
      cross_entropy(logits[0, b, n, p].astype(np.float64), labels[b].ravel()[layout.cells[n, p]])
      for b in range(2) for n in range(12) for p in range(4)
  ])
  assert float(jax.jit(task.loss)(logits, np.zeros_like(labels), labels)) == pytest.approx(want, rel=1e-5)
  merged = np.zeros((2, 16, 5))
  for cell in range(16):
    merged[:, cell] = logits[0][:, layout.cells == cell].mean(1)
  predict = jax.jit(lambda logits: task.predict(logits, (4, 4)))
  np.testing.assert_array_equal(predict(logits[0]), merged.argmax(-1).reshape(2, 4, 4))


def test_digits_average_probabilities_not_logits():
  task = tasks.digits((9, 9))
  logits = np.zeros((1, 9, 10), np.float32)
  logits[0, :2, 3] = 50.0  # two are certain of 3: 2 / 9 of the votes, 100 / 9 of the logits
  logits[0, 2:, 7] = 3.0  # seven lean to 7
  assert logits[0].mean(0).argmax() == 3 and jax.jit(lambda l: task.predict(l, (9, 9)))(logits).tolist() == [7]
  labels = np.array([7])
  want = np.mean([cross_entropy(row.astype(np.float64), 7) for row in logits[0]])
  assert float(jax.jit(task.loss)(logits[None], None, labels)) == pytest.approx(want, rel=1e-5)
  assert task.score(np.array([7, 3]), None, np.array([7, 7]))["acc"].tolist() == [True, False]
