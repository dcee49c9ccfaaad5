"""The shipped configs: published parameter counts, matched baselines, board sizes, and what a wrong key says."""

import dataclasses
import functools

import jax
import pytest

from configs.sheaf_admm import SCALES, TASKS, get_config
from sakanajax.core import config as config_lib
from sakanajax.core import trees
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import config as config_of_sheaf
from sakanajax.sheaf_admm import fitting
from sakanajax.sheaf_admm.config import Config

MATCHED = {
    "maze": ("mpnn",), "sudoku": ("mpnn", "slot"), "sudoku9": ("mpnn", "slot"), "mnist": ("mpnn", "cnn_gap", "cnn_gmp")
}
NOT_OFFERED = ("sudoku,gpu", "sudoku,paper")
NAMES = [name for task in TASKS for scale in SCALES if (name := f"{task},{scale}") not in NOT_OFFERED]
PUBLISHED = [
    ("maze", "sheaf", 181_859), ("maze", "mpnn", 182_007), ("maze", "mpnn_cm", 48_807), ("sudoku9", "sheaf", 543_025),
    ("sudoku9", "lora", 2_029_233), ("mnist", "sheaf", 1_081_835),
]


@functools.cache
def load(name):
  return config_lib.from_config(Config, get_config(name))


def count(cfg):
  _, network = fitting.network_of(cfg)
  return trees.count_params(jax.eval_shape(network.init, jax.random.key(0)))


@functools.cache
def count_arm(name, arm):
  return count(config_of_sheaf.of_arm(load(name), arm))


@pytest.mark.parametrize("task,arm,params", PUBLISHED)
def test_published_parameter_counts(task, arm, params):
  assert count_arm(f"{task},paper", arm) == params


@pytest.mark.parametrize("width,params", [(225, 879_156), (288, 1_227_889), (504, 3_026_185)])
def test_published_sudoku_message_passing(width, params):
  cfg = config_of_sheaf.of_arm(load("sudoku9,paper"), "mpnn")
  assert count(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_v=width, d_e=32))) == params


@pytest.mark.parametrize(
    "name,arm",
    [(name, arm) for name in NAMES if name.endswith(("cpu", "paper")) for arm in MATCHED.get(name.split(",")[0], ())],
)
def test_baselines_have_as_many_parameters(name, arm):
  assert count_arm(name, arm) == pytest.approx(count_arm(name, "sheaf"), rel=0.02)


def test_ablations_do_not_gain_parameters():
  for arm in set(load("maze,cpu").variants) - {"mpnn", "mpnn_cm"}:
    assert count_arm("maze,cpu", arm) <= count_arm("maze,cpu", "sheaf") + 1, arm  # gd learns its rate


@pytest.mark.parametrize(
    "task,board,agents,edges",
    [("maze", (19, 19), 81, 272), ("mnist", (28, 28), 81, 272), ("sudoku9", (9, 9), 27, 243)],
)
def test_boards_of_the_paper(task, board, agents, edges):
  built = config_of_sheaf.task_of(load(f"{task},paper"))
  graph = built.graph(built.board)
  assert (built.board, graph.num_agents, graph.num_edges) == (board, agents, edges)
  if task == "mnist":
    assert built.graph((60, 60)).num_agents == 400


def test_the_laptop_sudoku():
  task = config_of_sheaf.task_of(load("sudoku,cpu"))
  assert task.board == (6, 6) and (task.graph(task.board).num_agents, task.graph(task.board).num_edges) == (18, 108)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_and_each_of_its_arms_is_valid(name):
  cfg = load(name)
  assert cfg.arms[0] == "sheaf" and set(cfg.once) <= set(cfg.arms) and set(cfg.tune.lrs) <= set(cfg.arms)
  for arm in {*cfg.arms, *cfg.variants}:
    config_of_sheaf.of_arm(cfg, arm)
  assert config_of_sheaf.data_of(cfg) is not None
  assert hash(cfg.model) == hash(dataclasses.replace(cfg.model))


