"""A loader's `Decoder` that takes batches from a share, and decodes by itself what that does not give."""

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
    """A `Decoder` of steps whose samples nobody read here.

    Args:
        batches: of the share; stays connected when this is closed.
        make_alone: makes a loader of the same batches, which shares nothing.
        iterate: returns the rest of its epoch.
        stopwatch: of the loader: what another process decodes is waited for.
    """

    def __init__(
        self,
        batches: SharedBatches,
        make_alone: Callable[[], Loader[B]],
        iterate: Callable[[Loader[B]], Iterator[B]],
        *,
        stopwatch: StepProfiler,
    ) -> None:
        self._batches = batches
        self._stopwatch = stopwatch
        self._alone = Positioned(make_alone, iterate)
        self._fed: deque[tuple[Cursor, bool]] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `Decoder`. Raises ConfigError, LagError: see `SharedBatches.ask`."""
        cursor = batch.before
        with self._stopwatch.waiting(Stage.DECODE):
            is_promised = self._batches.ask(cursor)
        self._fed.append((cursor, is_promised))

    def take(self) -> B:
        """See `Decoder`."""
        cursor, is_promised = self._fed[0]
        with self._stopwatch.waiting(Stage.DECODE):
            batch: B | None = self._batches.take(cursor) if is_promised else None
        if batch is None:
            batch = self._alone.read(cursor)
            self._batches.counts.alone += 1
        elif not any(True for _, promised in self._fed if not promised):
            self._alone.close()  # back among the others: its threads and memory are not needed
        self._fed.popleft()
        return batch

    def close(self) -> None:
        """See `Decoder`."""
        self._fed.clear()
        self._batches.forget()
        self._alone.close()
