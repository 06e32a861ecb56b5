"""The replicated state machine, without processes: all ranks are simulated from one list of submissions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.engine.messages import CycleMessage, decode_message, encode_message
from trainer.engine.negotiation import Negotiation, Ready, Refused
from trainer.engine.request_cache import RequestCache
from trainer.engine.requests import Kind, ReduceOp, Request


def allreduce(name="x", **changes):
    request = Request(
        name=name,
        kind=Kind.ALLREDUCE,
        dtypes=("float32",),
        shapes=((3,),),
        reduce_op=ReduceOp.SUM,
    )
    return replace(request, **changes)


def broadcast(root_rank):
    return Request(name="x", kind=Kind.BROADCAST, dtypes=("float32",), shapes=((3,),), root_rank=root_rank)


def allgather(*shape):
    return Request(name="x", kind=Kind.ALLGATHER, dtypes=("float32",), shapes=(shape,))


class SimulatedRank:
    """One rank as the engine drives it: it shortens what it says and resolves what it hears."""

    def __init__(self, num_ranks):
        self.negotiation = Negotiation(num_ranks)
        self.cache = RequestCache(capacity=3)
        self.outcomes = []

    def speak(self, requests):
        numbers = [self.cache.find(request) for request in requests]
        entries = [r if n is None else n for r, n in zip(requests, numbers, strict=True)]
        return encode_message(CycleMessage(tuple(entries)))

    def listen(self, everything):
        messages = [decode_message(data).entries for data in everything]
        submitted = [[self.cache.resolve(e) if isinstance(e, int) else e for e in m] for m in messages]
        for outcome in self.negotiation.advance(submitted):
            self.outcomes.append(outcome.name)
            if isinstance(outcome, Ready):
                self.cache.remember(outcome.requests[0])


@st.composite
def interleavings(draw):
    """Per rank, an order of the same names, cut into cycles."""
    num_ranks = draw(st.integers(1, 4))
    num_names = draw(st.integers(0, 6))
    num_cycles = draw(st.integers(1, 5))
    names = [f"op{i}" for i in range(num_names)]
    orders = [draw(st.permutations(names)) for _ in range(num_ranks)]
    cycles = [[draw(st.integers(0, num_cycles - 1)) for _ in names] for _ in range(num_ranks)]
    return [
        [[name for name, at in zip(order, sorted(when), strict=True) if at == cycle] for cycle in range(num_cycles)]
        for order, when in zip(orders, cycles, strict=True)
    ]


@given(interleavings(), st.integers(1, 3))
def test_any_interleaving_gives_every_rank_the_same_list_with_every_name_once(submissions, num_steps):
    num_ranks, num_cycles = len(submissions), len(submissions[0])
    ranks = [SimulatedRank(num_ranks) for _ in range(num_ranks)]
    names = sorted(name for cycle in submissions[0] for name in cycle)
    for step in range(1, num_steps + 1):
        for cycle in range(num_cycles):
            everything = [
                rank.speak([allreduce(name) for name in mine[cycle]])
                for rank, mine in zip(ranks, submissions, strict=True)
            ]
            for rank in ranks:
                rank.listen(everything)
        assert all(rank.outcomes == ranks[0].outcomes for rank in ranks)
        assert sorted(ranks[0].outcomes) == sorted(names * step)
        assert ranks[0].negotiation.missing_ranks() == {}


def test_an_operation_waits_for_the_last_rank_and_knows_who_is_missing():
    negotiation = Negotiation(3)
    assert negotiation.advance([[allreduce("a")], [], [allreduce("a"), allreduce("b")]]) == []
    assert negotiation.missing_ranks() == {"a": (1,), "b": (0, 1)}
    (ready,) = negotiation.advance([[], [allreduce("a")], []])
    assert ready == Ready((allreduce("a"),) * 3)
    assert negotiation.missing_ranks() == {"b": (0, 1)}


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
def test_a_disagreement_names_which_rank_said_what(requests, words):
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
