"""TwELL: neurons made quiet by an L1 penalty, and feed-forward layers that skip the quiet ones.

  python -m experiments.twell --config=configs/twell.py:sweep,cpu --workdir=runs/twell --jobs=2
  python -m experiments.twell --config=configs/twell.py:ffn,cpu --workdir=runs/twell_ffn
  python -m experiments.twell --config=configs/twell.py:lm,cpu --config.checkpoint=runs/twell/units/c2e-3/seed_0
  python -m experiments.twell --config=configs/twell.py:sweep,cpu --mode=inspect
      --checkpoint=runs/twell/units/c2e-3/seed_0 --input=mytext.txt --out=inspection
  python -m experiments.twell --config=configs/twell.py:sweep,cpu --mode=sparsify
      --checkpoint=runs/twell/units/c2e-3/seed_0 --input=mytext.txt --out=packed

Modes read a trained unit's folder, or a folder of safetensors of a ReLU model, and the user's own text (--input;
without it the unit's test split): `inspect` draws where it is sparse, `sparsify` saves the packed model and predicts
its speed-up on that text.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from experiments import launch, plots
from experiments.launch import Claim, Context, Experiment, ModeFlags, Unit
from sakanajax.core.errors import UserError
from sakanajax.twell import front
from sakanajax.twell.config import Config, alone, coefficients, of_arm


def run(cfg: Config, unit: Unit, context: Context) -> dict[str, float]:
  """Runs one arm with one seed: trains and measures a model, or times."""
  import jax

  if cfg.scale == "smoke":  # a handful of steps: compiling is all the work
    jax.config.update("jax_disable_most_optimizations", True)
  if cfg.task != "sweep":
    from sakanajax.twell import timing

    if cfg.task == "lm":
      return timing.whole_model(of_arm(cfg, unit.arm), unit.seed, context)
    return timing.others(cfg, unit.seed) if unit.arm == "others" else timing.layer(cfg, unit.arm == "gated", unit.seed)
  return _sweep(of_arm(cfg, unit.arm), unit, context)


def _sweep(arm: Config, unit: Unit, context: Context) -> dict[str, float]:
  from sakanajax.core import train, trees
  from sakanajax.twell import fitting

  steps = max(1, round(arm.train.steps * unit.fraction))
  settings = dataclasses.replace(
      arm.train, steps=steps, lr=unit.lr or arm.train.lr, warmup=min(arm.train.warmup, steps - 1))
  arm = dataclasses.replace(arm, train=settings)
  state = fitting.fit(
      arm, seed=unit.seed, workdir=context.workdir, fingerprint=context.fingerprint, desc=context.desc,
      tensorboard=context.tensorboard)
  evaluator = fitting.Evaluator(arm)
  average = train.ema_params(state, settings.ema_decay)
  if unit.fraction < 1:
    return {"tune_score": -evaluator.loss(average, "valid")}
  scores = evaluator(average)
  raw = {f"{key}_raw": value for key, value in evaluator(state.params).items()}
  extra = evaluator.imposed(average) if not arm.penalty.coefficient else {}
  return scores | raw | extra | {"params": float(trees.count_params(state.params))}


def summarize(cfg: Config, outcomes: dict[str, dict[int, dict[str, Any]]], workdir: pathlib.Path):
  """Collects metrics, baselines and plots (see `sakanajax.twell.front` for the sweep)."""
  if cfg.task == "sweep":
    return _summarize_sweep(cfg, outcomes, workdir)
  table = {}
  for arm, seeds in outcomes.items():
    keys = [key for key in next(iter(seeds.values())) if not key.startswith("_")]
    table[arm] = {key: [seeds[seed][key] for seed in sorted(seeds)] for key in keys}
  baselines = table.pop("others", {})
  metrics = {key: values for columns in table.values() for key, values in columns.items()}
  drawings = [_draw_speed(cfg, metrics, workdir)] if cfg.task == "ffn" else []
  return metrics, baselines, drawings


def _summarize_sweep(cfg: Config, outcomes: dict, workdir: pathlib.Path):
  rows = coefficients(cfg)
  chosen = cfg.choice.arm
  metrics = front.metrics(outcomes, rows, chosen, cfg.choice.ce_increase) if rows else {}
  if chosen in outcomes:
    seeds = sorted(outcomes[chosen])
    metrics["train_s"] = [outcomes[chosen][seed]["_wall_s"] for seed in seeds]
    for key in ("sparsity", "ce"):
      metrics[f"{key}_raw"] = [outcomes[chosen][seed][f"{key}_test_raw"] for seed in seeds]
  baselines = {}
  for arm in ("c0", "silu", "revive"):
    seeds = sorted(outcomes.get(arm, {}))
    for key in ("ce", "nnz", "sparsity", "dead", "first_position_ratio") if seeds else ():
      baselines[f"{key}_{arm}"] = [outcomes[arm][seed][f"{key}_test"] for seed in seeds]
    for key in (k for k in outcomes[arm][seeds[0]] if "@" in k) if seeds else ():
      head, count = key.split("@")  # top-k and threshold, applied to the arms without a penalty
      baselines[f"{head}_{arm}@{count}"] = [outcomes[arm][seed][key] for seed in seeds]
  log = lambda arm, seed: workdir / "units" / arm / f"seed_{seed}" / "metrics.jsonl"
  logs = {arm: [log(arm, seed) for seed in sorted(outcomes[arm])] for arm in outcomes}
  drawings = [plots.training(workdir / f"sweep_{key}.png", logs, key=key, title=f"sweep: {title}")
              for key, title in (("ce", "training cross-entropy"), ("nnz", "active neurons per token"))]
  if len(rows) > 1:
    drawings.append(_draw_front(metrics, baselines, rows, workdir))
  return metrics, baselines, drawings


def _draw_front(metrics: dict, baselines: dict, rows: dict[str, float], workdir: pathlib.Path) -> pathlib.Path:
  """Cross-entropy against non-zeros: the sweep, and what top-k and threshold make of the arm without a penalty."""
  at = [f"{c:g}" for c in rows.values() if f"nnz@{c:g}" in metrics]
  series = {"L1 (each a coefficient)": ([metrics[f"nnz@{c}"][0] for c in at], [[metrics[f"ce@{c}"][0] for c in at]])}
  for way in ("topk", "threshold"):
    keys = sorted((key for key in baselines if key.startswith(f"ce_{way}_c0@")), key=lambda key: int(key.split("@")[1]))
    if keys:
      series[f"{way} on c0"] = ([int(key.split("@")[1]) for key in keys], [[baselines[key][0] for key in keys]])
  return plots.lines(workdir / "sweep_front.png", series, title="What sparsity costs", logx=True,
                     xlabel="active neurons per token and layer", ylabel="test cross-entropy, nats per byte")


def _draw_speed(cfg: Config, metrics: dict, workdir: pathlib.Path) -> pathlib.Path:
  from sakanajax.twell import timing

  series = {}
  for form in ("gated", "plain"):
    keys = [f"speedup_{form}_{timing.name_of(density)}" for density in cfg.speed.densities]
    if all(key in metrics for key in keys):
      series[form] = ([100 * density for density in cfg.speed.densities], list(zip(*(metrics[key] for key in keys))))
  title = f"Feed-forward layer, {cfg.speed.rows[0]} tokens"
  return plots.lines(workdir / "ffn_speedup.png", series, title=title, xlabel="active neurons, %",
                     ylabel="dense time / sparse time", logx=True, bars={"dense": 1.0})


def dry_run(cfg: Config) -> list[dict]:
  """Parameters, FLOPs and expected time of every arm; nothing runs."""
  import jax

  from sakanajax.core import train, trees
  from sakanajax.twell import fitting

  if cfg.task == "ffn":
    size = cfg.speed.dim * cfg.speed.hidden
    return [{"arm": arm, "params": (2 if arm == "plain" else 3) * size, "steps": 0} for arm in cfg.arms]
  out = []
  for name in cfg.arms:
    arm = of_arm(cfg, name)
    params = jax.eval_shape(fitting.model_of(arm).init, jax.random.key(0))
    tx = fitting.wrap_of(arm, 0)(train.make_optimizer(arm.train))
    state = jax.eval_shape(lambda p, tx=tx: train.init_state(p, tx), params)
    flops = 6.0 * trees.count_params(params) * arm.train.batch_size * arm.data.length
    out.append({
        "arm": name, "params": trees.count_params(params), "steps": arm.train.steps,
        "GFLOP/step": round(flops / 1e9, 2),
        "state MB": round(trees.tree_bytes(state) / 2**20, 1),
        "minutes (2 cores)": round(flops * arm.train.steps / 2e10 / 60, 1)})
  return out


def inspect(cfg: Config, flags: ModeFlags) -> None:
  """Writes sparsity.json and its pictures."""
  from sakanajax.twell import tools

  for path in tools.inspect(cfg, flags.checkpoint, flags.input, flags.out or "inspection"):
    print(path)


def sparsify(cfg: Config, flags: ModeFlags) -> None:
  """Writes the packed model and what it will gain."""
  from sakanajax.twell import tools

  if not flags.out:
    raise UserError("--mode=sparsify writes a model; give its folder with --out")
  print(launch.table(tools.pack(cfg, flags.checkpoint, flags.input, flags.out)))


EXPERIMENT = Experiment(
    name="twell",
    config_cls=Config,
    run=run,
    summarize=summarize,
    dry_run=dry_run,
    modes={"inspect": inspect, "sparsify": sparsify},
    arm_config=alone,
    claims=(
        Claim("sweep", "An L1 penalty makes a ReLU model sparse at almost no cost", "99.5 % zeros (29 of 5632 active)",
              "1.5B parameters, c = 2e-5", "sparsity", baseline_metric="sparsity_c0", scaled="2 layers of 1,024 neurons"),
        Claim("sweep", "... which cross-entropy hardly notices", "2.255 to 2.297 (+1.9 %)", "1.5B parameters, c = 2e-5",
              "ce_increase", direction="lower"),
        Claim("sweep", "Sparsity grows with the coefficient", "911 to below 1 active neurons over c = 0 to 1e-4",
              "1.5B parameters, 8 coefficients", "monotone"),
        Claim("sweep", "Re-initialising dead neurons removes almost all of them, at equal quality",
              "over 30 % dead to almost none", "1.5B parameters, c = 2e-5", "dead_reduction"),
        Claim("sweep", "The first tokens of a text activate more neurons",
              "far more, falling log-log with the position", "1.5B parameters", "first_position_ratio"),
        Claim("ffn", "A sparse gated layer is faster, packing included", "whole model +20.5 % at 99.6 % zeros",
              "2B parameters, H100", "speedup_gated_d005"),
        Claim("ffn", "So is a layer without a gate", "whole model +11.2 %", "1.5B parameters, H100",
              "speedup_plain_d005"),
        Claim("ffn", "The speed-up falls as the number of non-zeros rises", "Pearson below -0.996 over layers",
              "1.5B parameters", "pearson_nnz_speedup", direction="lower"),
        Claim("ffn", "Training keeps less for the backward pass", "peak memory -28.1 %", "1.5B parameters, 8 H100",
              "backward_bytes_ratio"),
        Claim("lm", "A whole model's forward pass is faster", "+20.5 % tokens per second", "2B parameters, H100",
              "speedup_forward"),
    ),
    paper="Sparser, Faster, Lighter Transformer Language Models, ICML 2026, arXiv 2603.23198",
)

if __name__ == "__main__":
  launch.run(EXPERIMENT)
