"""Which rank is missing, and which failure ends the job? Clocks and ends of processes are given."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from datasvc.trainer.launch.ranks.job import LaunchJob
from datasvc.trainer.launch.ranks.rank_process import RankEnd
from datasvc.trainer.launch.ranks.static_job import Arrivals, LateRanks, _RankMonitor


def look(arrivals, now_s, come=(), called=()):
    return arrivals.find_late(now_s=now_s, started=set(come), called=set(called))


def test_ranks_whose_process_does_not_come_are_late_after_the_limit_and_named_once():
    arrivals = Arrivals(3, limit_s=10.0, now_s=100.0)
    assert look(arrivals, 109.0, come=[1]) is None
    assert look(arrivals, 110.0, come=[1]) == LateRanks((0, 2), "start")
    assert look(arrivals, 120.0, come=[1]) is None


def test_a_rank_that_does_not_call_init_is_late_counted_from_the_first_that_did():
    arrivals = Arrivals(2, limit_s=10.0, now_s=0.0)
    assert look(arrivals, 1000.0, come=[0, 1]) is None
    assert look(arrivals, 1001.0, come=[0, 1], called=[1]) is None
    assert look(arrivals, 1010.0, come=[0, 1], called=[1]) is None
    assert look(arrivals, 1011.0, come=[0, 1], called=[1]) == LateRanks((0,), "call hvd.init()")


def test_ranks_that_came_late_may_be_late_with_init_too():
    arrivals = Arrivals(2, limit_s=10.0, now_s=0.0)
    assert look(arrivals, 10.0) == LateRanks((0, 1), "start")
    assert look(arrivals, 20.0, come=[0, 1], called=[0]) is None
    assert look(arrivals, 30.0, come=[0, 1], called=[0]) == LateRanks((1,), "call hvd.init()")


def test_the_watch_is_over_when_all_have_called():
    arrivals = Arrivals(2, limit_s=10.0, now_s=0.0)
    look(arrivals, 1.0, come=[0, 1], called=[0])
    assert not arrivals.is_over
    look(arrivals, 2.0, come=[0, 1], called=[0, 1])
    assert arrivals.is_over


SERVER_JOB = LaunchJob(command=["x"], num_ranks=4, num_servers=2)


@pytest.mark.parametrize(
    ("ends", "failed"),
    [
        ({2: -9, 3: 0, 1: 0, 0: 0}, None),  # one of two workers is lost
        ({3: 0, 2: -9, 1: 0, 0: 0}, None),  # the last worker fails at its end, and server 0 still saves
        ({2: -9, 3: 1}, 3),  # all workers are lost
        ({1: -9}, 1),
        ({2: 0, 3: 0, 1: 0, 0: -9}, 0),
    ],
)
def test_a_job_with_servers_goes_on_without_a_worker(ends, failed):
    left = [RankEnd(str(rank), status) for rank, status in ends.items()]
    process = SimpleNamespace(trouble=None, last_lines=lambda **_: [])
    group = SimpleNamespace(
        next_end=lambda _: left.pop(0) if left else None,
        terminate=left.clear,
        first_signal=None,
        processes=defaultdict(lambda: process),
    )
    monitor = _RankMonitor(SERVER_JOB, [], group, HashStore())
    monitor._arrivals = SimpleNamespace(is_over=True)
    failure = monitor.run()
    assert (failure and failure.rank) == failed
