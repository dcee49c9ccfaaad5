"""Arms of a config: what they may change, and what is refused by its name."""

import dataclasses

import pytest

from sakanajax.core import arms
from sakanajax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Model:
  width: int = 4
  depth: int = 2


@dataclasses.dataclass(frozen=True)
class Config:
  variants: dict = dataclasses.field(default_factory=dict)
  model: Model = Model()
  other: Model = Model()


def test_an_arm_changes_the_keys_it_names_and_an_unknown_arm_none():
  cfg = Config(variants={"wide": {"model": {"width": 9}}})
  assert arms.of_arm(cfg, "wide", ("model",)) == dataclasses.replace(cfg, model=Model(9, 2))
  assert arms.of_arm(cfg, "base", ("model",)) == cfg


@pytest.mark.parametrize("change,words", [
    ({"other": {"width": 1}}, "config.variants.odd.other: unknown section; known: model"),
    ({"model": {"widht": 1}}, "config.variants.odd.model.widht: unknown key"),
    ({"model": {"width": "a"}}, "config.variants.odd.model.width"),
])
def test_wrong_changes_are_named(change, words):
  with pytest.raises(UserError, match=words):
    arms.of_arm(Config(variants={"odd": change}), "odd", ("model",))


@pytest.mark.parametrize("names,seeds,words", [
    (("a", "c"), (0,), r"arms \['c'\] are not among the variants \['a', 'b'\]"),
    (("a",), (0, 0), "different numbers"), (("a",), (-1,), "different numbers"),
])
def test_arms_and_seeds_are_checked(names, seeds, words):
  with pytest.raises(ValueError, match=words):
    arms.check(names, ("a", "b"), seeds)
  arms.check(("a", "b"), ("b", "a"), (0, 1))


@pytest.mark.parametrize("fraction", [0.0, 1.0, 3.0, -0.5])
def test_a_trial_is_a_part_of_the_run(fraction):
  with pytest.raises(ValueError, match="between 0 and 1"):
    arms.Tune(fraction=fraction)
