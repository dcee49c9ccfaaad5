"""Inspection: what is traced is what the network computes, right is right, every file is whole, bad input is one line."""

import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from experiments import launch, sheaf_admm
from experiments.command_line import Options
from experiments.protocol import ModeFlags
from sakanajax.core import checkpoint, config as config_lib, train
from sakanajax.core.errors import UserError
from sakanajax.core.train import TrainConfig
from sakanajax.sheaf_admm import fitting, inspection
from sakanajax.sheaf_admm import inspection_artists, inspection_boards, inspection_page, inspection_plots
from sakanajax.sheaf_admm.config import Config, Iterations
from sakanajax.sheaf_admm.data import digits, maze_text
from sakanajax.sheaf_admm.model import ModelConfig

FILES = sorted(["curves.png", "disagreement.png", "evolution.png", "negotiation.gif", "negotiation.html", "prediction.txt",
                "residuals.png", "trajectories.png"])
MAZE = "#######\n#S    #\n##### #\n#G  # #\n# # # #\n# #   #\n#######\n"
WIDE = "###########\n#S        #\n######### #\n#G        #\n###########"
SUDOKU = "12.4 3.12 2143 4.21"  # 4x4
DATA = {
    "maze": {"splits": {"train": dict(n=8, size=(7, 7), min_path=2, seed=0)}},
    "sudoku": {"box": (2, 2), "splits": {"train": dict(n=8, givens=(6, 9), seed=0, part="train")}},
    "mnist": {"source": "synthetic"},
}
MODELS = {
    "maze": ModelConfig(d_v=6, d_e=3, hidden=8, decoder_hidden=8, lora_rank=2, z_steps=2, window=2),
    "sudoku": ModelConfig(d_v=16, d_e=4, hidden=8, decoder_hidden=8, objective="non_negative", map_init="soft_slice",
                          z_steps=2, gamma=2.0, window=2),
    "mnist": ModelConfig(d_v=6, d_e=3, hidden=8, objective="lasso", l1=0.006, z_update="project", sharing="global",
                         lora_rank=2, lora_init="legacy", z_steps=2, window=2),
}
KINDS = tuple(DATA)


def config(task, **changes):
  settings = dict(
      task=task, scale="smoke", seeds=(0,), arms=("sheaf", "mpnn"), variants={"mpnn": {"model": {"kind": "mpnn"}}},
      data=DATA[task], model=MODELS[task], train=TrainConfig(steps=2, batch_size=4, lr=1e-2, ema_decay=0.5),
      iterations=Iterations((1, 3), eval=5, far=7))
  return Config(**(settings | changes))


def save_unit(folder, cfg, arm="sheaf", step=0):
  """Leaves what the launcher leaves of a unit, with random weights; returns them and the folder."""
  _, network = fitting.network_of(cfg)
  params = network.init(jax.random.key(1))
  state = train.init_state(params, train.make_optimizer(cfg.train))
  if step:  # an average unlike the weights
    average = jax.tree.map(lambda p: 2.0 * p, params)
    weight = 1.0 - cfg.train.ema_decay**step
    state = state._replace(step=jnp.int32(step), ema=jax.tree.map(lambda p: weight * p, average))
    params = average
  checkpoint.save(folder / "checkpoints", step, state, {"train": dataclasses.asdict(cfg.train), "fingerprint": "x"})
  unit = {"experiment": "sheaf_admm", "unit": {"arm": arm}, "config": config_lib.to_dict(cfg)}
  (folder / "unit.json").write_text(json.dumps(unit))
  return params, folder


