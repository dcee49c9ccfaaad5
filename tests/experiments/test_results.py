"""Committed results were made by the committed configs."""

import json
import pathlib

import pytest

from experiments import papers
from experiments.protocol import NEUTRAL
from sakanajax.core import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "results").glob("*/*.json"))


def differences(there, here, path=""):
  """Keys of a result's config that the config has otherwise now; keys that it did not have yet are nobody's fault."""
  if path in NEUTRAL:
    return []
  if isinstance(there, dict) and isinstance(here, dict):
    return [key for name in there for key in differences(there[name], here.get(name), f"{path}.{name}".lstrip("."))]
  return [] if there == here else [f"{path}: {there} in the result, {here} in the config"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_belongs_to_its_config(name):
  result = json.loads((ROOT / name).read_text(encoding="utf-8"))
  cfg = papers.config(papers.PAPERS[result["experiment"]], result["task"], result["scale"])
  assert differences(result["config"], json.loads(json.dumps(config_lib.to_dict(cfg)))) == []


def test_a_changed_step_count_is_seen_and_a_new_key_is_not():
  there = {"train": {"steps": 1600, "log_every": 1}, "seeds": [0]}
  here = {"train": {"steps": 1200, "log_every": 2, "skip": 5}, "seeds": [0, 1]}
  assert differences(there, here) == ["train.steps: 1600 in the result, 1200 in the config"]
