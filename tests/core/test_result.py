"""result.json: the rule of `passed`, the schema, and that a result tells nothing about the machine's names."""

import json
import math
import os
import pathlib
import socket

import pytest

from sakanajax.core import result as result_lib
from sakanajax.core.errors import UserError


def _build(**changes):
  arguments = dict(
      experiment="sheaf_admm", task="maze", scale="cpu", config={"a": 1}, seeds=(0, 1, 2),
      metrics={"solved": [0.9, 0.95, 1.0]},
      baselines={"solved_mpnn": [0.5, 0.6, 0.4]}, expect={"solved": (0.9, None)}, wall_s=12.345,
  )
  return result_lib.build(**(arguments | changes))


@pytest.mark.parametrize("expect, passed, missed", [
    ({}, False, []),
    ({"solved": (0.95, None)}, True, []),  # the mean is 0.95 exactly
    ({"solved": (0.96, None)}, False, ["solved"]),
    ({"solved": (None, 0.96)}, True, []),
    ({"solved": (0.9, 0.94)}, False, ["solved"]),
    ({"solved": (None, None)}, True, []),
    ({"solved_mpnn": (None, 0.5)}, True, []),  # baselines count too
    ({"solved": (0.9, None), "other": (None, None)}, False, ["other"]),
])
def test_passed(expect, passed, missed):
  result = _build(expect=expect)
  assert result["passed"] is passed and result_lib.missed(result) == missed


def test_a_value_on_its_bar_passes():
  assert result_lib.within(0.5, (0.5, None)) and result_lib.within(0.5, (None, 0.5)) and result_lib.within(0.5, (0.5, 0.5))
  assert not result_lib.within(0.4999999, (0.5, None)) and not result_lib.within(0.5000001, (None, 0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_one_seed_that_is_not_finite_fails_the_bar(bad, tmp_path):
  result = _build(metrics={"solved": [1.0, bad, 1.0]}, expect={"solved": (None, None)})
  assert result["metrics"]["solved"] == [1.0, None, 1.0] and result["passed"] is False
  assert math.isnan(result_lib.mean(result, "solved")) and math.isnan(result_lib.values(result, "solved")[1])
  assert result_lib.load(result_lib.write(tmp_path / "r.json", result)) == result


def test_statistics():
  result = _build(metrics={"a": [1.0, 2.0, 4.0], "one": [0.5]})
  assert result_lib.mean(result, "a") == pytest.approx(7 / 3)
  assert result_lib.spread(result, "a") == pytest.approx(1.5275252316519468)  # sample standard deviation by hand
  assert result_lib.spread(result, "one") is None and result_lib.spread(result, "none") is None
  assert result_lib.show_mean(result, "a") == "2.333 ± 1.5" and result_lib.show_mean(result, "one") == "0.5"
  counts = _build(metrics={"n": [181859.0, 181859.0, 181859.0], "m": [2e4], "bad": [math.inf]})
  assert [result_lib.show_mean(counts, key) for key in ("n", "m", "bad")] == ["181,859 ± 0", "20,000", "nan"]
  assert result_lib.show_mean(result, "none") == "not measured" and math.isnan(result_lib.mean(result, "none"))


@pytest.mark.parametrize("bar, words", [((0.97, None), ">= 0.97"), ((None, 0.5), "<= 0.5"), ((1, 2), "1 .. 2"),
                                        ((None, None), ""), (None, "")])
def test_bars_in_words(bar, words):
  assert result_lib.show_bar(bar) == words


def test_round_trip(tmp_path):
  result = _build()
  assert list(result) == list(result_lib.SCHEMA)
  assert result_lib.load(result_lib.write(tmp_path / "deep" / "result.json", result)) == result
  assert _build(peak_rss_mb=123.0)["peak_rss_mb"] == 123.0 and result["peak_rss_mb"] > 10


@pytest.mark.parametrize("change, message", [
    (lambda r: r.pop("expect"), "key 'expect' is missing"),
    (lambda r: r.update(seeds=3), "key 'seeds' holds int"),
    (lambda r: r.update(passed=1), "key 'passed' holds int"),
    (lambda r: r.update(wall_s=True), "key 'wall_s' holds bool"),
    (lambda r: r["metrics"].update(solved=0.9), "metrics.solved must be a list"),
    (lambda r: r["baselines"].update(x=["a"]), "baselines.x must be a list"),
    (lambda r: r["expect"].update(solved=[0.9]), r"expect.solved must be \[lo, hi\]"),
    (lambda r: r["expect"].update(solved=[0.99, None]), "passed=True contradicts its own numbers"),
    (lambda r: r.update(passed=False), "passed=False contradicts"),
    (lambda r: r.update(seeds=["a"]), "seeds must be integers"),
])
def test_a_damaged_result_is_refused(tmp_path, change, message):
  result = _build()
  change(result)
  path = tmp_path / "result.json"
  path.write_text(json.dumps(result))
  with pytest.raises(UserError, match=message) as error:
    result_lib.load(path)
  assert str(path) in str(error.value)
  with pytest.raises(UserError):
    result_lib.write(tmp_path / "again.json", result)
  assert not (tmp_path / "again.json").exists()


def test_not_an_object(tmp_path):
  (tmp_path / "r.json").write_text("[]")
  with pytest.raises(UserError, match="expected a JSON object"):
    result_lib.load(tmp_path / "r.json")


def test_environment_names_versions_but_not_the_machine():
  found = result_lib.environment()
  text = json.dumps(found)
  assert found["versions"]["jax"] and found["devices"] >= 1 and found["cpus"] >= 1
  for private in (socket.gethostname(), str(pathlib.Path.home()), os.getcwd()):
    assert private not in text
