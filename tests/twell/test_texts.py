"""Made-up text, splits, batches that are functions of the step, and evaluation rows that count every token once."""

import numpy as np
import pytest

from sakanajax.core import text
from sakanajax.core.errors import UserError
from sakanajax.nn import tokenizers
from sakanajax.twell import texts
from sakanajax.twell.texts import Data

BYTES = tokenizers.byte_tokenizer()


def test_made_up_text_is_a_function_of_its_seed_and_fills_all_splits():
  assert texts.synthetic(5) == texts.synthetic(5) != texts.synthetic(5, seed=1)
  sizes = {split: len(texts.tokens(Data(documents=60), BYTES, split).ids) for split in ("train", "valid", "test")}
  assert all(size > 100 for size in sizes.values()) and sizes["train"] > 5 * sizes["test"]
  whole = sum(len(document.encode()) + 1 for document in texts.synthetic(60))
  assert sum(sizes.values()) == whole


def test_batches_depend_on_the_step_only_and_carry_it():
  ids = texts.tokens(Data(documents=30), BYTES, "train")
  batch = texts.batches(ids, 4, 16, seed=3)
  jumped, straight = batch(7), texts.batches(ids, 4, 16, seed=3)(7)
  for name in jumped:
    np.testing.assert_array_equal(jumped[name], straight[name])
  assert jumped["step"].tolist() == [7] * 4 and jumped["tokens"].shape == (4, 16)


@pytest.mark.parametrize("batch,limit", [(3, 0), (4, 5), (2, 4)])
def test_evaluation_rows_hold_every_token_once(batch, limit):
  ids = texts.tokens(Data(documents=30), BYTES, "test")
  rows = texts.in_order(ids, batch, 16, limit)
  assert {row["tokens"].shape for row in rows} == {(batch, 16)}
  seen = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in rows])
  want = ids.ids if not limit else ids.ids[: 16 * limit]
  np.testing.assert_array_equal(seen[: len(want)], want[: len(seen)])
  assert len(want) - len(seen) in (0, 1)  # the very last id is a label only when it would begin a row
  count = min(limit or 10**9, text.count(ids, 16))
  assert len(rows) == -(-count // batch)
  assert not any(row["mask"][row["segment_ids"] == 0].any() for row in rows)


def test_text_of_the_user_and_bad_input(tmp_path):
  (tmp_path / "mine.txt").write_text("one two three. " * 2000)
  ids = texts.tokens(Data(source=str(tmp_path / "mine.txt")), BYTES, "train")
  assert BYTES.decode(ids.ids[:14].tolist()) == "one two three."
  with pytest.raises(UserError, match="nowhere.txt"):
    texts.tokens(Data(source=str(tmp_path / "nowhere.txt")), BYTES, "train")
  with pytest.raises(UserError, match="tokenizer"):
    texts.tokenizer_of(Data(tokenizer=str(tmp_path / "none.json")))
  with pytest.raises(UserError, match="no text"):
    texts.of_documents([], BYTES)
