"""All ranks are simulated, without processes: what they send, bit by bit, and which outcomes they get."""

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.engine.negotiation.agreement import Agreement
from datasvc.trainer.engine.negotiation.negotiation import Negotiation, Ready
from datasvc.trainer.engine.negotiation.requests import (
    CollectiveKind,
    CycleMessage,
    ReduceOp,
    Request,
    decode_message,
    encode_message,
)


def allreduce(name="x", **changes):
    request = Request(
        name=name, kind=CollectiveKind.ALLREDUCE, dtypes=("float32",), shapes=((3,),), reduce_op=ReduceOp.SUM
    )
    return replace(request, **changes)


def set_change(*ranks, kind=CollectiveKind.ADD_PROCESS_SET):
    return Request(name=f"{kind.value} {ranks}", kind=kind, ranks=ranks)


JOIN = Request(name="join", kind=CollectiveKind.JOIN)


class Job:
    """The ranks of a job, driven as their engines do.

    `asking` are the ranks that ask for messages, `recording` those that record a timeline.
    """

    def __init__(self, num_ranks, capacity=1024, asking=(), recording=()):
        self.ranks = [Agreement(rank, num_ranks, capacity) for rank in range(num_ranks)]
        self.asking, self.recording = set(asking), set(recording)
        self.num_exchanges = 0
        self.sent_bytes = 0
        self.submitted = []  # the requests of the last messages

    def cycle(self, submitted):
        """Return the outcomes, which must be equal on all ranks."""
        for rank, requests in zip(self.ranks, submitted, strict=True):
            rank.submit(requests, 0.0)
        bits = [
            rank.encode_bits(needs_messages=number in self.asking, sends_every_request=number in self.recording)
            for number, rank in enumerate(self.ranks)
        ]
        assert len({len(data) for data in bits}) == 1
        self.sent_bytes += len(bits[0])
        combined = reduce(lambda a, b: bytes(x & y for x, y in zip(a, b, strict=True)), bits)
        of_ranks, needs = zip(*(rank.apply_bits(combined) for rank in self.ranks), strict=True)
        assert len(set(needs)) == 1
        of_ranks = [list(outcomes) for outcomes in of_ranks]
        if needs[0]:
            self.num_exchanges += 1
            messages = [encode_message(CycleMessage(rank.take_entries())) for rank in self.ranks]
            entries = [decode_message(data).entries for data in messages]
            if any(entries):
                for rank, found in zip(self.ranks, of_ranks, strict=True):
                    self.submitted, outcomes = rank.apply_entries(entries)
                    found.extend(outcomes)
        assert all(outcomes == of_ranks[0] for outcomes in of_ranks)
        caches = [list(map(rank._cache.resolve, range(len(rank._cache)))) for rank in self.ranks]
        assert all(cache == caches[0] for cache in caches)
        return of_ranks[0]


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


@given(interleavings(), st.integers(1, 3), st.sampled_from([0, 3, 1024]), st.sets(st.integers(0, 3)))
def test_any_interleaving_gives_every_rank_the_same_list_once(submissions, num_steps, capacity, recording):
    job = Job(len(submissions), capacity, recording=recording)
    names = sorted(name for cycle in submissions[0] for name in cycle)
    for _ in range(num_steps):
        outcomes = []
        for cycle in zip(*submissions, strict=True):
            outcomes += job.cycle([[allreduce(name) for name in of_rank] for of_rank in cycle])
        assert sorted(outcome.key.name for outcome in outcomes) == names
        assert all(rank.waiting() == (False, False) for rank in job.ranks)
        assert all(rank.negotiation.missing_ranks() == {} for rank in job.ranks)


