"""The meter against a loop over tokens in NumPy, the report's numbers by hand, and pictures that are pictures."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sakanajax.nn.transformer import token_nll
from sakanajax.twell import inspection, inspection_plots, loss as losses, model as models
from tests.twell.helpers import TINY, batch_of, params_of, quick_compilation  # noqa: F401


@pytest.fixture(scope="module")
def measured():
  """(batches, their sums, what the model itself says of each batch)."""
  model = models.language_model(TINY)
  params = params_of(model)
  batches = [batch_of(padded=2, seed=0), batch_of(seed=1)]
  meter = inspection.Meter(model, TINY.layers, TINY.hidden, TINY.vocab, 6)
  run = jax.jit(lambda b: model.apply(params, b["tokens"], (), losses.context(b))[::2])
  return batches, meter(params, batches), [jax.device_get(run(batch)) for batch in batches]


def test_sums_against_a_loop(measured):
  batches, stats, outputs = measured
  want = jax.tree.map(lambda leaf: np.zeros(leaf.shape), stats)._asdict()
  for batch, (logits, aux) in zip(batches, outputs):
    report = jax.tree.map(np.asarray, aux)["ffn"]["layer"]
    losses_of = np.asarray(token_nll(jnp.asarray(logits), jnp.asarray(batch["labels"])))
    for b, t in np.ndindex(batch["tokens"].shape):
      if batch["mask"][b, t]:
        want["labels"] += 1
        want["nll"] += losses_of[b, t]
      if not batch["segment_ids"][b, t]:
        continue
      active = report["active"][:, b, t]
      want["tokens"] += 1
      want["layer"] += active
      want["positions"][batch["positions"][b, t]] += 1
      want["at_position"][:, batch["positions"][b, t]] += active
      want["ids"][batch["tokens"][b, t]] += 1
      want["at_id"][batch["tokens"][b, t]] += active.mean()
    want["fired"] += report["fired"]
    count = (batch["segment_ids"] > 0).sum()
    want["idle"] = np.where(report["fired"] > 0, 0, want["idle"] + count)
  for name, value in want.items():
    np.testing.assert_allclose(getattr(stats, name), value, rtol=1e-5, err_msg=name)
  assert stats.fired.sum() == stats.layer.sum() == stats.at_position.sum()


def test_the_report_is_the_sums_divided(measured):
  _, stats, _ = measured
  report = inspection.report(stats, show=lambda i: f"t{i}", top=3, least_count=1)
  assert report.tokens == 20 and report.ce == pytest.approx(float(stats.nll / stats.labels))
  assert report.nnz == pytest.approx(float(stats.layer.sum() / 20 / 2))
  assert report.sparsity == pytest.approx(1 - report.nnz / 24)
  assert report.dead_layer == pytest.approx((stats.fired == 0).mean(1).tolist())  # the window is all of the text
  means = {f"t{i}": stats.at_id[i] / stats.ids[i] for i in range(19) if stats.ids[i]}
  assert report.most[0]["token"] == max(means, key=means.get) and report.least[0]["token"] == min(means, key=means.get)
  assert len(report.most) == 3 and report.most[0]["nnz"] == pytest.approx(max(means.values()), abs=1e-3)


def test_dead_within_a_window_of_the_text(measured):
  _, stats, _ = measured
  short = inspection.report(stats, window=12)  # the second batch alone
  assert short.dead_layer == pytest.approx((stats.idle >= 12).mean(1).tolist())
  assert short.dead >= inspection.report(stats).dead


def test_first_positions_against_the_second_half():
  ratio = inspection.first_position_ratio
  assert ratio(np.array([8.0, 3.0, 2.0, 4.0]), np.array([5.0, 5.0, 3.0, 1.0])) == pytest.approx(8 / (10 / 4))
  assert math.isnan(ratio(np.array([8.0, np.nan]), np.array([1.0, 0.0])))
  assert math.isnan(ratio(np.array([np.nan, 1.0]), np.array([0.0, 2.0])))


def test_pearson_against_numpy():
  x, y = np.random.default_rng(0).normal(size=(2, 9))
  assert inspection.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
  assert inspection.pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
  assert math.isnan(inspection.pearson([1, 1], [1, 2]))


def test_files_of_a_report(measured, tmp_path):
  report = inspection.report(measured[1], show=lambda i: f"$_{i}\n", top=4, least_count=1)
  path = inspection.write(tmp_path, report._replace(first_position_ratio=math.nan), {"model": "m"})
  content = json.loads(path.read_text())
  assert content["nnz_layer"] == pytest.approx(report.nnz_layer) and content["model"] == "m"
  assert content["first_position_ratio"] is None
  paths = inspection_plots.draw(tmp_path, report)
  assert [path.name for path in paths] == ["layers.png", "positions.png", "tokens.png"]
  assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)
