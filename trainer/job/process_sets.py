"""Process sets: some of the ranks, with operations of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET
from datasvc.trainer.job import runtime


class ProcessSet:
    """Ranks that run operations among themselves.

    A new one takes part in nothing until every rank has called `add_process_set` with it, or given it to ``init``.

    Args:
        ranks_or_comm: global ranks, at least one, in any order.

    Attributes:
        process_set_id: its number, the same on every rank; None while it is not added.
        ranks: global ranks, sorted.

    Raises:
        ValueError: no rank, one twice, or one below 0; or something that is not a sequence of ranks.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if isinstance(ranks_or_comm, str) or not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"a process set is made of ranks, such as [0, 2], not {ranks_or_comm!r}")  # noqa: TRY004 - Horovod's
        given = [int(rank) for rank in ranks_or_comm]
        if not given or len(set(given)) < len(given) or min(given) < 0:
            raise ValueError(f"a process set needs ranks, each once and none below 0, not {given}")
        self._ranks: list[int] | None = sorted(given)
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks, sorted; of the global set None before ``init``."""
        if self._ranks is not None:
            return list(self._ranks)
        return list(range(runtime.size())) if runtime.is_initialized() else None

    def size(self) -> int:
        """Number of ranks. Raises ValueError: not added."""
        return len(members_of(self))

    def rank(self) -> int:
        """This process among those of the set, from 0. Raises ValueError: not in it, or not added."""
        if not self.included():
            raise ValueError(f"rank {runtime.rank()} is not in {self}")
        return members_of(self).index(runtime.rank())

    def included(self) -> bool:
        """Whether this process is in the set. Raises ValueError: not added."""
        return runtime.rank() in members_of(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    def __hash__(self) -> int:
        return hash(tuple(self._ranks or ()))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self._ranks = None
        self.process_set_id = GLOBAL_SET


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks; number 0."""

_added: dict[int, ProcessSet] = {}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a set. Every rank of the job calls this, in or out of the set, with the same ranks.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The set, with its number.

    Raises:
        ValueError: there is one of these ranks already, such as the global one; or a rank that the job has not.
        HorovodInternalError: ranks disagree on the set, or a rank is lost.
    """
    from datasvc.trainer.job.submit import submit_process_set

    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = wanted.ranks or []
    if not ranks or ranks[-1] >= runtime.size():
        raise ValueError(f"a process set of the ranks {ranks} among {runtime.size()} ranks is impossible")
    known = runtime.current_job().engine.process_sets
    if wanted.process_set_id is not None or tuple(ranks) in known.values():
        raise ValueError(f"there is a process set of the ranks {ranks} already")
    number = submit_process_set(ranks, is_new=True).wait()
    assert isinstance(number, int)
    wanted.process_set_id = number
    _added[number] = wanted
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, which then is as if it had not been added. Every rank of the job calls this.

    Returns:
        False, with nothing done, if it is the global one, or not added.

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
    """Global ranks of every set, by number."""
    return {number: list(ranks) for number, ranks in runtime.current_job().engine.process_sets.items()}


def members_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Global ranks of a set that was added. Raises ValueError: it was not."""
    members = runtime.current_job().engine.process_sets.get(
        -1 if process_set.process_set_id is None else process_set.process_set_id
    )
    if members is None:
        raise ValueError(f"{process_set} is not known: every rank must call hvd.add_process_set() with it first")
    return members


def forget_all() -> None:
    """Leaves every set without a number: the job that knew them is over."""
    for process_set in _added.values():
        process_set.process_set_id = None
    _added.clear()
