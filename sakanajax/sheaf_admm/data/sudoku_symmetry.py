"""The symmetry group of Sudoku: keys that tell classes of grids apart, and random symmetries as augmentation.

Equivalent grids differ by a relabelling of the digits, a permutation of the rows inside a band, of the columns inside a
stack, of the bands, of the stacks, and, where boxes are square, a transposition.

Legend: B grids, S side, boxes of h rows by w columns; a band is h rows (there are w of them), a stack w columns (h).
"""

import functools
from itertools import permutations, product

import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: np.ndarray) -> np.ndarray:
  """Scrambles uint64 values one by one (the splitmix64 finaliser), so that sums of them act as hashes of multisets."""
  x = x + _MIX[0]
  x = (x ^ (x >> np.uint64(30))) * _MIX[1]
  x = (x ^ (x >> np.uint64(27))) * _MIX[2]
  return x ^ (x >> np.uint64(31))


def line_orders(groups: int, size: int) -> np.ndarray:
  """All orders of `groups * size` lines that keep the groups together: `[groups! * size!^groups, groups * size]`."""
  inner = list(permutations(range(size)))
  orders = [
    [size * g + i for g, order in zip(outer, chosen) for i in order]
    for outer in permutations(range(groups))
    for chosen in product(inner, repeat=groups)
  ]
  return np.array(orders, np.int64)


def class_keys(solutions: np.ndarray, box: tuple[int, int]) -> np.ndarray:
  """One uint64 per full grid `[B, S, S]`, equal for equivalent grids.

  Sides up to 6: exact (different classes have different keys). Larger sides: a strong invariant (see `invariant`);
  inequivalent grids that happen to share a key are merely kept in the same split.
  """
  if solutions.shape[-1] > 6:
    return invariant(solutions, box)
  chunks = [_canonical(solutions[i : i + 1024], box) for i in range(0, len(solutions), 1024)]
  return np.concatenate(chunks) if chunks else np.zeros(0, np.uint64)


def _canonical(grids, box):
  """Least code of the orbit, `[B]` uint64. Transposed grids share it: tall boxes are laid on their side first."""
  if box[0] > box[1]:
    return _canonical(grids.swapaxes(1, 2), box[::-1])
  code = _least_code(grids, box)
  return np.minimum(code, _least_code(grids.swapaxes(1, 2), box)) if box[0] == box[1] else code


def _least_code(grids, box):
  """Least code over row orders, column orders and relabellings of `[B, S, S]`.

  With one row on top and its digits relabelled 1..S, every other row is a permutation of the columns, and a new column
  order conjugates it. So one table of conjugated codes serves all grids, and row orders reduce to sorting rows, bands.
  """
  (h, w), side = box, grids.shape[-1]
  power, rank, table = _conjugates(h, w)
  where = grids.argsort(axis=-1)  # [B, S, digit] column of each digit
  best = None
  for top in range(side):
    relative = np.take_along_axis(where[:, top : top + 1].repeat(side, 1), grids.astype(np.int64) - 1, axis=-1)
    codes = table[rank[relative @ power]]  # [B, S rows, orders]
    bands = np.sort(codes.reshape(len(grids), w, h, -1), axis=2)
    own, others = top // h, [b for b in range(w) if b != top // h]
    rest = bands[:, others]
    rest = np.take_along_axis(rest, rest[:, :, :1].argsort(axis=1), axis=1)
    rows = np.concatenate([bands[:, own, 1:], rest.reshape(len(grids), -1, rest.shape[-1])], axis=1)
    code = np.zeros(rows.shape[::2], np.uint64)
    for k in range(rows.shape[1]):
      code = code * np.uint64(len(table)) + rows[:, k].astype(np.uint64)
    best = code.min(axis=1) if best is None else np.minimum(best, code.min(axis=1))
  return best


@functools.lru_cache(maxsize=None)
def _conjugates(h, w):
  """(place values, rank of a permutation from its digits, rank of each conjugate `[S!, column orders]`)."""
  side = h * w
  perms = np.array(list(permutations(range(side))), np.int64)
  power = side ** np.arange(side - 1, -1, -1)
  rank = np.zeros(side**side, np.int64)
  rank[perms @ power] = np.arange(len(perms))
  orders = line_orders(h, w)
  moved = [inverse[perms[:, order]] for order, inverse in zip(orders, orders.argsort(axis=1))]
  return power, rank, rank[np.stack(moved, axis=1) @ power]


def puzzle_keys(puzzles: np.ndarray, solutions: np.ndarray) -> np.ndarray:
  """One uint64 per 4x4 puzzle `[B, 4, 4]` with its solution, equal exactly for equivalent puzzles."""
  orders = line_orders(2, 2)
  cell = np.arange(16).reshape(4, 4)
  moves = np.array([base[r][:, c].ravel() for base in (cell, cell.T) for r in orders for c in orders])
  moved = solutions.reshape(-1, 16)[:, moves].astype(np.int64) - 1  # [B, 128, 16]
  given = (puzzles.reshape(-1, 16)[:, moves] > 0).astype(np.uint64)
  moved = np.take_along_axis(moved[..., :4].argsort(axis=-1), moved, axis=-1).astype(np.uint64)  # first row 0 1 2 3
  code = np.zeros(moved.shape[:2], np.uint64)
  for k in range(16):
    code = code * np.uint64(8) + moved[..., k] * np.uint64(2) + given[..., k]
  return code.min(axis=1)


