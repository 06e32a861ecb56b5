"""Base class of all loaders: access order, data rank, batches in progress, and the cursor of the run.

Invariant: the cursor counts batches handed over, never prefetched ones. Each kind of loader has its own
`BatchDecoder`, which converts samples to batches. A decoder can be dropped at any moment, because a new one
starts at the cursor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from datasvc.cache import Cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import ConfigError
from datasvc.ledger.broken_rounds import RestOfRound, RestQueue
from datasvc.ledger.masked import NOTHING_MASKED, Masked, masks_of, with_masks
from datasvc.loaders.core.arguments import check_num_steps, check_sizes, choose_order
from datasvc.loaders.core.batch import Batch
from datasvc.loaders.core.batches import BatchDecoder, Cursor, SampleBatch, SampleBatches
from datasvc.loaders.core.derived_order import derive_windowed, order_of_state
from datasvc.loaders.core.leased_rounds import RoundQueue, open_batches
from datasvc.loaders.core.ledger import Ledger, open_ledger
from datasvc.loaders.core.mixture import Mixture, purged_samples, splits_of
from datasvc.loaders.core.parts import PartReader
from datasvc.loaders.core.sample_keys import BatchPlaces, SampleKeys
from datasvc.loaders.core.state import MisuseGuard, SingleThreadGuard, restore_state, save_state
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.profiling.report import Report, make_report
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage, write_trace
from datasvc.loaders.profiling.tunable import TunableLoader
from datasvc.loaders.ranks.data_ranks import DataRanks, check_group, choose_data_ranks
from datasvc.order import OrderConfig, Shuffle, Tail, count_steps, parse_tail
from datasvc.shards import Split

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from datasvc.ledger.signals import RecordedBatch, SignalWriter

B = TypeVar("B")


class Loader(PartReader[B], TunableLoader, MisuseGuard):
    """Batches of a split in the access order: `for batch in loader` runs to the end of the epoch.

    `ImageLoader`, `TokenLoader`, `AudioLoader` and `VideoLoader` derive from this class.

    Args:
        split: a split of a data-set version, or a mixture of several splits.
        blob: column to decode; None if the decoder reads the parts of a batch itself.
        columns: other columns of fixed width that the decoder needs.
        batch_size: samples of this rank per step.
        training: True: shuffled order, full batches only; False: order of the shard table, last batch padded, and
            each loop starts at the first sample.
        cache: cache of the node, or the folder of a cache whose budget is set; None: read a local repository in
            place, and a remote one into memory, or large videos by ranges.
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
        masked: samples that keep their positions but are False in `batch.mask` and zero in the inputs; the same on
            all ranks. The state has them, and a loaded state adds its own.

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
        masked: Masked | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size)
        if prefetch < 0:
            raise ConfigError(f"prefetch is {prefetch}; expected at least 0")
        if (blob or columns) and any(part.packs is not None for part in splits_of(split)):
            raise ConfigError(f"{split!r} is packed, which only a TokenLoader reads; give the split without packs")
        self.split, self.batch_size, self.training = split, batch_size, training
        self.tail = parse_tail(tail or ("drop" if training else "pad"))
        self._ranks_are_found = ranks is None
        self.ranks = ranks = choose_data_ranks(ranks)
        self.profiler = StepProfiler()
        self._prefetch = prefetch
        self._rounds: RoundQueue | RestQueue | None = None
        check_num_steps(split, batch_size=batch_size, world_size=ranks.world_size, tail=self.tail)
        # A step that starts before this position is a full global batch.
        self._full_until = split.num_positions - self._global_batch + 1
        # Whether lanes and block are derived below; then `load_state_dict` may replace them.
        self._is_derived = order is None and shuffle == "windowed"
        self.order = choose_order(
            order,
            seed=seed,
            shuffle=shuffle,
            training=training,
            derive=lambda order_seed: derive_windowed(split, cache, ranks, self._batches_at_once, seed=order_seed),
        )
        self._cache, self._columns = cache, {"blob": blob, "columns": tuple(columns)}
        self._masked_argument = self._masked = (masked or NOTHING_MASKED) | purged_samples(split)
        self._cached_stores, self._batches = self._open(self.order)
        self._keys = SampleKeys(splits_of(split))

        self._cursor = Cursor(0, 0)
        self._num_loads = 0  # of states; a loop compares it, to continue at the state that was loaded inside of it
        self._is_loaded = False  # whether no batch was handed over since a state was loaded
        self._loop: object | None = None  # identifies the iterator that yielded the last batch; None: no loop runs
        self._decoder: BatchDecoder[B] | None = None
        self._stream: Iterator[SampleBatch | None] | None = None
        self._in_progress: deque[SampleBatch] = deque()
        self._num_decoding = 0  # batches in progress that have samples
        self._thread_guard = SingleThreadGuard()
        self.signals: SignalWriter | None = None
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

    @abstractmethod
    def _make_decoder(self) -> BatchDecoder[B]:
        """Return a new decoder for up to `prefetch` batches with samples at a time, at least one."""

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return count_steps(0, self.split.num_positions, self._global_batch, self.tail)

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
        ahead = 0.0 if self._rounds is None else self._rounds.num_ahead
        return self._reported_cursor.epoch + (self._reported_cursor.position + ahead) / self.split.num_positions

    @property
    def cursor(self) -> Cursor:
        """Epoch and position of `state_dict`: all batches before it were handed over."""
        return self._cursor

    @property
    def steps_left(self) -> int:
        """Number of steps that are left in the current epoch."""
        return self._count_steps_left(self._reported_cursor)

    @property
    def masked(self) -> Masked:
        """The samples that are masked: those of the argument and of the state that was loaded, and purged ones."""
        return self._masked

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
        return with_masks(save_state(self.split, self.order, self._cursor), self._masked)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was saved with any world size, batch size, cache or device.

        Raises:
            ConfigError: `state` is no loader state, or has a later format.
            StateMismatchError: the state belongs to another version, mixture or order; the message has both.
        """
        # Check the state before dropping prefetched batches: after an error the loader continues as before.
        order = order_of_state(state, self.order) if self._is_derived else self.order
        cursor = restore_state(state, self.split, order)
        masked = masks_of(state) | self._masked_argument.since(cursor)
        opened = None if order == self.order else self._open(order)
        with self._thread_guard:
            self._discard()
            self._loop, self._is_loaded = None, True
            self._num_loads += 1
            if opened is not None:
                self._change_order(order, *opened)
            if masked != self._masked:
                self._change_masks(masked)
            self._begin(cursor)

    def read_in_rounds(self, max_steps: int) -> RoundQueue:
        """Read one run of positions in each round from now on; return the rounds, which the caller adds.

        Every rank must call this, at the same position, and add the same rounds, of up to `max_steps` global batches.
        `load_state_dict` forgets the rounds. For errors see the class.
        """
        with self._thread_guard:
            self._discard()
            sizes = (self.split.num_positions, self.batch_size, self.ranks, self.tail)
            self._rounds = queue = RoundQueue(*sizes, max_steps=max_steps)
            self._change_order(self.order, *self._open(self.order))
            self._begin(self._cursor)
            return queue

    def read_rest(self, rest: RestOfRound) -> None:
        """Read the rest of the round that begins at the cursor, which stays there to its end, then what follows."""
        with self._thread_guard:
            self._discard()
            self._open_ledger()
            if self._ledger is not None:
                self._ledger.write_carried(self._cursor.epoch, rest)
            self._rounds = RestQueue(rest, self.split.num_positions)

    def _move(self, cursor: Cursor) -> None:
        """Continue at a cursor, and drop the batches in progress, unless the loader is there already."""
        if cursor != self._cursor:
            with self._thread_guard:
                self._discard()
                self._begin(cursor)

    def _begin(self, cursor: Cursor) -> None:
        self._cursor = cursor
        if self._rounds is not None:
            self._rounds.begin(cursor)
        if self._ledger is not None:
            self._ledger.begin(*cursor)

    @property
    def settings(self) -> dict[str, Any] | None:
        """Settings that make batches of samples, as JSON values, for `batch_at`; None: it cannot make them."""
        return None

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

    def record(self, batch: B, values: Tensor | npt.NDArray[Any]) -> None:
        """Keep a number of each sample of a batch, such as its loss, in the signal of the run.

        Args:
            batch: batch of this loader.
            values: `[n]`, one number per sample.

        Raises:
            ConfigError: the loader records no signal: call `repo.runs.record` first; or see `SignalWriter.record`.
        """
        if self.signals is None:
            raise ConfigError("this loader has no signal: call repo.runs.record(run, loader) first")
        self.signals.record(cast("RecordedBatch", batch), values)

    def close(self) -> None:
        """Release the shards and the decoder. The loader may be used again and continues from its cursor.

        Raises:
            ConfigError: another thread uses the loader.
            UnavailableError: the store does not take the values that were recorded.
        """
        if self._thread_guard.is_foreign:
            return  # a forked child must not close its parent's resources
        with self._thread_guard:
            if self.signals is not None:
                self.signals.flush()
            self._discard()
            self._close_stores_and_ledger()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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

    def _end_epoch(self) -> None:
        """Move the cursor to the next epoch, and record the samples that this one drops."""
        epoch, position = self._cursor
        if self._ledger is not None:
            with self._thread_guard:
                self._ledger.end_epoch(epoch, position)
        self._cursor = Cursor(epoch + 1, 0)

    @property
    def _batches_at_once(self) -> BatchesAtOnce:
        # A rank may be at the end of a round, and prefetch in the next one, before all have left its start.
        of_rounds = 0 if self._rounds is None else 2 * self._rounds.max_steps
        return BatchesAtOnce(self.batch_size, self.ranks.world_size, self._prefetch + of_rounds, self.tail)

    def _deliver(self, decoded: B) -> B:
        """Return a decoded batch as the caller gets it; a subclass may copy it, such as to page-locked memory."""
        return decoded

    def _bad_samples(self, finished: B) -> Collection[int]:  # noqa: ARG002 - for loaders whose samples may be bad
        """Return the indices, in a batch, of samples that did not decode and were masked."""
        return ()

    def _open(self, order: OrderConfig) -> tuple[list[PrefetchingShardStore], SampleBatches]:
        """Return the shard stores that use the cache ([] without a cache), and the batches in the given order."""
        return open_batches(
            self.split,
            order,
            self._cache,
            at_once=self._batches_at_once,
            rank=self.ranks.rank,
            rounds=self._rounds if isinstance(self._rounds, RoundQueue) else None,
            profiler=self.profiler,
            masked=self._masked,
            **self._columns,
        )

    def _change_masks(self, masked: Masked) -> None:
        """Mask other samples from now on. No batch may be in progress."""
        self._masked = masked
        self._batches.mask(masked)

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
        folder, sizes = self._ledger_folder, {"batch_size": self.batch_size, "tail": self.tail}
        self._ledger = open_ledger(folder, self.split, self.order, self._cursor, ranks=self.ranks, **sizes)

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
                if isinstance(finished, Batch):
                    # Not a replacement: batches are frozen for their users, and this one has none yet.
                    places = BatchPlaces(self._keys, *batch.places())
                    object.__setattr__(finished, "places", places)
                timer.num_samples = len(batch.positions)
                self._num_decoding -= timer.num_samples > 0  # `_fill` did not count empty batches
                self._fill(self._prefetch)  # decoders work on these batches while the caller trains
                self._batches.retire(batch)
                # Write to the ledger before the cursor moves, so that no state is ahead of the ledger.
                self._open_ledger()  # it is closed if a state of another order was loaded inside the loop
                if self._ledger is not None:
                    # Creating a file syncs it, once, which is no sign of a slow disk.
                    with self.profiler.stage(Stage.START):
                        self._ledger.prepare()
                    with self.profiler.stage(Stage.LEDGER):
                        self._ledger.write(batch, self._bad_samples(finished))
                if self._rounds is not None:
                    self._rounds.hand_over()
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
            picked = self._rounds.left if isinstance(self._rounds, RestQueue) else ()
            self._stream = self._batches.stream(self._cursor, tuple(picked))
        while self._num_decoding < num_batches:
            with self.profiler.stage(Stage.READ):
                batch = next(self._stream)
            if batch is None:  # the next round is not known yet
                return
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
