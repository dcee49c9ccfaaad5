"""Mazes: perfect, solved by their unique path, apart by symmetry class, the same on disk, clear about bad input."""

import numpy as np
import pytest

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import data
from sakanajax.sheaf_admm.data import maze, symmetry

SIZES = [((11, 11), 10), ((5, 13), 4), ((23, 23), 20)]


def orbit(grid):
  """All symmetric copies of one grid that keep its shape, by numpy alone."""
  turned = [np.rot90(g, k) for g in (grid, grid.T) for k in range(4)]
  return {g.tobytes() for g in turned if g.shape == grid.shape}


@pytest.mark.parametrize("size,min_path", SIZES)
def test_mazes_are_perfect(size, min_path):
  made = maze.generate(40, size, min_path, seed=3)
  inputs = made["inputs"]
  assert inputs.shape == (40, *size) and inputs.dtype == np.uint8
  opened = inputs != maze.WALL
  assert opened[:, 1::2, 1::2].all(), "every room is open"
  assert not opened[:, ::2, ::2].any() and not opened[:, [0, -1]].any() and not opened[:, :, [0, -1]].any()
  rooms = (size[0] // 2) * (size[1] // 2)
  passages = opened[:, 1::2, ::2].sum((1, 2)) + opened[:, ::2, 1::2].sum((1, 2))
  np.testing.assert_array_equal(passages, rooms - 1)  # with connectedness below: a spanning tree
  for grid in inputs:
    flooded = (grid == maze.START).copy()
    for _ in range(grid.size):
      wider = flooded.copy()
      for axis in (0, 1):
        for shift in (1, -1):
          wider |= np.roll(flooded, shift, axis)
      wider &= grid != maze.WALL
      if (wider == flooded).all():
        break
      flooded = wider
    np.testing.assert_array_equal(flooded, grid != maze.WALL)


@pytest.mark.parametrize("size,min_path", SIZES)
def test_label_is_the_breadth_first_path(size, min_path):
  made = maze.generate(25, size, min_path, seed=4)
  for grid, label in zip(made["inputs"], made["labels"]):
    np.testing.assert_array_equal(maze.solve(maze.validate(grid)), label)
    length = int((label == maze.PATH).sum()) + 1
    assert length == maze.path_length(grid) >= min_path
    assert (label[grid == maze.START] == maze.START).all() and (label[grid == maze.GOAL] == maze.GOAL).all()
    np.testing.assert_array_equal(label[label != maze.PATH], grid[label != maze.PATH])


def test_start_and_goal_use_all_open_cells_in_both_orders():
  inputs = maze.generate(3000, (9, 9), 1, seed=0)["inputs"]
  start, goal = ((inputs == v).sum(0) for v in (maze.START, maze.GOAL))
  assert (start[1::2, 1::2] > 0).all() and (goal[1::2, 1::2] > 0).all()
  assert start[1::2, 2].sum() > 0 and start[2, 1::2].sum() > 0, "passages too, not only rooms"
  position = np.arange(81).reshape(9, 9)
  first = ((inputs == maze.START) * position).sum((1, 2)) < ((inputs == maze.GOAL) * position).sum((1, 2))
  assert 0.45 < first.mean() < 0.55


def test_every_direction_is_carved_equally_often():
  opened = maze.generate(2000, (11, 11), 1, seed=1)["inputs"] != maze.WALL
  counts = opened.mean(0)
  np.testing.assert_allclose(counts, counts.T, atol=0.06)
  np.testing.assert_allclose(counts, counts[::-1], atol=0.06)


def test_deterministic_by_seed():
  one, two = (maze.generate(30, (11, 11), 10, seed=7) for _ in range(2))
  np.testing.assert_array_equal(one["inputs"], two["inputs"])
  np.testing.assert_array_equal(one["labels"], two["labels"])
  other = maze.generate(30, (11, 11), 10, seed=8)["inputs"]
  assert not (other == one["inputs"]).all((1, 2)).any()


def test_class_keys_are_equal_exactly_for_symmetric_mazes():
  for size in ((7, 7), (5, 9)):
    grids = maze.generate(60, size, 2, seed=5)["inputs"]
    keys = symmetry.class_keys(grids)
    for k in range(symmetry.order(size)):
      np.testing.assert_array_equal(symmetry.class_keys(np.ascontiguousarray(symmetry.transform(grids, k))), keys)
    orbits = [orbit(grid) for grid in grids]
    for i in range(len(grids)):
      for j in range(i):
        assert (keys[i] == keys[j]) == bool(orbits[i] & orbits[j])


def test_transform_is_the_whole_group():
  square, wide = np.arange(9).reshape(3, 3), np.arange(6).reshape(2, 3)
  assert {symmetry.transform(square, k).tobytes() for k in range(8)} == orbit(square)
  assert {np.ascontiguousarray(symmetry.transform(wide, k)).tobytes() for k in range(4)} == orbit(wide)
  np.testing.assert_array_equal(symmetry.transform(square, 0), square)
  with pytest.raises(ValueError, match="symmetry 4 outside 0..3"):
    symmetry.transform(wide, 4)


def test_splits_share_no_maze_up_to_symmetry():
  # There are so few of these mazes that a split by equality alone would leak.
  table = {
      "train": maze.Split(120, (5, 7), 2, 0),
      "val": maze.Split(50, (5, 7), 2, 0),  # the same seed: only the exclusion keeps it apart
      "test": maze.Split(50, (5, 7), 2, 1000),
      "2x": maze.Split(20, (7, 7), 3, 0),
  }
  made = maze.splits(table)
  seen = set()
  for name in table:
    for grid in made[name]["inputs"]:
      mine = orbit(grid)
      assert not mine & seen, f"{name} holds a twin of an earlier maze"
      seen |= mine
  turned = maze.splits(dict(reversed(table.items())))
  for name in table:
    np.testing.assert_array_equal(turned[name]["inputs"], made[name]["inputs"])


def test_dihedral_keeps_the_label_right():
  made = maze.generate(16, (11, 11), 10, seed=2)
  for index in range(8):
    inputs, labels = symmetry.dihedral(made["inputs"], made["labels"], index)
    for grid, label in zip(inputs[:3], labels[:3]):
      np.testing.assert_array_equal(maze.solve(grid), label)
  each = np.arange(16) % 8
  inputs, labels = symmetry.dihedral(made["inputs"], made["labels"], each)
  for i in range(16):
    np.testing.assert_array_equal(inputs[i], symmetry.transform(made["inputs"][i], each[i]))
    np.testing.assert_array_equal(labels[i], symmetry.transform(made["labels"][i], each[i]))


def test_published_table():
  paper = maze.SPLITS["paper"]
  assert {k: (s.size, s.min_path, s.seed) for k, s in paper.items() if k != "val"} == {
      "train": ((19, 19), 18, 0), "test": ((19, 19), 18, 1000), "1_5x": ((29, 29), 42, 2000),
      "2x": ((37, 37), 36, 3500), "2x_long": ((37, 37), 54, 3600), "2xW": ((19, 37), 35, 3000),
      "4xW": ((19, 73), 69, 4000), "4x": ((73, 73), 72, 5000), "4x_long": ((73, 73), 109, 6000),
  }  # fmt: skip
  made = maze.generate(2, (73, 73), 109, seed=6000)
  assert [maze.path_length(grid) >= 109 for grid in made["inputs"]] == [True, True]


def test_text_round_trip():
  made = maze.generate(3, (7, 11), 5, seed=0)
  for grid, label in zip(made["inputs"], made["labels"]):
    np.testing.assert_array_equal(maze.parse_maze(maze.render(grid)), grid)
    np.testing.assert_array_equal(maze.parse_maze(maze.render(label)), grid)  # path marks are read as empty
    digits = "\n".join("".join(map(str, row)) for row in label.tolist())
    np.testing.assert_array_equal(maze.parse_maze("\r\n".join(digits.split("\n")) + "\n\n"), grid)
  assert maze.render(maze.solve(maze.parse_maze("#####\n#S.G#\n#####"))) == "#####\n#S*G#\n#####"


@pytest.mark.parametrize("text,words", [
    ("", "the text is empty"),
    ("#####\n#S G#\n####", "row 3 has 4 characters but row 1 has 5"),
    ("#####\n#SxG#\n#####", "row 2, column 3 holds 'x'"),
    ("#####\n#S0G#\n#####", "row 2, column 3 holds '0'"),
    ("#####\n#S G#\n#   #\n#####", "height 4 of a 4x5 maze is not an odd number"),
    ("######\n#S  G#\n######", "width 6 of a 3x6 maze is not an odd number"),
    ("#####\n#S G \n#####", "row 2, column 5 on the border is open"),
    ("#####\n#   #\n#####", "found 0 start cells; mark exactly one with 'S'"),
    ("#####\n#S S#\n#####", "found 2 start cells, the second at row 2, column 4"),
    ("#####\n#S  #\n#####", "found 0 goal cells; mark exactly one with 'G'"),
    ("#####\n#S#G#\n#####", "the goal at row 2, column 4 cannot be reached from the start at row 2, column 2"),
])  # fmt: skip
def test_bad_text(text, words):
  with pytest.raises(UserError) as error:
    maze.parse_maze(text)
  assert words in str(error.value) and "\n" not in str(error.value) and str(error.value).startswith("maze:")


def test_bad_grids():
  with pytest.raises(UserError, match="expected a 2-d integer grid"):
    maze.validate(np.zeros((3, 5, 1), np.uint8))
  grid = maze.parse_maze("#####\n#S G#\n#####")
  grid[1, 2] = 9
  with pytest.raises(UserError, match="row 2, column 3 holds 9"):
    maze.validate(grid)


@pytest.mark.parametrize("args,words", [
    ((5, (12, 11), 10, 0), "height 12 in size \\(12, 11\\) must be odd and at least 3; try 13"),
    ((5, (11, 1), 10, 0), "width 1 in size .* try 3"),
    ((5, (3, 3), 1, 0), "single open cell"),
    ((5, (5, 5), 7, 0), "min_path 7 must lie in 1..6"),
    ((-1, (5, 5), 3, 0), "n -1 must not be negative"),
    ((500, (5, 5), 6, 0), "found only [0-9]+ of 500 different 5x5 mazes with min_path 6"),
])  # fmt: skip
def test_bad_requests(args, words):
  with pytest.raises(UserError, match=words):
    maze.generate(*args)


def test_none_asked_for():
  assert maze.generate(0, (5, 5), 3, 0)["inputs"].shape == (0, 5, 5)


def test_tfds_round_trip(tmp_path):
  table = {
      "train": maze.Split(50, (7, 7), 4, 0),
      "test": maze.Split(10, (7, 7), 4, 1000),
      "2xW": maze.Split(5, (7, 13), 6, 3000),
  }
  config, made = data.MazeData(table), maze.splits(table)
  for _ in range(2):  # generated, then read
    loaded = data.load(config, tmp_path)
    assert list(loaded) == list(table)
    for name in table:
      for key in ("inputs", "labels"):
        assert loaded[name][key].dtype == np.uint8
        np.testing.assert_array_equal(loaded[name][key], made[name][key])
  prepared = [p.name for p in (tmp_path / "sheaf_maze").iterdir()]
  assert sorted(name.split("-")[0] for name in prepared) == ["7x13", "7x7"]
  assert list((tmp_path / "sheaf_maze").glob("*/*/*.array_record*"))


def test_config_from_a_plain_mapping():
  from sakanajax.core.config import from_config

  config = from_config(
      data.MazeData, {"splits": {"train": {"n": 5, "size": [11, 11], "min_path": 10, "seed": 0}}}
  )
  assert config.splits["train"] == maze.Split(5, (11, 11), 10, 0)
  with pytest.raises(UserError, match="split name 'a.b'"):
    from_config(data.MazeData, {"splits": {"a.b": {"n": 5, "size": [11, 11], "min_path": 10, "seed": 0}}})
