"""The commands and the Python of the page find-the-batch.md run as they stand."""

import pytest

from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support.doc_blocks import read_blocks, run_blocks


@pytest.mark.slow
def test_the_page_runs(digits_folder, tmp_path):
    ingest(Repository.create(str(tmp_path / "repo")), str(digits_folder), "digits")
    printed = run_blocks(read_blocks("find-the-batch.md"), tmp_path)
    assert "64 samples, so up to 6 runs from the beginning" in printed
    assert (tmp_path / "batch" / "inputs.npy").exists()
    assert "digits@1/val: 0 of 360 samples are in the training data of digits-cnn@1" in printed
