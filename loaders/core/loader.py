"""Base class of all loaders: access order, data rank, batches in progress, and the cursor of the run.

Invariant: the cursor counts batches handed over, never prefetched ones. Each kind of loader has its own
`BatchDecoder`, which converts samples to batches. A decoder can be dropped at any moment, because a new one
starts at the cursor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, Protocol, Self, TypeVar

from datasvc.cache import Cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import Cursor, SampleBatch, SampleBatches
from datasvc.loaders.core.cached_splits import follow_splits
from datasvc.loaders.core.derived_order import derive_windowed, order_of_state
from datasvc.loaders.core.ledger import Ledger
from datasvc.loaders.core.mixture import Mixture, name_of, splits_of
from datasvc.loaders.core.state import SingleThreadGuard, restore_state, save_state
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.profiling.report import Report, make_report
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.loaders.profiling.timed_shards import TimedShards
from datasvc.loaders.profiling.trace import write_trace
from datasvc.loaders.ranks.data_ranks import DataRanks, check_group, choose_data_ranks
from datasvc.order import OrderConfig, Shuffle, Tail, count_steps, parse_tail
from datasvc.printable import count_text
from datasvc.shards import ShardStore, Split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The batches and the cursor depend on these attributes, so they are set once.
_FIXED: Final = frozenset({"split", "batch_size", "training", "tail", "ranks"})
B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class BatchDecoder(Protocol[B_co]):
    """Converts sample batches to the loader's batches, several at a time, in the order in which `feed` gets them."""

    def feed(self, batch: SampleBatch) -> None:
        """Start decoding a batch, which may be empty. Its views of shards stay valid until `take` has returned it."""

    def take(self) -> B_co:
        """Wait for the oldest batch that was fed, and return it decoded.

        Raises:
            BadSampleError: a sample does not decode; the message names it. The caller must then close the decoder.
        """

    def close(self) -> None:
        """Stop, and release all resources."""


