"""Process sets: subsets of the ranks that run operations among themselves.

A process set has a number only while it is added to the job of this process. `runtime` clears the numbers when the
job ends. The import of `submit` is inside functions, because `submit` imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET
from datasvc.trainer.job import runtime


class ProcessSet:
    """A subset of the ranks that runs operations among its members.

    A new set is unusable until every rank has called `add_process_set` with it, or passed it to `init`. Until then
    `size`, `rank` and `included` raise ValueError.

    Args:
        ranks_or_comm: global ranks, at least one, in any order.

    Attributes:
        process_set_id: number of the set, the same on every rank; None while the set is not added.
        ranks: global ranks, sorted.

    Raises:
        ValueError: `ranks_or_comm` is empty, contains a rank twice or a negative number, or is not a sequence of
            ranks.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if isinstance(ranks_or_comm, str) or not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"a process set needs a list of ranks, such as [0, 2], not {ranks_or_comm!r}")  # noqa: TRY004 - Horovod's
        ranks = [int(rank) for rank in ranks_or_comm]
        if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            raise ValueError(f"a process set needs at least one rank, each once and none negative, not {ranks}")
        self._ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks, sorted; None for the global set before `init`."""
        if self._ranks is not None:
            return list(self._ranks)
        return list(range(runtime.size())) if runtime.is_initialized() else None

    def size(self) -> int:
        """Return the number of ranks."""
        return len(members_of(self))

    def rank(self) -> int:
        """Return the rank of this process within the set, from 0.

        Raises:
            ValueError: this process is not in the set.
        """
        if not self.included():
            raise ValueError(f"rank {runtime.rank()} is not in {self}; call rank() on ranks of the set only")
        return members_of(self).index(runtime.rank())

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return runtime.rank() in members_of(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    def __hash__(self) -> int:
        # Leave out `process_set_id`, because it changes when the set is added or removed, but the hash must not.
        return hash(tuple(self._ranks or ()))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks. Its number is fixed, and its ranks are not known before `init`."""

    def __init__(self) -> None:
        self._ranks = None
        self.process_set_id = GLOBAL_SET


global_process_set: ProcessSet = _GlobalProcessSet()
"""The process set of all ranks; its `process_set_id` is 0."""

# The sets that were added to the current job, by their numbers, so that `shutdown` can clear the numbers.
_added: dict[int, ProcessSet] = {}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. Every rank of the job calls this with the same ranks, even a rank outside the set.

    Args:
        process_set: process set, or its ranks.

    Returns:
        The process set, with its number.

    Raises:
        ValueError: a set of these ranks (perhaps the global set) exists already, or a rank is not in the job.
        HorovodInternalError: ranks disagree on the set, or a rank is lost.
    """
    from datasvc.trainer.job.submit import submit_process_set

    new_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = new_set.ranks or []
    if not ranks or ranks[-1] >= runtime.size():
        raise ValueError(
            f"a process set has the ranks {ranks}, but the ranks of the job are 0 to {runtime.size() - 1}"
        )
    current_sets = runtime.current_job().engine.process_sets
    if new_set.process_set_id is not None or tuple(ranks) in current_sets.values():
        raise ValueError(f"a process set of the ranks {ranks} exists already; use that one")
    number = submit_process_set(ranks, is_new=True).wait()
    assert isinstance(number, int)
    new_set.process_set_id = number
    _added[number] = new_set
    return new_set


def add_process_sets(rank_lists: Iterable[Sequence[int]]) -> ProcessSet:
    """Add a process set for each list of ranks, and return that of this rank. Sets that exist are used again.

    Every rank of the job calls this with the same lists, in any order; each rank is in one of them.
    """
    numbers = {tuple(ranks): number for number, ranks in process_set_table().items()}
    own = None
    for ranks in sorted(sorted(each) for each in rank_lists):
        process_set = ProcessSet(ranks)
        if tuple(ranks) in numbers:
            process_set.process_set_id = numbers[tuple(ranks)]
        else:
            add_process_set(process_set)
        if runtime.rank() in ranks:
            own = process_set
    assert own is not None, "each rank is in one of the lists"
    return own


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; it can be added again later. Every rank of the job calls this.

    Returns:
        True if the set was removed; False, without any effect, if it is the global set or is not added.

    Raises:
        HorovodInternalError: ranks disagree on the set, or a rank is lost.
    """
    from datasvc.trainer.job.submit import submit_process_set

    number = process_set.process_set_id
    if number is None or number == GLOBAL_SET or number not in runtime.current_job().engine.process_sets:
        return False
    submit_process_set(process_set.ranks or [], is_new=False).wait()
    process_set.process_set_id = None
    _added.pop(number, None)
    return True


def process_set_table() -> dict[int, list[int]]:
    """Return the global ranks of every process set, by its `process_set_id`."""
    return {number: list(ranks) for number, ranks in runtime.current_job().engine.process_sets.items()}


def members_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Return the global ranks of a process set.

    Raises:
        ValueError: the set is not added.
    """
    number = process_set.process_set_id
    members = None if number is None else runtime.current_job().engine.process_sets.get(number)
    if members is None:
        raise ValueError(f"{process_set} is not added: every rank must call hvd.add_process_set() with it first")
    return members


def clear_numbers() -> None:
    """Clear `process_set_id` of all added sets when the job ends, because the next job assigns new numbers."""
    for process_set in _added.values():
        process_set.process_set_id = None
    _added.clear()
