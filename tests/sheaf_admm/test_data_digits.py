"""Digits: every file kind, the synthetic twin, the corruptions, real MNIST where cached, clear about bad input."""

import dataclasses
import gzip
import pathlib
import struct

import numpy as np
import pytest

from sakanajax.core import assets
from sakanajax.core.errors import UserError
from sakanajax.sheaf_admm import data
from sakanajax.sheaf_admm.data import digits, digits_io


def sample(n=12, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (n, 6, 6), np.uint8), (np.arange(n) % 10).astype(np.uint8)


def idx(array):
  return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, part, images, labels, pack=lambda b: b, end=""):
  (folder / f"{part}-images-idx3-ubyte{end}").write_bytes(pack(idx(images)))
  (folder / f"{part}-labels-idx1-ubyte{end}").write_bytes(pack(idx(labels)))


def same(pair, other):
  for a, b in zip(pair, other):
    assert a.dtype == np.uint8
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("pack,end", [(lambda b: b, ""), (gzip.compress, ".gz")])
def test_idx(tmp_path, pack, end):
  train, test = sample(12), sample(5, 1)
  write_idx(tmp_path, "train", *train, pack, end)
  write_idx(tmp_path, "t10k", *test, pack, end)
  first, second = digits_io.read(tmp_path)
  same(first, train)
  same(second, test)
  alone, none = digits_io.read(tmp_path / f"t10k-images-idx3-ubyte{end}")
  same(alone, test)
  assert none is None


def test_npz(tmp_path):
  train, test = sample(12), sample(5, 1)
  np.savez(tmp_path / "a.npz", x_train=train[0][..., None], y_train=train[1][:, None], x_test=test[0], y_test=test[1])
  first, second = digits_io.read(tmp_path / "a.npz")
  same(first, train)
  same(second, test)
  np.savez(tmp_path / "b.npz", images=train[0].astype(np.float32) / 255, labels=train[1].astype(np.int64))
  first, second = digits_io.read(str(tmp_path / "b.npz"))
  same(first, train)
  assert second is None


@pytest.mark.parametrize("header", ["", "label," + ",".join(f"p{i}" for i in range(36)) + "\n"])
def test_csv(tmp_path, header):
  images, labels = sample()
  lines = "\n".join(",".join(map(str, [y, *x.ravel()])) for x, y in zip(images, labels))
  for name in ("train.csv", "test.csv"):
    (tmp_path / name).write_text(header + lines + "\n")
  same(digits_io.read(tmp_path / "train.csv")[0], (images, labels))
  first, second = digits_io.read(tmp_path)
  same(first, (images, labels))
  same(second, (images, labels))


def test_single_set_is_cut_without_overlap(tmp_path):
  images, labels = sample(30)
  np.savez(tmp_path / "own.npz", images=images, labels=labels)
  parts = digits.load(str(tmp_path / "own.npz"), seed=3)
  assert (len(parts["train"]["labels"]), len(parts["test"]["labels"])) == (25, 5)
  together = np.concatenate([parts["train"]["inputs"], parts["test"]["inputs"]])
  assert {x.tobytes() for x in together} == {x.tobytes() for x in images}
  again = digits.load(str(tmp_path / "own.npz"), seed=3)
  np.testing.assert_array_equal(parts["test"]["inputs"], again["test"]["inputs"])


def test_synthetic_twin():
  images, labels = digits.synthetic(600, seed=0)
  assert images.shape == (600, 28, 28) and images.dtype == labels.dtype == np.uint8
  assert set(labels.tolist()) == set(range(10)) and images.max() == 255
  assert 0.02 < images.mean() / 255 < 0.2 and not images[:, [0, -1]].any()
  again = digits.synthetic(600, seed=0)
  np.testing.assert_array_equal(images, again[0])
  assert not (digits.synthetic(600, seed=1)[0] == images).all()
  # Learnable, and not trivially: the nearest class mean does far better than chance, below 100 %.
  test_images, test_labels = digits.synthetic(400, seed=1)
  means = np.stack([images[labels == k].mean(0) for k in range(10)]).reshape(10, -1)
  distance = ((test_images.reshape(400, 1, -1).astype(np.float32) - means) ** 2).sum(-1)
  accuracy = (distance.argmin(1) == test_labels).mean()
  assert 0.4 < accuracy < 1.0
  assert digits.synthetic(3, seed=0, size=14)[0].shape == (3, 14, 14)


