"""`BatchDecoder` that receives batches from the decode group, and decodes the others in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.consumer import SharedBatches
from datasvc.loaders.decode_sharing.loader_spec import Positioned
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage

B = TypeVar("B")


class SharedDecoder(Generic[B]):
    """A `BatchDecoder` for planned steps, whose samples this process does not read.

    Args:
        batches: batches of the decode group; the connection stays open after `close`.
        make_alone: function that creates a loader of the same batches without a decode group.
        iterate: function that returns an iterator over the rest of that loader's epoch.
        profiler: profiler of the loader; time spent on the other process counts as a wait for decoding.
    """

    def __init__(
        self,
        batches: SharedBatches,
        make_alone: Callable[[], Loader[B]],
        iterate: Callable[[Loader[B]], Iterator[B]],
        *,
        profiler: StepProfiler,
    ) -> None:
        self._batches = batches
        self._profiler = profiler
        self._alone = Positioned(make_alone, iterate)
        self._fed: deque[tuple[Cursor, bool]] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`. Raises ConfigError, LagError: see `SharedBatches.request`."""
        cursor = batch.before
        with self._profiler.waiting(Stage.DECODE):
            is_pending = self._batches.request(cursor)
        self._fed.append((cursor, is_pending))

    def take(self) -> B:
        """See `BatchDecoder`."""
        cursor, is_pending = self._fed[0]
        with self._profiler.waiting(Stage.DECODE):
            batch: B | None = self._batches.take(cursor) if is_pending else None
        if batch is None:
            batch = self._alone.read(cursor)
            self._batches.counts.alone += 1
        elif not any(True for _, pending in self._fed if not pending):
            self._alone.close()  # this job has caught up: free the threads and memory of the separate loader
        self._fed.popleft()
        return batch

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._fed.clear()
        self._batches.cancel()
        self._alone.close()