def picture(path, size=28):
  image = np.zeros((size, size), np.uint8)
  image[5:-5, size // 2 : size // 2 + 3] = 255
  Image.fromarray(image).save(path)
  return path


@pytest.fixture(scope="module")
def units(tmp_path_factory):
  """{task: (config, params, unit folder)}"""
  root = tmp_path_factory.mktemp("units")
  made = {}
  for task in KINDS:
    cfg = config(task)
    made[task] = (cfg, *save_unit(root / task / "units" / "sheaf" / "seed_0", cfg))
  return made


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  """{task: a good --input}: a file, a string, a picture."""
  root = tmp_path_factory.mktemp("inputs")
  (root / "maze.txt").write_text(MAZE)
  return {"maze": str(root / "maze.txt"), "sudoku": SUDOKU, "mnist": str(picture(root / "one.png"))}


# --- what is traced ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", KINDS)
def test_the_trace_is_what_the_network_computes(units, inputs, task):
  cfg, params, _ = units[task]
  board, network = fitting.network_of(cfg)
  given = inspection_boards.read(cfg, inputs[task])
  n = inspection.negotiate(cfg, network, params, given.board)
  graph = board.graph(given.board.shape)
  for k in (0, 1, 5):
    logits = network.apply(params, jnp.asarray(given.board)[None], graph, k)[-1]
    np.testing.assert_array_equal(n.prediction[k], board.predict(logits, given.board.shape)[0])
  agents = graph.num_agents
  assert n.prediction.shape[0] == n.belief.shape[0] == 6
  assert n.primal.shape == n.dual.shape == (6, agents) and n.disagreement.shape == (6, graph.num_edges)
  assert n.x.shape == n.z.shape == (5, agents, cfg.model.d_v)
  assert np.isnan(n.primal[0]).all() and np.isfinite(n.primal[1:]).all() and np.isfinite(n.disagreement[1:]).all()
  np.testing.assert_allclose(n.primal[1:], np.linalg.norm(n.x - n.z, axis=-1), atol=1e-5)
  steps = np.linalg.norm(np.diff(n.z, axis=0), axis=-1)
  np.testing.assert_allclose(n.dual[2:] / steps, (n.dual[2] / steps[0])[0], rtol=2e-3)  # the same rho everywhere
  assert (n.belief >= 0).all() and (n.belief <= 1 + 1e-6).all()


def test_boards_of_another_size_run_longer(units):
  cfg, params, _ = units["maze"]
  _, network = fitting.network_of(cfg)
  n = inspection.negotiate(cfg, network, params, maze_text.parse_maze(WIDE))
  assert n.prediction.shape == (8, 5, 11) and inspection_artists.agents_of(n) == (2, 5)
  smallest = inspection.negotiate(cfg, network, params, maze_text.parse_maze("#####\n#S G#\n#####"))
  assert smallest.primal.shape == (8, 2) and smallest.disagreement.shape == (8, 1)


def test_the_average_weights_are_restored_without_their_bias(tmp_path):
  cfg = config("maze")
  average, folder = save_unit(tmp_path / "unit", cfg, step=3)
  _, network = fitting.network_of(cfg)
  for place in (folder, folder / "checkpoints"):
    restored = inspection.load_params(cfg, network, str(place))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), restored, average)


# --- what is right -------------------------------------------------------------------------------------------------


def test_only_a_shortest_path_counts():
  board = maze_text.parse_maze(MAZE)
  path = maze_text.solve(board) == maze_text.PATH
  assert inspection_boards.is_shortest_path(board, path)
  missing, extra, astray = path.copy(), path.copy(), path.copy()
  missing[tuple(np.argwhere(path)[0])] = False
  extra[4, 1] = True
  astray[1, 3], astray[0, 3] = False, True  # as many cells, one through the wall
  for wrong in (missing, extra, astray, np.zeros_like(path)):
    assert not inspection_boards.is_shortest_path(board, wrong)
  loop = maze_text.parse_maze("#####\n#S  #\n# # #\n#  G#\n#####")
  for cells in (((1, 2), (1, 3), (2, 3)), ((2, 1), (3, 1), (3, 2))):
    way = np.zeros(loop.shape, bool)
    way[tuple(np.transpose(cells))] = True
    assert inspection_boards.is_shortest_path(loop, way)


def outcome(cfg, text, predictions):
  """The report on predictions `[K+1, H, W]` about a board."""
  given = inspection_boards.read(cfg, text)
  blank = np.zeros((len(predictions), 1))
  n = inspection.Negotiation(cfg.kind, given.board, np.stack(predictions), blank, blank, blank, blank, blank, blank, blank,
                             blank, tuple(cfg.data["box"]) if cfg.kind == "sudoku" else None, None)
  return given, inspection_boards.report(n, given)


def test_report_on_a_maze():
  board = maze_text.parse_maze(MAZE)
  solution = maze_text.solve(board)
  _, report = outcome(config("maze"), MAZE, [board, solution, board, solution, solution])
  steps = maze_text.path_length(board)
  assert report.title == f"solved: a shortest path of {steps} steps, right since iteration 3 of 4"
  assert report.text.startswith(maze_text.render(solution))
  np.testing.assert_array_equal(report.wrong, [steps - 1, 0, steps - 1, 0, 0])
  _, worse = outcome(config("maze"), MAZE, [solution, board])
  assert worse.title == f"not solved: {steps - 1} cells of the path are missing, 0 cells are marked wrongly"


