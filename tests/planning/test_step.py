import dataclasses
import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.prediction import Bound, costs_on, find_limit, predict
from datasvc.planning.step import Message, StepCosts, StepMode, exposed_reduce_s, last_reduced_s, step_time
from datasvc.trainer.recipes.profiling.measure.profile import median_costs
from tests.planning.examples import EXAMPLE, step_costs

SERIAL, PREFETCHED, OVERLAPPED = StepMode


def test_serial_steps_take_the_sum_of_their_parts():
    assert step_time(EXAMPLE, SERIAL) == 4 + 0.25 + 3 + 6 + (2 + 4 + 1) + 1


def test_a_loader_that_works_ahead_costs_its_part_in_the_training_thread_or_all_where_it_is_slower():
    assert step_time(EXAMPLE, PREFETCHED) == 0.5 + 0.25 + 9 + 7 + 1
    slow = dataclasses.replace(EXAMPLE, io_s=40.0, ahead_s=30.0)
    assert step_time(slow, PREFETCHED) == step_time(slow, OVERLAPPED) == 30.0


@pytest.mark.parametrize("mode", StepMode)
def test_adding_up_targets_is_hidden_by_nothing_and_takes_as_long_as_the_links_there_do(mode):
    counting = dataclasses.replace(EXAMPLE, targets_s=0.25)
    assert step_time(counting, mode) == step_time(EXAMPLE, mode) + 0.25
    assert costs_on(counting, Cluster(2, Link(8.0, 0.5))).targets_s == 1.0 + 2 * 0.5


def test_all_reduces_beside_the_backward_pass_cost_what_it_does_not_hide():
    # Ready at 5, 8 and 9; the channel is busy from 5 to 7 and from 8 to 13: for 4 after the pass ends at 9.
    assert exposed_reduce_s(EXAMPLE) == 4.0
    assert step_time(EXAMPLE, OVERLAPPED) == 0.5 + 0.25 + 9 + 4 + 1


def test_work_beside_is_not_free_where_the_processors_are_busy():
    busy = dataclasses.replace(EXAMPLE, io_beside_s=1.0, reduce_beside_s=0.7, contention=0.5)
    assert step_time(busy, SERIAL) == step_time(EXAMPLE, SERIAL)
    assert step_time(busy, PREFETCHED) == pytest.approx(step_time(EXAMPLE, PREFETCHED) + 0.5)
    assert step_time(busy, OVERLAPPED) == pytest.approx(step_time(EXAMPLE, OVERLAPPED) + 0.5 * (1.0 + 0.7 * 3 / 7))


@given(step_costs(contention=st.just(0.0)))
def test_where_processors_are_free_no_arrangement_is_slower_than_a_plainer_one(costs):
    serial_s, prefetched_s, overlapped_s = (step_time(costs, mode) for mode in StepMode)
    assert overlapped_s <= prefetched_s <= serial_s


def replay(messages):
    """Play gradients and one channel event by event; returns when the last message has gone."""
    events = [(message.ready_s, 0, number) for number, message in enumerate(messages)]
    heapq.heapify(events)
    waiting, is_busy, now = [], False, 0.0
    while events:
        now, kind, number = heapq.heappop(events)
        if kind == 0:
            waiting.append(number)
        else:
            is_busy = False
        if waiting and not is_busy:
            is_busy = True
            heapq.heappush(events, (now + messages[waiting.pop(0)].reduce_s, 1, -1))
    return now


@given(step_costs())
def test_the_recurrence_is_what_a_channel_does_event_by_event(costs):
    assert last_reduced_s(costs.messages) == pytest.approx(replay(costs.messages), abs=1e-12)


@given(step_costs())
def test_what_is_not_hidden_is_a_part_of_the_all_reduces(costs):
    assert 0 <= exposed_reduce_s(costs) <= costs.reduce_s
    assert 0.3 + 0.1 - 0.3 > 0.1  # as floats are
    rounded = dataclasses.replace(costs, forward_s=0.0, backward_s=0.3, messages=(Message(1, 0.3, 0.1),))
    assert exposed_reduce_s(rounded) == 0.1