def test_pad_and_to_float():
  images = sample()[0]
  padded = digits.pad(images, 4)
  assert padded.shape == (12, 14, 14) and padded.dtype == np.uint8
  np.testing.assert_array_equal(padded[:, 4:-4, 4:-4], images)
  assert padded.sum() == images.sum()
  np.testing.assert_array_equal(digits.pad(images, 0), images)
  with pytest.raises(ValueError):
    digits.pad(images, -1)
  floats = digits.to_float(images)
  assert floats.dtype == np.float32 and floats.max() <= 1 and floats[0, 0, 0] == np.float32(images[0, 0, 0]) / 255


def test_shift_moves_images_whole():
  images = np.zeros((400, 7, 9), np.uint8)
  images[:, 3, 4], images[:, 4, 4] = 7, 9
  moved = digits.shift(np.random.default_rng(0), images, 2)
  n, y, x = np.nonzero(moved == 7)
  assert len(n) == 400 and (moved[n, y + 1, x] == 9).all() and (moved > 0).sum() == 800
  assert set(zip((y - 3).tolist(), (x - 4).tolist())) == {(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}
  edge = np.ones((50, 4, 4), np.uint8)
  lost = digits.shift(np.random.default_rng(1), edge, 1)
  assert set(lost.sum((1, 2)).tolist()) == {9, 12, 16}  # what leaves the picture does not come back on the other side
  with pytest.raises(ValueError, match="shift -1"):
    digits.shift(np.random.default_rng(0), images, -1)


def test_noise_is_clipped_normal():
  grey = np.full((50, 28, 28), 0.5, np.float32)
  noisy = digits.noise(np.random.default_rng(0), grey, 0.1)
  assert noisy.dtype == np.float32 and abs(noisy.std() - 0.1) < 2e-3 and abs(noisy.mean() - 0.5) < 2e-3
  strong = digits.noise(np.random.default_rng(0), grey, 5.0)
  assert strong.min() == 0 and strong.max() == 1
  np.testing.assert_array_equal(digits.noise(np.random.default_rng(0), grey, 0.0), grey)
  with pytest.raises(ValueError, match="uint8"):
    digits.noise(np.random.default_rng(0), sample()[0], 0.1)


def test_patch_drop():
  stays = digits.drop_mask(np.random.default_rng(0), 200, 81, 0.1)
  assert stays.shape == (200, 81)
  np.testing.assert_array_equal((~stays).sum(1), 8)
  assert (~stays).sum(0).std() > 0 and abs((~stays).mean(0) - 8 / 81).max() < 0.12
  assert digits.drop_mask(np.random.default_rng(0), 3, 81, 0.0).all()
  assert not digits.drop_mask(np.random.default_rng(0), 3, 81, 1.0).any()
  with pytest.raises(ValueError):
    digits.drop_mask(np.random.default_rng(0), 3, 81, 1.1)


def test_drop_pixels_by_hand():
  images = np.ones((2, 28, 28), np.uint8)
  stays = np.ones((2, 81), bool)
  stays[0, 0] = stays[0, 10] = False  # agents at rows 0..2, columns 0..2 and rows 3..5, columns 3..5
  dropped = digits.drop_pixels(images, stays, 3, 3)
  want = images.copy()
  want[0, 0:3, 0:3] = want[0, 3:6, 3:6] = 0
  np.testing.assert_array_equal(dropped, want)
  nothing = digits.drop_pixels(images, np.zeros((2, 81), bool), 3, 3)
  assert not nothing[:, :27, :27].any() and nothing[:, 27].all()  # no agent sees the last row and column
  # Overlapping patches: a pixel stays while anyone sees it.
  grid = np.ones((1, 7, 7), np.uint8)
  stays = np.ones((1, 9), bool)
  stays[0, 4] = False  # centre (3, 3) of rows 2..4, columns 2..4
  want = grid.copy()
  want[0, 3, 3] = 0
  np.testing.assert_array_equal(digits.drop_pixels(grid, stays, 3, 2), want)
  with pytest.raises(ValueError, match="stays has shape"):
    digits.drop_pixels(grid, stays[:, :5], 3, 2)


def test_picture(tmp_path):
  from PIL import Image

  image = digits.synthetic(1, seed=0)[0][0]
  Image.fromarray(image).save(tmp_path / "grey.png")
  np.testing.assert_array_equal(digits.read_image(tmp_path / "grey.png"), image)
  Image.fromarray(255 - image).save(tmp_path / "ink.png")
  np.testing.assert_array_equal(digits.read_image(tmp_path / "ink.png"), image)
  np.testing.assert_array_equal(digits.read_image(tmp_path / "ink.png", invert=False), 255 - image)
  Image.fromarray(np.stack([image] * 3, -1)).save(tmp_path / "colour.png")
  assert abs(digits.read_image(tmp_path / "colour.png").astype(int) - image).max() <= 1
  clear = np.zeros((28, 28, 4), np.uint8)
  clear[..., :3], clear[..., 3] = 255, image  # white ink on nothing
  Image.fromarray(clear).save(tmp_path / "clear.png")
  assert abs(digits.read_image(tmp_path / "clear.png").astype(int) - image).max() <= 1


def test_bad_pictures(tmp_path):
  from PIL import Image

  (tmp_path / "text.png").write_text("not a picture")
  Image.fromarray(np.zeros((2, 28), np.uint8)).save(tmp_path / "small.png")
  Image.fromarray(np.zeros((600, 28), np.uint8)).save(tmp_path / "large.png")
  Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90), np.uint8)).save(tmp_path / "cut.png")
  (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:500])
  for name, words in {
      "none.png": "does not exist",
      "text.png": "is not a picture that can be read",
      "cut.png": "is not a picture that can be read",
      "small.png": "is 2x28 pixels, smaller than one patch of 3x3",
      "large.png": "is 600x28 pixels; resize it to at most 512",
  }.items():
    with pytest.raises(UserError, match=words) as error:
      digits.read_image(tmp_path / name)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
  images, labels = sample()
  write_idx(tmp_path, "train", images, labels)
  (tmp_path / "cut-images-idx3-ubyte").write_bytes(idx(images)[:-5])
  (tmp_path / "odd-images-idx3-ubyte").write_bytes(b"\x89PNG....")
  (tmp_path / "zip-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images))[:40])
  for name in ("cut", "odd"):
    (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
  (tmp_path / "zip-labels-idx1-ubyte.gz").write_bytes(b"")
  (tmp_path / "solo-images-idx3-ubyte").write_bytes(idx(images))
  (tmp_path / "few.npz").write_bytes(b"PK\x03\x04 broken")
  np.savez(tmp_path / "names.npz", a=images, b=labels)
  np.savez(tmp_path / "objects.npz", images=np.array([None, {}], object), labels=labels)
  (tmp_path / "odd.csv").write_text("1,2,3\n4,5,6\n")
  (tmp_path / "words.csv").write_text("label,p\n1,two\n")
  (tmp_path / "empty.csv").write_text("")
  (tmp_path / "notes.txt").write_text("hello")
  (tmp_path / "sub").mkdir()
  for name, words in {
      "nowhere": "does not exist; give 'mnist'",
      "cut-images-idx3-ubyte": r"promises \(12, 6, 6\) bytes but holds 427",
      "odd-images-idx3-ubyte": "is not an IDX file of unsigned bytes",
      "zip-images-idx3-ubyte.gz": "cannot read .*zip-images",
      "solo-images-idx3-ubyte": "needs its labels solo-labels-idx1-ubyte",
      "few.npz": "cannot read .* as npz",
      "objects.npz": "cannot read .* as npz",
      "names.npz": r"holds \['a', 'b'\]; name the arrays",
      "odd.csv": "has 3 columns",
      "words.csv": "cannot read .* as csv",
      "empty.csv": "columns|cannot read",
      "notes.txt": "is of no known kind",
      "sub": "has no IDX images or .csv with 'train' in the name",
  }.items():
    with pytest.raises(UserError, match=words) as error:
      digits_io.read(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change,words", [
    (lambda x, y: (x[0], y), r"images have shape \(6, 6\)"),
    (lambda x, y: (x[:0], y[:0]), r"images have shape \(0, 6, 6\)"),
    (lambda x, y: (x, y[:-1]), r"12 images but labels of shape \(11,\)"),
    (lambda x, y: (x, y.astype(np.float32)), "labels have dtype float32"),
    (lambda x, y: (x, y + 1), "label 10 of image 9 is outside 0..9"),
    (lambda x, y: (x, y.astype(np.int64) - 1), "label -1 of image 0"),
    (lambda x, y: (x.astype(np.float32), y), r"pixels lie in .*float32 images must lie in 0..1"),
    (lambda x, y: (x.astype(np.int32) * 2, y), "int32 images must lie in 0..255"),
    (lambda x, y: (np.full(x.shape, np.nan), y), "pixels lie in nan"),
    (lambda x, y: (x.astype(str), y), "images have dtype <U3"),
])  # fmt: skip
def test_bad_arrays(change, words):
  with pytest.raises(UserError, match=words):
    digits_io.validate(*change(*sample()), "own.npz")


def test_load_slices_and_round_trip(tmp_path):
  train, test = sample(20), sample(7, 1)
  np.savez(tmp_path / "own.npz", x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
  config = data.DigitsData(source=str(tmp_path / "own.npz"), train=10, val=4, test=5, size=(6, 6))
  order = {n: np.random.default_rng(0).permutation(n) for n in (20, 7)}
  for _ in range(2):
    loaded = data.load(config, tmp_path / "data")
    np.testing.assert_array_equal(loaded["train"]["inputs"], train[0][order[20][:10]])
    np.testing.assert_array_equal(loaded["val"]["inputs"], train[0][order[20][16:]])
    np.testing.assert_array_equal(loaded["val"]["labels"], train[1][order[20][16:]])
    np.testing.assert_array_equal(loaded["test"]["inputs"], test[0][order[7][:5]])
    assert loaded["test"]["labels"].dtype == np.int32
  everything = data.load(data.DigitsData(str(tmp_path / "own.npz"), 0, 0, 0, size=(6, 6)), tmp_path / "data")
  assert set(everything) == {"train", "test"}
  assert (len(everything["train"]["labels"]), len(everything["test"]["labels"])) == (20, 7)
  with pytest.raises(UserError, match="has 20 training images, train 18 and val 4 ask for more"):
    data.load(dataclasses.replace(config, train=18), tmp_path / "data")
  with pytest.raises(UserError, match="has 7 test images, test 8 asks for more"):
    data.load(dataclasses.replace(config, test=8), tmp_path / "data")
  assert len(list((tmp_path / "data" / "sheaf_digits").iterdir())) == 1, "one preparation serves all subsets"


def test_load_synthetic(tmp_path):
  loaded = data.load(data.DigitsData("synthetic", 60, 20, 30, seed=4), tmp_path)
  images, labels = digits.synthetic(80, 4)
  order = np.random.default_rng(0).permutation(80)
  np.testing.assert_array_equal(loaded["train"]["inputs"], images[order[:60]])
  np.testing.assert_array_equal(loaded["val"]["labels"], labels[order[60:]])
  np.testing.assert_array_equal(loaded["test"]["inputs"], digits.synthetic(30, 5)[0][np.random.default_rng(0).permutation(30)])


def test_the_first_of_a_sorted_file_stand_for_all(tmp_path):
  labels = np.repeat(np.arange(10), 30)
  np.savez(tmp_path / "own.npz", x_train=np.zeros((300, 6, 6), np.uint8), y_train=labels,
           x_test=np.zeros((300, 6, 6), np.uint8), y_test=labels)
  config = data.DigitsData(source=str(tmp_path / "own.npz"), train=100, val=100, test=100, size=(6, 6))
  assert all(len(set(part["labels"])) == 10 for part in data.load(config, tmp_path / "data").values())


def test_negative_counts_are_refused():
  with pytest.raises(ValueError, match="val -1 must not be negative"):
    data.DigitsData(val=-1)


def test_images_of_another_size(tmp_path):
  images, labels = sample(20)
  np.savez(tmp_path / "own.npz", x_train=images[:, :5, :4], y_train=labels, x_test=images[:, :5, :4], y_test=labels)
  config = data.DigitsData(str(tmp_path / "own.npz"), 0, 0, 0)
  with pytest.raises(UserError, match=r"are 5x4, config.data.size says 28x28; set it to \(5, 4\)"):
    data.load(config, tmp_path / "data")
  loaded = data.load(dataclasses.replace(config, size=(5, 4)), tmp_path / "data")
  assert loaded["train"]["inputs"].shape == (20, 5, 4)
  with pytest.raises(ValueError, match="smaller than the 3x3 patch"):
    dataclasses.replace(config, size=(2, 2))
  with pytest.raises(ValueError, match="up to 1,000,000 images"):
    data.DigitsData("synthetic", train=9_999_999)


@pytest.mark.slow
def test_real_mnist_is_the_official_one():
  folder = assets.cache_dir() / f"mnist-{assets.ASSETS['mnist'].version}"
  if not (folder / "mnist_test.csv").exists():
    pytest.skip("the asset 'mnist' is not in the cache; run any experiment that uses it once")
  images, labels = digits_io.read_csv(pathlib.Path(folder) / "mnist_test.csv")
  assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
  assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
  images, labels = digits_io.read_csv(folder / "mnist_train.csv")
  assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
  assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
  assert images.shape == (60_000, 28, 28)
  assert abs(images.mean() / 255 - 0.13066) < 1e-5 and abs(images.std() / 255 - 0.30811) < 1e-5