def test_report_on_a_sudoku():
  cfg = config("sudoku")
  answer = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]])
  given, report = outcome(cfg, SUDOKU, [np.ones((4, 4), int), answer])
  assert given.unique and report.title == "solved: all 3 empty cells, right since iteration 1 of 1"
  assert report.text.splitlines()[:4] == ["1 2 | 3 4", "3 4 | 1 2", "----+----", "2 1 | 4 3"]
  assert "1234341221434321" in report.text
  solution = given.truth.astype(int)
  wrong, overwritten = solution.copy(), solution.copy()
  wrong[0, 2] = 0
  overwritten[0, 0] = 2
  assert outcome(cfg, SUDOKU, [wrong])[1].title == "not solved: 1 of 3 empty cells are wrong"
  assert outcome(cfg, SUDOKU, [overwritten])[1].title == "not solved: the network overwrites a given"
  open_, first = outcome(cfg, "." * 16, [solution])
  assert not open_.unique
  assert first.title == "solved: all 16 empty cells, right since iteration 0 of 0 (the puzzle has several solutions)"


def test_rules_of_a_six_by_six_sudoku():
  grid = np.array([[(3 * (r % 2) + r // 2 + c) % 6 + 1 for c in range(6)] for r in range(6)])
  assert inspection_boards.obeys_rules(grid, (2, 3))
  assert not inspection_boards.obeys_rules(grid, (3, 2))
  assert not inspection_boards.obeys_rules(np.where(grid == 6, 5, grid), (2, 3))


# --- what is drawn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["maze", *(pytest.param(task, marks=pytest.mark.slow) for task in ("sudoku", "mnist"))])
def test_all_files_are_whole(units, inputs, tmp_path, capsys, task):
  cfg, _, folder = units[task]
  out = tmp_path / "deep" / "out"
  paths = inspection.run(cfg, str(folder), inputs[task], str(out))
  assert [path.name for path in paths] == FILES and sorted(p.name for p in out.iterdir()) == FILES
  assert [p.name for p in out.parent.iterdir()] == ["out"]  # no temporary folder stays
  for path in paths:
    if path.suffix == ".png":
      with Image.open(path) as image:
        image.load()
        assert min(image.size) > 300 and len(image.convert("L").getcolors(256)) > 8
  with Image.open(out / "negotiation.gif") as film:
    assert film.n_frames == 6
  page = (out / "negotiation.html").read_text()
  assert page.count('class="frame"') == 6 and "const iterations = [0, 1, 2, 3, 4, 5];" in page
  assert not re.search(r"https?:|src=\"(?!data:)|<link|@import|url\(", page)
  printed = capsys.readouterr().out
  assert printed.strip() == (out / "prediction.txt").read_text().strip()
  assert {"maze": "solved", "sudoku": "solved", "mnist": "of 81 agents say"}[task] in printed


@pytest.mark.slow
def test_other_shapes_of_boards_are_drawn(units, tmp_path):
  cfg, _, folder = units["maze"]
  (tmp_path / "keep.txt").write_text("mine")
  for text in (WIDE, "#####\n#S G#\n#####"):
    inspection.run(cfg, str(folder / "checkpoints"), text, str(tmp_path))  # a folder that is there, and again
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*FILES, "keep.txt"])


def test_a_single_agent_has_no_neighbours(units, tmp_path):
  cfg, params, _ = units["mnist"]
  given = inspection_boards.read(cfg, str(picture(tmp_path / "dot.png", 3)))
  n = inspection.negotiate(cfg, fitting.network_of(cfg)[1], params, given.board)
  assert n.disagreement.shape == (8, 0)
  inspection_plots.draw_disagreement(tmp_path / "disagreement.png", n)
  inspection_plots.draw_trajectories(tmp_path / "trajectories.png", n)
  assert len(inspection_page.frames(n, given, [0, 7])) == 2


def test_a_sudoku_changes_from_frame_to_frame(units):
  cfg, params, _ = units["sudoku"]
  given = inspection_boards.read(cfg, SUDOKU)
  n = inspection.negotiate(cfg, fitting.network_of(cfg)[1], params, given.board)
  first, last, again = (np.asarray(image) for image in inspection_page.frames(n, given, [0, 5, 5]))
  assert first.shape == last.shape and (first != last).any()
  np.testing.assert_array_equal(last, again)


def test_agents_stand_where_their_cells_are():
  blank = np.zeros((1, 1))
  sudoku = inspection.Negotiation("sudoku", np.zeros((6, 6), np.uint8), *[blank] * 9, (2, 3), None)
  picture_of = inspection_artists.agent_map(sudoku, np.arange(18.0))
  np.testing.assert_array_equal(picture_of[2:, 0], np.arange(6))
  np.testing.assert_array_equal(picture_of[0, 2:], np.arange(6, 12))
  assert np.isnan(picture_of[1]).all() and np.isnan(picture_of[:, 1]).all()
  boxes = [[left] * 3 + [left + 1] * 3 for left in (12, 12, 14, 14, 16, 16)]
  np.testing.assert_array_equal(picture_of[2:, 2:], boxes)


@pytest.mark.parametrize(
    "last,count,first", [(100, 8, 0), (100, 48, 0), (20, 8, 0), (5, 8, 1), (1, 6, 1), (40, 6, 1), (9, 9, 0)])
def test_moments_are_dense_at_the_start_and_include_both_ends(last, count, first):
  shown = inspection_plots.moments(last, count, first)
  assert shown[0] == first and shown[-1] == last and len(shown) == min(count, last - first + 1)
  gaps = np.diff(shown)
  assert (gaps > 0).all() and (np.diff(gaps) >= -1).all()


def test_the_page_escapes_what_it_shows():
  report = inspection_boards.Report("<b>1 & 2</b>", "<script>", None)
  page = inspection_page.as_page("maze", report, [0], [b"x"], [("a < b", b"y")])
  assert "<b>" not in page and "&lt;script&gt;" in page and "a &lt; b" in page


# --- bad input -----------------------------------------------------------------------------------------------------


def refused(out, *arguments, match):
  with pytest.raises(UserError, match=match) as error:
    inspection.run(*arguments, str(out))
  assert "\n" not in str(error.value)
  assert not out.exists() and not [p for p in out.parent.iterdir() if p.name.startswith(".")]


CONTRADICTION = "11.4 3.12 2143 4.21"
BAD = {
    "empty": ("maze", "", "--input is empty"),
    "no file": ("maze", "lab.txt", "there is no file 'lab.txt'"),
    "even maze": ("maze", "######\n#S  G#\n######", "width 6 of a 3x6 maze is not an odd number"),
    "walled in": ("maze", "#####\n#S#G#\n#####", "cannot be reached"),
    "ragged maze": ("maze", "#####\n#S G\n#####", "row 2 has 4 characters"),
    "two starts": ("maze", "#######\n#S S G#\n#######", "found 2 start cells"),
    "short sudoku": ("sudoku", "12.43.1221434.2", "got 15 characters, a 4x4 puzzle has 16"),
    "long sudoku": ("sudoku", "." * 81, "got 81 characters, a 4x4 puzzle has 16"),
    "digit": ("sudoku", "12.43.12214395.1", "holds 9, but a 4x4 puzzle"),
    "letter": ("sudoku", "12.43.12214x4.21", "holds 'x'"),
    "contradictory": ("sudoku", CONTRADICTION, "contradictory givens, row 1 holds 1 twice"),
    "no sudoku": ("sudoku", "puzzle.txt", "there is no file 'puzzle.txt'"),
    "no picture": ("mnist", "digit.png", "digit.png does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_boards(units, tmp_path, name):
  task, text, match = BAD[name]
  refused(tmp_path / "out", units[task][0], str(units[task][2]), text, match=match)


def test_eighty_characters_for_a_nine_by_nine(units):
  nine = config("sudoku", data={"box": (3, 3), "splits": {}})
  with pytest.raises(UserError, match="got 80 characters, a 9x9 puzzle has 81"):
    inspection_boards.read(nine, "." * 80)


def test_bad_files(units, tmp_path):
  small, text, noise, huge = (tmp_path / name for name in ("small.png", "text.png", "noise.txt", "huge.txt"))
  Image.fromarray(np.zeros((2, 9), np.uint8)).save(small)
  text.write_text("no picture")
  noise.write_bytes(b"\xff\xfe\x00")
  huge.write_bytes(b"#" * 1_000_001)
  for task, path, match in (
      ("mnist", small, "smaller than one patch of 3x3"), ("mnist", text, "not a picture"),
      ("mnist", tmp_path, "not a picture"),
      ("maze", noise, "noise.txt is not a text file"), ("maze", huge, "longer than 1,000,000 bytes")):
    refused(tmp_path / "out", units[task][0], str(units[task][2]), str(path), match=match)


def test_bad_checkpoints(units, inputs, tmp_path):
  cfg, _, folder = units["maze"]
  run = lambda cfg, place, match: refused(tmp_path / "out", cfg, str(place), inputs["maze"], match=match)
  run(cfg, "", "--checkpoint is missing")
  run(cfg, tmp_path / "nowhere", "there is no folder .*nowhere")
  (tmp_path / "empty").mkdir()
  run(cfg, tmp_path / "empty", "no checkpoint in .*empty; give a unit's folder")
  run(cfg, folder.parents[2], "give .*units/sheaf/seed_0")
  other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, gamma=1.0))
  run(other, folder, "was trained with gamma = 5.0, the config says 1.0")
  run(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_v=8)), folder, "trained with d_v = 6")
  _, baseline = save_unit(tmp_path / "mpnn", cfg, arm="mpnn")
  run(cfg, baseline, "holds arm mpnn; --mode=inspect looks into arm sheaf only")
  (baseline / "unit.json").write_text("{}")
  run(cfg, baseline, "does not describe a unit")
  (baseline / "unit.json").unlink()
  wider = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, hidden=9))
  run(wider, baseline, "holds another model")
  victim = max((p for p in (baseline / "checkpoints" / "0").rglob("*") if p.is_file() and p.name != "meta.json"),
               key=lambda p: p.stat().st_size)
  victim.write_bytes(b"noise")
  run(cfg, baseline, "is corrupt .* delete that folder")


