"""The comparison of predicted with measured steps runs on a tiny workload; nothing here judges a speed."""

import pytest

from tests.tools.test_bench import run_json
from tools.bench.profile_check import far_off
from tools.bench.runner import Figure


def test_only_medians_farther_off_than_asked_are_named():
    ratios = [Figure("near", "", [0.5, 1.05, 3.0]), Figure("over", "", [1.2]), Figure("under", "", [0.85])]
    assert far_off(ratios, 0.1) == ["over 1.200", "under 0.850"]


@pytest.mark.long
def test_predicted_and_measured_steps_are_compared_for_both_models_and_all_modes():
    found = run_json("profile_check", "--repeats", 1, "--steps", 1, "--within", 1e9)
    assert len(found["rows"]) == len(found["ratios"]) == 2 * 3
    assert all(figure["n"] == 1 and figure["min"] > 0 for figure in found["rows"] + found["ratios"])