@given(step_costs(), st.sampled_from(StepMode), st.integers(2, 5000), st.floats(1e6, 1e12), st.floats(1, 100))
def test_a_faster_network_never_makes_steps_slower(costs, mode, nodes, bytes_per_s, factor):
    costs = dataclasses.replace(costs, contention=0.0)

    def step_at(bandwidth):
        return predict(costs, Cluster(nodes, Link(bandwidth, 1e-5))).step_s[mode]

    assert step_at(bytes_per_s * factor) <= step_at(bytes_per_s) * (1 + 1e-12)


@given(step_costs(), st.sampled_from(StepMode))
def test_one_rank_has_no_communication_and_waits_for_nobody(costs, mode):
    alone = predict(costs, Cluster(1, Link(1.0, 1.0)))
    assert alone.efficiency[mode] == 1.0
    there = costs_on(costs, Cluster(1, Link(1.0, 1.0)))
    assert (there.reduce_s, there.skew_s, there.targets_s) == (0.0, 0.0, 0.0)
    assert (there.launch_s, there.reduce_beside_s) == (0.0, 0.0)
    assert step_time(there, PREFETCHED) == step_time(there, OVERLAPPED)


@given(step_costs())
def test_costs_survive_json(costs):
    assert StepCosts.from_dict(dataclasses.asdict(costs)) == costs


def test_what_cannot_be_a_step_is_refused():
    with pytest.raises(ConfigError, match="forward_s is -1"):
        dataclasses.replace(EXAMPLE, forward_s=-1.0)
    with pytest.raises(ConfigError, match="no longer with prefetching"):
        dataclasses.replace(EXAMPLE, ahead_s=5.0)
    with pytest.raises(ConfigError, match="ready when the backward pass ends"):
        dataclasses.replace(EXAMPLE, messages=(Message(1, 9.5, 1.0),))
    for sent in ({"reduce_s": float("nan")}, {"reduce_s": float("inf")}, {"ready_s": -1.0}, {"size_bytes": -1}):
        with pytest.raises(ConfigError, match="expected finite numbers"):
            Message(**{"size_bytes": 1, "ready_s": 1.0, "reduce_s": 1.0, **sent})
    with pytest.raises(ConfigError, match="forward_s and backward_s are both 0"):
        dataclasses.replace(EXAMPLE, forward_s=0.0, backward_s=0.0, messages=())
    with pytest.raises(ConfigError, match="not the costs of a step"):
        StepCosts.from_dict({"messages": []})


@pytest.mark.parametrize(
    ("change", "bound", "says"),
    [
        ({}, Bound.COMPUTE, "t_f 3000.00"),
        ({"io_s": 40.0, "ahead_s": 30.0}, Bound.DATA, "t_a 30000.00 > t_i 500.00"),
        ({"messages": (Message(1, 9.0, 20.0),)}, Bound.COMMUNICATION, "t_c 20000.00 > "),
        ({"io_beside_s": 8.0, "contention": 1.0}, Bound.PROCESSORS, "t_k 8000.00"),
        ({"targets_s": 0.5}, Bound.COMPUTE, "t_n 500.00"),
    ],
)
def test_the_verdict_names_what_limits_with_the_numbers(change, bound, says):
    limit = find_limit(dataclasses.replace(EXAMPLE, **change))
    assert limit.bound is bound
    assert says in limit.inequality
    assert str(limit).startswith(f"{bound}-bound: ")


@given(st.lists(step_costs(), min_size=1, max_size=1))
def test_the_median_of_one_measurement_is_the_measurement(costs):
    assert median_costs(costs) == costs[0]


def test_medians_are_taken_number_by_number():
    others = [dataclasses.replace(EXAMPLE, update_s=update_s) for update_s in (9.0, 2.0)]
    assert median_costs([EXAMPLE, *others]) == dataclasses.replace(EXAMPLE, update_s=2.0)
