"""Every notebook runs from top to bottom, in a clean folder, in under three minutes on a quiet machine."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_is_a_notebook_for_every_paper():
  from experiments import papers

  assert {path.stem for path in NOTEBOOKS} == set(papers.PAPERS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
  nbformat = pytest.importorskip("nbformat")
  cells = nbformat.read(path, as_version=4).cells
  assert cells and all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
  nbformat = pytest.importorskip("nbformat")
  nbclient = pytest.importorskip("nbclient")
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
  shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
  assert shown, "the notebook draws nothing"
