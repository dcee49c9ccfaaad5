"""Reads digit images from files: IDX (plain or gzip), npz, csv, folders of these, and single pictures.

Everything ends as images `[n, H, W]` uint8 and labels `[n]` uint8, or as one UserError line that names the file and the
remedy. Nothing is unpickled. Legend: n images of H rows and W columns.
"""

import gzip
import pathlib
import warnings
import zipfile
import zlib

import numpy as np

from sakanajax.core.errors import UserError, first_line

MAX_SIDE = 512  # of a single picture
_FORMATS = "IDX (*-images-idx3-ubyte[.gz] beside *-labels-idx1-ubyte[.gz]), .npz or .csv"
_NPZ_KEYS = (("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels"))


def read(path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray] | None]:
  """A file or a folder -> ((images, labels) for training, the same for the test or None when there is one set only)."""
  path = pathlib.Path(path).expanduser()
  if not path.exists():
    raise UserError(
        f"digits: {path} does not exist; give 'mnist', 'fashion_mnist', 'synthetic' or a path to {_FORMATS}"
    )
  if path.is_dir():
    return _read_folder(path)
  if path.suffix == ".npz":
    return _read_npz(path)
  if path.suffix == ".csv":
    return read_csv(path), None
  if "images" in path.name:
    return _read_idx_pair(path), None
  raise UserError(
      f"digits: {path.name} is of no known kind; give {_FORMATS}, or a folder that holds train and test files"
  )


def _read_folder(folder):
  """Finds files by name: IDX images (or else csv) with 'train', and with 't10k' or 'test'."""
  names = sorted(p for p in folder.iterdir() if p.is_file())
  for reader, kind in ((_read_idx_pair, "images"), (read_csv, ".csv")):
    files = [p for p in names if kind in p.name]
    train = [p for p in files if "train" in p.name]
    test = [p for p in files if "t10k" in p.name or "test" in p.name]
    if train:
      return reader(train[0]), reader(test[0]) if test else None
  raise UserError(f"digits: folder {folder} has no IDX images or .csv with 'train' in the name; put {_FORMATS} there")


def _read_idx_pair(path):
  labels = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
  if not labels.exists():
    raise UserError(f"digits: {path.name} needs its labels {labels.name} in the same folder")
  return validate(read_idx(path), read_idx(labels), path.name)


def read_idx(path) -> np.ndarray:
  """One IDX file of unsigned bytes, gzipped or not -> uint8 array of the shape in its header."""
  path = pathlib.Path(path)
  try:
    content = path.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
  except (OSError, EOFError, zlib.error) as error:
    raise UserError(f"digits: cannot read {path} ({error}); fetch or copy it again") from error
  if len(content) < 4 or content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * content[3]:
    raise UserError(
        f"digits: {path.name} is not an IDX file of unsigned bytes (it begins with {content[:4].hex() or 'nothing'}, "
        f"not 000008..); give {_FORMATS}"
    )
  shape = tuple(int(v) for v in np.frombuffer(content, ">u4", content[3], 4))
  body = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
  if body.size != int(np.prod(shape, dtype=object)):
    raise UserError(
        f"digits: {path.name} promises {shape} bytes but holds {body.size}; it is damaged, fetch or copy it again"
    )
  return body.reshape(shape)


def _read_npz(path):
  try:
    with np.load(path, allow_pickle=False) as file:
      held = set(file.files)
      for keys in _NPZ_KEYS:
        if held.issuperset(keys):
          a, b, c, d = (file[k] for k in keys)
          return validate(a, b, path.name), validate(c, d, path.name)
      if held.issuperset(("images", "labels")):
        return validate(file["images"], file["labels"], path.name), None
  except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
    raise UserError(
        f"digits: cannot read {path} as npz ({first_line(error)}); save plain arrays with numpy.savez"
    ) from error
  raise UserError(
      f"digits: {path.name} holds {sorted(held)}; name the arrays images and labels, or {', '.join(_NPZ_KEYS[0])}"
  )