@st.composite
def programs(draw):
    """The submissions of each rank by cycle: of changing shapes, in a set of some ranks, with joins."""
    num_ranks, num_cycles = draw(st.integers(2, 4)), 8
    members = sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks - 1)))
    script = [[(None, set_change(*members))]]  # of each step: requests, and the ranks that submit them if not all do
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from("abc"), unique=True))
        step = [(None, allreduce(name, shapes=((draw(st.sampled_from([3, 3, 3, 4])),),))) for name in names]
        if draw(st.booleans()):
            step.append((members, allreduce("inner", process_set=1)))
        script.append(step)
    odd = draw(st.none() | st.integers(0, num_ranks - 1))  # a rank with other shapes, in the last step
    if draw(st.booleans()):
        script.append([(None, set_change(*members, kind=CollectiveKind.REMOVE_PROCESS_SET))])
    joins = draw(st.booleans())
    steps = []
    for number, step in enumerate(script):
        submitted = []
        for rank in range(num_ranks):
            own = [request for ranks, request in step if ranks is None or rank in ranks]
            if number == len(script) - 1 and rank == odd:
                own = [replace(r, shapes=((9,),)) if r.kind is CollectiveKind.ALLREDUCE else r for r in own]
            when = sorted(draw(st.integers(0, num_cycles - 1)) for _ in own)
            own = draw(st.permutations(own))
            submitted.append([[r for r, at in zip(own, when, strict=True) if at == c] for c in range(num_cycles)])
        steps.append([list(cycle) for cycle in zip(*submitted, strict=True)])
    if joins:  # one rank after the other, while the others go on with what is allowed then
        order = draw(st.permutations(range(num_ranks)))
        cycles = []
        for last in range(num_ranks):
            cycles.append([[JOIN] if rank == order[last] else [] for rank in range(num_ranks)])
            cycles.append([[allreduce("a")] if rank in order[last + 1 :] else [] for rank in range(num_ranks)])
        steps.append(cycles)
    return num_ranks, steps


def facts(outcome):
    """The parts of an outcome that do not depend on the order in which the requests came."""
    return (outcome.key, type(outcome), outcome.requests, getattr(outcome, "members", None))


@given(programs(), st.sampled_from([0, 1, 3, 1024]), st.data())
def test_the_outcomes_are_those_of_messages_alone(program, capacity, data):
    num_ranks, steps = program
    job, plain = Job(num_ranks, capacity), Negotiation(num_ranks)
    for step in steps:
        found, expected = [], []
        for cycle in step:
            job.asking = data.draw(st.sets(st.integers(0, 3), max_size=1))
            job.recording = data.draw(st.sets(st.integers(0, 3), max_size=1))
            found += job.cycle(cycle)
            expected += plain.advance(cycle)
        job.asking = {0}
        found += job.cycle([[]] * num_ranks)
        assert sorted(map(facts, found), key=str) == sorted(map(facts, expected), key=str)
        assert job.ranks[0].negotiation.missing_ranks().keys() == plain.missing_ranks().keys()


@pytest.mark.slow
def test_steps_with_known_requests_need_no_messages_and_equally_many_bytes_on_any_number_of_ranks():
    sent = []
    for num_ranks in (2, 64):
        job = Job(num_ranks)
        names = [f"bucket {number}" for number in range(20)]
        for step in range(3):
            if step == 1:
                job.num_exchanges = job.sent_bytes = 0
            for name in names:  # half of the ranks are a cycle behind
                half = num_ranks // 2
                assert job.cycle([[allreduce(name)]] * half + [[]] * half) == []
                (outcome,) = job.cycle([[]] * half + [[allreduce(name)]] * half)
                assert isinstance(outcome, Ready)
                assert list(outcome.requests) == list(range(num_ranks))
        assert job.num_exchanges == 0
        sent.append(job.sent_bytes)
    assert sent == [2 * 40 * 6] * 2  # 1 + 2 * 20 bits


def test_a_known_request_that_a_rank_lacks_is_named_when_a_rank_asks_and_completes_when_it_comes():
    job = Job(3)
    job.cycle([[allreduce()]] * 3)
    job.num_exchanges = 0
    job.cycle([[allreduce()], [], [allreduce()]])
    assert [rank.waiting() for rank in job.ranks] == [(True, False), (False, True), (True, False)]
    assert job.ranks[0].negotiation.missing_ranks() == {}
    assert job.ranks[0].unsent_since_s == 0.0
    job.asking = {2}
    assert job.cycle([[]] * 3) == []
    job.asking = set()
    assert job.ranks[0].unsent_since_s is None
    assert [rank.waiting() for rank in job.ranks] == [(True, False), (False, True), (True, False)]
    assert all(rank.negotiation.missing_ranks() == {allreduce().key: (1,)} for rank in job.ranks)
    assert len(job.cycle([[], [allreduce()], []])) == 1
    assert job.num_exchanges == 1
    assert all(rank.negotiation.missing_ranks() == {} for rank in job.ranks)


def test_a_rank_that_records_a_timeline_gets_the_requests_of_each_rank():
    job = Job(2)
    job.cycle([[allreduce()]] * 2)
    job.recording = {1}
    job.num_exchanges = 0
    assert job.cycle([[allreduce()], []]) == []
    assert job.ranks[1].negotiation.missing_ranks() == {allreduce().key: (1,)}
    assert len(job.cycle([[], [allreduce()]])) == 1
    assert len(job.cycle([[allreduce()]] * 2)) == 1
    assert job.num_exchanges == 3
    assert job.submitted == [[allreduce()]] * 2


