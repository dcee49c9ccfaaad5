"""Views and merging against loops over agents and cells."""

import jax
import numpy as np
import pytest

from sakanajax.sheaf_admm import graph as graph_lib
from sakanajax.sheaf_admm import views

SIZES = [(5, 5, 3, 2), (11, 7, 3, 2), (6, 8, 3, 2), (10, 10, 3, 3), (9, 9, 5, 2)]


def patches_by_hand(board, patch, stride, outside):
  """[N, P]: a padded board, cut out around every centre."""
  half = patch // 2
  padded = np.pad(board, half, constant_values=outside)
  return np.array([
      padded[r : r + patch, c : c + patch].ravel()
      for r in range(half, board.shape[0], stride) for c in range(half, board.shape[1], stride)
  ])


@pytest.mark.parametrize("height,width,patch,stride", SIZES)
def test_patches_are_cut_around_the_centres(height, width, patch, stride):
  boards = np.random.default_rng(0).integers(2, 6, (3, height, width)).astype(np.uint8)
  layout = views.patch_layout(height, width, patch, stride)
  got = jax.jit(lambda b: views.take(layout, b, 1))(boards)
  want = np.stack([patches_by_hand(board, patch, stride, 1) for board in boards])
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(layout.inside, want[0] != 1)  # ones stand outside only
  assert len(layout.cells) == graph_lib.grid_graph(height, width, patch, stride).num_agents


@pytest.mark.parametrize("height,width,patch,stride", SIZES)
def test_merging_is_the_mean_of_those_who_see_a_cell(height, width, patch, stride):
  layout = views.patch_layout(height, width, patch, stride)
  opinions = np.random.default_rng(1).normal(size=(2, *layout.cells.shape, 3)).astype(np.float32)
  want = np.zeros((2, height * width, 3))
  for cell in range(height * width):
    seen = layout.cells == cell
    if seen.any():
      want[:, cell] = opinions[:, seen].mean(1)
  np.testing.assert_allclose(jax.jit(lambda o: views.merge(layout, o))(opinions), want, atol=1e-6)


def test_a_maze_is_seen_whole_and_digits_are_not():
  assert set(views.patch_layout(19, 19, 3, 2).cells.ravel()) == set(range(361))
  seen = np.isin(np.arange(784), views.patch_layout(28, 28, 3, 3).cells).reshape(28, 28)
  assert seen[:27, :27].all() and not seen[27].any() and not seen[:, 27].any()


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 3)])
def test_sudoku_agents_see_rows_columns_and_boxes(box):
  size = box[0] * box[1]
  board = np.random.default_rng(2).permutation(size * size).reshape(1, size, size)
  got = np.asarray(views.take(views.sudoku_layout(box), board, 0))[0]
  blocks = [
      board[0, r : r + box[0], c : c + box[1]].ravel() for r in range(0, size, box[0]) for c in range(0, size, box[1])
  ]
  np.testing.assert_array_equal(got, np.concatenate([board[0], board[0].T, blocks]))


def test_what_all_agree_on_comes_back():
  layout = views.sudoku_layout((2, 2))
  board = np.random.default_rng(3).integers(0, 5, (2, 4, 4))
  opinions = jax.nn.one_hot(views.take(layout, board, 0), 5)
  np.testing.assert_array_equal(np.asarray(views.merge(layout, opinions)).argmax(-1).reshape(2, 4, 4), board)


@pytest.mark.parametrize("layout", [views.sudoku_layout((2, 2)), views.patch_layout(5, 5, 3, 2)], ids=["sudoku", "patch"])
def test_boards_of_another_size_are_refused(layout):
  with pytest.raises(ValueError, match=r"9x9 .* cells"):
    views.take(layout, np.zeros((1, 9, 9)), 0)