def read_csv(path) -> tuple[np.ndarray, np.ndarray]:
  """Rows of label and H*W pixels 0..255 of square images, with or without a header line -> (images, labels)."""
  path = pathlib.Path(path)
  try:
    with open(path, encoding="ascii") as file:
      header = int(not file.readline().split(",")[0].strip().isdigit())
    with warnings.catch_warnings(action="ignore"):  # an empty file is answered below
      rows = np.loadtxt(path, np.int16, delimiter=",", skiprows=header, ndmin=2)
  except (OSError, ValueError) as error:
    raise UserError(
        f"digits: cannot read {path} as csv ({first_line(error)}); write label,pixel,...,pixel in each line"
    ) from error
  side = int(round(max(rows.shape[1] - 1, 0) ** 0.5))
  if rows.shape[1] < 2 or side * side != rows.shape[1] - 1:
    raise UserError(
        f"digits: {path.name} has {rows.shape[1]} columns; give a label and a square image's pixels (785 for 28x28)"
    )
  return validate(rows[:, 1:].reshape(-1, side, side), rows[:, 0], path.name)


def validate(images: np.ndarray, labels: np.ndarray, name: str, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
  """Checks shapes, ranges and counts -> (images `[n, H, W]` uint8, labels `[n]` uint8).

  Takes integers 0..255 or floats in [0, 1], with or without a last axis of size 1. Raises UserError naming `name`.
  """
  images, labels = np.asarray(images), np.asarray(labels)
  images = images[..., 0] if images.ndim == 4 and images.shape[-1] == 1 else images
  labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
  if images.ndim != 3 or 0 in images.shape:
    raise UserError(f"digits: {name}: images have shape {images.shape}; give [n, height, width] grey values, none 0")
  if labels.shape != images.shape[:1]:
    raise UserError(
        f"digits: {name}: {len(images)} images but labels of shape {labels.shape}; give one label per image"
    )
  if labels.dtype.kind not in "iu":
    raise UserError(f"digits: {name}: labels have dtype {labels.dtype}; give integers 0..{classes - 1}")
  bad = np.flatnonzero((labels < 0) | (labels >= classes))
  if len(bad):
    raise UserError(
        f"digits: {name}: label {labels[bad[0]]} of image {bad[0]} is outside 0..{classes - 1}; correct or drop it"
    )
  if images.dtype.kind not in "iuf":
    raise UserError(
        f"digits: {name}: images have dtype {images.dtype}; give integers 0..255 or floats in [0, 1]"
    )
  top = 1.0 if images.dtype.kind == "f" else 255
  if not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= top):
    raise UserError(
        f"digits: {name}: pixels lie in {images.min()}..{images.max()}; {images.dtype} images must lie in 0..{top:g}"
    )
  images = np.round(images * 255.0) if images.dtype.kind == "f" else images
  return images.astype(np.uint8), labels.astype(np.uint8)


def read_image(path, patch: int = 3, invert: bool | None = None) -> np.ndarray:
  """One picture (PNG or whatever PIL reads) -> grey image `[H, W]` uint8, light digit on dark ground.

  invert: None turns light and dark around when the border is lighter than middle grey (ink on paper). Transparent
    pixels count as ground.
  Raises UserError when the file is missing or no picture, smaller than `patch` or larger than MAX_SIDE on a side.
  """
  from PIL import Image, UnidentifiedImageError

  path = pathlib.Path(path).expanduser()
  try:
    with Image.open(path) as picture:
      width, height = picture.size
      if min(width, height) < patch:
        raise UserError(
            f"digits: {path.name} is {height}x{width} pixels, smaller than one patch of {patch}x{patch}; enlarge it"
        )
      if max(width, height) > MAX_SIDE:
        raise UserError(
            f"digits: {path.name} is {height}x{width} pixels; resize it to at most {MAX_SIDE} a side (digits are 28x28)"
        )
      if picture.mode in ("RGBA", "LA", "P"):
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, (0, 0, 0, 255) if not invert else (255, 255, 255, 255))
        picture = Image.alpha_composite(ground, picture)
      grey = np.asarray(picture.convert("L"), np.uint8)
  except FileNotFoundError as error:
    raise UserError(f"digits: picture {path} does not exist") from error
  except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
    raise UserError(
        f"digits: {path.name} is not a picture that can be read ({first_line(error)}); save it as a grey PNG"
    ) from error
  border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
  return 255 - grey if (border.mean() > 127 if invert is None else invert) else grey.copy()