def test_bad_settings(units, inputs, tmp_path):
  cfg, _, folder = units["maze"]
  run = lambda cfg, match: refused(tmp_path / "out", cfg, str(folder), inputs["maze"], match=match)
  run(dataclasses.replace(cfg, arms=("mpnn",)), "looks into arm sheaf only, not into mpnn")
  run(dataclasses.replace(cfg, task="speed"), "the task speed trains no network")
  run(dataclasses.replace(cfg, iterations=Iterations((0, 0), eval=0, far=0)), "nothing to inspect")
  with pytest.raises(UserError, match="--out is missing"):
    inspection.run(cfg, str(folder), inputs["maze"], "")
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="is a file; give a folder"):
    inspection.run(cfg, str(folder), inputs["maze"], str(tmp_path / "file"))
  with pytest.raises(UserError, match="--out=.*choose another folder"):
    inspection.run(cfg, str(folder), inputs["maze"], str(tmp_path / "file" / "below"))


def test_a_board_with_too_many_agents_is_refused(units, tmp_path, monkeypatch):
  cfg, _, folder = units["mnist"]
  monkeypatch.setattr(inspection, "LARGEST", 10_000)
  refused(tmp_path / "out", cfg, str(folder), str(picture(tmp_path / "big.png", 60)), match="has 400 agents, too many")


