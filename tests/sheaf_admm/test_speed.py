"""The comparison of the two forms of the Laplacian reports what it says, at a size that takes a moment."""

import dataclasses
import math

from configs.sheaf_admm import get_config
from sakanajax.core import config as config_lib
from sakanajax.sheaf_admm import speed
from sakanajax.sheaf_admm.config import Config, Iterations
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)


def test_both_forms_agree_and_compile_once(monkeypatch):
  monkeypatch.setattr(speed, "REPEATS", 2)
  cfg = config_lib.from_config(Config, get_config("speed,smoke"))
  cfg = dataclasses.replace(cfg, iterations=Iterations((3, 3), eval=3))
  got = speed.measure(cfg, seed=1)
  assert got["gemm_error"] < 1e-5 and got["compilations"] == 1
  assert got["gemm_s"] > 0 and math.isclose(got["gemm_speedup"], got["scatter_s"] / got["gemm_s"])
