"""Which operations may run, and in which order: a replicated state machine without clocks, threads or I/O.

Every rank feeds it the same input, all ranks' new submissions of a cycle, and so every rank gets the same
list. That is what makes it safe to submit in any order: an operation starts when its name has come from every
rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.engine.agreement import find_disagreement
from trainer.engine.requests import Request


@dataclass(frozen=True, slots=True)
class Ready:
    """Every rank has asked for it and they agree. ``requests`` is in rank order."""

    requests: tuple[Request, ...]

    @property
    def name(self) -> str:
        """The name under which all ranks submitted it."""
        return self.requests[0].name


@dataclass(frozen=True, slots=True)
class Refused:
    """Every rank has asked for it, but not for the same thing; ``reason`` says which rank said what."""

    name: str
    reason: str


Outcome = Ready | Refused


class Negotiation:
    """The operations that some ranks have submitted and others have not yet."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pending: dict[str, dict[int, Request]] = {}

    def advance(self, submitted: Sequence[Sequence[Request]]) -> list[Outcome]:
        """Takes one cycle's new submissions, by rank, and settles what has now come from every rank.

        Returns:
            The outcomes in the order in which they became complete, reading rank 0's submissions first.
        """
        assert len(submitted) == self._num_ranks
        outcomes = []
        for rank, requests in enumerate(submitted):
            for request in requests:
                outcome = self._add(rank, request)
                if outcome is not None:
                    outcomes.append(outcome)
        return outcomes

    def missing_ranks(self) -> dict[str, tuple[int, ...]]:
        """For each pending name, in order of first submission, the ranks that have not submitted it."""
        everyone = range(self._num_ranks)
        return {name: tuple(r for r in everyone if r not in by_rank) for name, by_rank in self._pending.items()}

    def _add(self, rank: int, request: Request) -> Outcome | None:
        by_rank = self._pending.setdefault(request.name, {})
        # The submitting engine refuses a name that is still in flight, so it cannot come twice.
        assert rank not in by_rank
        by_rank[rank] = request
        if len(by_rank) < self._num_ranks:
            return None
        del self._pending[request.name]
        requests = tuple(by_rank[r] for r in range(self._num_ranks))
        reason = find_disagreement(requests)
        return Ready(requests) if reason is None else Refused(request.name, reason)
