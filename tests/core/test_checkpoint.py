import contextlib
import errno
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sakanajax.core import checkpoint
from sakanajax.core.errors import UserError

META = {"fingerprint": "mine", "config": {"lr": 0.1, "name": "日本"}}


def make_tree(scale=1.0):
  params = {"w": scale * jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
  return {
      "params": params,
      "opt": optax.adam(1e-3).init(params),
      "key": jax.random.key(3),
      "host": np.arange(4, dtype=np.int32),
      "count": jnp.int32(7),
      "empty": jnp.zeros((0, 2)),
  }


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(x, y)


@contextlib.contextmanager
def full_disk(limit):
  """Makes the system refuse files longer than `limit` bytes, as a full disk would."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_round_trip_is_exact(tmp_path):
  tree = make_tree()
  path = checkpoint.save(tmp_path / "ck", 3, tree, META)
  assert path == tmp_path / "ck" / "3"
  restored, meta = checkpoint.restore(tmp_path / "ck", tree, fingerprint="mine")
  assert_same(restored, tree)
  assert meta == {"step": 3, **META}
  assert isinstance(restored["host"], np.ndarray)


def test_shapes_alone_are_a_template(tmp_path, recwarn):
  tree = make_tree()
  checkpoint.save(tmp_path, 1, tree, META)
  template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  assert_same(checkpoint.restore(tmp_path, template)[0], tree)
  assert not [str(w.message) for w in recwarn if "shard" in str(w.message).lower()]


def test_the_newest_stay_and_saving_again_replaces(tmp_path):
  for step in (1, 2, 10):
    checkpoint.save(tmp_path, step, make_tree(step), META, keep=2)
  checkpoint.save(tmp_path, 10, make_tree(11), META, keep=2)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "2"]
  assert checkpoint.latest(tmp_path) == 10
  assert_same(checkpoint.restore(tmp_path, make_tree())[0], make_tree(11))
  assert_same(checkpoint.restore(tmp_path, make_tree(), step=2)[0], make_tree(2))


def test_only_whole_checkpoints_count(tmp_path):
  assert checkpoint.latest(tmp_path / "none") is None
  for name in ("7.partial", "8.partial.orbax-checkpoint-tmp", "best", "-3"):
    (tmp_path / name).mkdir()
  (tmp_path / "9").write_text("a file")
  assert checkpoint.latest(tmp_path) is None
  with pytest.raises(UserError, match="no checkpoint in .*train first"):
    checkpoint.restore(tmp_path, make_tree())


def test_missing_folder_or_step(tmp_path):
  with pytest.raises(UserError, match="no checkpoint in .*none"):
    checkpoint.restore(tmp_path / "none", make_tree())
  checkpoint.save(tmp_path, 3, make_tree(), META)
  with pytest.raises(UserError, match=r"no checkpoint of step 4 in .*\[3\]"):
    checkpoint.restore(tmp_path, make_tree(), step=4)


def test_any_damaged_file_is_found(tmp_path):
  tree = make_tree()
  checkpoint.save(tmp_path / "whole", 5, tree, META)
  checkpoint.save(tmp_path / "whole", 6, tree, META)
  names = [p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole" / "6").rglob("*")]
  names = [n for n in names if (tmp_path / "whole" / n).is_file()]
  assert len(names) > 4
  for name in names:
    for damage in ("flip", "truncate", "remove"):
      shutil.rmtree(tmp_path / "copy", ignore_errors=True)
      shutil.copytree(tmp_path / "whole", tmp_path / "copy")
      victim = tmp_path / "copy" / name
      content = bytearray(victim.read_bytes())
      if not content and damage != "remove":
        continue
      if damage == "remove":
        victim.unlink()
      elif damage == "truncate":
        victim.write_bytes(content[: len(content) // 2])
      else:
        content[len(content) // 2] ^= 0xFF
        victim.write_bytes(content)
      with pytest.raises(UserError, match="copy/6 is corrupt.*delete .*resumes from step 5") as info:
        checkpoint.restore(tmp_path / "copy", tree)
      assert "\n" not in str(info.value)
  assert_same(checkpoint.restore(tmp_path / "copy", tree, step=5)[0], tree)


def test_an_emptied_checkpoint_is_corrupt(tmp_path):
  (tmp_path / "4").mkdir()
  with pytest.raises(UserError, match="4 is corrupt.*the run starts over"):
    checkpoint.restore(tmp_path, make_tree())


def test_another_configuration_is_refused(tmp_path):
  checkpoint.save(tmp_path, 1, make_tree(), META)
  with pytest.raises(UserError, match="another configuration"):
    checkpoint.restore(tmp_path, make_tree(), fingerprint="yours")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t | {"count": jnp.zeros(2, jnp.int32)}, r"count.*int32\[\].*int32\[2\]"),
        (lambda t: t | {"count": jnp.float32(0)}, r"count.*int32\[\].*float32\[\]"),
        (lambda t: t | {"extra": jnp.zeros(2)}, r"extra.*has nothing.*wants float32\[2\]"),
        (lambda t: {k: v for k, v in t.items() if k != "host"}, r"host.*has int32\[4\].*nothing"),
    ],
)
def test_another_model_is_refused(tmp_path, change, words):
  checkpoint.save(tmp_path, 1, make_tree(), META)
  with pytest.raises(UserError, match=f"another model .*{words}"):
    checkpoint.restore(tmp_path, change(make_tree()), fingerprint="mine")


def test_an_interrupted_save_leaves_the_previous_one(tmp_path, monkeypatch):
  tree = make_tree()
  checkpoint.save(tmp_path, 1, tree, META)

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(checkpoint, "_publish", killed)
    with pytest.raises(KeyboardInterrupt):
      checkpoint.save(tmp_path, 2, make_tree(2.0), META)
  assert (tmp_path / "2.partial").exists()
  assert checkpoint.latest(tmp_path) == 1
  assert_same(checkpoint.restore(tmp_path, tree)[0], tree)
  checkpoint.save(tmp_path, 2, make_tree(2.0), META)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
  assert_same(checkpoint.restore(tmp_path, tree)[0], make_tree(2.0))


def test_full_disk(tmp_path, capfd):
  tree = {"noise": jax.random.normal(jax.random.key(0), (64, 64))}
  checkpoint.save(tmp_path, 1, tree, META)
  with full_disk(8000), pytest.raises(UserError, match="cannot write .*/2: File too large; free"):
    checkpoint.save(tmp_path, 2, tree, META)
  assert [p.name for p in tmp_path.iterdir()] == ["1"]
  assert_same(checkpoint.restore(tmp_path, tree)[0], tree)
  assert "Traceback" not in "".join(capfd.readouterr())


def test_full_disk_at_the_last_moment(tmp_path, monkeypatch):
  tree = make_tree()
  checkpoint.save(tmp_path, 1, tree, META)

  def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(checkpoint.os, "fsync", refuse)
  with pytest.raises(UserError, match="cannot write .*/2: No space left on device"):
    checkpoint.save(tmp_path, 2, tree, META)
  assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_a_file_in_the_way_of_the_folder(tmp_path):
  (tmp_path / "ck").write_text("a file")
  with pytest.raises(UserError, match="cannot write .*ck/1: "):
    checkpoint.save(tmp_path / "ck", 1, make_tree(), META)


def test_our_own_mistakes_are_not_the_users(tmp_path):
  with pytest.raises(Exception) as info:
    checkpoint.save(tmp_path, 1, {"a": object()}, META)
  assert not isinstance(info.value, UserError)
  assert checkpoint.latest(tmp_path) is None
