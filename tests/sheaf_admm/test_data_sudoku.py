"""Sudokus: one solution each, classes of solutions apart, symmetries that keep the rules, clear about bad input."""

import itertools
import math

import numpy as np
import pytest

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import data
from sakanajax.sheaf_admm.data import sudoku, sudoku_solver, sudoku_symmetry, symmetry

BOXES = [(2, 2), (2, 3), (3, 2), (3, 3)]
GIVENS = {(2, 2): (4, 7), (2, 3): (12, 20), (3, 2): (12, 20), (3, 3): (34, 50)}
EASY = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"


def valid(grid, box):
  """The rules, written down naively."""
  side, (h, w) = len(grid), box
  full = set(range(1, side + 1))
  corners = itertools.product(range(0, side, h), range(0, side, w))
  boxes = ([grid[r + i][c + j] for i in range(h) for j in range(w)] for r, c in corners)
  return all(set(unit) == full for unit in itertools.chain(grid, zip(*grid), boxes))


def all_solutions(puzzle, box, limit):
  """An independent solver: plain backtracking over the emptiest cell with sets."""
  side, (h, w) = len(puzzle), box
  grid, found = [list(map(int, row)) for row in puzzle], []

  def options(r, c):
    used = set(grid[r]) | {grid[i][c] for i in range(side)}
    top, left = r // h * h, c // w * w
    used |= {grid[i][j] for i in range(top, top + h) for j in range(left, left + w)}
    return [d for d in range(1, side + 1) if d not in used]

  def search():
    empty = [(options(r, c), r, c) for r in range(side) for c in range(side) if grid[r][c] == 0]
    if not empty:
      found.append([row[:] for row in grid])
      return
    choice, r, c = min(empty, key=lambda e: len(e[0]))
    for digit in choice:
      grid[r][c] = digit
      search()
      if len(found) >= limit:
        break
    grid[r][c] = 0

  search()
  return found


@pytest.mark.parametrize("box,n", [((2, 2), 60), ((2, 3), 40), ((3, 2), 10), ((3, 3), 12)])
def test_each_puzzle_has_exactly_its_solution(box, n):
  made = sudoku.generate(n, box, GIVENS[box], seed=1)
  side = box[0] * box[1]
  assert made["inputs"].shape == made["labels"].shape == (n, side, side)
  assert made["inputs"].dtype == made["labels"].dtype == np.uint8
  for puzzle, label in zip(made["inputs"], made["labels"]):
    assert valid(label.tolist(), box)
    assert all_solutions(puzzle, box, 2) == [label.tolist()]
  givens = (made["inputs"] > 0).sum((1, 2))
  assert givens.min() >= GIVENS[box][0] and givens.max() <= GIVENS[box][1]
  assert len({p.tobytes() for p in made["inputs"]}) == n


def test_givens_are_spread_over_the_range():
  givens = (sudoku.generate(600, (2, 3), (12, 20), seed=0)["inputs"] > 0).sum((1, 2))
  assert (np.bincount(givens)[12:21] > 30).all()


def test_deterministic_by_seed():
  one, two = (sudoku.generate(20, (2, 3), (12, 20), seed=5, part="val") for _ in range(2))
  np.testing.assert_array_equal(one["inputs"], two["inputs"])
  np.testing.assert_array_equal(one["labels"], two["labels"])
  other = sudoku.generate(20, (2, 3), (12, 20), seed=6, part="val")["inputs"]
  assert not (other == one["inputs"]).all((1, 2)).any()


def test_solver_counts_all_grids():
  empty = np.zeros((1, 4, 4), np.uint8)
  count, _ = sudoku_solver.completions(sudoku_solver.masks_of(empty), (2, 2), limit=1000)
  assert count[0] == 288
  first_row = np.zeros((1, 6, 6), np.uint8)
  first_row[0, 0] = range(1, 7)
  count, _ = sudoku_solver.completions(sudoku_solver.masks_of(first_row), (2, 3), limit=10**6)
  assert count[0] * math.factorial(6) == 28_200_960  # the published number of 6x6 grids


