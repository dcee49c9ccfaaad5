"""The dihedral symmetries of a grid, and keys that are equal exactly for symmetric grids.

A square grid has 8 symmetries, a rectangular one 4 (those that keep its shape). Splits are kept apart by class, not by
grid: a mirrored training maze in the test split would be a leak.

Legend: n grids of h rows and w columns.
"""

import numpy as np

SQUARE, RECTANGULAR = 8, 4


def order(shape) -> int:
  """Number of symmetries of a grid whose last two axes are (h, w): 8 when square, else 4."""
  return SQUARE if shape[-2] == shape[-1] else RECTANGULAR


def transform(grid: np.ndarray, index: int) -> np.ndarray:
  """Symmetry `index` of `grid` `[..., h, w]` (a view).

  Square: index = 4 * transposed + quarter turns (transposition first). Rectangular: bit 0 flips rows, bit 1 flips
  columns. Index 0 is the identity. Raises ValueError outside `range(order(grid.shape))`.
  """
  if not 0 <= index < order(grid.shape):
    raise ValueError(f"symmetry {index} outside 0..{order(grid.shape) - 1} for a grid of shape {grid.shape[-2:]}")
  if grid.shape[-2] != grid.shape[-1]:
    grid = grid[..., ::-1, :] if index & 1 else grid
    return grid[..., ::-1] if index & 2 else grid
  grid = grid.swapaxes(-1, -2) if index & 4 else grid
  return np.rot90(grid, index & 3, axes=(-2, -1))


def dihedral(inputs: np.ndarray, labels: np.ndarray, index) -> tuple[np.ndarray, np.ndarray]:
  """Moves inputs and labels `[n, h, w]` together by one symmetry (an int) or by one per grid (`[n]` ints)."""
  if np.ndim(index) == 0:
    inputs, labels = (np.ascontiguousarray(transform(x, int(index))) for x in (inputs, labels))
    return inputs, labels
  index = np.asarray(index)
  out = np.zeros_like(inputs), np.zeros_like(labels)
  for k in np.unique(index):
    rows = index == k
    for source, target in zip((inputs, labels), out):
      target[rows] = transform(source[rows], int(k))
  return out


def _fingerprints(grids: np.ndarray) -> np.ndarray:
  """64-bit linear hash of each grid: `[n, h, w]` uint8 -> `[n]` uint64; the weights depend on the shape only."""
  n, h, w = grids.shape
  weights = np.random.default_rng([h, w]).integers(0, 2**64, size=h * w, dtype=np.uint64)
  flat = grids.reshape(n, h * w).astype(np.uint64)
  return (flat * weights).sum(axis=1, dtype=np.uint64)


def class_keys(grids: np.ndarray, chunk: int = 4096) -> np.ndarray:
  """One uint64 per grid `[n, h, w]`, equal for all symmetries of a grid (the least fingerprint of its orbit).

  Different classes share a key with probability about n^2 / 2^65; such a pair would merely count as duplicates.
  """
  keys, moves = np.zeros(len(grids), np.uint64), range(order(grids.shape))
  for i in range(0, len(grids), chunk):
    part = grids[i : i + chunk]
    keys[i : i + chunk] = np.min([_fingerprints(transform(part, k)) for k in moves], axis=0)
  return keys


def fresh(keys, seen: set, limit: int | None = None) -> np.ndarray:
  """Positions of the first `limit` keys that are neither in `seen` nor earlier in `keys`; adds those to `seen`."""
  keep = []
  for i, key in enumerate(keys.tolist() if isinstance(keys, np.ndarray) else keys):
    if len(keep) == limit:
      break
    if key not in seen:
      seen.add(key)
      keep.append(i)
  return np.asarray(keep, np.int64)
