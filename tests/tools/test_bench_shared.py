"""The benchmarks of shared decoding run on a tiny workload and print their figures; nothing here judges a speed."""

import pytest

from tests.tools.test_bench import check, run_json


@pytest.mark.long
def test_jobs_that_share_and_jobs_that_do_not_are_measured(tmp_path):
    sizes = ["--images", 24, "--batch", 4, "--steps", 3, "--size", 32, "--jobs", 2, "--threads", 1]
    found = run_json("shared", "--repeats", 1, *sizes, "--folder", tmp_path)
    check(found, repeats=1)
    assert {row["name"] for row in found["rows"]} == {"2 jobs, sharing", "2 jobs, separate", "one job alone"}
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_training_programs_that_share_and_that_do_not_are_measured(tmp_path):
    sizes = ["--images", 24, "--batch", 4, "--epochs", 1, "--size", 32, "--runs", 1]
    found = run_json("shared_training", "--repeats", 1, *sizes, "--folder", tmp_path)
    check(found, repeats=1)
    assert (len(found["rows"]), len(found["ratios"])) == (4, 2)
    assert not list(tmp_path.iterdir())
