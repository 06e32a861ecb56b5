"""Parts of global batches in any order: for the workers of parameter servers, which share a run by their speed.

A worker reads the part that some data rank would serve, of a step that the servers choose. Steps never go back to an
earlier epoch. The ledger has what this process read, under its own data rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from datasvc.loaders.core.split_reader import Cursor
from datasvc.order import Tail, count_steps

if TYPE_CHECKING:
    from datasvc.loaders.core.batches import SampleBatch, SampleBatches
    from datasvc.loaders.core.ledger import Ledger
    from datasvc.loaders.core.mixture import Mixture
    from datasvc.loaders.ranks.data_ranks import DataRanks
    from datasvc.shards import Split

B = TypeVar("B")


class PartReader(ABC, Generic[B]):
    """What `take_part` and `end_epochs_before` need of a loader; see `Loader` for its attributes."""

    split: Split | Mixture
    batch_size: int
    ranks: DataRanks
    tail: Tail
    _batches: SampleBatches
    _cursor: Cursor
    _ledger: Ledger | None
    _prefetch: int
    _stream: Iterator[SampleBatch | None] | None

    @abstractmethod
    def _next(self) -> tuple[B, Cursor]: ...

    @abstractmethod
    def _open_ledger(self) -> None: ...

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.ranks.world_size

    def _count_steps_left(self, cursor: Cursor) -> int:
        return count_steps(cursor.position, self.split.num_positions, self._global_batch, self.tail)

    def _take_part(self, epoch: int, position: int, rank: int, *, lost_ranks: Sequence[int] = ()) -> B:
        assert not self._prefetch, "the next part is not known in advance"
        self._open_ledger()
        self._end_epochs_before(epoch)
        cursor = Cursor(epoch, position)
        if cursor < self._cursor:
            # The shards of this step are released already; read it as if it were the first one.
            self._batches.close()
        batch = self._batches.read_part(cursor, rank)
        if self._ledger is not None:
            for lost_rank in lost_ranks:
                self._ledger.write_returned(batch, lost_rank)
        self._cursor, self._stream = cursor, iter([batch])
        finished, self._cursor = self._next()
        return finished

    def _end_epochs_before(self, epoch: int) -> None:
        while self._cursor.epoch < epoch:
            # Not the position of the last part: other processes may have served later ones.
            ended, start = self._cursor.epoch, self._cursor.position % self._global_batch
            stop = start + self._count_steps_left(Cursor(ended, start)) * self._global_batch
            if self._ledger is not None:
                self._ledger.end_epoch(ended, min(stop, self.split.num_positions))
            self._cursor = Cursor(ended + 1, 0)


def take_part(loader: PartReader[B], epoch: int, position: int, rank: int, *, lost_ranks: Sequence[int] = ()) -> B:
    """Return the part of the global batch at a position that a data rank serves.

    Args:
        loader: loader with `prefetch=0`, because the next part is not known in advance.
        epoch: epoch of the step; not before that of the last part.
        position: first position of the step.
        rank: data rank whose part it is.
        lost_ranks: data ranks of processes that may have served this part, whose updates are lost.

    Raises:
        ConfigError: the epoch has no step at the position.
        BadSampleError, CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Loader`.
    """
    return loader._take_part(epoch, position, rank, lost_ranks=lost_ranks)  # noqa: SLF001 - not of the public API


def end_epochs_before(loader: PartReader[Any], epoch: int) -> None:
    """Record that the epochs before `epoch` are over, and drop their last samples, which fill no batch."""
    loader._end_epochs_before(epoch)  # noqa: SLF001
