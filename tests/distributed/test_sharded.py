"""Sharded checkpoints over real gloo ranks: one program makes many checks, because loading torch takes longer."""

import pytest
import torch

import datasvc
from tests.distributed.programs.sharded_states import VALUES, whole_tensors


def assert_one_process_restores(url, ref):
    checkpoint = datasvc.open(url).models.restore(ref)
    for name, tensor in whole_tensors().items():
        assert torch.equal(checkpoint.state["model"][name], tensor), name
    assert checkpoint.state["values"] == VALUES


@pytest.mark.slow
def test_four_ranks_save_and_any_number_restores(launcher, tmp_path):
    url = str(tmp_path / "repo")
    launcher.run_program(1, "sharded.py", url)
    for number in range(1, 6):
        assert_one_process_restores(url, f"layouts@{number}")


@pytest.mark.slow
def test_managers_of_four_ranks_save_their_parts_and_any_layout_restores(launcher, tmp_path):
    url = str(tmp_path / "repo")
    launcher.run_program(1, "sharded_saves.py", url)
    for number in range(1, 6):
        assert_one_process_restores(url, f"layouts@{number}")
