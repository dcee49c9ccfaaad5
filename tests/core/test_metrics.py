import json

import pytest

from sakanajax.core import metrics
from sakanajax.core.errors import UserError


def test_written_lines_are_read_back(tmp_path):
  path = tmp_path / "run" / "metrics.jsonl"
  with metrics.JsonlWriter(path) as writer:
    writer.write(1, {"loss": 0.5})
    assert metrics.read_jsonl(path) == [{"step": 1, "loss": 0.5}]  # at once, not at close
    writer.write(2, {"loss": 0.25, "mae": 0.125})
  assert metrics.read_jsonl(path)[1] == {"step": 2, "loss": 0.25, "mae": 0.125}


def test_resuming_drops_later_lines_and_a_torn_one(tmp_path):
  path = tmp_path / "metrics.jsonl"
  with metrics.JsonlWriter(path) as writer:
    for step in (2, 4, 6):
      writer.write(step, {"loss": float(step)})
  with open(path, "a", encoding="utf-8") as file:
    file.write('{"step": 8, "lo')
  assert [r["step"] for r in metrics.read_jsonl(path)] == [2, 4, 6]
  with metrics.JsonlWriter(path, resume_step=4) as writer:
    writer.write(6, {"loss": 0.0})
  assert [(r["step"], r["loss"]) for r in metrics.read_jsonl(path)] == [(2, 2.0), (4, 4.0), (6, 0.0)]


def test_starting_over_empties_the_file(tmp_path):
  path = tmp_path / "metrics.jsonl"
  with metrics.JsonlWriter(path) as writer:
    writer.write(1, {"loss": 1.0})
  metrics.JsonlWriter(path).close()
  assert metrics.read_jsonl(path) == []


def test_nan_and_infinity_become_null(tmp_path):
  path = tmp_path / "metrics.jsonl"
  with metrics.JsonlWriter(path) as writer:
    writer.write(1, {"a": float("nan"), "b": float("-inf"), "c": 3})
  assert json.loads(path.read_text()) == {"step": 1, "a": None, "b": None, "c": 3}


@pytest.mark.parametrize("content", [b"[1, 2]\n", b"hello\n", b'{"step": 1}\n}{\n', b"\xff\xfe\n"])
def test_a_damaged_file_is_named(tmp_path, content):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(content)
  with pytest.raises(UserError, match="metrics.jsonl.*remove"):
    metrics.read_jsonl(path)


def test_a_missing_file_and_a_full_disk_are_user_errors(tmp_path):
  with pytest.raises(UserError, match="cannot read .*none.jsonl"):
    metrics.read_jsonl(tmp_path / "none.jsonl")
  writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
  writer.close()
  writer._file = open("/dev/full", "w", encoding="utf-8")  # pylint: disable=protected-access
  with pytest.raises(UserError, match="No space left"):
    writer.write(1, {"loss": 1.0})


def test_tensorboard_events(tmp_path):
  pytest.importorskip("tensorboardX")
  with metrics.TensorboardWriter(tmp_path / "tb", resume_step=0) as writer:
    writer.write(1, {"loss": 0.5})
  (events,) = (tmp_path / "tb").iterdir()
  assert b"loss" in events.read_bytes()
