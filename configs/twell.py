"""TwELL: `get_config("task,scale")` with tasks sweep, ffn, lm.

  python -m experiments.twell --config=configs/twell.py:sweep,cpu --workdir=runs/twell --jobs=2

  sweep  trains a small language model on real text for seven L1 coefficients (0 to 0.01, sum form), the chosen one
         with and without re-initialisation of dead neurons, and SiLU: 14 runs of 1,500 steps of 16 x 128 bytes. Expect
         nnz to fall with the coefficient, and the chosen one at 95 % zeros for at most 3 % of cross-entropy.
  ffn    one feed-forward layer of the 1.5B model (2048 -> 5632), 256 tokens, float32: dense XLA against every sparse
         way, over eight densities. Needs an idle machine. Expect 2.0 at 0.5 % density, 1.3 at 5 %, below 1 at 30 %.
  lm     the forward pass of a whole trained model, dense against packed; --config.checkpoint=UNIT takes the model of a
         sweep (runs/twell/units/c2e-3/seed_0), else one is trained.

The coefficient that carries the claims is CHOSEN: it runs on all seeds. After the sweep, `choice_agrees` says whether
the validation split of the first seed picks it, too; if not, set CHOSEN to the arm of `chosen_coefficient` and run
again: finished arms are kept. Text of your own: --config.data.source=FILE_OR_FOLDER.
`smoke` runs in seconds on made-up text and claims nothing; `gpu` is sized for ten minutes of one H200; `paper` is the
1.5B recipe (give data.source and a tokenizer.json of 49,152 ids).
"""

from ml_collections import ConfigDict

from sakanajax.core.config import complete
from sakanajax.twell.config import Config

SCALES = ("smoke", "cpu", "gpu", "paper")
TASKS = ("sweep", "ffn", "lm")
COEFFICIENTS = {"c0": 0.0, "c3e-4": 3e-4, "c1e-3": 1e-3, "c2e-3": 2e-3, "c3e-3": 3e-3, "c4e-3": 4e-3, "c1e-2": 1e-2}
PUBLISHED = {"c0": 0.0, "c15e-6": 1.5e-5, "c2e-5": 2e-5, "c3e-5": 3e-5, "c1e-4": 1e-4}
CHOSEN, CHOSEN_PUBLISHED = "c2e-3", "c2e-5"


def get_config(arg: str = "sweep,cpu") -> ConfigDict:
  """Returns the config of "task,scale"."""
  parts = arg.split(",")
  if len(parts) != 2 or parts[0] not in TASKS or parts[1] not in SCALES:
    raise ValueError(f"{arg!r}: give task,scale with a task of {', '.join(TASKS)} and a scale of {', '.join(SCALES)}")
  task, scale = parts
  sections = {"sweep": _sweep, "ffn": _ffn, "lm": _lm}[task](scale)
  base = {"task": task, "scale": scale, "seeds": (0,) if scale == "smoke" else (0, 1, 2), "expect": {}}
  return ConfigDict(complete(Config, base | sections))


def _arm(coefficient: float, **more: dict) -> dict:
  return {"penalty": {"coefficient": coefficient}} | more


def _network(scale: str) -> dict:
  """The model, the text and the optimizer, which sweep and lm share."""
  return {
      "smoke": dict(
          model=dict(dim=16, hidden=64, layers=2, heads=2), data=dict(source="synthetic", length=32, documents=60),
          train=dict(steps=6, batch_size=4, lr=2e-3, warmup=2, b2=0.95, weight_decay=0.1, ema_decay=0.5, log_every=3),
          evaluation=dict(batch=4, rows=8, imposed=(4,))),
      "cpu": dict(
          model=dict(dim=128, hidden=1024, layers=2, heads=4, unroll=2), data=dict(source="sotu", length=128),
          train=dict(steps=1500, batch_size=16, lr=2e-3, warmup=100, schedule="cosine", b2=0.95, weight_decay=0.1,
                     ema_decay=0.99, log_every=50, checkpoint_every=250),
          evaluation=dict(batch=16, rows=512, imposed=(51, 16))),
      "gpu": dict(
          model=dict(dim=512, hidden=2048, layers=8, heads=8, dtype="bfloat16"), data=dict(source="gcide", length=512),
          train=dict(steps=2000, batch_size=64, lr=1e-3, warmup=200, schedule="cosine", b2=0.95, weight_decay=0.1,
                     ema_decay=0.99, log_every=50, checkpoint_every=500),
          evaluation=dict(batch=32, rows=512, imposed=(102, 32))),
      "paper": dict(
          model=dict(vocab=49_152, dim=2048, hidden=5632, layers=28, heads=32, theta=100_000.0, form="hybrid",
                     remat=True, dtype="bfloat16"),
          data=dict(source="fineweb_edu", tokenizer="tokenizer.json", length=2048),
          train=dict(steps=30_000, batch_size=512, lr=1e-3, warmup=600, schedule="cosine", b2=0.95, weight_decay=0.1,
                     clip=1.0, ema_decay=0.999, log_every=100, checkpoint_every=1000),
          evaluation=dict(batch=16, rows=2048, window=1_048_576)),
  }[scale]


