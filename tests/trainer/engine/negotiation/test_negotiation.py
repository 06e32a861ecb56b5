"""The replicated state machine, without processes: all ranks are simulated from one list of submissions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.engine.negotiation.negotiation import Negotiation, Ready, Refused
from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET, CollectiveKind, Key, ReduceOp, Request


def allreduce(name="x", **changes):
    request = Request(
        name=name,
        kind=CollectiveKind.ALLREDUCE,
        dtypes=("float32",),
        shapes=((3,),),
        reduce_op=ReduceOp.SUM,
    )
    return replace(request, **changes)


def key(name, process_set=GLOBAL_SET):
    return Key(process_set, name)


def broadcast(root_rank):
    return Request(name="x", kind=CollectiveKind.BROADCAST, dtypes=("float32",), shapes=((3,),), root_rank=root_rank)


def allgather(*shape):
    return Request(name="x", kind=CollectiveKind.ALLGATHER, dtypes=("float32",), shapes=(shape,))


def test_an_operation_waits_for_the_last_rank_and_the_missing_ranks_are_listed():
    negotiation = Negotiation(3)
    assert negotiation.advance([[allreduce("a")], [], [allreduce("a"), allreduce("b")]]) == []
    assert negotiation.missing_ranks() == {key("a"): (1,), key("b"): (0, 1)}
    (ready,) = negotiation.advance([[], [allreduce("a")], []])
    assert ready == Ready(dict.fromkeys(range(3), allreduce("a")), (0, 1, 2))
    assert negotiation.missing_ranks() == {key("b"): (0, 1)}


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (
            [allreduce(), allreduce(shapes=((4,),)), allreduce()],
            "shape of 'x' (ranks 0, 2: (3,); rank 1: (4,))",
        ),
        (
            [allreduce(), allreduce(), allreduce(dtypes=("int8",))],
            "data type of 'x' (ranks 0, 1: float32; rank 2",
        ),
        (
            [allreduce(), allreduce(reduce_op=ReduceOp.MAX), allreduce()],
            "reduction of 'x' (ranks 0, 2: Sum; rank 1",
        ),
        ([allreduce(), allreduce(prescale_factor=2.0), allreduce()], "prescale factor"),
        ([allreduce(), allreduce(postscale_factor=2.0), allreduce()], "postscale factor"),
        ([allreduce(), allreduce(device_type="cuda"), allreduce()], "device"),
        ([allreduce(), allreduce(is_grouped=True), allreduce()], "grouping"),
        ([allreduce(), broadcast(0), broadcast(0)], "operation"),
        ([broadcast(0), broadcast(1), broadcast(2)], "root rank of 'x' (rank 0: 0; rank 1: 1; rank 2: 2)"),
        ([allgather(1, 2), allgather(1, 2), allgather(1, 3)], "shape after the first dimension"),
        ([allgather(1, 2), allgather(1), allgather(1, 2)], "number of dimensions"),
        ([allgather(), allgather(), allgather()], "cannot be gathered"),
    ],
)
def test_a_disagreement_names_the_value_of_each_rank(requests, words):
    (outcome,) = Negotiation(3).advance([[request] for request in requests])
    assert isinstance(outcome, Refused)
    assert words in outcome.reason


def test_a_name_can_be_used_again_after_it_was_refused():
    negotiation = Negotiation(2)
    assert isinstance(negotiation.advance([[allreduce()], [allreduce(shapes=((4,),))]])[0], Refused)
    assert isinstance(negotiation.advance([[allreduce()], [allreduce()]])[0], Ready)


def test_gathered_tensors_may_have_different_numbers_of_rows():
    (outcome,) = Negotiation(2).advance([[allgather(0, 2)], [allgather(7, 2)]])
    assert isinstance(outcome, Ready)


def alltoall(*shape, splits=(1, 1, 1)):
    return Request(name="x", kind=CollectiveKind.ALLTOALL, dtypes=("float32",), shapes=(shape,), splits=splits)


def add_set(*ranks):
    return Request(name="add", kind=CollectiveKind.ADD_PROCESS_SET, ranks=ranks)


def remove_set(*ranks):
    return Request(name="remove", kind=CollectiveKind.REMOVE_PROCESS_SET, ranks=ranks)


JOIN = Request(name="join", kind=CollectiveKind.JOIN)


def test_dealt_rows_may_differ_in_number_only():
    (outcome,) = Negotiation(3).advance([[alltoall(3, 2)], [alltoall(4, 2, splits=(4, 0, 0))], [alltoall(3, 2)]])
    assert isinstance(outcome, Ready)
    (outcome,) = Negotiation(3).advance([[alltoall(3, 2)], [alltoall(3, 1)], [alltoall(3, 2)]])
    assert "shape after the first dimension" in outcome.reason


def test_a_process_set_waits_for_its_own_ranks_only():
    negotiation = Negotiation(3)
    (added,) = negotiation.advance([[add_set(0, 2)]] * 3)
    assert added.value == 1
    assert negotiation.process_sets == {0: (0, 1, 2), 1: (0, 2)}
    in_set = allreduce("a", process_set=1)
    assert negotiation.advance([[in_set], [allreduce("a")], []]) == []
    assert negotiation.missing_ranks() == {key("a", 1): (2,), key("a"): (0, 2)}
    (ready,) = negotiation.advance([[], [], [in_set]])
    assert ready.members == (0, 2)
    assert list(ready.requests) == [0, 2]


def test_ranks_must_agree_on_a_process_set_and_have_each_once():
    negotiation = Negotiation(2)
    (refused,) = negotiation.advance([[add_set(0)], [add_set(1)]])
    assert "ranks disagree on the ranks of 'add' (rank 0: (0,); rank 1: (1,))" in refused.reason
    negotiation.advance([[add_set(0)]] * 2)
    (refused,) = negotiation.advance([[add_set(0)]] * 2)
    assert "already" in refused.reason


def test_a_removed_process_set_is_unknown_and_its_number_not_used_again():
    negotiation = Negotiation(2)
    negotiation.advance([[add_set(1)]] * 2)
    (removed,) = negotiation.advance([[remove_set(1)]] * 2)
    assert removed.value == 1
    assert negotiation.process_sets == {0: (0, 1)}
    (late,) = negotiation.advance([[], [allreduce(process_set=1)]])
    assert "was removed" in late.reason
    (again,) = negotiation.advance([[add_set(1)]] * 2)
    assert again.value == 2


def test_an_operation_of_a_removed_process_set_fails_where_it_waits():
    negotiation = Negotiation(3)
    negotiation.advance([[add_set(0, 1)]] * 3)
    negotiation.advance([[allreduce("a", process_set=1)], [], []])
    refused, removed = negotiation.advance([[remove_set(0, 1)]] * 3)
    assert (refused.key, removed.value) == (key("a", 1), 1)


def test_joined_ranks_are_not_waited_for_and_the_last_one_is_named():
    negotiation = Negotiation(3)
    assert negotiation.advance([[], [JOIN], []]) == []
    (ready,) = negotiation.advance([[allreduce()], [], [allreduce()]])
    assert list(ready.requests) == [0, 2]
    assert ready.members == (0, 1, 2)
    assert negotiation.advance([[], [], [JOIN]]) == []
    (joined,) = negotiation.advance([[JOIN], [], []])
    assert joined.value == 0
    assert list(joined.requests) == [0, 1, 2]
    assert negotiation.advance([[allreduce()], [], []]) == [], "everybody is waited for again"


def test_what_waited_for_a_rank_starts_when_it_joins():
    negotiation = Negotiation(2)
    negotiation.advance([[allreduce("a")], []])
    (ready,) = negotiation.advance([[], [JOIN]])
    assert (ready.key.name, list(ready.requests)) == ("a", [0])


@pytest.mark.parametrize("request_", [broadcast(0), allgather(1, 2)])
def test_only_allreduce_runs_with_joined_ranks(request_):
    negotiation = Negotiation(2)
    negotiation.advance([[], [JOIN]])
    (refused,) = negotiation.advance([[request_], []])
    assert "rank 1 joined" in refused.reason


@st.composite
def uneven_steps(draw):
    """For each rank, how many allreduces it makes before it joins, and in which cycle each thing is said."""
    num_ranks = draw(st.integers(1, 4))
    num_steps = draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks))
    return [
        (steps, sorted(draw(st.lists(st.integers(0, 6), min_size=steps + 1, max_size=steps + 1))))
        for steps in num_steps
    ]


@given(uneven_steps())
def test_uneven_epochs_end_with_every_step_of_the_longest_rank_once_and_then_the_join(plan):
    negotiation = Negotiation(len(plan))
    outcomes = []
    for cycle in range(7):
        submitted = []
        for steps, when in plan:
            said = [allreduce(str(i)) for i in range(steps)] + [JOIN]
            submitted.append([each for each, at in zip(said, when, strict=True) if at == cycle])
        outcomes += negotiation.advance(submitted)
    longest = max(steps for steps, _ in plan)
    assert [outcome.key.name for outcome in outcomes] == [*map(str, range(longest)), "join"]
    assert negotiation.missing_ranks() == {}
    for step, outcome in enumerate(outcomes[:-1]):
        assert set(outcome.requests) >= {rank for rank, (steps, _) in enumerate(plan) if steps > step}


def test_the_negotiation_has_which_ranks_wait_and_for_which():
    negotiation = Negotiation(2)
    assert [negotiation.waiting(rank) for rank in (0, 1)] == [(False, False)] * 2
    negotiation.advance([[allreduce("x")], []])
    assert [negotiation.waiting(rank) for rank in (0, 1)] == [(True, False), (False, True)]
    negotiation.advance([[], [allreduce("y")]])
    assert [negotiation.waiting(rank) for rank in (0, 1)] == [(True, True)] * 2
    negotiation.advance([[allreduce("y")], [allreduce("x")]])
    negotiation.advance([[], [Request(name="join", kind=CollectiveKind.JOIN)]])
    assert [negotiation.waiting(rank) for rank in (0, 1)] == [(False, False), (True, False)]


def test_one_rank_gets_the_refusal_each_time_it_submits():
    negotiation, request = Negotiation(1), allgather()
    for _ in range(2):
        (outcome,) = negotiation.advance([[request]])
        assert isinstance(outcome, Refused)
