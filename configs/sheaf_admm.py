"""Sheaf-ADMM: `get_config("task,scale")` with tasks maze, sudoku, sudoku9, mnist, speed.

  python -m experiments.sheaf_admm --config=configs/sheaf_admm.py:maze,cpu --workdir=runs/maze --jobs=2

What a `cpu` run does and about costs on two quiet cores (--jobs=2); the table of README.md has the numbers to expect:
  maze     25 agents on 11x11 mazes, tested on 11x11 and 23x23; an hour
  sudoku   18 agents on 6x6 Sudokus; one hour
  sudoku9  27 agents on 9x9 Sudokus, short of data and time on purpose: accuracy of empty cells at equal samples; ten minutes
  mnist    81 agents on real MNIST digits, tested on larger canvases; an hour
  speed    the Laplacian at the paper's Sudoku size, two ways; a minute
`smoke` runs in seconds and claims nothing; `gpu` is sized for ten minutes of one H200; `paper` is the released recipe.
"""

from ml_collections import ConfigDict

from sakanajax.core.config import complete
from sakanajax.sheaf_admm.config import Config

SCALES = ("smoke", "cpu", "gpu", "paper")
TASKS = ("maze", "sudoku", "sudoku9", "mnist", "speed")


def get_config(arg: str = "maze,cpu") -> ConfigDict:
  """Returns the config of "task,scale"."""
  parts = arg.split(",")
  if len(parts) != 2 or parts[0] not in TASKS or parts[1] not in SCALES:
    raise ValueError(f"{arg!r}: give task,scale with a task of {', '.join(TASKS)} and a scale of {', '.join(SCALES)}")
  task, scale = parts
  sections = {"maze": _maze, "sudoku": _sudoku, "sudoku9": _sudoku9, "mnist": _mnist, "speed": _speed}[task](scale)
  base = {"task": task, "scale": scale, "seeds": (0,) if scale == "smoke" else (0, 1, 2), "expect": {}}
  return ConfigDict(complete(Config, base | sections))


# --- mazes ---------------------------------------------------------------------------------------------------------


def _maze(scale: str) -> dict:
  model = dict(d_v=10, d_e=5, hidden=256, objective="l1box_diag", z_update="prox", gamma=5.0,
               z_steps=2 if scale == "smoke" else 5, rho=3.0 if scale == "cpu" else 0.25, sharing="slot",
               map_init="orthonormal", lora_rank=4, lora_init="standard", window=4)
  short = {"train": {"steps": {"smoke": 8, "cpu": 600}.get(scale, 5000)}}
  variants = {
      "mpnn": {"model": dict(kind="mpnn", d_v=84, d_e=42), "iterations": dict(grad=0)},  # parameter-matched
      "mpnn_cm": {"model": dict(kind="mpnn", d_v=10, d_e=5), "iterations": dict(grad=0)},  # communication-matched
      "sheaf_half": short,  # what the ablations, trained half as long, are to be compared with
      "k0": short | {"iterations": dict(train=(0, 0), eval=0, far=0)},
      "identity": short | {"model": dict(map_init="identity", d_e=10, lora_rank=0)},
      "shared": short | {"model": dict(lora_rank=0)},
      "gd": short | {"model": dict(z_update="gd", z_steps=5, gamma=0.5, rho=2.0)},  # larger ones explode
      "paper_rho": short | {"model": dict(rho=0.25)},
  }
  rates = (3e-4, 1e-3, 3e-3)
  settings = {
      "smoke": dict(
          arms=("sheaf", "mpnn"), train=dict(steps=8, batch_size=16, lr=1e-3, warmup=2, ema_decay=0.5, log_every=4),
          data={"splits": _splits("smoke")}, evaluation=dict(examples=32, batch=32),
          iterations=dict(train=(2, 6), eval=6, far=12)),
      "cpu": dict(
          arms=("sheaf", "mpnn", "mpnn_cm", "sheaf_half", "k0", "identity", "shared", "gd",
                "paper_rho"),
          once=("sheaf_half", "k0", "identity", "shared", "gd", "paper_rho"),
          train=dict(steps=1200, batch_size=32, lr=1e-3, warmup=50, schedule="cosine", weight_decay=1e-6, skip=5,
                     ema_decay=0.99, checkpoint_every=200),
          data={"splits": _splits("cpu") | _SHORT_AND_LONG}, evaluation=dict(examples=1000, batch=100),
          iterations=dict(train=(15, 40), grad=20, eval=40, far=100),
          tune=dict(lrs={arm: (5e-4, 1e-3) for arm in ("sheaf", "mpnn", "mpnn_cm")}),
          expect={"solved_test": (0.97, None), "solved_2x": (0.80, None), "solved_2x_gain": (0.15, None)}),
      "gpu": dict(
          arms=("sheaf", "mpnn"), seeds=(0,),
          train=dict(steps=5000, batch_size=128, lr=1e-3, warmup=200, weight_decay=1e-6, ema_decay=0.999),
          data={"splits": _splits("paper")}, evaluation=dict(examples=1000, batch=100),
          iterations=dict(train=(15, 40), eval=100, far=100)),
      "paper": dict(
          arms=("sheaf", "mpnn", "mpnn_cm"),
          train=dict(steps=31_250, batch_size=128, lr=3e-4, warmup=200, weight_decay=1e-6, ema_decay=0.999),
          data={"splits": _splits("paper")}, evaluation=dict(examples=0, batch=100),
          iterations=dict(train=(15, 40), eval=100, far=100),
          expect={"solved_test": (0.99, None), "solved_2x": (0.95, None), "solved_2x_gain": (0.2, None)}),
  }[scale]
  return dict(model=model, variants=variants, augment="dihedral") | settings


