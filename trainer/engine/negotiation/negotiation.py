"""Negotiation of the operations to run and of their order: a replicated state machine without clocks, threads or I/O.

Invariant: what is passed to it in each cycle is the same on every rank, so every rank gets the same list of
operations. Ranks may therefore submit in any order: an operation starts when every rank of its process set has
submitted its name or has joined, that is, has declared that it has no more data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET, CollectiveKind, Key, Request

JOIN: Final = Key(GLOBAL_SET, CollectiveKind.JOIN.value)
# These kinds can run while some ranks have joined. For an allreduce, those ranks send neutral values.
_WITH_JOINED: Final = (CollectiveKind.ALLREDUCE, CollectiveKind.BARRIER)

_Property = Callable[[Request], object]

# Properties that must be equal on all ranks, each with its title for error messages. `_EVERY_KIND` has those of every
# operation, `_BY_KIND` those of one kind.
_EVERY_KIND: tuple[tuple[str, _Property], ...] = (
    ("operation", lambda request: request.kind.value),
    # Before the others: ranks at unequal steps may also differ in the fragment, and so in the shape.
    ("round", lambda request: request.round),
    ("data type", lambda request: _one_or_all(request.dtypes)),
    ("device", lambda request: request.device_type),
)
_GROUPING: tuple[str, _Property] = ("grouping", lambda request: "grouped" if request.is_grouped else "single")
_LAYOUT: tuple[str, _Property] = ("layout", lambda request: request.layout)
_REDUCTION: tuple[tuple[str, _Property], ...] = (
    ("shape", lambda request: _one_or_all(request.shapes)),
    ("reduction", lambda request: request.reduce_op.value if request.reduce_op else None),
    ("prescale factor", lambda request: request.prescale_factor),
    ("postscale factor", lambda request: request.postscale_factor),
    _GROUPING,
    _LAYOUT,
)
_ROWS: tuple[tuple[str, _Property], ...] = (
    ("number of dimensions", lambda request: _one_or_all([len(shape) for shape in request.shapes])),
    ("shape after the first dimension", lambda request: _one_or_all([shape[1:] for shape in request.shapes])),
    _GROUPING,
    _LAYOUT,
)
_BY_KIND: Mapping[CollectiveKind, tuple[tuple[str, _Property], ...]] = {
    CollectiveKind.ALLREDUCE: _REDUCTION,
    CollectiveKind.REDUCESCATTER: _REDUCTION,
    CollectiveKind.BROADCAST: (
        ("root rank", lambda request: request.root_rank),
        ("shape", lambda request: _one_or_all(request.shapes)),
    ),
    CollectiveKind.ALLGATHER: _ROWS,
    CollectiveKind.ALLTOALL: _ROWS,
    CollectiveKind.BARRIER: (),
    CollectiveKind.ADD_PROCESS_SET: (("ranks", lambda request: request.ranks),),
    CollectiveKind.REMOVE_PROCESS_SET: (("ranks", lambda request: request.ranks),),
}


@dataclass(frozen=True, slots=True)
class Ready:
    """An operation that can run: every rank of the set has submitted it or joined, and the requests agree.

    Attributes:
        requests: requests of the ranks that submitted it, by global rank, in rank order.
        members: global ranks of the set, in order.
        value: for a join, the rank that joined last; for a change of a process set, its number; otherwise None.
    """

    requests: Mapping[int, Request]
    members: tuple[int, ...]
    value: int | None = None

    @property
    def request(self) -> Request:
        """The request of the first rank. Those of other ranks may differ in some properties, such as the rows."""
        return next(iter(self.requests.values()))

    @property
    def key(self) -> Key:
        """The key of the operation."""
        return self.request.key


@dataclass(frozen=True, slots=True)
class Refused:
    """An operation that cannot run, usually because the requests of the ranks disagree."""

    key: Key
    reason: str
    requests: Mapping[int, Request]


Outcome = Ready | Refused


class Negotiation:
    """The state machine: pending operations, joined ranks and process sets.

    An operation is pending while it waits for some of its ranks, and complete when it waits for none.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(num_ranks))}
        self._next_set = GLOBAL_SET + 1
        self._pending: dict[Key, dict[int, Request]] = {}  # the requests of each pending operation, by rank
        self._joined: dict[int, Request] = {}  # the join of each joined rank

    @property
    def process_sets(self) -> Mapping[int, tuple[int, ...]]:
        """The global ranks of each process set, by its number; changed by `advance`."""
        return self._sets

    def advance(self, submitted: Sequence[Sequence[Request]]) -> list[Outcome]:
        """Process the new submissions of one cycle, listed by rank, and return the outcomes of complete operations.

        Returns:
            The outcomes in the order in which the operations become complete if ranks are processed in rank order.
        """
        assert len(submitted) == self._num_ranks
        outcomes: list[Outcome] = []
        for rank, requests in enumerate(submitted):
            for request in requests:
                outcomes += (
                    self._join(rank, request) if request.kind is CollectiveKind.JOIN else self._add(rank, request)
                )
        return outcomes

    def complete(self, request: Request) -> Ready:
        """Return the outcome of a request that every rank of its set has submitted alike."""
        self._pending.pop(request.key, None)
        members = self._sets[request.process_set]
        return Ready(dict.fromkeys(members, request), members)

    @property
    def has_joined_ranks(self) -> bool:
        """Whether some ranks have joined, and others not yet."""
        return bool(self._joined)

    @property
    def pending(self) -> Mapping[Key, Mapping[int, Request]]:
        """The requests of each pending operation, by rank; changed by `advance` and `complete`."""
        return self._pending

    def waiting(self, rank: int) -> tuple[bool, bool]:
        """Return whether this rank waits for other ranks, and whether other ranks wait for this rank.

        A rank waits while an operation that it submitted is pending, and after it has joined.
        """
        awaits_others, is_awaited = rank in self._joined, False
        for key, by_rank in self._pending.items():
            awaits_others = awaits_others or rank in by_rank
            is_awaited = is_awaited or rank in self._missing(key)
        return awaits_others, is_awaited

    def missing_ranks(self) -> dict[Key, tuple[int, ...]]:
        """Return, for each pending operation in order of first submission, the ranks that have not submitted it."""
        missing = {key: tuple(self._missing(key)) for key in self._pending}
        if self._joined:
            missing[JOIN] = tuple(rank for rank in range(self._num_ranks) if rank not in self._joined)
        return missing

    def _missing(self, key: Key) -> list[int]:
        """Return the ranks for which a pending operation waits, in the order of the process set."""
        by_rank = self._pending[key]
        return [rank for rank in self._sets[key.process_set] if rank not in by_rank and rank not in self._joined]

    def _add(self, rank: int, request: Request) -> list[Outcome]:
        """Add a request to its operation, and return the outcomes if the operation is now complete."""
        # The set may have been removed after the rank submitted this request.
        if request.process_set not in self._sets:
            return [Refused(request.key, f"{request.key.describe()}: the process set was removed", {rank: request})]
        by_rank = self._pending.setdefault(request.key, {})
        # The submitting engine rejects a name that is still in flight, so a rank cannot submit it twice.
        assert rank not in by_rank
        by_rank[rank] = request
        return self._complete_if_ready(request.key)

    def _join(self, rank: int, request: Request) -> list[Outcome]:
        """Mark a rank as joined, and return the outcomes of the operations that are complete now."""
        self._joined[rank] = request
        # Pending operations may have waited for this rank only.
        outcomes = [outcome for key in list(self._pending) for outcome in self._complete_if_ready(key)]
        if len(self._joined) == self._num_ranks:
            joined, self._joined = self._joined, {}
            outcomes.append(Ready(dict(sorted(joined.items())), self._sets[GLOBAL_SET], value=rank))
        return outcomes

    def _complete_if_ready(self, key: Key) -> list[Outcome]:
        """Remove a pending operation that is complete, and return its outcomes; none if it still waits for a rank."""
        if key not in self._pending or self._missing(key):
            return []
        # Sort by rank, so that every rank has the same first request and the same error message.
        requests = dict(sorted(self._pending.pop(key).items()))
        members = self._sets[key.process_set]
        reason = self._find_refusal_reason(requests, members)
        if reason is not None:
            return [Refused(key, reason, requests)]
        return self._accept(Ready(requests, members))

    def _find_refusal_reason(self, requests: Mapping[int, Request], members: Sequence[int]) -> str | None:
        request = next(iter(requests.values()))
        joined = [rank for rank in members if rank not in requests]
        if joined and any(submitted.kind not in _WITH_JOINED for submitted in requests.values()):
            return (
                f"{request.key.describe()}: {name_ranks(joined)} joined; until every rank has joined only allreduce "
                f"and barrier can run, not {request.kind.value}"
            )
        if joined and any(submitted.round for submitted in requests.values()):
            # The neutral values of a joined rank are zeros, which would be averaged as weights.
            return (
                f"{request.key.describe()}: {name_ranks(joined)} joined, and has no weights to average; every rank "
                "must make the same number of rounds, so call join only after the last round of all ranks"
            )
        disagreement = find_disagreement(requests)
        # No two sets may have the same ranks, because a removal identifies a set by its ranks.
        is_addition = request.kind is CollectiveKind.ADD_PROCESS_SET
        if disagreement is None and is_addition and request.ranks in self._sets.values():
            return f"a process set of the ranks {request.ranks} exists already; use that one"
        return disagreement

    def _accept(self, ready: Ready) -> list[Outcome]:
        """Apply the change of a process set, if the operation is one, and return the outcomes."""
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
        """Remove a process set; return the refusals of its pending operations, then the outcome of the removal."""
        ranks = ready.request.ranks
        number = next((number for number, members in self._sets.items() if members == ranks), None)
        if number is None:
            return [Refused(ready.key, f"there is no process set of the ranks {ranks}", ready.requests)]
        # No rank can submit to the set any more, so its pending operations fail instead of waiting.
        del self._sets[number]
        refusals = [
            Refused(key, f"{key.describe()}: the process set was removed", self._pending.pop(key))
            for key in list(self._pending)
            if key.process_set == number
        ]
        return [*refusals, Ready(ready.requests, ready.members, value=number)]