def _sweep(scale: str) -> dict:
  published = scale == "paper"
  values, chosen = (PUBLISHED, CHOSEN_PUBLISHED) if published else (COEFFICIENTS, CHOSEN)
  variants = {arm: _arm(coefficient) for arm, coefficient in values.items()}
  if published:  # without a penalty hundreds of neurons are active for each token: nothing for a sparse form
    variants["c0"] |= {"model": {"form": "dense"}}
  dense = {"model": {"activation": "silu", "form": "dense"}}
  variants |= {"revive": _arm(values[chosen], revival={"rate": 0.1}), "silu": dense}
  arms = ("c0", chosen, "revive", "silu") if scale == "smoke" else tuple(variants)
  out = _network(scale) | dict(
      arms=arms, variants=variants, once=tuple(arm for arm in arms if arm not in ("c0", chosen, "revive")),
      choice=dict(arm=chosen, ce_increase=0.03))
  if scale in ("gpu", "paper"):
    out["seeds"] = (0,)
  if scale in ("cpu", "paper"):
    out["expect"] = {
        "sparsity": (0.95, None), "ce_increase": (None, 0.03), "dead_reduction": (5.0, None), "monotone": (1.0, 1.0),
        "dead_monotone": (1.0, 1.0), "ce_revive_increase": (-0.01, 0.01), "nnz_revive_ratio": (0.8, 1.2),
        "first_position_ratio": (1.0, None), "choice_agrees": (1.0, 1.0)}
  return out


def _ffn(scale: str) -> dict:
  speed = {
      "smoke": dict(dim=64, hidden=512, rows=(8, 1), densities=(0.01, 0.05, 0.3), reps=3, other_densities=(0.05,)),
      "cpu": dict(dim=2048, hidden=5632, rows=(256, 1, 16), densities=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3),
                  reps=15, other_densities=(0.005, 0.02)),
      "gpu": dict(dim=2048, hidden=5632, rows=(131_072,), densities=(0.0051, 0.0178), reps=10, dtype="bfloat16",
                  other_densities=()),
      "paper": dict(dim=2048, hidden=5632, rows=(131_072,), densities=(0.0051, 0.0178), reps=10, dtype="bfloat16",
                    other_densities=()),
  }[scale]
  arms = ("gated", "plain") if not speed["other_densities"] else ("gated", "plain", "others")
  expect = {}
  if scale == "cpu":
    expect = {
        "speedup_gated_d005": (2.0, None), "speedup_gated_d05": (1.3, None), "speedup_plain_d005": (1.4, None),
        "pearson_nnz_speedup": (None, -0.9), "backward_bytes_ratio": (5.0, None), "speedup_gated_d3": (None, 1.0),
        "switched_gated_d3": (1.0, 1.0)}
  return dict(arms=arms, variants={arm: {} for arm in arms}, once=("others",), speed=speed, expect=expect)


def _lm(scale: str) -> dict:
  rows, reps = ((2,), 3) if scale == "smoke" else ((16, 1), 15)
  speed = dict(rows=rows, densities=(0.005, 0.02, 0.05, 0.2), reps=reps)
  return _network(scale) | dict(
      arms=("lm",), variants={"lm": {}}, speed=speed,
      penalty={"coefficient": PUBLISHED[CHOSEN_PUBLISHED] if scale == "paper" else COEFFICIENTS[CHOSEN]},
      expect={"logits_error": (None, 1e-3), "speedup_forward": (1.0, None)} if scale == "cpu" else {})
