"""Arms: the method, its baselines and its ablations as changes to one base config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sakanajax.core import config as config_lib
from sakanajax.core.errors import UserError

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Tune:
  """Learning rates tried on the first seed at a fraction of the steps; arms not named keep train.lr."""

  lrs: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  fraction: float = 0.25

  def __post_init__(self):
    if not 0 < self.fraction < 1:
      raise ValueError(f"fraction {self.fraction} must lie between 0 and 1")


def check(arms: Sequence[str], known: Sequence[str], seeds: Sequence[int]) -> None:
  """Raises ValueError for arms that are not known, and for seeds that are negative or repeated."""
  unknown = set(arms) - set(known)
  if unknown:
    raise ValueError(f"arms {sorted(unknown)} are not among the variants {sorted(known)}")
  if min(seeds, default=0) < 0 or len(set(seeds)) < len(seeds):
    raise ValueError(f"seeds {seeds} must be different numbers >= 0")


def of_arm(cfg: Config, arm: str, sections: Sequence[str]) -> Config:
  """The config of one arm: the base with the arm's changes.

  Args:
    cfg: a frozen dataclass with `variants`, arm -> {section: {key: value}}; an arm that is not there changes nothing.
    arm: its name.
    sections: the sections that an arm may change.

  Raises:
    UserError: a section or a key that is wrong, by its name.
  """
  changes: Mapping[str, Any] = cfg.variants.get(arm, {})
  for section in changes:
    if section not in sections:
      raise UserError(f"config.variants.{arm}.{section}: unknown section; known: {', '.join(sections)}")
  changed = {
      section: config_lib.from_config(
          type(getattr(cfg, section)), config_lib.to_dict(getattr(cfg, section)) | dict(values),
          f"config.variants.{arm}.{section}")
      for section, values in changes.items()
  }
  return dataclasses.replace(cfg, **changed)