# The following functions depend only on their arguments, so every rank gets the same result and error message.


def find_disagreement(requests: Mapping[int, Request]) -> str | None:
    """Return the reason why requests, by global rank, cannot run as one operation; None if they can.

    Factors are compared as numbers, so a factor of NaN always disagrees, even with itself.
    """
    first = next(iter(requests.values()))
    if len(requests) > 1 and all(request is first for request in requests.values()):
        # One object for several ranks comes from the request cache, so the ranks have agreed on it before.
        return None
    # `_EVERY_KIND` compares the kinds first, because the other properties depend on the kind.
    for title, get_value in (*_EVERY_KIND, *_BY_KIND[first.kind]):
        if any(get_value(request) != get_value(first) for request in requests.values()):
            return _describe(requests, title, get_value)
    if first.kind is CollectiveKind.ALLGATHER and () in first.shapes:
        return f"{first.key.describe()}: a tensor without dimensions cannot be gathered; use tensor.reshape(1)"
    return None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text, such as "rank 3" or "ranks 0, 1"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _describe(requests: Mapping[int, Request], title: str, get_value: _Property) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, request in requests.items():
        ranks_by_value.setdefault(str(get_value(request)), []).append(rank)
    values = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
    key = next(iter(requests.values())).key
    return f"ranks disagree on the {title} of {key.describe()} ({values})"