# Training mazes of the laptop size: half with short paths (much dead end to recognise), half with long ones (far to carry
# a signal); with paths of at least ten alone, agents on larger boards take far-off dead ends for the path. Tests keep theirs.
_SHORT_AND_LONG = {
    "train": dict(n=10_000, size=(11, 11), min_path=2, seed=0),
    "train_long": dict(n=10_000, size=(11, 11), min_path=24, seed=1),
}


def _splits(table: str) -> dict:
  import dataclasses

  from sakanajax.sheaf_admm.data import maze

  return {name: dataclasses.asdict(split) for name, split in maze.SPLITS[table].items()}


# --- Sudokus -------------------------------------------------------------------------------------------------------


def _sudoku_model(side: int, per_cell: int, hidden: int, steps: int) -> dict:
  return dict(d_v=side * per_cell, d_e=per_cell, hidden=hidden, objective="non_negative", z_update="prox", gamma=2.0,
              z_steps=steps, rho=0.25, sharing="slot", map_init="soft_slice", window=2)


def _puzzles(train: int, rest: int, givens: tuple, seed: int = 0) -> dict:
  part = lambda n, name, offset: dict(n=n, givens=givens, seed=seed + offset, part=name)
  return {"train": part(train, "train", 0), "val": part(rest // 2, "val", 500), "test": part(rest, "test", 1000)}


def _sudoku(scale: str) -> dict:
  """6x6, the size between the trivial and the expensive; it has no gpu and no paper scale."""
  if scale in ("gpu", "paper"):
    raise ValueError(f"'sudoku,{scale}': 6x6 boards are for cpu; the paper's 9x9 boards are 'sudoku9,{scale}'")
  model = _sudoku_model(6, 10, 64, 3 if scale == "cpu" else 1) | dict(decoder_hidden=64)
  variants = {
      "mpnn": {"model": dict(kind="mpnn", d_v=30, d_e=32)},
      "slot": {"model": dict(kind="mpnn", d_v=30, d_e=16, slot_aware=True)},
      "k0": {"iterations": dict(train=(0, 0), eval=0, far=0)},
      "identity": {"model": dict(map_init="identity", d_e=60)},
      "gd": {"model": dict(z_update="gd", z_steps=6)},
  }
  box = (2, 3)
  settings = {
      "smoke": dict(
          arms=("sheaf", "slot"), train=dict(steps=8, batch_size=16, lr=3e-3, warmup=2, ema_decay=0.5, log_every=4),
          data={"box": box, "splits": _puzzles(256, 64, (16, 24))}, evaluation=dict(examples=32, batch=32),
          iterations=dict(train=(4, 4), eval=8, far=8)),
      "cpu": dict(
          arms=("sheaf", "mpnn", "slot", "k0"), once=("k0",),
          train=dict(steps=1600, batch_size=32, lr=3e-3, warmup=50, schedule="cosine", skip=5, ema_decay=0.99,
                     checkpoint_every=200),
          data={"box": box, "splits": _puzzles(20_000, 1000, (12, 20))}, evaluation=dict(examples=1000, batch=100),
          iterations=dict(train=(10, 10), eval=20, far=20),
          tune=dict(lrs={arm: (1e-3, 3e-3) for arm in ("sheaf", "mpnn", "slot")}),
          expect={"solved": (0.30, None), "solved_ratio": (2.0, None)}),
  }[scale]
  return dict(model=model, variants=variants, augment="full") | settings


def _sudoku9(scale: str) -> dict:
  small = scale in ("smoke", "cpu")
  model = _sudoku_model(9, 10 if small else 32, 64 if small else 128, 2 if small else 5)
  if small:
    model |= dict(decoder_hidden=64)
  variants = {
      "mpnn": {"model": dict(kind="mpnn", d_v=45 if small else 144, d_e=16 if small else 32)},
      "slot": {"model": dict(kind="mpnn", d_v=45 if small else 126, d_e=10 if small else 40, slot_aware=True)},
      "lora": {"model": dict(lora_rank=4)},
      "k0": {"iterations": dict(train=(0, 0), eval=0, far=0)},
  }
  box = (3, 3)
  settings = {
      "smoke": dict(
          arms=("sheaf",), train=dict(steps=4, batch_size=8, lr=3e-3, warmup=2, ema_decay=0.5, log_every=2),
          data={"box": box, "splits": _puzzles(64, 16, (40, 50))}, evaluation=dict(examples=16, batch=16),
          iterations=dict(train=(3, 3), eval=6, far=6)),
      "cpu": dict(
          arms=("sheaf", "mpnn", "slot"), seeds=(0,),  # at the rate that the sweep on 6x6 picks for all three
          train=dict(steps=250, batch_size=32, lr=3e-3, warmup=50, schedule="cosine", skip=5, ema_decay=0.99,
                     checkpoint_every=200),
          data={"box": box, "splits": _puzzles(20_000, 500, (42, 58))}, evaluation=dict(examples=500, batch=100),
          iterations=dict(train=(10, 10), eval=20, far=20),
          expect={"empty_acc_gain": (0.0, None)}),
      "gpu": dict(
          arms=("sheaf", "mpnn", "slot"), seeds=(0,),
          train=dict(steps=3000, batch_size=128, lr=1.7e-3, warmup=200, weight_decay=1e-7, ema_decay=0.999),
          data={"box": box, "splits": _puzzles(50_000, 2000, (30, 36))}, evaluation=dict(examples=2000, batch=200),
          iterations=dict(train=(20, 20), eval=50, far=50)),
      "paper": dict(
          arms=("sheaf", "mpnn", "slot", "lora", "k0"),
          train=dict(steps=31_250, batch_size=128, lr=1.7e-3, warmup=200, weight_decay=1e-7, ema_decay=0.999),
          data={"box": box, "splits": _puzzles(50_000, 2000, (30, 36))}, evaluation=dict(examples=0, batch=200),
          iterations=dict(train=(20, 20), eval=50, far=50),
          expect={"solved": (0.9, None), "solved_ratio": (2.0, None)}),
  }[scale]
  return dict(model=model, variants=variants, augment="full" if small else "dihedral") | settings


# --- digits --------------------------------------------------------------------------------------------------------


def _mnist(scale: str) -> dict:
  small = scale in ("smoke", "cpu")
  model = dict(d_v=16 if small else 32, d_e=8 if small else 24, hidden=64 if small else 256, objective="lasso",
               l1=0.006337180166370117, z_update="project", epsilon=1e-5, z_steps={"smoke": 2, "cpu": 3}.get(scale, 5),
               rho=1.0 if small else 0.12, sharing="global", map_init="orthonormal", lora_rank=2 if small else 8,
               lora_init="legacy", window=2)
  variants = {
      "mpnn": {"model": dict(kind="mpnn", d_v=43 if small else 296, d_e=16 if small else 64, pool="mean")},
      "cnn_gap": {"model": dict(kind="cnn", d_v=26 if small else 141, pool="average")},
      "cnn_gmp": {"model": dict(kind="cnn", d_v=26 if small else 141, pool="max")},
      "k0": {"iterations": dict(train=(0, 0), eval=0, far=0)},
      "identity": {"model": dict(map_init="identity", d_e=16 if small else 32, lora_rank=0)},
  }
  shifts = dict(pads=(2, 4, 8, 12, 16), noises=(0.1, 0.2), drops=(0.05, 0.1, 0.3))
  settings = {
      "smoke": dict(
          arms=("sheaf", "cnn_gap"), train=dict(steps=6, batch_size=16, lr=1e-3, warmup=2, ema_decay=0.5, log_every=3),
          data=dict(source="synthetic", train=256, val=64, test=64),
          evaluation=dict(examples=32, batch=32, pads=(16,), noises=(0.1,), drops=(0.1,)),
          iterations=dict(train=(4, 4), eval=8, far=8)),
      "cpu": dict(
          arms=("sheaf", "cnn_gap", "cnn_gmp"), augment="shift",
          train=dict(steps=1500, batch_size=48, lr=6e-3, warmup=50, schedule="cosine", weight_decay=1e-7, skip=5,
                     ema_decay=0.99, checkpoint_every=200),
          data=dict(source="mnist", train=20_000, val=2_000, test=10_000),
          evaluation=dict(
              examples=2000, far_examples=500, batch=100, pads=(4, 8, 16), noises=(0.1, 0.2), drops=(0.1, 0.3)),
          iterations=dict(train=(10, 10), eval=10, far=100),
          tune=dict(lrs={arm: (3e-3, 6e-3) for arm in ("sheaf", "cnn_gap", "cnn_gmp")}),
          expect={"acc_clean": (0.95, None), "acc_pad16": (0.75, None), "acc_pad16_cnn_gap": (None, 0.50)}),
      "gpu": dict(
          arms=("sheaf", "cnn_gap", "cnn_gmp"), seeds=(0,),
          train=dict(steps=3000, batch_size=128, lr=1e-3, warmup=200, weight_decay=1e-7, ema_decay=0.999),
          data=dict(source="mnist", train=0, val=5_000, test=10_000), evaluation=dict(examples=10_000, batch=100) | shifts,
          iterations=dict(train=(20, 20), eval=100, far=100)),
      "paper": dict(
          arms=("sheaf", "mpnn", "cnn_gap", "cnn_gmp", "k0", "identity"),
          train=dict(steps=9_375, batch_size=128, lr=1e-3, warmup=200, weight_decay=1e-7, ema_decay=0.999),
          data=dict(source="mnist", train=0, val=0, test=10_000), evaluation=dict(examples=0, batch=100) | shifts,
          iterations=dict(train=(20, 20), eval=100, far=100),
          expect={"acc_clean": (0.98, None), "acc_pad16": (0.8, None)}),
  }[scale]
  return dict(model=model, variants=variants) | settings


# --- the Laplacian -------------------------------------------------------------------------------------------------


def _speed(scale: str) -> dict:
  paper = _sudoku_model(9, 32, 128, 5)
  return dict(
      arms=("sheaf",), model=paper if scale != "smoke" else _sudoku_model(9, 4, 16, 2),
      data={"box": (3, 3), "splits": _puzzles(16, 8, (40, 50))},
      evaluation=dict(batch=4 if scale == "smoke" else 32), iterations=dict(train=(20, 20), eval=20, far=20),
      expect={} if scale == "smoke" else {"gemm_error": (None, 1e-5), "gemm_speedup": (1.5, None), "compilations": (1, 1)},
  )
