import pytest
import torch

from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.reporting.recorder import MeanTimes, StepTimer, describe_ranks
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.start import has_own_times


def test_the_parts_of_steps_are_means_over_the_steps_since_the_last_call():
    times = iter([0.0, 0.0, 0.0, 1.0, 3.0, 4.0, 6.0, 8.0, 10.0, 11.0, 12.0, 13.0, 16.0])
    timer = StepTimer(torch.device("cpu"), now=lambda: next(times))
    timer.got_batch()
    mark = timer.begin_parts(0)
    for part in ("forward", "backward", "forward"):
        mark(part)
    timer.end_step()
    timer.got_batch()
    mark = timer.begin_parts(1)
    for part in ("forward", "backward", "all-reduce"):
        mark(part)
    timer.end_step()
    means = {"step_s": 8.0, "wait_s": 1.0, "forward_s": 1.5, "backward_s": 1.5, "all_reduce_s": 1.0}
    assert timer.take() == means
    assert timer.take() == {}


def test_a_step_that_failed_leaves_no_parts_to_the_next():
    times = iter([0.0, 0.0, 5.0, 10.0, 11.0, 12.0])
    timer = StepTimer(torch.device("cpu"), now=lambda: next(times))
    timer.begin_parts(0)("forward")
    timer.begin_parts(0)("forward")
    timer.end_step()
    assert timer.take()["forward_s"] == 1.0


def test_a_clock_tells_waits_from_steps_and_counts_nothing_in_between():
    times = iter([0.0, 1.0, 3.0, 100.0, 104.0, 106.0])
    timer = StepTimer(torch.device("cpu"), now=lambda: next(times))
    timer.got_batch()
    timer.end_step()
    timer.restart()
    timer.got_batch()
    timer.end_step()
    assert timer.take() == {"step_s": 4.5, "wait_s": 2.5}


def test_the_times_of_a_rank_are_means_of_what_was_measured():
    times = MeanTimes()
    assert not times
    times.add({"step_s": 1.0, "forward_s": 0.5})
    times.add({"step_s": 3.0})
    assert times.take() == {"step_s": 2.0, "forward_s": 0.5}
    assert not times


def test_a_straggler_is_the_rank_that_does_not_wait_for_others():
    facts = describe_ranks(
        ["a", "a", "b", "b"], [{"step_s": 1.0, "all_reduce_s": wait_s} for wait_s in (0.5, 0.5, 0.0, 0.45)]
    )
    assert facts["stragglers"] == [2]
    assert facts["own_s"] == [0.5, 0.5, 1.0, 0.55]
    assert facts["host"] == ["a", "a", "b", "b"]


def test_the_wait_for_the_targets_of_other_ranks_is_not_a_rank_s_own_time():
    times_s = [{"step_s": 1.0, "targets_s": 0.6, "all_reduce_s": 0.1}, {"step_s": 1.0, "targets_s": 0.0}]
    facts = describe_ranks(["a", "b", "c"], [*times_s[:1] * 2, times_s[1]])
    assert facts["stragglers"] == [2]


def test_where_ranks_wait_in_every_part_no_rank_is_called_a_straggler():
    facts = describe_ranks(["a", "b"], [{"step_s": 1.0}, {"step_s": 3.0}], has_own_times=False)
    assert (facts["rank"], facts["step_s"]) == ([0, 1], [1.0, 3.0])
    assert not {"stragglers", "own_s"} & facts.keys()


@pytest.mark.parametrize(
    ("layout", "settings", "expected"),
    [
        (Layout(data=2), {}, True),
        (Layout(shard=2), {"layout": "shard=2", "zero": 1}, True),
        (Layout(shard=2), {"layout": "shard=2"}, False),
        (Layout(data=2), {"op": "adasum"}, False),
        (Layout(data=2), {"sync": "local:8"}, False),
        (Layout(data=2), {"sync_batch_norm": True}, False),
    ],
)
def test_own_times_are_those_of_ranks_that_compute_without_each_other(layout, settings, expected):
    config = TrainConfig(data="a@1", repo="r", name="n", **settings)
    assert has_own_times(config, layout) == expected


def test_of_many_ranks_the_slowest_are_listed():
    facts = describe_ranks(["h"] * 1000, [{"step_s": float(rank)} for rank in range(1000)])
    assert facts["num_ranks"] == 1000
    assert facts["rank"] == [*range(744, 1000)]