def _one_or_all(values: Sequence[object]) -> object:
    return values[0] if len(values) == 1 else tuple(values)


# Without the detection of stalls, a missing submission would look like a hang without a cause.


@dataclass(frozen=True)
class StalledOperation:
    """An operation that ranks have not submitted, and the seconds since the first rank has submitted it."""

    key: Key
    ranks: tuple[int, ...]
    waited_s: float

    def describe(self) -> str:
        """Return this as text, for messages."""
        return (
            f"{self.key.describe()} has waited {self.waited_s:.0f} s for {name_ranks(self.ranks)}, which did not "
            "submit it"
        )


class StallWatch:
    """The waiting times of the pending operations (only some ranks submitted them), and their last warnings.

    Warnings about one operation are `warning_s` apart, 0 for none; the job ends after `shutdown_s`, 0 for never.
    """

    def __init__(self, warning_s: float, shutdown_s: float = 0.0) -> None:
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._last_warning: dict[Key, float] = {}  # before the first warning, the beginning of the wait
        self._waiting_since: dict[Key, float] = {}

    def restart(self, key: Key) -> None:
        """Delete the waiting time of an operation, so that it starts at zero in the next check."""
        self._waiting_since.pop(key, None)
        self._last_warning.pop(key, None)

    def check(self, now_s: float, missing: Mapping[Key, tuple[int, ...]]) -> tuple[list[StalledOperation], str]:
        """Return the operations to warn of, and the reason why the job must end; an empty reason if it can continue.

        `missing` has, for each pending operation, the ranks that have not submitted it.
        """
        # Delete completed operations, so that a later operation of the same name starts at zero.
        for key in self._waiting_since.keys() - missing.keys():
            self.restart(key)
        stalled, failure = [], ""
        for key, ranks in missing.items():
            waiting = StalledOperation(key, ranks, now_s - self._waiting_since.setdefault(key, now_s))
            if self._warning_s and now_s - self._last_warning.setdefault(key, now_s) >= self._warning_s:
                self._last_warning[key] = now_s
                stalled.append(waiting)
            if self._shutdown_s and waiting.waited_s >= self._shutdown_s and not failure:
                failure = f"{waiting.describe()}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends the job"
        return stalled, failure