def test_nothing_is_left_when_drawing_fails(units, inputs, tmp_path, monkeypatch):
  cfg, _, folder = units["maze"]

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(inspection_page, "write_all", full)
  monkeypatch.setattr(inspection_plots, "draw_all", lambda *_: None)
  refused(tmp_path / "out", cfg, str(folder), inputs["maze"], match="No space left on device; choose another folder")


def test_the_binary_turns_it_into_code_2(units, inputs, tmp_path, capsys):
  cfg = units["maze"][0]
  flags = ModeFlags("", inputs["maze"], str(tmp_path / "out"), "")
  options = Options(tmp_path, 1, False, "inspect", False, None, flags, "", 1, 0, ())
  assert launch.main(sheaf_admm.EXPERIMENT, cfg, options) == 2
  error = capsys.readouterr().err.strip()
  assert error.startswith("error: --checkpoint is missing") and "\n" not in error


def test_digits_are_light_on_dark_whatever_the_paper(units, tmp_path):
  cfg = units["mnist"][0]
  image, _ = digits.synthetic(1, 3)
  for name, pixels in (("dark.png", image[0]), ("light.png", 255 - image[0])):
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    (tmp_path / name).write_bytes(content.getvalue())
  dark, light = (inspection_boards.read(cfg, str(tmp_path / name)).board for name in ("dark.png", "light.png"))
  np.testing.assert_allclose(dark, light)
  assert dark.dtype == np.float32 and 0 <= dark.min() and dark.max() <= 1
