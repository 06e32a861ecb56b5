from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.engine.negotiation.requests import Tuning
from datasvc.trainer.engine.tuning import CYCLE_TIME_MS, FUSION_MIB, Autotuner

GRID = [Tuning(fusion * 2**20, cycle / 1e3) for fusion in FUSION_MIB for cycle in CYCLE_TIME_MS]


def run(start, bytes_per_s_of, **options):
    """Lets a job run under the tuner, a second between two looks."""
    tuner, now_s, seen = Autotuner(start, **options), 0.0, []
    tuner.observe(0, now_s)
    while not tuner.is_done:
        seen.append(tuner.tuning)
        now_s += 1.0
        tuner.observe(bytes_per_s_of(tuner.tuning), now_s)
    return tuner, seen


@given(st.sampled_from(GRID), st.sampled_from(GRID))
def test_it_walks_to_the_one_summit_from_anywhere_and_stays(start, summit):
    def bytes_per_s_of(tuning):
        fusion_steps = FUSION_MIB.index(tuning.fusion_bytes // 2**20) - FUSION_MIB.index(summit.fusion_bytes // 2**20)
        cycle_steps = CYCLE_TIME_MS.index(tuning.cycle_time_s * 1e3) - CYCLE_TIME_MS.index(summit.cycle_time_s * 1e3)
        return 1000 - abs(fusion_steps) - abs(cycle_steps)

    tuner, _ = run(start, bytes_per_s_of)
    assert tuner.tuning == summit
    assert len(tuner.trials) <= len(GRID)
    assert not tuner.observe(1, 1e9)


def test_each_candidate_is_tried_once_over_several_samples():
    tuner, seen = run(GRID[0], lambda tuning: tuning.fusion_bytes)
    tried = [trial.tuning for trial in tuner.trials]
    assert len(set(tried)) == len(tried)
    assert all(seen.count(tuning) > 1 for tuning in tried)


def test_pauses_of_the_job_do_not_count():
    tuner, now_s = Autotuner(GRID[0]), 0.0
    tuner.observe(0, now_s)
    while not tuner.trials:
        now_s += 1000.0 if now_s == 3.0 else 1.0  # an evaluation, in the middle of a step
        tuner.observe(7, now_s)
    assert tuner.trials[0].bytes_per_s == 7.0
    tuner.observe(0, now_s + 1000.0)  # and one between two steps
    tuner.observe(7, now_s + 1001.0)
    assert tuner._samples == [7.0]


def test_hierarchical_allreduces_are_tried_only_where_the_nodes_allow_them():
    for options, expected in (({"tries_hierarchical": True}, True), ({}, False)):
        tuner, _ = run(GRID[0], lambda tuning: 1 + tuning.is_hierarchical, **options)
        assert tuner.tuning.is_hierarchical == expected
        assert {trial.tuning.is_hierarchical for trial in tuner.trials} == {False, expected}