def test_an_arm_changes_what_it_names_only():
  cfg = load("maze,paper")
  arm = config_of_sheaf.of_arm(cfg, "mpnn")
  assert (arm.model.kind, arm.model.d_v, arm.model.d_e) == ("mpnn", 84, 42)
  back = dataclasses.replace(arm.model, kind="sheaf", d_v=cfg.model.d_v, d_e=cfg.model.d_e)
  assert (back, arm.train, arm.data) == (cfg.model, cfg.train, cfg.data)
  assert config_of_sheaf.of_arm(cfg, "sheaf") == cfg


@pytest.mark.parametrize(
    "change,message",
    [(dict(model=dict(d_w=3)), "config.model.d_w: unknown key.*d_v"),
     (dict(arms=("sheaf", "cnn")), r"\['cnn'\] are not among"),
     (dict(iterations=dict(train=(5, 2))), r"\(5, 2\)"), (dict(model=dict(rho=0.0)), "rho must be positive"),
     (dict(model=dict(relaxation=2.0)), "relaxation"), (dict(model=dict(z_steps=0)), "z_steps must be at least 1"),
     (dict(model=dict(map_init="identity")), "identity needs d_e = d_v"), (dict(task="chess"), "chess"),
     (dict(seeds=(0, 0)), "different numbers"), (dict(seeds=(-1,)), "different numbers"),
     (dict(evaluation=dict(batch=0)), "batch 0 must be at least 1"), (dict(evaluation=dict(examples=-5)), "not be negative"),
     (dict(evaluation=dict(pads=(4, -1))), "not be negative"), (dict(evaluation=dict(drops=(2.0,))), "shares between 0 and 1"),
     (dict(iterations=dict(eval=-1)), "eval -1"), (dict(iterations=dict(grad=-1)), "grad -1"),
     (dict(tune=dict(fraction=1.0)), "fraction 1.0"), (dict(model=dict(gamma=-5.0)), "gamma must not be negative"),
     (dict(model=dict(lora_rank=-1)), "lora_rank must not be negative")],
)
def test_wrong_values_are_named(change, message):
  raw = get_config("maze,smoke").to_dict()
  for key, value in change.items():
    raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
  with pytest.raises(UserError, match=message):
    config_lib.from_config(Config, raw)


@pytest.mark.parametrize(
    "task,change,message",
    [("sudoku", dict(d_v=20), "config.model: d_v 20 must be a multiple of 6"),
     ("sudoku", dict(d_e=11), r"config.model: soft_slice .* 6 · 11 > 60"),
     ("maze", dict(d_e=11), "config.model: orthonormal .* d_e = 11 and d_v = 10")],
)
def test_sizes_that_do_not_fit_are_refused_before_training(task, change, message):
  cfg = load(f"{task},cpu")
  with pytest.raises(UserError, match=message):
    fitting.network_of(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **change)))


def test_wrong_variants_and_data_are_named():
  cfg = load("maze,smoke")
  with pytest.raises(UserError, match=r"config.variants.mpnn.model.d_w: unknown key"):
    config_of_sheaf.of_arm(dataclasses.replace(cfg, variants={"mpnn": {"model": {"d_w": 3}}}), "mpnn")
  with pytest.raises(UserError, match="config.variants.mpnn.data: unknown section"):
    config_of_sheaf.of_arm(dataclasses.replace(cfg, variants={"mpnn": {"data": {}}}), "mpnn")
  with pytest.raises(UserError, match="config.data.spltis"):
    config_of_sheaf.data_of(dataclasses.replace(cfg, data={"spltis": {}}))


@pytest.mark.parametrize("argument", ["maze", "maze,huge", "chess,cpu", "", "sudoku,paper"])
def test_wrong_config_names(argument):
  with pytest.raises(ValueError, match="give task,scale|sudoku9,paper"):
    get_config(argument)