@pytest.mark.parametrize("is_other_first", [False, True])
def test_a_known_request_and_another_of_the_same_name_are_compared_in_the_cycle_of_the_second(is_other_first):
    job = Job(2)
    job.cycle([[allreduce()]] * 2)
    known, other = [[allreduce()], []], [[], [allreduce(shapes=((4,),))]]
    first, second = (other, known) if is_other_first else (known, other)
    assert job.cycle(first) == []
    (refused,) = job.cycle(second)
    assert "ranks disagree on the shape of 'x' (rank 0: (3,); rank 1: (4,))" in refused.reason
    assert all(rank.waiting() == (False, False) for rank in job.ranks)
    assert len(job.cycle([[allreduce()]] * 2)) == 1


def test_known_requests_of_a_set_of_some_ranks_need_no_messages():
    job = Job(3)
    job.cycle([[set_change(0, 2)]] * 3)
    inner = allreduce(process_set=1)
    job.cycle([[inner], [], [inner]])
    job.num_exchanges = 0
    assert job.cycle([[inner], [], []]) == []
    assert [rank.waiting() for rank in job.ranks] == [(True, False), (False, False), (False, True)]
    (ready,) = job.cycle([[], [], [inner]])
    assert (ready.members, list(ready.requests)) == ((0, 2), [0, 2])
    assert job.num_exchanges == 0
    job.cycle([[set_change(0, 2, kind=CollectiveKind.REMOVE_PROCESS_SET)]] * 3)
    (refused, _) = job.cycle([[inner], [], [inner]])
    assert "was removed" in refused.reason


def test_known_requests_wait_for_no_rank_that_has_joined_and_every_join_has_the_last_rank():
    job = Job(2)
    for last in (0, 1):
        job.cycle([[allreduce()]] * 2)
        job.cycle([[JOIN] if rank != last else [] for rank in range(2)])
        (ready,) = job.cycle([[allreduce()] if rank == last else [] for rank in range(2)])
        assert list(ready.requests) == [last]
        (join,) = job.cycle([[JOIN] if rank == last else [] for rank in range(2)])
        assert join.value == last
    (join,) = job.cycle([[JOIN]] * 2)
    assert join.value == 1


def test_a_request_that_a_rank_lacks_is_named_while_others_are_agreed_in_every_cycle():
    """horovod/horovod#902, a review of its cache of responses: a thread that reduces on hides one that is stalled."""
    job = Job(2)
    job.cycle([[allreduce("stalled"), allreduce("busy")]] * 2)
    job.cycle([[allreduce("stalled")], []])
    for _ in range(3):
        assert len(job.cycle([[allreduce("busy")]] * 2)) == 1
    assert job.ranks[0].unsent_since_s is not None  # by which its engine asks
    job.asking = {0}
    job.cycle([[]] * 2)
    assert job.ranks[0].negotiation.missing_ranks() == {allreduce("stalled").key: (1,)}


def test_a_known_name_of_another_kind_is_what_it_says_and_not_what_is_known():
    """horovod/horovod#2872, where the cache compared the name alone."""
    job = Job(2)
    job.cycle([[allreduce()]] * 2)
    broadcast = Request(name="x", kind=CollectiveKind.BROADCAST, dtypes=("float32",), shapes=((3,),), root_rank=0)
    for request in (broadcast, allreduce(), broadcast):
        (ready,) = job.cycle([[request]] * 2)
        assert ready.request == request


def test_gathers_of_a_known_name_have_the_rows_of_this_step():
    """horovod/horovod#941: rows that change from step to step, on one rank or on both."""

    def allgather(rows):
        return Request(name="x", kind=CollectiveKind.ALLGATHER, dtypes=("float32",), shapes=((rows, 2),))

    job = Job(2)
    for rows in ((3, 3), (3, 4), (3, 3), (5, 5), (3, 3), (3, 4)):
        (ready,) = job.cycle([[allgather(number)] for number in rows])
        assert [request.shapes for request in ready.requests.values()] == [((number, 2),) for number in rows]


def test_more_names_a_step_than_the_cache_has_room_for_are_all_agreed():
    """horovod/horovod#2626."""
    job = Job(2, capacity=8)
    for _ in range(3):
        outcomes = [outcome for name in "abcdefghij" for outcome in job.cycle([[allreduce(name)]] * 2)]
        assert [outcome.key.name for outcome in outcomes] == list("abcdefghij")
