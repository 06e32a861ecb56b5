"""Who gets which part of which step, and who waits for whom; workers are simulated, in units of work."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.servers.leases import LeaseTable, Staleness, may_start, parse_staleness


@pytest.mark.parametrize(("text", "bound"), [("ssp:0", 0), ("ssp:3", 3), ("async", None)])
def test_a_bound_is_a_number_of_steps_or_none(text, bound):
    assert parse_staleness(text) == Staleness(bound)


@pytest.mark.parametrize("text", ["ssp", "ssp:", "ssp:-1", "ssp:1:2", "async:3", "bsp"])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match="expected ssp:STEPS"):
        parse_staleness(text)


def test_a_worker_waits_if_it_is_more_than_the_bound_ahead_of_the_slowest():
    assert may_start(7, slowest=4, bound=3)
    assert not may_start(8, slowest=4, bound=3)
    assert may_start(80, slowest=4, bound=None)


def work_off(table, costs, *, lose=(), num_steps=10):
    """Let workers with a cost per part work until the table is drained.

    Returns (worker, step, part, time) of each part that was committed; `lose` are (time, worker) of losses.
    """
    table.open(num_steps)
    committed, time, waiting = [], 0, set(range(len(costs)))
    running, losses = [], sorted(lose, reverse=True)
    while not table.is_drained:
        for worker in sorted(waiting):
            if (lease := table.grant(worker)) is not None:
                waiting.discard(worker)
                heapq.heappush(running, (time + costs[worker], worker, lease))
        if losses and (not running or losses[-1][0] < running[0][0]):
            time, worker = losses.pop()
            running = [each for each in running if each[1] != worker]
            heapq.heapify(running)
            waiting.discard(worker)
            table.lose(worker)
            continue
        time, worker, lease = heapq.heappop(running)
        table.commit(worker, lease.number)
        committed.append((worker, lease.step, lease.part, time))
        waiting.add(worker)
    return committed


@given(
    bound=st.one_of(st.none(), st.integers(0, 4)),
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    losses=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=4),
)
def test_every_part_is_committed_once_whoever_is_lost_and_no_worker_is_further_ahead_than_the_bound(
    bound, costs, losses
):
    table = LeaseTable(len(costs), bound)
    lost = {worker: time for time, worker in losses if worker < len(costs)}
    parts = work_off(table, costs, lose=[(time, worker) for worker, time in lost.items()])
    assert sorted((step, part) for _, step, part, _ in parts) == [
        (step, part) for step in range(10) for part in range(len(costs))
    ]
    assert table.num_done == 10
    assert bound is None or table.largest_gap <= bound


def test_fast_workers_take_the_parts_that_a_slow_one_leaves():
    parts = work_off(LeaseTable(3, 3), [1, 1, 4], num_steps=30)
    counts = [sum(worker == each for worker, *_ in parts) for each in range(3)]
    assert counts[2] <= 11
    assert min(counts[:2]) >= 39
    # All workers are busy all the time: 90 parts at 2 1/4 in a unit of time.
    assert parts[-1][3] <= 42


def test_with_bound_0_all_wait_for_the_slow_one_in_each_step():
    assert work_off(LeaseTable(3, 0), [1, 1, 4], num_steps=30)[-1][3] == 30 * 4


def test_without_a_bound_the_gap_is_what_the_slow_one_makes_it():
    table = LeaseTable(3, None)
    work_off(table, [1, 1, 40], num_steps=60)
    assert table.largest_gap > 20


def test_a_synchronous_step_is_one_update_of_all_its_parts_in_their_order():
    table = LeaseTable(2, 0)
    table.open(1)
    first, second = table.grant(5), table.grant(3)
    assert table.plan_update(3, second.number) == []
    table.commit(3, second.number)
    assert table.plan_update(5, first.number) == [(5, 0), (3, 1)]
    assert LeaseTable(2, 1).plan_update(5, 0) == [(5, 0)]


def test_a_returned_lease_is_granted_first_and_has_the_workers_that_were_lost():
    table = LeaseTable(2, 3)
    table.open(4)
    for worker in (0, 1):
        table.grant(worker)
    assert table.lose(0) == 0
    assert table.lose(7) is None
    assert table.grant(2).lost == (0,)
    assert table.lose(2) == 0
    lease = table.grant(1)
    assert (lease.number, lease.step, lease.part, lease.lost) == (0, 0, 0, (0, 2))


def test_a_closed_table_completes_the_steps_that_have_begun():
    table = LeaseTable(3, None)
    table.open(9)
    begun = [table.grant(worker) for worker in range(2)]
    table.close()
    last = table.grant(2)
    assert (last.step, table.grant(3)) == (0, None)
    for worker, lease in enumerate([*begun, last]):
        assert not table.is_drained
        table.commit(worker, lease.number)
    assert table.is_drained
    assert table.num_done == 1
