"""Which worker computes which part of which step, and when it may begin. Pure: without clocks, tensors or threads.

Every step has the same number of parts. A *lease* is one part of one step, granted to one worker; leases are numbered
in the order of steps and parts. A worker takes the next lease when it has finished its last one, so a fast worker
computes more parts. Invariants: every lease is committed once; the committed leases below `num_done` steps are all of
them, so that a version of the weights has consumed a prefix of the access order as soon as the table is drained.

The rule is that of stale synchronous parallel training (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NeurIPS 2013): a worker that reads weights at clock c sees all updates of
clocks before c - s. There, a clock counts the iterations of a worker, each of which has a fixed share of the samples.
Here, workers share the samples by their speed, so the clock of a worker is the step to which its part belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Staleness:
    """Who waits for whom.

    Attributes:
        bound: largest number of steps by which a worker may be ahead of the slowest; None: no bound.
    """

    bound: int | None

    @property
    def is_synchronous(self) -> bool:
        """Whether each step is one update, with the gradients of all its parts, as without servers."""
        return self.bound == 0


def parse_staleness(text: str) -> Staleness:
    """Return what a text describes, "ssp:3" or "async".

    Raises:
        ValueError: the text has another form.
    """
    kind, _, bound = text.partition(":")
    if text == "async":
        return Staleness(None)
    if kind == "ssp" and bound.isdecimal():
        return Staleness(int(bound))
    raise ValueError(f"sync is {text!r}; expected ssp:STEPS, with a whole number of at least 0, or async")


def may_start(clock: int, slowest: int, bound: int | None) -> bool:
    """Return whether a worker may start a part of step `clock`, if the slowest worker is at step `slowest`."""
    return bound is None or clock - slowest <= bound


@dataclass(frozen=True)
class PartLease:
    """A part of a step, granted to a worker.

    Attributes:
        number: number of the lease.
        step, part: what to compute.
        lost: workers that had it before and were lost, in that order.
    """

    number: int
    step: int
    part: int
    lost: tuple[int, ...] = ()


class LeaseTable:
    """Grants the parts of steps to workers. Steps count from 0.

    Args:
        num_parts: parts of a step.
        bound: see `Staleness`.

    Attributes:
        num_done: number of first steps of which all parts are committed.
        largest_gap: largest number of steps by which a worker was ahead of the slowest, when it started.
    """

    def __init__(self, num_parts: int, bound: int | None) -> None:
        self._num_parts, self._bound = num_parts, bound
        self._next = self._limit = 0  # numbers of leases
        self._holders: dict[int, int] = {}  # worker by lease
        self._returned: set[int] = set()
        self._lost: dict[int, tuple[int, ...]] = {}  # workers by lease
        self._committed: dict[int, int] = {}  # worker by lease, for leases of steps that are not done
        self.num_done = 0
        self.largest_gap = 0

    @property
    def is_drained(self) -> bool:
        """Whether all leases up to the limit are committed."""
        return self.num_done * self._num_parts >= self._limit

    def open(self, num_steps: int) -> None:
        """Grant the leases of `num_steps` more steps from now on. The table must be drained."""
        assert self.is_drained
        self._limit += num_steps * self._num_parts

    def close(self) -> None:
        """Grant no more leases, but those that complete the steps that have begun."""
        self._limit = min(self._limit, -(-self._next // self._num_parts) * self._num_parts)

    def grant(self, worker: int) -> PartLease | None:
        """Return a lease for a worker, which holds none; None: it must wait. Returned leases are granted first."""
        number = min(self._returned, default=self._next)
        step = number // self._num_parts
        if number >= self._limit or not may_start(step, self.num_done, self._bound):
            return None
        self._returned.discard(number)
        self._next = max(self._next, number + 1)
        self._holders[number] = worker
        self.largest_gap = max(self.largest_gap, step - self.num_done)
        return PartLease(number, step, number % self._num_parts, self._lost.get(number, ()))

    def plan_update(self, worker: int, number: int) -> Sequence[tuple[int, int]]:
        """Return the pushes, (worker, lease), that are applied as one update once this lease is committed.

        If each step is one update, they are those of all its parts, in their order, or none if others are missing.
        """
        if self._bound != 0:
            return [(worker, number)]
        first = number - number % self._num_parts
        pushes = {**self._committed, number: worker}
        parts = range(first, first + self._num_parts)
        return [(pushes[part], part) for part in parts] if all(part in pushes for part in parts) else []

    def commit(self, worker: int, number: int) -> None:
        """Record that a lease is done; call this after its update is applied."""
        assert self._holders.pop(number) == worker
        self._committed[number] = worker
        self._lost.pop(number, None)
        while all(number in self._committed for number in self._leases_of(self.num_done)):
            for done in self._leases_of(self.num_done):
                del self._committed[done]
            self.num_done += 1

    def lose(self, worker: int) -> int | None:
        """Record that a worker is lost; return the number of its lease, which is granted again; None: it had none."""
        number = next((number for number, holder in self._holders.items() if holder == worker), None)
        if number is not None:
            del self._holders[number]
            self._returned.add(number)
            self._lost[number] = (*self._lost.get(number, ()), worker)
        return number

    def _leases_of(self, step: int) -> range:
        return range(step * self._num_parts, (step + 1) * self._num_parts)
