import torch

from datasvc.trainer.recipes.reporting.rank_times import RankTimes, describe_ranks
from datasvc.trainer.recipes.reporting.step_parts import StepParts


def test_the_parts_of_steps_are_means_over_the_steps_since_the_last_call():
    times = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0, 12.0])
    parts = StepParts(torch.device("cpu"), now=lambda: next(times))
    mark = parts.begin(0)
    for part in ("forward", "backward", "all-reduce"):
        mark(part)
    mark = parts.begin(1)
    for part in ("forward", "backward"):
        mark(part)
    assert parts.take() == {"forward_s": 1.0, "backward_s": 1.5, "all_reduce_s": 0.5}
    assert parts.take() == {}


def test_the_times_of_a_rank_are_means_of_what_was_measured():
    times = RankTimes()
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


def test_of_many_ranks_the_slowest_are_listed():
    facts = describe_ranks(["h"] * 1000, [{"step_s": float(rank)} for rank in range(1000)])
    assert facts["num_ranks"] == 1000
    assert facts["rank"] == [*range(744, 1000)]
