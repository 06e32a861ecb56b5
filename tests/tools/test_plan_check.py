"""The comparison of estimated with measured layouts runs on a tiny number of steps; nothing here judges a speed."""

import pytest

from tests.tools.test_bench import run_json
from tools.bench.plan_check import rank_medians


def test_layouts_are_ranked_by_the_median_of_their_repeats():
    assert rank_medians({"data=4": [2.0, 9.0, 2.5], "shard=4": [3.0, 1.0, 3.0], "tensor=4": [0.5]}) == [
        "tensor=4",
        "data=4",
        "shard=4",
    ]


@pytest.mark.long
def test_estimated_and_measured_steps_of_layouts_are_compared():
    found = run_json("plan_check", "--repeats", 1, "--ranks", 2, "--layouts", 9, "--beside", "data=2")
    assert (len(found["rows"]), len(found["ratios"])) == (2 * 5, 5 + 4)
    assert all(figure["n"] == 1 and figure["min"] > 0 for figure in found["rows"] + found["ratios"])
