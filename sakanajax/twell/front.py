"""The sweep as numbers: which coefficient is chosen, and what the arms say together. Pure functions of outcomes.

An outcome is {key_split: value}; the table is {arm: {seed: outcome}}. The choice looks at the validation split alone,
all that is reported is of the test split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Outcomes = Mapping[str, Mapping[int, Mapping[str, Any]]]
FLOOR = 5e-4  # the least dead share that a ratio divides by: one of the 2,048 neurons of the small model


def choose(validation: Mapping[str, Mapping[str, float]], base: str, limit: float) -> str:
  """Returns the arm with the fewest non-zeros among those whose cross-entropy is at most `limit` above the base's.

  Args:
    validation: arm -> {"ce_valid", "nnz_valid"}, of one seed.
    base: the arm without a penalty; it is returned when no other qualifies.
    limit: relative increase, 0.03 for 3 %.
  """
  ce = validation[base]["ce_valid"]
  good = [arm for arm, row in validation.items() if arm != base and increase(row["ce_valid"], ce) <= limit]
  return min(good, key=lambda arm: validation[arm]["nnz_valid"], default=base)


def increase(value: float, base: float) -> float:
  """(value - base) / base."""
  return (value - base) / base


def falls(values: list[float]) -> float:
  """1.0 when each value is below the one before it, else 0.0."""
  return float(all(b < a for a, b in zip(values, values[1:])))


def grows(values: list[float]) -> float:
  """1.0 when no value is below the one before it and the last is above the first, else 0.0."""
  return float(all(b >= a for a, b in zip(values, values[1:])) and values[-1] > values[0])


def metrics(outcomes: Outcomes, coefficients: Mapping[str, float], chosen: str, limit: float, revived: str = "revive"
            ) -> dict[str, list[float]]:
  """Returns the keys of the sweep's result: one number per seed for those of the chosen arm, one for those of a row.

  Args:
    outcomes: of all arms.
    coefficients: arms of the sweep with their coefficients, rising; one of them is 0, or nothing is said about the cost.
    chosen: the arm that ran on all seeds as the chosen one.
    limit: of `choose`.
    revived: the arm with re-initialisation.
  """
  rows = {arm: c for arm, c in coefficients.items() if arm in outcomes}
  if not rows:
    return {}
  base = next((arm for arm, c in rows.items() if c == 0), None)  # without it nothing says what sparsity costs
  first = min(outcomes[base or next(iter(rows))])
  out = _rows(outcomes, rows, first, base)
  if len(rows) > 1:
    out |= {
        "monotone": [falls([out[f"nnz@{c:g}"][0] for c in rows.values()])],
        "dead_monotone": [grows([out[f"dead@{c:g}"][0] for c in rows.values()])],
    }
  if len(rows) > 1 and base:
    picked = choose({arm: outcomes[arm][first] for arm in rows}, base, limit)
    out |= {"chosen_coefficient": [rows[picked]], "choice_agrees": [float(picked == chosen)]}
  if chosen in outcomes:
    out |= _chosen(outcomes, base, chosen)
  if revived in outcomes and chosen in outcomes:
    out |= _revival(outcomes, chosen, revived)
  return out


def _rows(outcomes: Outcomes, rows: Mapping[str, float], first: int, base: str | None) -> dict[str, list[float]]:
  out = {}
  for arm, c in rows.items():
    own = outcomes[arm][first]
    for key in ("nnz", "sparsity", "ce", "dead"):
      out[f"{key}@{c:g}"] = [own[f"{key}_test"]]
    if base:
      out[f"ce_increase@{c:g}"] = [increase(own["ce_test"], outcomes[base][first]["ce_test"])]
  return out


def _chosen(outcomes: Outcomes, base: str | None, chosen: str) -> dict[str, list[float]]:
  seeds = sorted(set(outcomes[chosen]) & set(outcomes[base or chosen]))
  ours = lambda key: [outcomes[chosen][seed][f"{key}_test"] for seed in seeds]
  out = {key: ours(key) for key in ("sparsity", "nnz", "ce", "dead")}
  out["first_position_ratio"] = ours("first_position_ratio")
  if base:
    out["ce_increase"] = [increase(a, outcomes[base][seed]["ce_test"]) for a, seed in zip(out["ce"], seeds)]
  named = (key for key in outcomes[chosen][seeds[0]] if key.startswith("nnz_layer") and key.endswith("_test"))
  out |= {key: ours(key) for key in sorted(name.removesuffix("_test") for name in named)}
  return out


def _revival(outcomes: Outcomes, chosen: str, revived: str) -> dict[str, list[float]]:
  seeds = sorted(set(outcomes[chosen]) & set(outcomes[revived]))
  of = lambda arm, seed, key: outcomes[arm][seed][f"{key}_test"]
  pairs = lambda key: [(of(chosen, seed, key), of(revived, seed, key)) for seed in seeds]
  return {
      "dead_reduction": [without / max(with_, FLOOR) for without, with_ in pairs("dead")],
      "ce_revive_increase": [increase(with_, without) for without, with_ in pairs("ce")],
      "nnz_revive_ratio": [with_ / without if without else math.nan for without, with_ in pairs("nnz")],
  }
