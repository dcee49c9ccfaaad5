"""Digit images: where they come from, and the corruptions under which coordination is measured.

Sources: 'mnist' and 'fashion_mnist' (real, fetched as assets on request), 'synthetic' (drawn here, offline: the tests'
twin), or a path to the user's own IDX, npz or csv files.

Legend: n images of H rows and W columns; N agents, one per patch.
"""

import numpy as np

from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm.data.digits_io import read, read_image, validate  # noqa: F401

ASSETS = ("mnist", "fashion_mnist")

_FONT = (  # 5 x 7 dot matrix, one string of 7 rows per digit
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)


def load(source: str, train: int = 0, test: int = 0, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
  """All of a source -> {"train" | "test": {"inputs": `[n, H, W]` uint8, "labels": `[n]` uint8}}.

  train, test: how many images of 'synthetic' to draw (2000 and 500 when 0). A file with one set only is cut 5 : 1 in a
  random order given by `seed`. Real sets depend on neither. Raises UserError when a file is missing or unusable.
  """
  if source == "synthetic":
    pairs = synthetic(train or 2000, seed), synthetic(test or 500, seed + 1)
  else:
    first, second = read(_locate(source))
    if second is None:
      order = np.random.default_rng(seed).permutation(len(first[0]))
      cut = len(order) - max(len(order) // 6, 1)
      if cut < 1:
        raise UserError(f"digits: {source} holds {len(order)} image; give at least 2, for training and for the test")
      first, second = (tuple(part[rows] for part in first) for rows in (order[:cut], order[cut:]))
    if first[0].shape[1:] != second[0].shape[1:]:
      raise UserError(
          f"digits: {source}: training images are {first[0].shape[1:]}, test images {second[0].shape[1:]}; make them "
          "alike"
      )
    pairs = first, second
  return {name: {"inputs": images, "labels": labels} for name, (images, labels) in zip(("train", "test"), pairs)}


def _locate(source):
  if source not in ASSETS:
    return source
  from sakanajax.core import assets

  return assets.fetch(source)


def synthetic(n: int, seed: int, size: int = 28) -> tuple[np.ndarray, np.ndarray]:
  """n dot-matrix digits, turned, slanted, stretched and moved -> (`[n, size, size]` uint8, labels `[n]` uint8)."""
  rng = np.random.default_rng(seed)
  labels = rng.integers(10, size=n).astype(np.uint8)
  font = np.array([[[float(c) for c in row] for row in digit.split()] for digit in _FONT])
  font = np.pad(font, ((0, 0), (2, 2), (2, 2)))  # ground around the digit, so that sampling may run over its edge
  angle, slant = rng.uniform(-0.25, 0.25, (2, n))
  scale = size / 28 * rng.uniform(1.9, 2.6, (n, 2))  # pixels per dot
  shift = size / 28 * rng.uniform(-1.5, 1.5, (n, 2))
  y, x = (np.indices((size, size)) - (size - 1) / 2)[:, None]
  y, x = y - shift[:, 0, None, None], x - shift[:, 1, None, None]
  cos, sin = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None]
  y, x = cos * y - sin * x, sin * y + cos * x + slant[:, None, None] * y
  y, x = y / scale[:, 0, None, None] + 5, x / scale[:, 1, None, None] + 4  # centre of the padded 11 x 9 glyph
  images = np.clip(1.6 * _bilinear(font, labels, y, x) - 0.25, 0, 1)
  return np.round(255 * images).astype(np.uint8), labels


def _bilinear(font, labels, y, x):
  """Samples glyph `labels[i]` at (y, x) `[n, H, W]`, 0 outside."""
  height, width = font.shape[1:]
  y, x = np.clip(y, 0, height - 1.001), np.clip(x, 0, width - 1.001)
  r, c = y.astype(int), x.astype(int)
  fy, fx, k = y - r, x - c, labels.astype(int)[:, None, None]
  top = font[k, r, c] * (1 - fx) + font[k, r, c + 1] * fx
  return top * (1 - fy) + (font[k, r + 1, c] * (1 - fx) + font[k, r + 1, c + 1] * fx) * fy


def to_float(images: np.ndarray) -> np.ndarray:
  """uint8 `[..., H, W]` -> float32 in [0, 1]."""
  return images.astype(np.float32) / np.float32(255)


def pad(images: np.ndarray, p: int) -> np.ndarray:
  """Canvas shift: p rows and columns of zeros on every side, `[n, H, W]` -> `[n, H + 2p, W + 2p]`."""
  if p < 0:
    raise ValueError(f"pad {p} must not be negative")
  return np.pad(images, ((0, 0), (p, p), (p, p)))


def shift(rng: np.random.Generator, images: np.ndarray, most: int) -> np.ndarray:
  """Moves each image `[n, H, W]` by whole pixels drawn from -most .. most in both directions; zeros come in."""
  if most < 0:
    raise ValueError(f"shift {most} must not be negative")
  height, width = images.shape[1:]
  wide = pad(images, most)
  windows = np.lib.stride_tricks.sliding_window_view(wide, (height, width), axis=(1, 2))
  y, x = rng.integers(2 * most + 1, size=(2, len(images)))
  return windows[np.arange(len(images)), y, x]


def noise(rng: np.random.Generator, images: np.ndarray, sigma: float) -> np.ndarray:
  """Adds normal noise of standard deviation `sigma` to floats in [0, 1] and clips to [0, 1]."""
  if images.dtype.kind != "f":
    raise ValueError(f"noise wants floats in [0, 1], got {images.dtype}; use to_float first")
  normal = rng.standard_normal(images.shape, np.float32)
  return np.clip(images + np.float32(sigma) * normal, 0, 1).astype(images.dtype)


def drop_mask(rng: np.random.Generator, n: int, agents: int, fraction: float) -> np.ndarray:
  """Patch drop: `[n, agents]` bool, True where the agent stays; round(fraction * agents) go in each image."""
  if not 0 <= fraction <= 1:
    raise ValueError(f"fraction {fraction} outside [0, 1]")
  return rng.random((n, agents)).argsort(axis=1) >= round(fraction * agents)


def drop_pixels(images: np.ndarray, stays: np.ndarray, patch: int, stride: int) -> np.ndarray:
  """The same patch drop for a model that sees whole images: blackens the pixels that only removed agents see.

  images `[n, H, W]`, stays `[n, N]` bool over agents at centres range(patch // 2, size, stride), row-major. Pixels that
  no agent ever sees are left as they are.
  """
  centres = [np.arange(patch // 2, size, stride) for size in images.shape[1:]]
  shape = tuple(map(len, centres))
  if stays.shape != (len(images), shape[0] * shape[1]):
    raise ValueError(f"stays has shape {stays.shape}, expected {(len(images), shape[0] * shape[1])}")
  rows, cols = (  # [pixels, centres]: 1 where the patch covers the pixel
      (np.abs(np.arange(size)[:, None] - c) <= patch // 2).astype(np.float32)
      for size, c in zip(images.shape[1:], centres)
  )

  def covered(agents):
    return rows @ agents.reshape(-1, *shape).astype(np.float32) @ cols.T > 0

  return np.where(covered(~stays) & ~covered(stays), 0, images).astype(images.dtype)
