import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from sakanajax.core import data
from sakanajax.core.errors import UserError

# The builder lives in a string so that a process of its own can run it too.
TOY = textwrap.dedent("""
    import os, signal, sys
    import numpy as np
    import tensorflow_datasets as tfds

    class Toy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
      name = "toy"
      VERSION = tfds.core.Version("1.0.0")

      def __init__(self, *, count=20, on_example=lambda i: None, **kwargs):
        self.count, self.on_example = count, on_example
        super().__init__(**kwargs)

      def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            "grid": tfds.features.Tensor(shape=(2, 3), dtype=np.int32),
            "x": tfds.features.Scalar(np.float32),
            "label": tfds.features.ClassLabel(num_classes=5),
            "text": tfds.features.Text(),
        }))

      def _split_generators(self, dl):
        return {"train": self._generate_examples(0, self.count),
                "test": self._generate_examples(100, 4)}

      def _generate_examples(self, start, count):
        for i in range(start, start + count):
          self.on_example(i)
          yield i, {"grid": np.full((2, 3), i, np.int32), "x": i / 2, "label": i % 5,
                    "text": f"é{i}"}
""")


def toy_class():
  namespace = {"__name__": "toy"}
  exec(TOY, namespace)  # pylint: disable=exec-used
  return namespace["Toy"]


def worker(folder, body):
  code = f"{TOY}\nfrom sakanajax.core import data\n{textwrap.dedent(body)}"
  root = pathlib.Path(data.__file__).parents[2]
  env = os.environ | {"PYTHONPATH": str(root)}
  return subprocess.Popen(
      [sys.executable, "-c", code, str(folder)], env=env, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, text=True)  # fmt: skip


def test_prepare_then_read(tmp_path):
  builder = data.prepare(toy_class(), tmp_path)
  arrays = data.to_arrays(builder, "train")
  order = np.argsort(arrays["x"])
  assert arrays["grid"].shape == (20, 2, 3) and arrays["grid"].dtype == np.int32
  np.testing.assert_array_equal(arrays["grid"][order][:, 0, 0], np.arange(20))
  np.testing.assert_array_equal(arrays["x"][order], np.arange(20, dtype=np.float32) / 2)
  np.testing.assert_array_equal(arrays["label"][order], np.arange(20) % 5)
  assert arrays["text"][order][7] == "é7".encode()
  assert data.to_arrays(builder, "test")["x"].shape == (4,)
  assert data.to_arrays(builder, "train[:5]")["x"].shape == (5,)
  files = [p.name for p in (tmp_path / "toy" / "1.0.0").iterdir()]
  assert "toy-train.array_record-00000-of-00001" in files
  assert "tensorflow" not in sys.modules


def test_prepared_data_are_not_made_again(tmp_path):
  data.prepare(toy_class(), tmp_path)
  data.prepare(toy_class(), tmp_path, on_example=lambda i: pytest.fail("generated again"))


def test_the_order_is_the_same_everywhere(tmp_path):
  a, b = (data.to_arrays(data.prepare(toy_class(), tmp_path / n), "train") for n in "ab")
  np.testing.assert_array_equal(a["x"], b["x"])


def test_the_folder_comes_from_the_environment(tmp_path, monkeypatch):
  monkeypatch.setenv("SAKANAJAX_DATA", str(tmp_path / "here"))
  assert data.default_data_dir() == tmp_path / "here"
  data.prepare(toy_class())
  assert (tmp_path / "here" / "toy" / "1.0.0" / "dataset_info.json").exists()
  monkeypatch.delenv("SAKANAJAX_DATA")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert data.default_data_dir() == tmp_path / ".cache" / "sakanajax" / "data"


