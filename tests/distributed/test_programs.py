"""Real ranks. Each program makes many checks per start, because loading torch takes longer than most."""

import pickle
import re
from importlib.util import find_spec

import pytest
import torch

from tests.support import warm_python

# Two nodes of two ranks.
HIERARCHICAL = ("-H", "localhost:2,127.0.0.1:2", "--hierarchical-allreduce")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_operation_gives_what_torch_computes_from_all_inputs(launcher, num_ranks):
    launcher.run_program(num_ranks, "operations.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_ranks", "programs"),
    [
        (2, ["rows.py", "combining.py", "normalizing.py", "recipe_updates.py", "averaging.py"]),
        (3, ["combining.py", "normalizing.py", "process_sets.py"]),
        (4, ["rows.py", "combining.py", "process_sets.py"]),
    ],
)
def test_rows_gradients_batch_norm_process_sets_and_steps_of_the_training_program(
    launcher, num_ranks, programs, tmp_path
):
    texts = [f"{name}:{tmp_path / 'trace.json'}" for name in programs]
    launcher.run_program(num_ranks, "several.py", *texts, timeout_s=500.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_are_averaged_on_two_nodes_of_two_ranks(launcher):
    program = launcher.program("averaging.py")
    done = launcher.run(4, warm_python.command(), program, options=HIERARCHICAL[:2], timeout_s=500.0)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_diloco_is_that_of_torchft_in_every_step(launcher):
    launcher.run_program(2, "averaging.py", "torchft", timeout_s=500.0)


@pytest.mark.slow
def test_ranks_join_and_leave_in_rounds_and_at_different_moments(launcher):
    launcher.run_program(2, "membership.py")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_training_equals_one_process_and_itself_bit_by_bit(launcher, num_ranks, tmp_path):
    launcher.run_program(num_ranks, "training.py", tmp_path / "first")
    launcher.run_program(num_ranks, "training.py", tmp_path / "second", "again")
    runs = [pickle.loads((tmp_path / run).read_bytes()) for run in ("first", "second")]
    assert set(runs[0]) == {"sgd", "adam", "swapped"}
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("training",)])
def test_hierarchical_allreduces_equal_flat_ones(launcher, arguments):
    launcher.run_program(4, "hierarchical.py", *arguments)


@pytest.mark.parametrize(
    ("num_ranks", "num_numbers", "options"),
    [
        (2, 1000, ()),
        pytest.param(4, 5_000_000, (), marks=pytest.mark.slow),
        pytest.param(4, 5_000_000, HIERARCHICAL, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_an_error_on_the_others_and_named_by_the_launcher(launcher, num_ranks, num_numbers, options):
    program = launcher.program("victim.py")
    done = launcher.run(num_ranks, warm_python.command(), program, str(num_numbers), options=options)
    assert done.returncode == 128 + 9
    assert re.search(rf"rank {num_ranks - 1}( on \S+)? was the first to fail: it was killed by SIGKILL", done.stderr)
    for survivor in range(num_ranks - 1):
        assert f"[{survivor}] survived" in done.stderr


@pytest.mark.slow
def test_torchrun_can_start_the_job_too(launcher):
    done = launcher.run_with_torchrun(2, "membership.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_are_each_other_s_peers_and_the_origin_is_read_once(launcher, digits, tmp_path):
    launcher.run_program(2, "rank_nodes.py", digits["train"].repository.url, tmp_path)


@pytest.mark.slow
def test_four_ranks_as_2_x_2_get_one_batch_a_pair_and_read_the_data_once(launcher, digits, tmp_path):
    launcher.run_program(4, "mesh.py", digits["val"].repository.url, tmp_path)
