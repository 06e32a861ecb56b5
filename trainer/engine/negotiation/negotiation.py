"""Which operations may run, and in which order: a replicated state machine without clocks, threads or I/O.

Every rank feeds it the same input, all ranks' new submissions of a cycle, and so every rank gets the same
list. That is what makes it safe to submit in any order: an operation starts when its name has come from every
rank of its process set that has not joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.trainer.engine.negotiation.agreement import find_disagreement, name_ranks
from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET, CollectiveKind, Key, Request

# A rank that has joined takes part in these without knowing their tensors: by zeros, or by nothing at all.
JOIN: Final = Key(GLOBAL_SET, CollectiveKind.JOIN.value)
_WITH_JOINED: Final = (CollectiveKind.ALLREDUCE, CollectiveKind.BARRIER)
# That change nothing here.
_WITHOUT_EFFECT: Final = (
    CollectiveKind.ALLREDUCE,
    CollectiveKind.ALLGATHER,
    CollectiveKind.BROADCAST,
    CollectiveKind.ALLTOALL,
    CollectiveKind.REDUCESCATTER,
    CollectiveKind.BARRIER,
)


@dataclass(frozen=True, slots=True)
class Ready:
    """Every rank of the set has asked for it, or joined, and those that asked agree.

    Attributes:
        requests: of the ranks that asked, by global rank, in rank order.
        members: global ranks of the set, in order.
        value: after a join the rank that joined last; after the addition of a process set its number.
    """

    requests: Mapping[int, Request]
    members: tuple[int, ...]
    value: int | None = None

    @property
    def request(self) -> Request:
        """What they agree on; where ranks may differ, such as in the number of rows, the first one's."""
        return next(iter(self.requests.values()))

    @property
    def key(self) -> Key:
        """Of the operation."""
        return self.request.key

    @property
    def name(self) -> str:
        """The name under which the ranks submitted it."""
        return self.request.name


@dataclass(frozen=True, slots=True)
class Refused:
    """Every rank has asked for it, but it cannot run; `reason` says which rank said what.

    Attributes:
        requests: as those of `Ready`.
    """

    key: Key
    reason: str
    requests: Mapping[int, Request]


Outcome = Ready | Refused


