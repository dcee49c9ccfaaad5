"""The choice and the sweep's numbers, by hand."""

import math

import pytest

from sakanajax.twell import front


def row(ce, nnz, dead=0.0, n=100, **valid):
  """An outcome whose scores on test are given; on validation they are others unless given, too."""
  test = {"ce": ce, "nnz": nnz, "dead": dead, "sparsity": 1 - nnz / n, "first_position_ratio": 2.0, "nnz_layer0": nnz}
  seen = {key: value + 0.001 if key == "ce" else 3 * value + 0.1 for key, value in test.items()}
  both = {f"{key}_test": value for key, value in test.items()} | {f"{key}_valid": value for key, value in seen.items()}
  return both | valid


def test_the_sparsest_that_is_good_enough_is_chosen():
  v = lambda ce, nnz: {"ce_valid": ce, "nnz_valid": nnz}
  assert front.choose({"c0": v(2.0, 50), "a": v(2.05, 20), "b": v(2.059, 9), "c": v(2.061, 3)}, "c0", 0.03) == "b"
  assert front.choose({"c0": v(2.0, 50), "a": v(1.9, 20), "b": v(2.05, 30)}, "c0", 0.03) == "a"
  assert front.choose({"c0": v(2.0, 50), "a": v(3.0, 1)}, "c0", 0.03) == "c0"
  assert front.choose({"c0": v(2.0, 50), "a": v(math.nan, 1)}, "c0", 0.03) == "c0"


def test_monotone_means_every_step():
  assert front.falls([3.0, 2.0, 1.0]) == 1 and front.falls([3.0, 3.0]) == 0 and front.falls([3.0, 1.0, 2.0]) == 0
  assert front.grows([0.0, 0.0, 0.2]) == 1 and front.grows([0.0, 0.0]) == 0 and front.grows([0.1, 0.0, 0.2]) == 0


def test_the_metrics_of_a_sweep():
  outcomes = {
      "c0": {0: row(2.0, 40), 1: row(2.2, 44)}, "c1": {0: row(2.02, 10, 0.1), 1: row(2.2, 12, 0.2)},
      "c2": {0: row(2.5, 1, 0.5)}, "revive": {0: row(2.0, 11, 0.01), 1: row(2.211, 12, 0.0)},
      "silu": {0: row(1.9, 100)},
  }
  got = front.metrics(outcomes, {"c0": 0.0, "c1": 0.001, "c2": 0.01}, "c1", 0.03)
  assert got["nnz@0"] == [40] and got["nnz@0.001"] == [10] and got["sparsity@0.01"] == [0.99]
  assert got["ce_increase@0.01"] == pytest.approx([0.25]) and got["monotone"] == got["dead_monotone"] == [1.0]
  assert got["chosen_coefficient"] == [0.001] and got["choice_agrees"] == [1.0]
  assert got["sparsity"] == pytest.approx([0.9, 0.88]) and got["ce_increase"] == pytest.approx([0.01, 0.0])
  assert got["dead_reduction"] == pytest.approx([10.0, 0.2 / front.FLOOR])
  assert got["ce_revive_increase"] == pytest.approx([-0.02 / 2.02, 0.005])
  assert got["nnz_revive_ratio"] == pytest.approx([1.1, 1.0])
  assert got["first_position_ratio"] == [2.0, 2.0] and got["nnz_layer0"] == [10, 12]
  other = front.metrics(outcomes, {"c0": 0.0, "c1": 0.001, "c2": 0.01}, "c2", 0.03)
  assert other["choice_agrees"] == [0.0] and other["sparsity"] == [0.99]  # only the seeds that both have


def test_the_choice_looks_at_validation_alone():
  outcomes = {
      "c0": {0: row(2.0, 40)}, "c1": {0: row(2.0, 10, nnz_valid=5)}, "c2": {0: row(2.0, 1, nnz_valid=9)},
      "c3": {0: row(2.0, 1, nnz_valid=1, ce_valid=2.1)}}
  got = front.metrics(outcomes, {"c0": 0.0, "c1": 0.001, "c2": 0.01, "c3": 0.1}, "c1", 0.03)
  assert got["chosen_coefficient"] == [0.001] and got["nnz"] == [10]


def test_without_the_arm_without_a_penalty_nothing_is_said_about_its_cost():
  outcomes = {"c1": {0: row(2.0, 10)}, "c2": {0: row(2.5, 1)}}
  got = front.metrics(outcomes, {"c0": 0.0, "c1": 0.001, "c2": 0.01}, "c1", 0.03)
  assert not any("increase" in key or "choice" in key for key in got)
  assert got["nnz"] == [10] and got["monotone"] == [1.0]
  assert front.metrics({"silu": {0: row(2.0, 10)}}, {"c0": 0.0}, "c1", 0.03) == {}


def test_a_part_of_the_arms_gives_a_part_of_the_keys():
  got = front.metrics({"c0": {0: row(2.0, 40)}}, {"c0": 0.0, "c1": 0.001}, "c1", 0.03)
  assert got["nnz@0"] == [40] and "monotone" not in got and "sparsity" not in got
