"""Three ranks that save together, over gloo: one version, or one error on all of them, and never a hang."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.models import model_log, restore
from datasvc.repository import Repository
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
SCENARIOS = ("unlike", "refused", "fails", "dies", "stops", "overlaps", "in_groups", "apart")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("joint")


@pytest.fixture(scope="module")
def seen(folder):
    """What the ranks saw in each of the `SCENARIOS`, by rank; None: the rank did not come to its end."""
    return run(folder, *SCENARIOS)


def run(folder, *scenarios):
    words = [warm_python.command(), ROOT / "tests/distributed/programs/joint_saves.py", folder, *scenarios]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    sys.stderr.write(done.stderr)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_the_ranks_share_the_work_and_each_finds_its_own_state_again(folder):
    ranks = run(folder, "share")["share"]
    assert [rank["versions"] for rank in ranks] == [["m@2", "m@3"]] * 3
    assert [rank["own"] for rank in ranks] == [[rank, [rank] * 3] for rank in range(3)]
    written = [rank["bytes"] for rank in ranks]
    assert min(written) > 2 * 160_000, "each has written large tensors"
    entries = [version.entry for version in model_log(Repository.open(str(folder / "share.repo")), "m")]
    assert [entry["parent"] for entry in entries] == [None, "m@1", "m@1"]
    stored = sum(entry["stored_bytes"] for entry in entries)
    assert sum(written) == stored, "nothing twice"
    assert all(0 < entry["duration"]["stall_s"] < entry["duration"]["total_s"] for entry in entries)


@pytest.mark.slow
def test_what_is_unlike_on_the_ranks_is_saved_as_rank_0_has_it(seen):
    assert seen["unlike"] == [[[0.0], 0, True]] * 3


@pytest.mark.slow
def test_the_failed_save_of_one_rank_is_an_error_on_all_ranks_which_then_continue(seen):
    ranks = seen["refused"]
    assert ranks[0] == ranks[1] == ranks[2]
    (kind, text), (other_kind, other_text), (step_kind, step_text), (no_kind, no_text), *others, version = ranks[0]
    assert (kind, other_kind, step_kind, no_kind) == ("ConfigError", "ConfigError", "ConfigError", "NotFoundError")
    assert text.startswith("rank 1: state value f is a builtin_function_or_method")
    difference = "rank 0 has 'w float32[3]' where rank 2 has 'w float32[4]'"
    assert f"rank 2 saves other tensors than rank 0: {difference}" in other_text
    assert "[3, 4, 5]" in step_text
    assert "no model 'm'" in no_text
    kinds = [(kind, text.partition(": ")[0]) for kind, text in others]
    assert kinds == [("ConfigError", "rank 1")] * 2 + [("DatasvcError", "rank 1")]
    assert "metric 'top1' is 'high'" in others[0][1]
    assert "step is None" in others[1][1]
    assert "OSError: no room for this rank" in others[2][1]
    assert version == "m@2"


@pytest.mark.slow
def test_what_fails_on_one_rank_in_the_background_fails_on_all_and_the_next_save_works(seen):
    ranks = seen["fails"]
    (kind, text), (commit_kind, commit_text), interrupted, version, small = ranks[0]
    assert ranks[2] == ranks[0]
    assert ranks[1] == [*ranks[0][:2], None, *ranks[0][3:]], "who was interrupted knows"
    assert interrupted[0] == "DatasvcError"
    assert interrupted[1] == "rank 1: the save of step 3 was interrupted: KeyboardInterrupt()"
    assert (kind, text) == ("UnavailableError", "rank 2: the disk of this rank is full")
    assert commit_kind == "UnavailableError"
    assert "the save of step 2 failed: rank 0: nothing can be committed" in commit_text
    assert (version, small) == ("m@1", [4.0] * 5)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_an_error_on_the_others_and_nothing_is_visible(seen):
    assert seen["dies"] == [[*["LostRankError"] * 2, None, []]] * 2 + [None]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_last_commit(seen):
    saved, step, number, committed = seen["stops"][0]
    assert seen["stops"] == [[saved, step, number, committed]] * 3
    assert number == signal.SIGTERM
    assert step >= 40
    assert committed == saved[-1] == step


@pytest.mark.slow
def test_a_save_is_refused_on_all_ranks_or_on_none(seen):
    errors = {json.dumps(error) for error, _ in seen["overlaps"]}
    assert len(errors) == 1
    assert len({version for _, version in seen["overlaps"]}) == 1


@pytest.mark.slow
def test_two_jobs_at_one_name_both_land(seen, folder):
    repository = Repository.open(str(folder / "in_groups.repo"))
    landed = [(restore(repository, f"m@{n}").state["job"], n) for n in range(1, 7)]
    assert sorted(job for job, _ in landed) == [0, 0, 0, 1, 1, 1]
    assert all(restore(repository, f"m@{n}").state["w"].unique().numel() == 1 for _, n in landed)
    assert seen["in_groups"][1] == seen["in_groups"][2]


@pytest.mark.slow
def test_ranks_that_do_not_store_to_one_place_are_named_on_all_and_commit_nothing(seen):
    assert seen["apart"][0] == seen["apart"][1] == seen["apart"][2]
    (kind, text), (sharded,), models = seen["apart"][0]
    assert kind == "ConfigError"
    assert text.startswith("rank 2 (of 3) does not store to the same place as rank 0")
    assert sharded == text
    assert models == []