class Negotiation:
    """The operations that some ranks have submitted and others have not yet, and the process sets."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(num_ranks))}
        self._next_set = GLOBAL_SET + 1
        self._pending: dict[Key, dict[int, Request]] = {}
        self._joined: dict[int, Request] = {}  # in the order in which they joined

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Global ranks of each set, by number."""
        return dict(self._sets)

    def advance(self, submitted: Sequence[Sequence[Request]]) -> list[Outcome]:
        """Takes one cycle's new submissions, by rank, and settles what is now complete.

        Returns:
            The outcomes in the order in which they became complete, reading rank 0's submissions first.
        """
        assert len(submitted) == self._num_ranks
        if self._are_agreed(submitted):
            members = self._sets[GLOBAL_SET]
            return [Ready(dict.fromkeys(members, request), members) for request in submitted[0]]
        outcomes: list[Outcome] = []
        for rank, requests in enumerate(submitted):
            for request in requests:
                outcomes += (
                    self._join(rank, request) if request.kind is CollectiveKind.JOIN else self._add(rank, request)
                )
        return outcomes

    def waiting(self, rank: int) -> tuple[bool, bool]:
        """Whether what this rank has submitted waits for others, and whether others wait for this rank.

        A rank that has joined waits for whatever the others will submit.
        """
        awaits_others, is_awaited = rank in self._joined, False
        for key, by_rank in self._pending.items():
            awaits_others = awaits_others or rank in by_rank
            is_awaited = is_awaited or rank in self._missing(key)
        return awaits_others, is_awaited

    def missing_ranks(self) -> dict[Key, tuple[int, ...]]:
        """For each pending operation, in order of first submission, the ranks that have not submitted it."""
        missing = {key: tuple(self._missing(key)) for key in self._pending}
        if self._joined:
            missing[JOIN] = tuple(rank for rank in range(self._num_ranks) if rank not in self._joined)
        return missing

    def _are_agreed(self, submitted: Sequence[Sequence[Request]]) -> bool:
        """Whether all that is asked for is complete, and was agreed on before: the steady state, by a short way."""
        if self._pending or self._joined or self._num_ranks == 1:
            return False
        first = submitted[0]
        return all(
            len(requests) == len(first) and all(a is b for a, b in zip(requests, first, strict=True))
            for requests in submitted
        ) and all(request.process_set == GLOBAL_SET and request.kind in _WITHOUT_EFFECT for request in first)

    def _missing(self, key: Key) -> list[int]:
        by_rank = self._pending[key]
        return [r for r in self._sets[key.process_set] if r not in by_rank and r not in self._joined]

    def _add(self, rank: int, request: Request) -> list[Outcome]:
        if request.process_set not in self._sets:  # removed while this was on its way
            return [Refused(request.key, f"{request.key.describe()}: the process set was removed", {rank: request})]
        by_rank = self._pending.setdefault(request.key, {})
        # The submitting engine refuses a name that is still in flight, so it cannot come twice.
        assert rank not in by_rank
        by_rank[rank] = request
        return self._settle(request.key)

    def _join(self, rank: int, request: Request) -> list[Outcome]:
        self._joined[rank] = request
        outcomes = [outcome for key in list(self._pending) for outcome in self._settle(key)]
        if len(self._joined) == self._num_ranks:
            joined, self._joined = self._joined, {}
            outcomes.append(Ready(dict(sorted(joined.items())), self._sets[GLOBAL_SET], value=rank))
        return outcomes

    def _settle(self, key: Key) -> list[Outcome]:
        if key not in self._pending or self._missing(key):
            return []
        requests = dict(sorted(self._pending.pop(key).items()))
        members = self._sets[key.process_set]
        reason = self._find_objection(requests, members)
        if reason is not None:
            return [Refused(key, reason, requests)]
        return self._accept(Ready(requests, members))

    def _find_objection(self, requests: Mapping[int, Request], members: Sequence[int]) -> str | None:
        request = next(iter(requests.values()))
        joined = [rank for rank in members if rank not in requests]
        if joined and any(each.kind not in _WITH_JOINED for each in requests.values()):
            return (
                f"{request.key.describe()}: {name_ranks(joined)} joined; until every rank has joined only allreduce "
                f"and barrier can run, not {request.kind.value}"
            )
        disagreement = find_disagreement(requests)
        if (
            disagreement is None
            and request.kind is CollectiveKind.ADD_PROCESS_SET
            and request.ranks in self._sets.values()
        ):
            return f"there is a process set of the ranks {request.ranks} already"
        return disagreement

    def _accept(self, ready: Ready) -> list[Outcome]:
        request = ready.request
        if request.kind is CollectiveKind.ADD_PROCESS_SET:
            assert request.ranks is not None
            number, self._next_set = self._next_set, self._next_set + 1
            self._sets[number] = request.ranks
            return [Ready(ready.requests, ready.members, value=number)]
        if request.kind is CollectiveKind.REMOVE_PROCESS_SET:
            return self._remove_set(ready)
        return [ready]

    def _remove_set(self, ready: Ready) -> list[Outcome]:
        ranks = ready.request.ranks
        number = next((number for number, each in self._sets.items() if each == ranks), None)
        if number is None:
            return [Refused(ready.key, f"there is no process set of the ranks {ranks}", ready.requests)]
        lost = {key: self._pending[key] for key in self._pending if key.process_set == number}
        for key in lost:
            del self._pending[key]
        del self._sets[number]
        refusals = [
            Refused(key, f"{key.describe()}: the process set was removed", by_rank) for key, by_rank in lost.items()
        ]
        return [*refusals, Ready(ready.requests, ready.members, value=number)]
