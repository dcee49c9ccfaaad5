"""A batched Sudoku solver on bit masks: constraint propagation over many boards at once, branching where it must.

Boards are masks `[S, S, B]` uint16, batch LAST so that every operation runs along contiguous memory: bit d of a cell is
set while digit d+1 is still possible there.

Legend: B boards, S side (= h * w), boxes of h rows by w columns.
"""

import numpy as np


class SearchLimit(Exception):
  """The search was stopped before it knew the answer."""


def masks_of(puzzles: np.ndarray) -> np.ndarray:
  """Puzzles `[B, S, S]` (0 = empty) -> masks `[S, S, B]` uint16."""
  side = puzzles.shape[-1]
  table = np.concatenate([[(1 << side) - 1], 1 << np.arange(side)]).astype(np.uint16)
  return np.ascontiguousarray(np.moveaxis(table[puzzles], 0, -1))


def digits_of(masks: np.ndarray) -> np.ndarray:
  """Masks `[S, S, B]` with one bit per cell -> grids `[B, S, S]` uint8."""
  digits = np.bitwise_count(masks - np.uint16(1)) + 1  # a single bit d gives d ones below it
  return np.ascontiguousarray(np.moveaxis(digits, -1, 0).astype(np.uint8))


def _units(masks, box, axis):
  """`[S units, S cells, B]`: the rows (axis 0), the columns (1) or the boxes (2)."""
  if axis == 0:
    return masks
  if axis == 1:
    return masks.swapaxes(0, 1)
  return to_boxes(masks, box)


def to_boxes(grid: np.ndarray, box: tuple[int, int]) -> np.ndarray:
  """`[S, S, ...]` rows x columns -> `[S, S, ...]` boxes x cells inside the box, row-major both."""
  (h, w), (side, *rest) = box, grid.shape[1:]
  return grid.reshape(w, h, h, w, *rest).swapaxes(1, 2).reshape(side, side, *rest)


def from_boxes(grid: np.ndarray, box: tuple[int, int]) -> np.ndarray:
  """Inverse of `to_boxes`."""
  (h, w), (side, *rest) = box, grid.shape[1:]
  return grid.reshape(w, h, h, w, *rest).swapaxes(1, 2).reshape(side, side, *rest)


def _narrow(units, full):
  """One sweep over `[S units, S cells, B]`: masks after naked and hidden singles; which boards stay possible `[B]`."""
  single = np.where(units & (units - np.uint16(1)), np.uint16(0), units)
  once, twice = single[:, 0].copy(), np.zeros_like(single[:, 0])
  for k in range(1, units.shape[1]):
    twice |= once & single[:, k]
    once |= single[:, k]
  units = units & (single | ~once[:, None])
  some, more = units[:, 0].copy(), np.zeros_like(units[:, 0])
  for k in range(1, units.shape[1]):
    more |= some & units[:, k]
    some |= units[:, k]
  hidden = units & (some & ~more)[:, None]
  units = np.where(hidden, hidden, units)
  return units, ((twice == 0) & (some == full)).all(axis=0)


def propagate(masks: np.ndarray, box: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
  """Naked and hidden singles to the fixed point: (masks `[S, S, B]`, possible `[B]` bool).

  `possible` false proves that the board has no completion; a possible board whose cells are all single is solved.
  Boards found impossible are frozen as they are.
  """
  side = masks.shape[0]
  full = np.uint16((1 << side) - 1)
  masks, possible = masks.copy(), np.ones(masks.shape[-1], bool)
  live = np.arange(masks.shape[-1])
  work = masks
  while len(live):
    before, alive = work, np.ones(len(live), bool)
    for axis in range(3):
      units, ok = _narrow(_units(work, box, axis), full)
      work = units if axis == 0 else units.swapaxes(0, 1) if axis == 1 else from_boxes(units, box)
      alive &= ok
    changed = (work != before).any(axis=(0, 1))
    possible[live[~alive]] = False
    going = alive & changed
    if going.sum() < 0.75 * len(live):
      masks[:, :, live] = work
      live, work = live[going], np.ascontiguousarray(work[:, :, going])
    elif not changed.any():
      break
  if len(live):
    masks[:, :, live] = work
  return masks, possible


def completions(
    masks: np.ndarray, box: tuple[int, int], limit: int = 2, block: int = 2048, budget: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Counts completions of each board up to `limit`: (count `[B]` int64, one of them `[B, S, S]` uint8, 0 where none).

  Depth-first over a common pile of open boards: the newest are propagated together, solved ones counted, the rest
  branch on a cell with the fewest candidates. Exact: every board is searched to its end or to `limit`. Raises
  SearchLimit when more than `budget` boards (None: no bound) were looked at.
  """
  side, boards, looked = masks.shape[0], masks.shape[-1], 0
  count, first = np.zeros(boards, np.int64), np.zeros((boards, side, side), np.uint8)
  pile = _pieces(masks, np.arange(boards), block)
  while pile:
    work, owner = pile.pop()
    open_ = count[owner] < limit
    looked += len(owner)
    if budget is not None and looked > budget:
      raise SearchLimit(f"more than {budget} boards")
    work, possible = propagate(work[:, :, open_], box)
    work, owner = work[:, :, possible], owner[open_][possible]
    sizes = np.bitwise_count(work).reshape(side * side, -1)
    done = (sizes == 1).all(axis=0)
    np.add.at(count, owner[done], 1)
    first[owner[done]] = digits_of(work[:, :, done])
    if not done.all():
      children, parents = branch(work[:, :, ~done], sizes[:, ~done])
      pile += _pieces(children, owner[~done][parents], max(block // 4, 1))  # small pieces keep the search depth-first
  return np.minimum(count, limit), first


def _pieces(masks, owner, size):
  """Cuts boards into pieces of at most `size`, the first piece last (on top of a pile)."""
  return [(masks[:, :, i : i + size], owner[i : i + size]) for i in range(0, len(owner), size)][::-1]


def branch(masks: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Splits boards on a cell with the fewest (>= 2) candidates: (children `[S, S, C]`, parent of each `[C]`)."""
  side, boards = masks.shape[0], masks.shape[-1]
  cell = np.where(sizes > 1, sizes, np.uint8(side + 1)).argmin(axis=0)
  options = masks.reshape(side * side, boards)[cell, np.arange(boards)]
  parent, digit = np.nonzero(options[:, None] >> np.arange(side, dtype=np.uint16) & 1)
  children = masks.reshape(side * side, boards)[:, parent]
  children[cell[parent], np.arange(len(parent))] = np.uint16(1) << digit.astype(np.uint16)
  return children.reshape(side, side, -1), parent