def invariant(solutions: np.ndarray, box: tuple[int, int]) -> np.ndarray:
  """An invariant hash of full grids `[B, S, S]` under the whole symmetry group -> `[B]` uint64.

  Two rows define a permutation of the digits (digit in one -> digit below it in the other); its cycle type does not
  change under relabelling or column orders. These types start the colours of the lines, which are then refined through
  cells, digits and boxes. Rows and columns are treated alike, so a (legal) transposition changes nothing either.
  """
  chunks = [_refine(solutions[i : i + 2048].astype(np.int64) - 1, box) for i in range(0, len(solutions), 2048)]
  return np.concatenate(chunks) if chunks else np.zeros(0, np.uint64)


def _refine(grids, box, rounds=2):
  (h, w), side = box, grids.shape[-1]
  rows, cols = _line_colours(grids, h, box), _line_colours(grids.swapaxes(1, 2), w, box)
  r, c = np.indices((side, side))
  boxes = np.broadcast_to(r // h * h + c // w, grids.shape)
  cell = mix(rows[:, :, None]) + mix(cols[:, None, :])
  for _ in range(rounds):
    sums = [_sum_by(mix(cell + np.uint64(k)), ids) for k, ids in ((1, grids), (2, boxes))]
    rows = mix(rows + mix(cell).sum(axis=2))
    cols = mix(cols + mix(cell).sum(axis=1))
    cell = mix(cell + mix(sums[0]) + np.uint64(3) * mix(sums[1])) + mix(rows)[:, :, None] + mix(cols)[:, None, :]
  return mix(cell).sum(axis=(1, 2))


def _sum_by(values, ids):
  """Sum of `values` `[B, S, S]` over the cells with the same id (0..S-1), put back on the cells."""
  batch, side = len(values), values.shape[-1]
  index = (np.arange(batch)[:, None] * side + ids.reshape(batch, -1)).ravel()
  total = np.zeros(batch * side, np.uint64)
  np.add.at(total, index, values.ravel())
  return total[index].reshape(values.shape)


def _line_colours(grids, size, box):
  """Colour of each row `[B, S]` from its permutations to all other rows, those of its own band (`size` rows) apart."""
  batch, side, _ = grids.shape
  where = grids.argsort(axis=-1)
  square = np.uint64(0 if box[0] == box[1] else size)  # rows and columns are of one kind only when boxes are square
  colour = np.zeros((batch, side), np.uint64)
  for a in range(side):
    for b in range(a + 1, side):
      move = np.take_along_axis(grids[:, b], where[:, a], axis=-1)
      kind = mix(_cycle_type(move) + np.uint64(1000 * (a // size == b // size)) + np.uint64(2000) * square)
      colour[:, a] += kind
      colour[:, b] += kind
  return mix(colour)


def _cycle_type(move):
  """Hash of the cycle type of permutations `[B, S]`: how many points return after k steps (as for the inverse)."""
  code, at = np.zeros(len(move), np.uint64), move
  for _ in range(move.shape[1] - 1):
    code = code * np.uint64(10) + (at == np.arange(move.shape[1])).sum(axis=1).astype(np.uint64)
    at = np.take_along_axis(move, at, axis=1)
  return mix(code)


def augment(
    rng: np.random.Generator, inputs: np.ndarray, labels: np.ndarray, box: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
  """Moves each puzzle and its solution `[B, S, S]` (0 = empty) together by a random symmetry of the whole group."""
  (h, w), (batch, side, _) = box, inputs.shape
  rows, cols = _random_orders(rng, batch, w, h), _random_orders(rng, batch, h, w)
  relabel = np.zeros((batch, side + 1), inputs.dtype)
  relabel[:, 1:] = rng.permuted(np.broadcast_to(np.arange(1, side + 1), (batch, side)), axis=1)
  flip = (rng.random(batch) < 0.5) & (h == w)
  index = rows[:, :, None] * side + cols[:, None, :]
  index = np.where(flip[:, None, None], index.swapaxes(1, 2), index).reshape(batch, -1)

  def move(x):
    digits = np.take_along_axis(x.reshape(batch, -1), index, axis=1).astype(np.int64)
    return np.take_along_axis(relabel, digits, axis=1).astype(x.dtype).reshape(x.shape)

  return move(inputs), move(labels)


def _random_orders(rng, batch, groups, size):
  """Independent random line orders that keep groups together, `[batch, groups * size]`."""
  outer = rng.random((batch, groups)).argsort(axis=1)
  inner = rng.random((batch, groups, size)).argsort(axis=2)
  return (size * outer[:, :, None] + inner).reshape(batch, -1)
