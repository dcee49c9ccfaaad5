"""Configs: every type that a field may have, and every way to get one wrong."""

import copy
import dataclasses
import json
import pathlib
from typing import Any, Literal, Optional

import ml_collections
import pytest

from sakanajax.core import config as config_lib
from sakanajax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Inner:
  lr: float
  steps: int = 10
  schedule: Literal["constant", "cosine"] = "constant"

  def __post_init__(self):
    if self.steps < 1:
      raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclasses.dataclass(frozen=True)
class Outer:
  task: str
  train: Inner
  extra: Inner | None = None
  seeds: tuple[int, ...] = (0,)
  pair: tuple[int, str] = (1, "a")
  flag: bool = False
  maybe: Optional[float] = None
  number: int | float = 1
  path: pathlib.Path = pathlib.Path(".")
  rates: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  free: Any = None


GOOD = {"task": "maze", "train": {"lr": 1e-3}}


def _make(**changes):
  return config_lib.from_config(Outer, GOOD | changes)


def test_defaults_and_conversions():
  made = _make(
      train={"lr": 1, "schedule": "cosine"}, extra={"lr": 0.5}, seeds=[3, 4], pair=[2, "b"], flag=True, maybe=2, number=3,
      path="a/b", rates={"net": [1, 0.5]}, free=[1, {"a": [2]}],
  )
  assert made.train == Inner(1.0, 10, "cosine") and isinstance(made.train.lr, float)
  assert made.extra == Inner(0.5) and made.seeds == (3, 4) and made.pair == (2, "b") and made.flag is True
  assert made.maybe == 2.0 and isinstance(made.maybe, float) and made.number == 3 and isinstance(made.number, int)
  assert made.path == pathlib.Path("a/b") and made.rates == {"net": (1.0, 0.5)} and made.free == (1, {"a": (2,)})
  assert _make() == Outer("maze", Inner(1e-3))


def test_config_dict_and_round_trip():
  source = ml_collections.ConfigDict({"task": "maze", "train": {"lr": 0.1}, "rates": {"net": (0.1, 0.2)}})
  made = config_lib.from_config(Outer, source.lock())
  plain = config_lib.to_dict(made)
  assert config_lib.from_config(Outer, json.loads(json.dumps(plain))) == made
  assert plain["rates"] == {"net": [0.1, 0.2]} and plain["path"] == "." and plain["train"]["steps"] == 10
  assert config_lib.from_config(Outer, made) is made


def test_configs_are_hashable_and_cannot_change():
  made = _make(rates={"a": [0.1]}, free={"b": [1]})
  assert hash(made) == hash(_make(free={"b": [1]}, rates={"a": [0.1]})) and {made: 1}[made] == 1
  assert isinstance(hash(_make()), int)  # the default dict too
  for change in (lambda: made.rates.update(b=1), lambda: made.rates.__setitem__("a", 1), lambda: made.rates.pop("a")):
    with pytest.raises(TypeError, match="cannot be changed"):
      change()
  assert copy.deepcopy(made) == made and copy.copy(made.rates) == made.rates
  assert config_lib.from_config(Outer, dataclasses.asdict(made)) == made


@pytest.mark.parametrize("changes, message", [
    ({"tsak": 1}, "config.tsak: unknown key; did you mean task?; known keys: task, train,"),
    ({"zzzzz": 1}, "config.zzzzz: unknown key; known keys: task"),
    ({"train": {"lr": 1, "step": 5}},
     "config.train.step: unknown key; did you mean steps?; known keys: lr, steps, schedule"),
    ({"train": {}}, "config.train.lr: missing; give a value of type float"),
    ({"train": 3}, "config.train: expected a section with the keys lr, steps, schedule, got 3 (int)"),
    ({"train": None}, "config.train: expected a section"),
    ({"task": 3}, "config.task: expected str, got 3 (int)"),
    ({"train": {"lr": "high"}}, "config.train.lr: expected float, got 'high' (str)"),
    ({"train": {"lr": True}}, "config.train.lr: expected float, got True (bool)"),
    ({"train": {"lr": float("nan")}}, "config.train.lr: expected a finite number, got nan"),
    ({"train": {"lr": float("inf")}}, "config.train.lr: expected a finite number, got inf"),
    ({"train": {"lr": 1, "steps": 2.5}}, "config.train.steps: expected int, got 2.5 (float)"),
    ({"train": {"lr": 1, "steps": True}}, "config.train.steps: expected int, got True (bool)"),
    ({"train": {"lr": 1, "steps": 0}}, "config.train: steps must be at least 1, got 0"),
    ({"train": {"lr": 1, "schedule": "cosin"}},
     "config.train.schedule: expected one of 'constant', 'cosine', got 'cosin' (str); did you mean cosine?"),
    ({"seeds": 3}, "config.seeds: expected tuple[int, ...], got 3 (int)"),
    ({"seeds": (1, "x")}, "config.seeds[1]: expected int, got 'x' (str)"),
    ({"pair": (1,)}, "config.pair: expected 2 values, got (1,) (tuple)"),
    ({"flag": 1}, "config.flag: expected bool, got 1 (int)"),
    ({"maybe": "x"}, "config.maybe: expected float, got 'x' (str)"),
    ({"number": "x"}, "config.number: expected int | float, got 'x' (str)"),
    ({"rates": 3}, "config.rates: expected dict[str, tuple[float, ...]], got 3 (int)"),
    ({"rates": {"net": "x"}}, "config.rates.net: expected tuple[float, ...], got 'x' (str)"),
    ({"rates": {1: (0.1,)}}, "config.rates.1: expected str, got 1 (int)"),
    ({"extra": {"lr": "x"}}, "config.extra.lr: expected float, got 'x' (str)"),
    ({"task": 10**100}, "... (int)"),
])
def test_every_slip_is_named(changes, message):
  with pytest.raises(UserError) as error:
    _make(**changes)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_other_roots():
  with pytest.raises(UserError, match="^maze.lr: missing"):
    config_lib.from_config(Inner, {}, path="maze")
  with pytest.raises(UserError, match="expected a section"):
    config_lib.from_config(Inner, [1])