class Loader(ABC, Generic[B]):
    """Batches of a split in the access order: `for batch in loader` runs to the end of the epoch.

    `ImageLoader` and `TokenLoader` derive from this class.

    Args:
        split: a split of a data-set version, or a mixture of several splits.
        blob: column to decode; None if the decoder reads the parts of a batch itself.
        columns: other columns of fixed width that the decoder needs.
        batch_size: samples of this rank per step.
        training: True: shuffled order, full batches only; False: order of the shard table, last batch padded, and
            each loop starts at the first sample.
        cache: cache of the node, or the folder of a cache whose budget is set; None: read a local repository in
            place, and a remote one into memory.
        seed: seed of the order and of all random changes, 0 <= seed < 2**64; default 0.
        shuffle: "global"; None (order of the shard table); "windowed", with lanes and block derived from the sizes of
            the shards and of the cache; or "auto": "global" in training, None otherwise. After `load_state_dict`, a
            windowed order has the lanes and the block of the state.
        order: all parameters of the order, in place of `seed` and `shuffle`.
        ranks: data-parallel rank of this process, or a `torch.distributed` device mesh of one axis, such as
            `mesh["data"]`. Tensor- and pipeline-parallel peers give the same rank and get the same batches. Default:
            the rank in the process group that is initialised (torch.distributed, `datasvc.trainer`, Horovod, JAX, Ray
            Train). `DataRanks()` reads all samples in this process.
        tail: treatment of the last samples if they do not fill a global batch: "drop", "short" or "pad" (masked);
            default "drop" in training, "pad" otherwise. With "short", some ranks may get an empty last batch.
        prefetch: batches in progress while the caller trains; 0: each batch is made in the call that returns it.
        ledger: folder of the ledger of batches handed over, for `datasvc audit`; the same for all ranks and restarts.

    Raises:
        ConfigError: an argument is out of range; `order` is given together with `seed` or `shuffle`; the split lacks
            a column; a batch is larger than the epoch with `tail="drop"`; the ledger belongs to other data or
            another order; a launcher started several processes, and there are neither `ranks` nor a process group.
        CacheFullError: the cache's budget cannot hold the shards that the order needs at once; the message has both
            sizes, their parts, and the largest values that fit.
    """

    def __init__(
        self,
        split: Split | Mixture,
        *,
        blob: str | None,
        columns: Sequence[str],
        batch_size: int,
        training: bool,
        cache: Cache | str | Path | None = None,
        seed: int | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        order: OrderConfig | None = None,
        ranks: DataRanks | DeviceMesh | None = None,
        tail: Tail | None = None,
        prefetch: int = 2,
        ledger: Path | str | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size)
        if prefetch < 0:
            raise ConfigError(f"prefetch is {prefetch}; expected at least 0")
        self.split = split
        self.batch_size = batch_size
        self.training = training
        self.tail = parse_tail(tail or ("drop" if training else "pad"))
        self._ranks_are_found = ranks is None
        self.ranks = ranks = choose_data_ranks(ranks)
        self.profiler = StepProfiler()
        self._prefetch = prefetch
        check_num_steps(split, batch_size=batch_size, world_size=ranks.world_size, tail=self.tail)
        # A step that starts before this position is a full global batch.
        self._full_until = len(split) - self._global_batch + 1
        # Whether lanes and block are derived below; then `load_state_dict` may replace them.
        self._is_derived = order is None and shuffle == "windowed"
        self.order = choose_order(
            order,
            seed=seed,
            shuffle=shuffle,
            training=training,
            derive=lambda order_seed: derive_windowed(split, cache, ranks, self._batches_at_once, seed=order_seed),
        )
        self._cache, self._blob, self._columns = cache, blob, tuple(columns)
        self._cached_stores, self._batches = self._open(self.order)

        self._cursor = Cursor(0, 0)
        self._num_loads = 0  # of states; a loop compares it, to continue at the state that was loaded inside of it
        self._is_loaded = False  # whether no batch was handed over since a state was loaded
        self._loop: object | None = None  # identifies the iterator that yielded the last batch; None: no loop runs
        self._decoder: BatchDecoder[B] | None = None
        self._stream: Iterator[SampleBatch] | None = None
        self._in_progress: deque[SampleBatch] = deque()
        self._num_decoding = 0  # batches in progress that have samples
        self._thread_guard = SingleThreadGuard()
        self._ledger_folder = ledger
        self._ledger: Ledger | None = None
        # `load_state_dict` may replace a derived order by that of the state, which an existing ledger has too. So the
        # ledger of a derived order is opened in the first loop.
        if not self._is_derived:
            self._open_ledger()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.split!r}, batch_size={self.batch_size}, training={self.training}, "
            f"data rank {self.ranks.rank} of {self.ranks.world_size}, epoch {self.epoch})"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and name in self.__dict__:
            raise ConfigError(
                f"{name} of a loader cannot change: create another loader with {name}={value!r}, which can load the "
                "state of this one"
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError(
            f"this {type(self).__name__} makes batches and has no samples by number: iterate over it, without a "
            "DataLoader; for a DataLoader use datasvc.loaders.torch.Dataset"
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"this {type(self).__name__} has threads and open files, so it cannot be copied, pickled or sent to "
            "another process: create one there, which can load the state_dict() of this one"
        )

    @abstractmethod
    def _make_decoder(self) -> BatchDecoder[B]:
        """Return a new decoder for up to `prefetch` batches with samples at a time, at least one."""

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return count_steps(0, len(self.split), self._global_batch, self.tail)

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0. A new `for` loop serves its remaining batches.

        It changes when the loop over an epoch ends, not at the last batch inside the loop. After a state from the end
        of an epoch is loaded, it is the next epoch.
        """
        return self._reported_cursor.epoch

    @property
    def progress(self) -> float:
        """Epochs served so far, with a fraction for the current one. Batch size and world size do not matter."""
        return self._reported_cursor.epoch + self._reported_cursor.position / len(self.split)

    @property
    def steps_left(self) -> int:
        """Number of steps that are left in the current epoch."""
        return self._count_steps_left(self._reported_cursor)

    def __iter__(self) -> Iterator[B]:
        """Yield the remaining batches of the epoch; if none remain, those of the next epoch.

        With `training=False`, yield all batches of the epoch, unless a state was loaded since the last batch:
        frameworks leave the loops of an evaluation early, and then expect the same samples again. Such iterators do
        not move each other.

        Raises:
            BadSampleError: a sample does not decode; the message names it. The cursor is still before its batch.
            ConfigError: the loader is used in a forked process, or by two threads at once; or it was created without
                `ranks` before the process group.
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: the cache or the repository fails.
        """
        if self._ranks_are_found:
            check_group(self.ranks)
        self._open_ledger()
        # No step is left after a `break` at the last batch, or after a state from the end of an epoch was loaded.
        if not self._count_steps_left(self._cursor):
            self._end_epoch()
        if self._restarts:
            self._move(Cursor(self._cursor.epoch, 0))
        cursor, num_loads = self._cursor, self._num_loads
        epoch = cursor.epoch
        loop = object()
        try:
            # The first test is cheap; steps are counted only after the last full batch of the epoch.
            while cursor.epoch == epoch and (cursor.position < self._full_until or self._count_steps_left(cursor)):
                if not self.training:
                    self._move(cursor)  # another iterator may have moved the loader
                batch, self._cursor = self._next()
                self._loop, self._is_loaded = loop, False
                cursor = self._cursor
                yield batch
                if self.training or num_loads != self._num_loads:
                    cursor, num_loads = self._cursor, self._num_loads
        finally:
            self.profiler.pause()
            if self._loop is loop:  # otherwise a later iterator is already in use
                self._loop = None
        if cursor.epoch == epoch:  # no state of another epoch was loaded inside the loop
            self._move(cursor)
            self._end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the batches handed over so far, as JSON values."""
        return save_state(self.split, self.order, self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was saved with any world size, batch size, cache or device.

        Raises:
            ConfigError: `state` is no loader state, or has a later format.
            StateMismatchError: the state belongs to another version, mixture or order; the message has both.
        """
        # Check the state before dropping prefetched batches: after an error the loader continues as before.
        order = order_of_state(state, self.order) if self._is_derived else self.order
        cursor = restore_state(state, self.split, order)
        opened = None if order == self.order else self._open(order)
        with self._thread_guard:
            self._discard()
            self._loop, self._is_loaded = None, True
            self._num_loads += 1
            if opened is not None:
                self._change_order(order, *opened)
            self._begin(cursor)

    def _move(self, cursor: Cursor) -> None:
        """Continue at a cursor, and drop the batches in progress, unless the loader is there already."""
        if cursor != self._cursor:
            with self._thread_guard:
                self._discard()
                self._begin(cursor)

    def _begin(self, cursor: Cursor) -> None:
        self._cursor = cursor
        if self._ledger is not None:
            self._ledger.begin(*cursor)

    def report(self) -> Report:
        """Return the time per stage and the bottleneck of the steps since `restart_report`."""
        return make_report(self.profiler, self._resources())

    def restart_report(self) -> None:
        """Forget the steps so far: `report` then covers only later steps."""
        self.profiler.restart()

    def write_trace(self, path: str | Path) -> None:
        """Write the stages of the last steps, thread by thread, as a Chrome trace for Perfetto.

        Raises:
            ConfigError: the file cannot be written.
        """
        names = " + ".join(split.dataset for split in splits_of(self.split))
        write_trace(path, self.profiler.spans(), process_name=f"{names}, rank {self.ranks.rank}")

    def close(self) -> None:
        """Release the shards and the decoder. The loader may be used again and continues from its cursor.

        Raises:
            ConfigError: another thread uses the loader.
        """
        if self._thread_guard.is_foreign:
            return  # a forked child must not close its parent's resources
        with self._thread_guard:
            self._discard()
            self._close_stores_and_ledger()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.ranks.world_size

    @property
    def _reported_cursor(self) -> Cursor:
        """The cursor that callers see: outside of a loop, that at which the next one starts."""
        cursor = self._cursor
        if self._loop is None and not self._count_steps_left(cursor):
            return Cursor(cursor.epoch + 1, 0)
        return Cursor(cursor.epoch, 0) if self._restarts and self._loop is None else cursor

    @property
    def _restarts(self) -> bool:
        """Whether the next loop starts at the first sample of the epoch."""
        return not self.training and not self._is_loaded

    def _count_steps_left(self, cursor: Cursor) -> int:
        return count_steps(cursor.position, len(self.split), self._global_batch, self.tail)

    def _end_epoch(self) -> None:
        """Move the cursor to the next epoch, and record the samples that this one drops."""
        epoch, position = self._cursor
        if self._ledger is not None:
            with self._thread_guard:
                self._ledger.end_epoch(epoch, position)
        self._cursor = Cursor(epoch + 1, 0)

    @property
    def _batches_at_once(self) -> BatchesAtOnce:
        return BatchesAtOnce(self.batch_size, self.ranks.world_size, self._prefetch, self.tail)

    def _deliver(self, decoded: B) -> B:
        """Return a decoded batch as the caller gets it; a subclass may copy it, such as to page-locked memory."""
        return decoded

    def _bad_samples(self, finished: B) -> Collection[int]:  # noqa: ARG002 - for loaders whose samples may be bad
        """Return the indices, in a batch, of samples that did not decode and were masked."""
        return ()

    def _open(self, order: OrderConfig) -> tuple[list[PrefetchingShardStore], SampleBatches]:
        """Return the shard stores that use the cache ([] without a cache), and the batches in the given order."""
        cached = (
            []
            if self._cache is None
            else follow_splits(self.split, order, self._cache, self.ranks, batches=self._batches_at_once)
        )
        stores: Sequence[ShardStore] = cached or [split.origin for split in splits_of(self.split)]
        return cached, SampleBatches(
            self.split,
            [TimedShards(store, self.profiler) for store in stores],
            order,
            batch_size=self.batch_size,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            tail=self.tail,
            blob=self._blob,
            columns=self._columns,
        )

    def _change_order(
        self, order: OrderConfig, cached_stores: list[PrefetchingShardStore], batches: SampleBatches
    ) -> None:
        """Read in another order from now on. No batch may be in progress."""
        self._close_stores_and_ledger()
        self.order, self._cached_stores, self._batches = order, cached_stores, batches
        self._ledger = None  # the next loop opens the ledger again, with the new order

    def _close_stores_and_ledger(self) -> None:
        for store in self._cached_stores:
            store.close()
        if self._ledger is not None:
            self._ledger.close()

    def _open_ledger(self) -> None:
        """Open the ledger if the user gave one and it is not open. Raises ConfigError: it has another order."""
        if self._ledger is not None or self._ledger_folder is None:
            return
        state = save_state(self.split, self.order, self._cursor)
        self._ledger = Ledger(
            self._ledger_folder,
            order={name: value for name, value in state.items() if name not in {"epoch", "position"}},
            source=" + ".join(map(name_of, splits_of(self.split))),
            num_samples=len(self.split),
            ranks=self.ranks,
            batch_size=self.batch_size,
            tail=self.tail,
        )
        self._ledger.begin(*self._cursor)

    def _resources(self) -> Resources:
        """Return the resources of this loader, for the advice of a report."""
        return Resources(prefetch=self._prefetch, has_cache=bool(self._cached_stores))

    def _next(self) -> tuple[B, Cursor]:
        """Return the next batch and the cursor after it, and start decoding one more."""
        with self._thread_guard, self.profiler.step() as timer:
            if self._in_progress and self._in_progress[0].before != self._cursor:
                self._discard()  # an interrupt came after `popleft` and before the cursor moved
            try:
                self._fill(max(1, self._prefetch))  # with `prefetch=0`, this starts the batch to return
                assert self._decoder is not None
                with self.profiler.stage(Stage.DECODE):
                    finished = self._deliver(self._decoder.take())
                batch = self._in_progress.popleft()
                timer.num_samples = len(batch.positions)
                self._num_decoding -= timer.num_samples > 0  # `_fill` did not count empty batches
                self._fill(self._prefetch)  # decoders work on these batches while the caller trains
                self._batches.retire(batch)
                # Write to the ledger before the cursor moves, so that no state is ahead of the ledger.
                if self._ledger is not None:
                    # Creating a file syncs it, once, which is no sign of a slow disk.
                    with self.profiler.stage(Stage.START):
                        self._ledger.prepare()
                    with self.profiler.stage(Stage.LEDGER):
                        self._ledger.write(batch, self._bad_samples(finished))
            except BaseException:
                # After Ctrl-C or an error the state of the decoder is unknown. The next call restarts at the cursor.
                self._discard()
                raise
        return finished, batch.after

    def _fill(self, num_batches: int) -> None:
        """Start decoding until `num_batches` are in progress. Empty batches cost nothing, so they do not count."""
        if self._decoder is None:
            with self.profiler.stage(Stage.START):
                self._decoder = self._make_decoder()
        if self._stream is None:
            self._stream = self._batches.stream(self._cursor)
        while self._num_decoding < num_batches:
            with self.profiler.stage(Stage.READ):
                batch = next(self._stream)
            with self.profiler.stage(Stage.DECODE):
                self._decoder.feed(batch)
            self._in_progress.append(batch)
            self._num_decoding += len(batch.positions) > 0

    def _discard(self) -> None:
        """Drop the decoder and all prefetched batches, and release the shards."""
        decoder, self._decoder, self._stream = self._decoder, None, None
        self._in_progress.clear()
        self._num_decoding = 0
        # Close the decoder before the shards, because its threads read from them.
        if decoder is not None:
            decoder.close()
        self._batches.close()


def choose_order(
    order: OrderConfig | None,
    *,
    seed: int | None,
    shuffle: Shuffle | Literal["auto"],
    training: bool,
    derive: Callable[[int], OrderConfig],
) -> OrderConfig:
    """Return the parameters of a loader's access order; for the arguments see `Loader`.

    `derive` returns the windowed order for a seed. It is called for `shuffle="windowed"` without `order`.

    Raises:
        ConfigError: `order` is given together with `seed` or `shuffle`; a value is out of range.
    """
    if order is not None:
        if seed is not None or shuffle != "auto":
            raise ConfigError(
                f"seed={seed} and shuffle={shuffle!r} are given together with order={order}, which has both; give "
                "them in the OrderConfig only"
            )
        return order
    if shuffle == "windowed":
        return derive(OrderConfig(seed=seed or 0).seed)  # `OrderConfig` checks the seed before the slow `derive`
    chosen = ("global" if training else None) if shuffle == "auto" else shuffle
    return OrderConfig(seed=seed or 0, shuffle=chosen)


def check_num_steps(samples: Split | Mixture, *, batch_size: int, world_size: int, tail: Tail) -> None:
    """Raise ConfigError if there are fewer samples than ranks, or an epoch has no step."""
    if len(samples) < world_size:
        raise ConfigError(f"{samples!r} has fewer samples than there are ranks: {world_size}; use fewer ranks")
    if not count_steps(0, len(samples), batch_size * world_size, tail):
        raise ConfigError(
            f"{samples!r} gives no full batch of {batch_size} x {count_text(world_size, 'rank')} with "
            "tail='drop'; use smaller "
            "batches, or tail='pad'"
        )


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError, with the argument's name, if a number is below 1 or no integer; None is allowed."""
    for name, value in sizes.items():
        if value is not None and not isinstance(value, Integral):
            raise ConfigError(f"{name} is {value!r}; expected an integer")
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
