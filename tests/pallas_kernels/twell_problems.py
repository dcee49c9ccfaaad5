"""Rows that sparse formats get wrong, and TwELL once more in plain Python."""

import jax
import ml_dtypes
import numpy as np

N = 600  # three tiles, the last of 88 columns
UP_TO_0 = np.float32(1e-41)  # positive; its bfloat16 is 0
SUBNORMAL = np.float32(2e-39)  # subnormal in float32 and in bfloat16
TIE_UP, TIE_DOWN = np.float32(1.01171875), np.float32(1.00390625)  # halfway: 1.0117 goes up, 1.0039 down to even


def adversarial_rows(subnormals: bool = True) -> np.ndarray:
  """Returns gate products [16, N] float32 that are finite: what is in each row stands beside it."""
  rng = np.random.default_rng(0)
  h = -np.abs(rng.normal(size=(16, N))).astype(np.float32)
  positive = lambda *shape: np.abs(rng.normal(size=shape)).astype(np.float32) + np.float32(0.1)
  h[1] = positive(N)  # all
  h[2, rng.choice(256, 31, replace=False)] = positive(31)  # as many as there are slots
  h[3, 256 + rng.choice(256, 32, replace=False)] = positive(32)  # one more
  h[4, 512 + rng.choice(88, 33, replace=False)] = positive(33)  # two more, in the short tile
  h[5, :256] = positive(256)  # a whole tile
  h[6], h[6, ::2] = 0.0, -0.0
  h[7, [0, 300, 599]] = (SUBNORMAL, UP_TO_0, SUBNORMAL) if subnormals else 0.5
  h[8, -1] = 2.0  # the last column
  h[9, [0, 255, 256, 511, 512]] = TIE_UP, TIE_DOWN, 3e38, 1e-30, 1.0  # the edges of tiles
  h[10:] = np.where(rng.random((6, N)) < 0.05, positive(6, N), h[10:])
  return h


def pack(h: np.ndarray, compression: int) -> np.ndarray:
  """TwELL by loops, straight from section 3.1 with the decisions of `formats.py`."""
  m, n = h.shape
  w = 256 // compression
  words = np.zeros((m, -(-n // 256), w), np.uint32)
  for row, column in np.ndindex(m, n):
    if not h[row, column] <= 0:
      tile = words[row, column // 256]
      tile[0] += 1
      if tile[0] < w:
        bits = h[row, column].astype(ml_dtypes.bfloat16).view(np.uint16)
        tile[tile[0]] = column | int(bits) << 16
  return words.reshape(m, -1)


def layer(m: int, k: int, n: int, l: int, seed: int = 0) -> tuple[np.ndarray, ...]:
  """Returns float32 (x [M, K], w_gate [K, N], w_up [N, K], w_down [N, L]) of about unit size, half of the gates on."""
  rng = np.random.default_rng(seed)
  scaled = lambda rows, columns, size: (rng.normal(size=(rows, columns)) / np.sqrt(size)).astype(np.float32)
  return scaled(m, k, 1), scaled(k, n, k), scaled(n, k, k), scaled(n, l, n)


def layer_of(h: np.ndarray, l: int = 40, seed: int = 0) -> tuple[np.ndarray, ...]:
  """Returns a layer whose gate product is exactly the finite `h`: x is the identity, w_gate is h."""
  _, _, w_up, w_down = layer(1, h.shape[0], h.shape[1], l, seed)
  return np.eye(h.shape[0], dtype=np.float32), h, w_up, w_down


def ffn(h, x, w_up, w_down) -> np.ndarray:
  """The layer in float64 from its gate product, without ReLU of jax: positives and NaN pass."""
  h, x, w_down = (np.asarray(a, np.float64) for a in (h, x, w_down))
  hidden = np.where(h <= 0, 0.0, h)
  with np.errstate(invalid="ignore"):
    return (hidden if w_up is None else hidden * (x @ np.asarray(w_up, np.float64).T)) @ w_down


def rounded(h: np.ndarray) -> np.ndarray:
  """To bfloat16 and back."""
  return h.astype(ml_dtypes.bfloat16).astype(np.float32)


def stored(h: np.ndarray, compression: int) -> np.ndarray:
  """`h` rounded, without the positives that find no slot."""
  kept, w = np.zeros_like(h), 256 // compression
  for start in range(0, h.shape[1], 256):
    tile = h[:, start : start + 256]
    on = ~(tile <= 0)
    kept[:, start : start + 256] = np.where(on & (np.cumsum(on, 1) < w), rounded(tile), 0)
  return kept


def unpack(packed) -> tuple[np.ndarray, np.ndarray]:
  """Returns (values float32, stored bool), each [M, N], of a `formats.Packed`, by numpy."""
  w = 256 // packed.compression
  words = np.asarray(packed.words).reshape(-1, -(-packed.n // 256), w)
  used = np.arange(1, w) <= words[..., :1]
  rows = np.broadcast_to(np.arange(words.shape[0])[:, None, None], used.shape)[used]
  entries = words[..., 1:][used]
  return _matrix(words.shape[0], packed.n, rows, entries & 0xFFFF, (entries & 0xFFFF0000).view(np.float32))


def unell(ell) -> tuple[np.ndarray, np.ndarray]:
  """The same of a `formats.Ell`."""
  used = np.arange(ell.indices.shape[1]) < np.asarray(ell.counts)[:, None]
  rows = np.broadcast_to(np.arange(used.shape[0])[:, None], used.shape)[used]
  return _matrix(used.shape[0], ell.n, rows, np.asarray(ell.indices)[used], np.asarray(ell.values, np.float32)[used])


def unhybrid(sparse) -> tuple[np.ndarray, np.ndarray]:
  """The same of a `hybrid.Hybrid`."""
  p = jax.tree.map(np.asarray, sparse.pattern)
  used = (np.arange(p.columns.shape[1]) < p.counts[:, None]) & (p.tail_row == -1)[:, None]
  rows = np.broadcast_to(np.arange(used.shape[0])[:, None], used.shape)[used]
  values, on = _matrix(used.shape[0], p.n, rows, p.columns[used], np.asarray(sparse.ell, np.float32)[used])
  for place, row in enumerate(p.rows):
    if row >= 0:
      values[row], on[row] = sparse.tail[place], np.unpackbits(p.tail_bits[place], count=p.n)
  return values, on


def _matrix(m, n, rows, columns, entries):
  values, on = np.zeros((m, n), np.float32), np.zeros((m, n), bool)
  assert not on[rows, columns].any() and len(set(zip(rows.tolist(), columns.tolist()))) == rows.size
  values[rows, columns], on[rows, columns] = entries, True
  return values, on


def same_bits(a, b) -> None:
  """Asserts that two float32 arrays are equal to the last bit, subnormals and the sign of zero included."""
  np.testing.assert_array_equal(np.asarray(a, np.float32).view(np.uint32), np.asarray(b, np.float32).view(np.uint32))


def relative_error(a, b) -> float:
  """Returns |a - b| / |b| over all entries."""
  a, b = (np.asarray(array, np.float64) for array in (a, b))
  return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def exact():
  """Products of float32 as float32."""
  return jax.default_matmul_precision("highest")
