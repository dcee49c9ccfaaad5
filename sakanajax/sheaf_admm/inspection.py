"""Looks into one negotiation of a trained sheaf network: what was believed, by whom, and where neighbours disagreed.

`run` is `python -m experiments.sheaf_admm --mode=inspect`. It reads a board of the user's, restores the averaged weights,
traces every iteration and leaves pictures, an animation and a page in a folder. Boards may be larger than those of training.

Legend: K iterations, N agents, E edges, H x W board, S board side of a Sudoku, C classes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core import checkpoint as checkpoint_lib
from sakanajax.core import config as config_lib
from sakanajax.core import files, train
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import fitting, inspection_boards, tasks, views
from sakanajax.sheaf_admm.config import Config, data_of, of_arm
from sakanajax.sheaf_admm.model import Network

ARM = "sheaf"
PATCHES = {"maze": (3, 2), "mnist": (3, 3)}  # patch and stride of `tasks`
LARGEST = 300_000_000  # numbers that a trace may hold: about 1.2 GB


class Negotiation(NamedTuple):
  """One negotiation as numpy arrays. Index k is what held after k iterations; the first four start at k = 0.

  The residuals of k = 0 do not exist and are NaN.
  """

  kind: str  # maze, sudoku or mnist
  board: np.ndarray  # [H, W] as given: uint8, for digits floats in [0, 1]
  prediction: np.ndarray  # [K+1, H, W], for digits [K+1]
  belief: np.ndarray  # [K+1, H, W] probability of the path; [K+1, S, S, S+1] of digits; [K+1, N, C] opinion of each agent
  primal: np.ndarray  # [K+1, N] ‖x - z‖ of each agent
  dual: np.ndarray  # [K+1, N] rho ‖z - z_prev‖ of each agent
  disagreement: np.ndarray  # [K+1, E] ‖F_u z_u - F_v z_v‖
  x: np.ndarray  # [K, N, d_v]
  z: np.ndarray  # [K, N, d_v]
  edges: np.ndarray  # [E, 2]
  slots: np.ndarray  # [E, 2]
  box: tuple[int, int] | None  # of a Sudoku
  patch: tuple[int, int] | None  # patch and stride of a grid


def run(cfg: Config, checkpoint: str, input: str, out: str) -> list[pathlib.Path]:  # pylint: disable=redefined-builtin
  """Renders one negotiation, prints its outcome and returns the files.

  Args:
    cfg: the config that the network was trained with.
    checkpoint: a unit's folder (WORKDIR/units/sheaf/seed_0) or the `checkpoints` in it.
    input: a maze's text or its file, a Sudoku's string or its file, a picture's file.
    out: the folder to fill; created when missing. It holds all files or, when something fails, none of them.

  Raises:
    UserError: for whatever is wrong with these four.
  """
  _check(cfg, checkpoint, out)
  cfg = of_arm(cfg, ARM)
  _, network = fitting.network_of(cfg)
  given = inspection_boards.read(cfg, input)
  params = load_params(cfg, network, checkpoint)
  negotiation = negotiate(cfg, network, params, given.board)
  report = inspection_boards.report(negotiation, given)
  with _published(pathlib.Path(out)) as (folder, paths):
    from sakanajax.sheaf_admm import inspection_page, inspection_plots

    files.write_text(folder / "prediction.txt", report.text + "\n")
    inspection_plots.draw_all(folder, negotiation, given, report)
    inspection_page.write_all(folder, negotiation, given, report)
  print(report.text)
  return paths


def _check(cfg: Config, checkpoint: str, out: str) -> None:
  if cfg.task == "speed":
    raise UserError("--mode=inspect: the task speed trains no network; use a config of maze, sudoku, sudoku9 or mnist")
  if ARM not in cfg.arms:
    raise UserError(f"--mode=inspect looks into arm {ARM} only, not into {', '.join(cfg.arms)}; give --arms={ARM}")
  if not checkpoint:
    raise UserError("--checkpoint is missing; give a unit's folder, such as runs/maze/units/sheaf/seed_0")
  if not out:
    raise UserError("--out is missing; give a folder for the pictures")
  if os.path.exists(out) and not os.path.isdir(out):
    raise UserError(f"--out={out} is a file; give a folder")


# --- the weights ---------------------------------------------------------------------------------------------------


def load_params(cfg: Config, network: Network, checkpoint: str) -> Any:
  """The debiased average of the weights in a unit's folder. Raises UserError when there is none, or another's."""
  folder = _checkpoints(pathlib.Path(checkpoint))
  _check_unit(cfg, folder.parent / "unit.json")
  make = lambda key: train.init_state(network.init(key), train.make_optimizer(cfg.train))
  state, meta = checkpoint_lib.restore(folder, jax.eval_shape(make, jax.random.key(0)))
  trained = meta.get("train")
  decay = trained.get("ema_decay", cfg.train.ema_decay) if isinstance(trained, dict) else cfg.train.ema_decay
  return jax.jit(train.ema_params, static_argnums=1)(state, decay)


def _checkpoints(folder: pathlib.Path) -> pathlib.Path:
  if not folder.is_dir():
    raise UserError(f"--checkpoint: there is no folder {folder}; give a unit's, such as runs/maze/units/{ARM}/seed_0")
  for candidate in (folder / "checkpoints", folder):
    if checkpoint_lib.latest(candidate) is not None:
      return candidate
  inside = sorted(folder.glob(f"units/{ARM}/seed_*"))
  hint = f"give {inside[0]}" if inside else f"give a unit's folder, such as runs/maze/units/{ARM}/seed_0"
  raise UserError(f"--checkpoint: no checkpoint in {folder}; {hint}")


def _check_unit(cfg: Config, path: pathlib.Path) -> None:
  """Holds what the launcher wrote beside the checkpoints against the config: shapes alone do not tell gamma 2 from 5."""
  if not path.exists():
    return
  unit = files.read_json(path)
  try:
    arm, trained = unit["unit"]["arm"], unit["config"]
    there = {"task": trained["task"], "box": trained["data"].get("box"), **trained["model"]}
  except (KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{path} does not describe a unit; give a folder that a run of this experiment left") from error
  if arm != ARM:
    raise UserError(f"--checkpoint: {path.parent} holds arm {arm}; --mode=inspect looks into arm {ARM} only")
  box = list(data_of(cfg).box) if cfg.kind == "sudoku" else None
  here = {"task": cfg.task, "box": box, **config_lib.to_dict(cfg.model)}
  different = [name for name in here if there.get(name) != here[name]]
  if different:
    name = different[0]
    raise UserError(f"--checkpoint: {path.parent} was trained with {name} = {there.get(name)}, the config says {here[name]}; "
                    "give the config that it was trained with")


# --- the negotiation -----------------------------------------------------------------------------------------------


def negotiate(cfg: Config, network: Network, params: Any, board: np.ndarray) -> Negotiation:
  """Traces the negotiation about one board `[H, W]`, as `fitting` evaluates it: K is iterations.eval, or .far off-size."""
  task = fitting.task_of(cfg)
  size = board.shape
  iterations = cfg.iterations.eval if size == tuple(task.board) else cfg.iterations.far
  if iterations < 1:
    raise UserError(f"config.iterations asks for {iterations} iterations on a {size[0]}x{size[1]} board: nothing to inspect")
  layout = _layout(cfg, size)
  agents, outputs = len(layout.cells), 10 if cfg.kind == "mnist" else layout.cells.shape[1] * 10
  if agents * iterations * (2 * cfg.model.d_v + outputs) > LARGEST:
    raise UserError(f"a {size[0]}x{size[1]} board has {agents} agents, too many to keep {iterations} iterations of; "
                    "give a smaller one, or fewer iterations by --config.iterations.far")
  graph = task.graph(size)

  @jax.jit
  def look(params, boards, graph):
    first = network.apply(params, boards, graph, 0)[-1:]
    logits, trace = network.trace(params, boards, graph, iterations)
    logits = jnp.concatenate([first, logits])[:, 0]
    seen = (task.predict(logits, size), _belief(cfg, layout, logits, size), trace.primal, trace.dual, trace.disagreement)
    return seen, trace.x, trace.z

  with jax.default_matmul_precision("highest"):
    seen, x, z = jax.device_get(look(params, jnp.asarray(board)[None], graph))
  prediction, belief, *residuals = seen
  late = lambda values: np.concatenate([np.full_like(values[:1], np.nan), values])[:, 0]
  return Negotiation(
      cfg.kind, board, prediction, belief, *map(late, residuals), x[:, 0], z[:, 0], np.asarray(graph.edges),
      np.asarray(graph.slots), tuple(data_of(cfg).box) if cfg.kind == "sudoku" else None, PATCHES.get(cfg.kind))


def _layout(cfg: Config, size: tuple[int, int]) -> views.Layout:
  if cfg.kind == "sudoku":
    return views.sudoku_layout(tuple(data_of(cfg).box))
  return views.patch_layout(*size, *PATCHES[cfg.kind])


def _belief(cfg: Config, layout: views.Layout, logits: jax.Array, size: tuple[int, int]) -> jax.Array:
  if cfg.kind == "mnist":
    return jax.nn.softmax(logits)
  merged = jax.nn.softmax(views.merge(layout, logits)).reshape(len(logits), *size, -1)
  return merged[..., tasks.PATH] if cfg.kind == "maze" else merged


# --- the folder ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _published(out: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[pathlib.Path]]]:
  """Yields (a folder to write in, a list); when the block ends well the files move to `out` and their paths to the list."""
  paths: list[pathlib.Path] = []
  folder = None
  try:
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    home = out if out.is_dir() else out.absolute().parent
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=home))
    yield folder, paths
    names = sorted(path.name for path in folder.iterdir())
    if home == out:
      for name in names:
        os.replace(folder / name, out / name)
    else:
      os.chmod(folder, 0o755)
      os.replace(folder, out)
    paths.extend(out / name for name in names)
  except OSError as error:
    raise UserError(f"--out={out}: {error.strerror or error}; choose another folder or free some space") from error
  finally:
    if folder is not None:
      shutil.rmtree(folder, ignore_errors=True)
