"""What every loader is: an order, a rank's part of it, batches under way, and where the run stands.

A loader counts what it handed over, never what it prefetched. A `BatchDecoder`, made by each kind of loader, turns
samples into batches; it may be dropped at any moment, because the loader holds the position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import Cursor, SampleBatch, SampleBatches
from datasvc.loaders.core.cached_splits import follow_splits
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.ledger import Ledger
from datasvc.loaders.core.mixture import Mixture, name_of, splits_of
from datasvc.loaders.core.single_thread import SingleThreadGuard
from datasvc.loaders.core.state import restore_state, save_state
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.profiling.report import Report, make_report
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.loaders.profiling.timed_shards import TimedShards
from datasvc.loaders.profiling.trace import write_trace
from datasvc.order import OrderConfig, Shuffle, Tail, count_steps, parse_tail
from datasvc.shards import ShardStore, Split

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class BatchDecoder(Protocol[B_co]):
    """Turns sample batches into what a loader hands over, several at a time."""

    def feed(self, batch: SampleBatch) -> None:
        """Start on a batch; its views stay valid until `take` has returned it. It may be empty."""

    def take(self) -> B_co:
        """Return what became of the oldest batch that was fed, waiting for it.

        Raises:
            BadSampleError: a sample does not decode; names it. The decoder is not used again.
        """

    def close(self) -> None:
        """Stop, and let go of everything."""


class BatchSource(Protocol):
    """Where a loader's batches come from before they are decoded: shards, or nowhere if that is done elsewhere."""

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on, for ever."""

    def retire(self, batch: SampleBatch) -> None:
        """Say that `batch` and all before it were handed over."""

    def close(self) -> None:
        """Let go of everything; a new `stream` begins anew."""


class Loader(ABC, Generic[B]):
    """Batches of a split in the access order: `for batch in loader` runs to the end of the epoch.

    Args:
        split: of a data-set version; or a mixture of several.
        blob: column that is decoded; None where the decoder reads the batch's parts itself.
        columns: others, of fixed width, that the decoder needs.
        batch_size: samples of this rank per step.
        order: its parameters.
        tail: what becomes of the samples that fill no global batch.
        ranks: which part of each global batch is this process's.
        cache: the node's; None reads a local repository in place, and a remote one into memory.
        prefetch: batches under way while the caller trains; 0: each is decoded in the call for it.
        ledger: folder that records what was handed over, for `datasvc audit`; the same for all ranks and restarts.

    Raises:
        ConfigError: an argument is out of range; no such column; a batch larger than the epoch with "drop"; the
            ledger is one of other data or another order.
        CacheFullError: the cache's budget is below the window that the order needs; says the number.
    """

    def __init__(
        self,
        split: Split | Mixture,
        *,
        blob: str | None,
        columns: Sequence[str],
        batch_size: int,
        order: OrderConfig,
        tail: Tail,
        ranks: DataRanks,
        cache: Cache | None,
        prefetch: int,
        ledger: Path | str | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size)
        if prefetch < 0:
            raise ConfigError(f"prefetch is {prefetch}; expected at least 0")
        self.split = split
        self.batch_size = batch_size
        self.order = order
        self.tail: Tail = tail
        self.ranks = ranks
        self.stopwatch = StepProfiler()
        self._prefetch = prefetch
        self._check_lengths()
        # A batch that begins before is a whole one.
        self._last_whole = len(split) - self._global_batch + 1
        self._followed = (
            []
            if cache is None
            else follow_splits(split, order, cache, ranks, global_batch=self._global_batch, prefetch=prefetch)
        )
        stores: Sequence[ShardStore] = self._followed or [each.origin for each in splits_of(split)]
        self._batches = SampleBatches(
            split,
            [TimedShards(store, self.stopwatch) for store in stores],
            order,
            batch_size=batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            tail=tail,
            blob=blob,
            columns=tuple(columns),
        )
        self._source: BatchSource = self._batches
        self._cursor = Cursor(0, 0)
        self._decoder: BatchDecoder[B] | None = None
        self._stream: Iterator[SampleBatch] | None = None
        self._under_way: deque[SampleBatch] = deque()
        self._num_decoding = 0  # of these, those with samples
        self._alone = SingleThreadGuard()
        self._ledger = None if ledger is None else self._make_ledger(ledger)

    @abstractmethod
    def _make_decoder(self) -> BatchDecoder[B]:
        """Return a new decoder, for at most `prefetch` batches with samples at a time, and one without prefetch."""

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return count_steps(0, len(self.split), self._global_batch, self.tail)

    @property
    def epoch(self) -> int:
        """The epoch that a new `for` serves the rest of, counted from 0.

        Inside the loop's last batch that rest is empty: a `for` from there yields nothing and ends the epoch.
        """
        return self._cursor.epoch

    @property
    def progress(self) -> float:
        """Epochs served so far, with the share of the current one: for schedules that outlive a resize."""
        return self._cursor.epoch + self._cursor.position / len(self.split)

    @property
    def steps_left(self) -> int:
        """Steps from here to the end of the epoch."""
        return count_steps(self._cursor.position, len(self.split), self._global_batch, self.tail)

    def __iter__(self) -> Iterator[B]:
        """Yield the rest of the epoch.

        Raises:
            BadSampleError: a sample does not decode; names it. The state still stands before its batch.
            ConfigError: used in a forked process, or from two threads at once.
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: from the cache or the repository.
        """
        epoch = self._cursor.epoch
        try:
            # Counting steps takes longer than to see that one fills a batch.
            while self._cursor.epoch == epoch and (self._cursor.position < self._last_whole or self.steps_left):
                batch, self._cursor = self._next()
                yield batch
        finally:
            self.stopwatch.pause()
        if self._cursor.epoch == epoch:
            if self._ledger is not None:
                with self._alone:
                    self._ledger.end_epoch(epoch, self._cursor.position)
            self._cursor = Cursor(epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands after the batches handed over so far, as JSON values."""
        return save_state(self.split, self.order, self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, saved at any world size, batch size, cache or device.

        Raises:
            ConfigError: not a state, or one of a later format.
            StateMismatchError: the state belongs to another version, mixture or order; says both.
        """
        wanted = restore_state(state, self.split, self.order)
        with self._alone:
            self._discard()
            self._cursor = wanted
            if self._ledger is not None:
                self._ledger.begin(wanted.epoch, wanted.position)

    def report(self) -> Report:
        """Return where the time of the steps went, and what limits the run: since `restart_report`, up to now."""
        return make_report(self.stopwatch, self._means())

    def restart_report(self) -> None:
        """Let `report` begin anew."""
        self.stopwatch.restart()

    def write_trace(self, path: str | Path) -> None:
        """Write the last steps, stage by stage and thread by thread, as a Chrome trace: for Perfetto.

        Raises:
            ConfigError: the file cannot be written.
        """
        names = " + ".join(split.dataset for split in splits_of(self.split))
        write_trace(path, self.stopwatch.spans(), process_name=f"{names}, rank {self.ranks.rank}")

    def close(self) -> None:
        """Release the shards and the decoder. The loader starts anew, from where it stands, when used again.

        Raises ConfigError: another thread uses it.
        """
        if self._alone.is_foreign:
            return  # a child closes nothing of its parent's
        with self._alone:
            self._discard()
            for followed in self._followed:
                followed.close()
            if self._ledger is not None:
                self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.ranks.world_size

    def _bad_samples(self, finished: B) -> Collection[int]:  # noqa: ARG002 - for loaders whose samples may be bad
        """Return which samples of a batch did not decode and were masked, as indices in it."""
        return ()

    def _make_ledger(self, folder: Path | str) -> Ledger:
        state = save_state(self.split, self.order, self._cursor)
        return Ledger(
            folder,
            order={name: value for name, value in state.items() if name not in {"epoch", "position"}},
            source=" + ".join(map(name_of, splits_of(self.split))),
            num_samples=len(self.split),
            ranks=self.ranks,
            batch_size=self.batch_size,
            tail=self.tail,
        )

    def _means(self) -> Resources:
        """Return what this loader has to work with, for the words of a verdict."""
        return Resources(prefetch=self._prefetch, has_cache=bool(self._followed))

    def _next(self) -> tuple[B, Cursor]:
        """Return the next batch and where the run stands after it, and start decoding one more."""
        with self._alone, self.stopwatch.step() as timer:
            if self._under_way and self._under_way[0].before != self._cursor:
                self._discard()  # an interrupt fell between the last batch and the cursor
            try:
                self._fill(max(1, self._prefetch))
                assert self._decoder is not None
                with self.stopwatch.stage(Stage.DECODE):
                    finished = self._decoder.take()
                batch = self._under_way.popleft()
                timer.num_samples = len(batch.positions)
                self._num_decoding -= timer.num_samples > 0
                self._fill(self._prefetch)
                self._source.retire(batch)
                if self._ledger is not None:  # before the cursor moves: no state is ahead of the ledger
                    with self.stopwatch.stage(Stage.LEDGER):
                        self._ledger.write(batch, self._bad_samples(finished))
            except BaseException:
                # Ctrl-C or a failing store, anywhere in between: start anew from the cursor, which has not moved.
                self._discard()
                raise
        return finished, batch.after

    def _fill(self, num_batches: int) -> None:
        """Start decoding until so many batches are under way; empty ones cost nothing and do not count."""
        if self._decoder is None:
            with self.stopwatch.stage(Stage.START):
                self._decoder = self._make_decoder()
        if self._stream is None:
            self._stream = self._source.stream(self._cursor)
        while self._num_decoding < num_batches:
            with self.stopwatch.stage(Stage.READ):
                batch = next(self._stream)
            with self.stopwatch.stage(Stage.DECODE):
                self._decoder.feed(batch)
            self._under_way.append(batch)
            self._num_decoding += len(batch.positions) > 0

    def _discard(self) -> None:
        """Drop what was prefetched: it belongs to a position that is no longer wanted."""
        decoder, self._decoder, self._stream = self._decoder, None, None
        self._under_way.clear()
        self._num_decoding = 0
        if decoder is not None:
            decoder.close()
        self._source.close()

    def _check_lengths(self) -> None:
        world_size = self.ranks.world_size
        if len(self.split) < world_size:
            raise ConfigError(f"{self.split!r} has fewer samples than there are ranks: {world_size}")
        if not len(self):
            raise ConfigError(
                f"{self.split!r} gives no full batch of {self.batch_size} x {world_size} ranks with "
                "tail='drop'; use smaller batches, or tail='pad'"
            )


def choose_shuffle(shuffle: Shuffle | str, *, training: bool) -> Shuffle:
    """Return how samples are shuffled; "auto" is "global" in training, and table order otherwise."""
    wanted: Any = ("global" if training else None) if shuffle == "auto" else shuffle
    return cast("Shuffle", wanted)


def choose_tail(tail: Tail | None, *, training: bool) -> Tail:
    """Return what becomes of the last samples; None is "drop" in training, "pad" otherwise. Raises ConfigError."""
    return parse_tail(tail or ("drop" if training else "pad"))


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError where a number that is given is below 1, by its name."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