def test_a_killed_preparation_leaves_nothing_and_the_next_one_works(tmp_path):
  process = worker(tmp_path, """
      die = lambda i: os.kill(os.getpid(), signal.SIGKILL) if i == 101 else None
      data.prepare(Toy, sys.argv[1], on_example=die)
  """)
  output = process.communicate(timeout=120)[0]
  assert process.returncode == -signal.SIGKILL, output
  assert not (tmp_path / "toy").exists()
  assert list(tmp_path.glob(".toy.partial-*"))
  assert len(data.to_arrays(data.prepare(toy_class(), tmp_path), "train")["x"]) == 20
  assert not list(tmp_path.glob(".toy.partial-*"))


def test_an_error_in_the_generator_leaves_nothing(tmp_path):
  def broken(i):
    if i == 3:
      raise RuntimeError("bad maze")

  with pytest.raises(RuntimeError, match="bad maze"):
    data.prepare(toy_class(), tmp_path, on_example=broken)
  assert [p.name for p in tmp_path.iterdir()] == [".toy.lock"]


@pytest.mark.parametrize("words", ["INTERNAL: No space left on device", "File too large"])
def test_a_full_disk_that_a_writer_reports_in_its_own_way(tmp_path, words):
  def full(i):
    raise RuntimeError(words)

  with pytest.raises(UserError, match="cannot prepare the data set toy .*free some space"):
    data.prepare(toy_class(), tmp_path, on_example=full)
  assert [p.name for p in tmp_path.iterdir()] == [".toy.lock"]


@pytest.mark.slow
def test_processes_that_want_the_same_data_make_it_once(tmp_path):
  body = """
      import time
      builder = data.prepare(Toy, sys.argv[1], on_example=lambda i: (time.sleep(.02), print("made")))
      assert len(data.to_arrays(builder, "train")["x"]) == 20
  """
  processes = [worker(tmp_path, body) for _ in range(2)]
  outputs = [p.communicate(timeout=120)[0] for p in processes]
  assert [p.returncode for p in processes] == [0, 0], outputs
  assert sorted(o.count("made") for o in outputs) == [0, 24]


def test_damaged_files_are_named(tmp_path):
  builder = data.prepare(toy_class(), tmp_path)
  (tmp_path / "toy" / "1.0.0" / "toy-train.array_record-00000-of-00001").unlink()
  with pytest.raises(UserError, match="toy/1.0.0 .*delete that folder") as info:
    data.to_arrays(builder, "train")
  assert "\n" not in str(info.value)
  with pytest.raises(UserError, match="'validation'"):
    data.to_arrays(builder, "validation")


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="cannot prepare the data set toy in .*set SAKANAJAX_DATA"):
    data.prepare(toy_class(), tmp_path / "file")


@pytest.mark.parametrize("n, batch", [(10, 5), (10, 3), (3, 7), (1, 2), (5, 5)])
def test_every_example_once_an_epoch(n, batch):
  indices = data.epoch_batches(n, batch, seed=0)
  stream = np.concatenate([indices(s) for s in range(4 * n)])
  assert all(indices(s).shape == (batch,) for s in range(3))
  for epoch in range(len(stream) // n):
    np.testing.assert_array_equal(np.sort(stream[epoch * n : (epoch + 1) * n]), np.arange(n))


def test_batches_are_a_pure_function_of_seed_and_step():
  a, b = data.epoch_batches(100, 7, seed=3), data.epoch_batches(100, 7, seed=3)
  late = a(1000)  # without the steps before it
  for step in range(0, 1001, 50):
    np.testing.assert_array_equal(a(step), b(step))
  np.testing.assert_array_equal(late, b(1000))
  assert not np.array_equal(data.epoch_batches(100, 7, seed=4)(0), a(0))
  epochs = np.concatenate([data.epoch_batches(100, 100, seed=3)(e)[None] for e in (0, 1)])
  assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize("n, batch", [(0, 1), (1, 0)])
def test_nothing_to_draw_from(n, batch):
  with pytest.raises(ValueError, match="at least 1"):
    data.epoch_batches(n, batch, seed=0)
