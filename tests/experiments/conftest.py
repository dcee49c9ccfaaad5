"""A tiny paper: a module and a config file in a temporary folder, run as the real binaries are."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


MODULE = '''
"""A fake paper."""
import dataclasses, os, time
from experiments import launch
from sakanajax.core.errors import Diverged, UserError

@dataclasses.dataclass(frozen=True)
class Tune:
  lrs: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  fraction: float = 0.25

@dataclasses.dataclass(frozen=True)
class Train:
  steps: int = 10
  lr: float = 1e-3

@dataclasses.dataclass(frozen=True)
class Config:
  task: str
  scale: str
  seeds: tuple[int, ...]
  arms: tuple[str, ...]
  train: Train = Train()
  tune: Tune = Tune()
  expect: dict[str, tuple[float | None, float | None]] = dataclasses.field(default_factory=dict)
  sleep: float = 0.0
  trouble: str = ""

  def __post_init__(self):
    if self.sleep < 0:
      raise ValueError(f"sleep must not be negative, got {self.sleep}")

def run(cfg, unit, ctx):
  with open(ctx.workdir / "ran.txt", "a") as file:
    file.write(f"{os.getpid()} {ctx.desc}\\\\n")
  print("cores", len(os.sched_getaffinity(0)), flush=True)
  time.sleep(cfg.sleep)
  lr = unit.lr or cfg.train.lr
  if cfg.trouble == "user" and unit.seed == 1:
    raise UserError("the data file is empty; give another")
  if cfg.trouble == "defect" and unit.seed == 1:
    raise RuntimeError("a defect")
  if cfg.trouble == "diverge" and lr > 0.005 or cfg.trouble == "diverge all":
    raise Diverged(f"loss is nan at lr {lr}")
  score = 0.0 if cfg.trouble == "tie" else -abs(lr - 0.01)
  return {"tune_score": score, "acc": {"net": 0.9, "base": 0.6}[unit.arm] + unit.seed / 100}

def summarize(cfg, outcomes, workdir):
  rows = {arm: [seeds[seed]["acc"] for seed in cfg.seeds] for arm, seeds in outcomes.items()}
  plot = workdir / "acc.png"
  plot.write_bytes(b"\\\\x89PNG fake")
  baselines = {"acc_base": rows["base"]} if "base" in rows else {}
  return {"acc": rows["net"], "lr_net": [outcomes["net"][cfg.seeds[0]]["_lr"] or 0.0]}, baselines, [plot]

EXPERIMENT = launch.Experiment(
    name="fakepaper", config_cls=Config, run=run, seeds=lambda cfg, arm: cfg.seeds,
    lrs=lambda cfg, arm: cfg.tune.lrs.get(arm, ()), summarize=summarize,
    dry_run=lambda cfg: [{"arm": arm, "params": 12345, "seconds": 1.5} for arm in cfg.arms],
    modes={"inspect": lambda cfg, flags: print("inspecting", flags.input, flags.out)},
    claims=(
        launch.Claim("a", "the net is accurate", "99.0 %", "19x19", "acc", baseline_metric="acc_base", scaled="9x9"),
        launch.Claim("b", "the other task <works>", "50 %", "9x9", "acc", bar=(0.99, None), baseline_metric="acc_base"),
    ),
    paper="A Fake Paper",
)

if __name__ == "__main__":
  launch.run(EXPERIMENT)
'''.replace("\\\\", "\\")

CONFIG = '''
import ml_collections
from sakanajax.core.errors import UserError

def get_config(arg):
  task, scale = arg.split(",")
  if task not in ("a", "b"):
    raise UserError(f"there is no task {task!r}; tasks: a, b")
  if scale not in ("smoke", "cpu"):
    raise ValueError(f"there is no scale {scale!r}; scales: smoke, cpu")
  config = ml_collections.ConfigDict()
  config.task, config.scale, config.seeds, config.arms = task, scale, (0, 1, 2), ("net", "base")
  config.train = dict(steps=10, lr=1e-3)
  config.tune = dict(lrs=dict(net=(0.1, 0.01, 0.001)), fraction=0.25)
  config.expect = dict(acc=(0.85, None)) if scale == "cpu" else {}
  config.sleep, config.trouble = 0.0, ""
  return config
'''


class Fake:
  """The files of the fake paper and the ways to run it."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.config = folder / "configs" / "fakepaper.py"
    self.config.parent.mkdir()
    self.config.write_text(CONFIG)
    (folder / "fakepaper.py").write_text(MODULE)
    self.env = dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", JAX_PLATFORMS="cpu")

  def argv(self, *flags: str, spec: str = "a,cpu") -> list[str]:
    return ["fakepaper", f"--config={self.config}:{spec}", f"--workdir={self.folder / 'work'}", *flags]

  def start(self, *flags: str, spec: str = "a,cpu") -> subprocess.Popen:
    command = [sys.executable, "-m", *self.argv(*flags, spec=spec)]
    # A shell that runs the tests in the background lets them, and so their children, ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
      return subprocess.Popen(
          command, cwd=self.folder, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
      )
    finally:
      signal.signal(signal.SIGINT, before)

  def run(self, *flags: str, spec: str = "a,cpu") -> subprocess.CompletedProcess:
    with self.start(*flags, spec=spec) as process:
      try:
        out, err = process.communicate(timeout=60)
      finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def fake(tmp_path, monkeypatch):
  """The fake paper, importable as `fakepaper`."""
  made = Fake(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  sys.modules.pop("fakepaper", None)
  yield made
  sys.modules.pop("fakepaper", None)