def test_solver_agrees_with_backtracking_on_random_boards():
  rng = np.random.default_rng(0)
  for box in ((2, 2), (2, 3)):
    grids = sudoku.fill(rng, 60, box)
    puzzles = np.where(rng.random(grids.shape) < rng.choice([0.2, 0.35, 0.5], (60, 1, 1)), grids, 0)
    spoiled = puzzles.reshape(60, -1)
    where = rng.integers(spoiled.shape[1], size=60)
    spoiled[::3][np.arange(20), where[::3]] = rng.integers(1, box[0] * box[1] + 1, 20)  # some without a solution
    counts, found = sudoku_solver.completions(sudoku_solver.masks_of(puzzles), box, limit=3, block=16)
    for puzzle, count, grid in zip(puzzles, counts, found):
      clash = any(
          puzzle[a] and puzzle[a] == puzzle[b] and (a[0] == b[0] or a[1] == b[1] or (
              a[0] // box[0], a[1] // box[1]) == (b[0] // box[0], b[1] // box[1]))
          for a, b in itertools.combinations(np.ndindex(puzzle.shape), 2)
      )  # fmt: skip
      assert count == (0 if clash else len(all_solutions(puzzle, box, 3)))
      if count:
        assert valid(grid.tolist(), box) and (grid[puzzle > 0] == puzzle[puzzle > 0]).all()
  assert (counts == 0).any() and (counts == 1).any() and (counts == 3).any()


@pytest.mark.parametrize("box", BOXES)
def test_keys_do_not_change_under_symmetries(box):
  rng = np.random.default_rng(2)
  grids = sudoku.fill(rng, 50, box)
  keys = sudoku.class_keys(grids, box)
  for _ in range(6):
    moved, _ = sudoku.augment(rng, grids, grids, box)
    np.testing.assert_array_equal(sudoku.class_keys(moved, box), keys)
  for k in range(8):  # the 8 symmetries of the published data; a quarter turn or transposition turns the boxes, too
    turned = box if k in (0, 2, 5, 7) else box[::-1]
    np.testing.assert_array_equal(sudoku.class_keys(symmetry.transform(grids, k), turned), keys)


def test_exact_keys_by_brute_force():
  # 4x4: every symmetry applied one by one; two classes in all, of 96 and 192 grids.
  masks = sudoku_solver.masks_of(np.zeros((1, 4, 4), np.uint8))
  grids, seen = np.unique(sudoku.fill(np.random.default_rng(0), 20_000, (2, 2)), axis=0), {}
  assert len(grids) == sudoku_solver.completions(masks, (2, 2), limit=999)[0][0] == 288
  keys = sudoku.class_keys(grids, (2, 2))
  assert sorted(np.unique(keys, return_counts=True)[1]) == [96, 192]
  orders = [p for p in itertools.permutations(range(4)) if {p[0] // 2, p[1] // 2} in ({0}, {1})]
  assert len(orders) == 8
  for grid, key in zip(grids, keys):
    least = None
    for g in (grid, grid.T):
      for r, c in itertools.product(orders, orders):
        moved = g[np.ix_(r, c)]
        names = {int(d): i for i, d in enumerate(moved[0])}
        form = tuple(names[int(d)] for d in moved.ravel())
        least = form if least is None else min(least, form)
    assert seen.setdefault(least, key) == key
  assert len(seen) == 2


def test_the_49_classes_of_6x6_and_their_division():
  rng = np.random.default_rng(1)
  for box in ((2, 3), (3, 2)):
    keys = sudoku.class_keys(sudoku.fill(rng, 4000, box), box)
    classes = np.unique(keys)
    assert len(classes) == 49  # the known number of essentially different 6x6 grids
    assert [int(sudoku.in_part(classes, part).sum()) for part in ("train", "val", "test")] == [34, 5, 10]


def test_invariant_tells_almost_all_9x9_grids_apart():
  grids = sudoku.fill(np.random.default_rng(3), 400, (3, 3))
  assert len(np.unique(sudoku.class_keys(grids, (3, 3)))) == 400
  # and the shuffles of one pattern are recognised as one class
  shuffled, _ = sudoku.augment(np.random.default_rng(4), grids[:1].repeat(200, 0), grids[:1].repeat(200, 0), (3, 3))
  assert len(np.unique(shuffled, axis=0)) > 190
  assert len(np.unique(sudoku.class_keys(shuffled, (3, 3)))) == 1


@pytest.mark.parametrize("box", [(2, 3), (3, 3)])
def test_splits_share_no_class_of_solutions(box):
  table = {part: sudoku.Split(40, GIVENS[box], 0, part) for part in ("train", "val", "test")}
  made = sudoku.splits(box, table)
  keys = {name: set(sudoku.class_keys(part["labels"], box).tolist()) for name, part in made.items()}
  assert not keys["train"] & keys["test"] and not keys["train"] & keys["val"] and not keys["val"] & keys["test"]
  if box == (2, 3):  # brute force: no symmetric copy of a test solution among the training solutions
    rows, cols = sudoku_symmetry.line_orders(3, 2), sudoku_symmetry.line_orders(2, 3)
    assert (len(rows), len(cols)) == (48, 72)
    relabelled = lambda g: np.take_along_axis(g[:, 0].argsort(-1), g.reshape(len(g), -1).astype(int) - 1, -1)
    train = {g.tobytes() for g in relabelled(made["train"]["labels"])}
    for grid in made["test"]["labels"][:20]:
      copies = np.concatenate([grid[r][:, cols].swapaxes(0, 1) for r in rows])
      assert not train & {g.tobytes() for g in relabelled(copies)}


def test_4x4_splits_share_no_class_of_puzzles():
  table = {part: sudoku.Split(80, (4, 7), 0, part) for part in ("train", "val", "test")}
  made = sudoku.splits((2, 2), table)
  orders = sudoku_symmetry.line_orders(2, 2)

  def orbit(puzzle):
    """Canonical forms are avoided: all copies, digits renamed in order of appearance."""
    for g in (puzzle, puzzle.T):
      for r, c in itertools.product(orders, orders):
        names = {0: 0}
        yield tuple(names.setdefault(int(d), len(names)) for d in g[np.ix_(r, c)].ravel())

  train = {next(orbit(p)) for p in made["train"]["inputs"]}
  for name in ("val", "test"):
    for puzzle in made[name]["inputs"]:
      assert not train & set(orbit(puzzle))


@pytest.mark.parametrize("box", BOXES)
def test_augmentation_moves_puzzle_and_solution_together(box):
  made = sudoku.generate(30, box, GIVENS[box], seed=3)
  inputs, labels = sudoku.augment(np.random.default_rng(0), made["inputs"], made["labels"], box)
  assert inputs.dtype == labels.dtype == np.uint8
  assert not (labels == made["labels"]).all((1, 2)).any()
  for puzzle, label in zip(inputs, labels):
    assert valid(label.tolist(), box)
    assert (puzzle[puzzle > 0] == label[puzzle > 0]).all()
  np.testing.assert_array_equal((inputs > 0).sum((1, 2)), (made["inputs"] > 0).sum((1, 2)))
  count, first = sudoku_solver.completions(sudoku_solver.masks_of(inputs), box)
  np.testing.assert_array_equal(count, 1)
  np.testing.assert_array_equal(first, labels)


def test_augmentation_reaches_the_whole_group():
  grid = sudoku.fill(np.random.default_rng(0), 1, (2, 2))
  many, _ = sudoku.augment(np.random.default_rng(1), grid.repeat(6000, 0), grid.repeat(6000, 0), (2, 2))
  assert len(np.unique(many, axis=0)) in (96, 192)  # the whole class of the grid


def test_parse_and_render():
  parsed = sudoku.parse_puzzle(EASY)
  assert parsed.unique and valid(parsed.labels.tolist(), (3, 3))
  assert sudoku.render(parsed.inputs) == EASY
  spaced = "\n".join(EASY.replace(".", "0")[i : i + 9] for i in range(0, 81, 9))
  np.testing.assert_array_equal(sudoku.parse_puzzle(spaced).labels, parsed.labels)
  several = sudoku.parse_puzzle("." * 36, (2, 3))
  assert not several.unique and valid(several.labels.tolist(), (2, 3))
  hard = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
  assert sudoku.parse_puzzle(hard).unique


@pytest.mark.parametrize("text,box,words", [
    (EASY[:80], (3, 3), "got 80 characters, a 9x9 puzzle has 81"),
    ("", (2, 2), "got 0 characters, a 4x4 puzzle has 16"),
    ("x" + EASY[1:], (3, 3), "row 1, column 1 holds 'x'; use the digits 1..9"),
    ("1...\n..5.\n....\n....", (2, 2), "row 2, column 3 holds 5, but a 4x4 puzzle has the digits 1..4"),
    ("5" + EASY[1:2] + "5" + EASY[3:], (3, 3), "row 1 holds 5 twice: row 1, column 1 and row 1, column 3"),
    ("1..." "...." "1..." "....", (2, 2), "column 1 holds 1 twice: row 1, column 1 and row 3, column 1"),
    ("1..." ".1.." "...." "....", (2, 2), "box 1 holds 1 twice: row 1, column 1 and row 2, column 2"),
    ("12.." "..3." "...." "...3", (2, 2), "no grid completes them"),
])  # fmt: skip
def test_bad_puzzles(text, box, words):
  with pytest.raises(UserError) as error:
    sudoku.parse_puzzle(text, box)
  assert words in str(error.value) and "\n" not in str(error.value) and str(error.value).startswith("sudoku:")


def test_bad_arrays():
  with pytest.raises(UserError, match="expected 9x9 integers, got shape \\(8, 9\\)"):
    sudoku.solve(np.zeros((8, 9), int))
  with pytest.raises(UserError, match="row 2, column 1 holds -1"):
    sudoku.solve(np.array([[0] * 4, [-1, 0, 0, 0], [0] * 4, [0] * 4]), (2, 2))


def test_search_gives_up_in_time(monkeypatch):
  from sakanajax.sheaf_admm.data import sudoku_text

  monkeypatch.setattr(sudoku_text, "_BUDGET", 3000)
  impossible = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."
  with pytest.raises(UserError, match="3000 boards tried and the 17 givens neither completed nor refuted"):
    sudoku.parse_puzzle(impossible)


@pytest.mark.parametrize("args,words", [
    ((5, (4, 4), (4, 7), 0), "boxes of \\(4, 4\\) are not supported"),
    ((5, (2, 2), (7, 4), 0), "givens \\(7, 4\\) must be a rising pair within 0..16"),
    ((5, (2, 2), (4, 7), 0, "dev"), "unknown part 'dev'"),
    ((-5, (2, 2), (4, 7), 0), "n -5 must not be negative"),
    ((5, (2, 2), (2, 3), 0), "no 4x4 puzzle with fewer than 4 givens"),
    ((5, (2, 3), (0, 1), 0), "no 6x6 puzzle with fewer than 8 givens"),
])  # fmt: skip
def test_bad_requests(args, words):
  with pytest.raises(UserError, match=words):
    sudoku.generate(*args)
  with pytest.raises(ValueError, match="unknown part"):
    sudoku.Split(5, (4, 7), 0, "dev")
  for n, seed in ((0, 0), (5, -1)):
    with pytest.raises(ValueError, match="n >= 1 and seed >= 0"):
      sudoku.Split(n, (4, 7), seed, "train")


def test_tfds_round_trip(tmp_path):
  table = {part: sudoku.Split(12, (12, 20), 0, part) for part in ("train", "val", "test")}
  made = sudoku.splits((2, 3), table)
  for _ in range(2):
    loaded = data.load(data.SudokuData((2, 3), table), tmp_path)
    for name in table:
      for key in ("inputs", "labels"):
        np.testing.assert_array_equal(loaded[name][key], made[name][key])
