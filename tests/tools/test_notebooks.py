"""The notebooks of examples/ run from the first cell to the last, and show what they make."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "examples/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What the output of the last cells must have: text of the pages that people come for.
SHOWN = {
    "first_data_set": ("badly written", "digits@2", "<svg"),
    "folder_to_model": ("digits are recognised", "top1", "<svg"),
    "trained_on": ("first@2", "epoch 1", "no sample was lost or served twice; 480 of 480 served once"),
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_leads_to_files_that_exist(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), cell.source
        assert cell.get("execution_count") is None, cell.source
        for target in re.findall(r"\]\(([^)#]+)\)", cell.source if cell.cell_type == "markdown" else ""):
            assert (FOLDER / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_makes(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook keeps its files
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, kernel_name="python3", timeout=200, resources={"metadata": {"path": tmp_path}}).execute()
    shown = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert [text for text in SHOWN[path.stem] if text not in shown] == []
