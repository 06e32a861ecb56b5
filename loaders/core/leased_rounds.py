"""Reads one run of positions in each round, in place of this rank's part of each global batch; see `ledger.leases`.

Invariant: the cursor of a loader is the low-water mark of the job. It stays at the start of a round until this rank
has handed over the last batch of its run, and is at the end of the round then. A state that all ranks save after a
round therefore counts exactly the samples before it, and the cache keeps what any rank of the node still needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasvc.cache import Cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.ledger.broken_rounds import PickedStep
from datasvc.ledger.leases import Leases, Round
from datasvc.ledger.strided_range import StridedRange
from datasvc.loaders.core.batches import SampleBatch, SampleBatches
from datasvc.loaders.core.derived_order import follow_splits
from datasvc.loaders.core.locations import locate_steps
from datasvc.loaders.core.mixture import Mixture, splits_of
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.timed_shards import TimedShards
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.order import OrderConfig, Step, Tail, plan_step
from datasvc.shards import ShardStore, Split

_STEPS_PER_CALL = 64


@dataclass(frozen=True)
class LeasedStep(Step):
    """A batch of this rank, from position `start` to `stop`.

    Attributes:
        round: the round of the batch.
        run: positions of this rank in the round.
    """

    round: Round
    run: range

    @property
    def position(self) -> int:
        """Low-water mark before this batch."""
        return self.round.start

    @property
    def next_position(self) -> int:
        """Low-water mark after this batch."""
        return self.round.stop if self.stop == self.run.stop else self.round.start

    @property
    def strided(self) -> StridedRange:
        """The positions, whose windows cover the round without a gap: the ledger joins them over rounds."""
        start = self.round.start if self.start == self.run.start else self.start
        stop = self.round.stop if self.stop == self.run.stop else self.stop
        period = self.round.stop - self.round.start
        return StridedRange(start, stop, period, self.run.start % period, len(self.run))


class RoundQueue:
    """The rounds that a loader is to read, from the one in progress on, and this rank's place in it.

    Args:
        num_samples: samples of an epoch.
        batch_size: samples of this rank per step.
        ranks: data rank of this process.
        tail: treatment of samples that do not fill a global batch: a round of one step that is divided as without
            leases, or none if they are dropped.
        max_steps: largest number of global batches of a round.

    Attributes:
        ended: the round that the last batch handed over has ended for this rank; None: it has not ended one.
    """

    def __init__(self, num_samples: int, batch_size: int, ranks: DataRanks, tail: Tail, *, max_steps: int) -> None:
        self.num_samples, self.batch_size, self.ranks, self.tail = num_samples, batch_size, ranks, tail
        self.max_steps = max_steps
        self.begin(Cursor(0, 0))

    def begin(self, cursor: Cursor) -> None:
        """Forget all rounds. The next one that is added starts at the cursor."""
        self._end = cursor  # of the last round
        self._rounds: deque[tuple[int, Round, Sequence[Step]]] = deque()  # with the epoch, and the steps of this rank
        self._number = 0  # of the first of them
        self._num_handed = 0  # its batches that this rank has handed over
        self.ended: Round | None = None

    def add(self, leases: Leases) -> Round:
        """Add the next round, also of the next epoch, and return it.

        Every rank adds the same rounds. Add the first before the first batch, and each before the one before it
        ends, so that the loader prefetches without a pause.
        """
        epoch, position = self._end
        if plan_step(position, self.num_samples, self._global_batch, self.tail) is None:
            epoch, position = epoch + 1, 0
        found = leases.next_round(position, self.num_samples, self.batch_size, self.ranks.world_size)
        if found is None:  # the samples that fill no global batch
            step = plan_step(position, self.num_samples, self._global_batch, self.tail)
            assert step is not None, "an epoch has a step, see `check_num_steps`"
            shares = (1,) * len(leases.shares)
            found = Round(position, self.num_samples, shares, self.batch_size, self.ranks.world_size)
            self._rounds.append((epoch, found, [step]))
        else:
            batches = [found.batch_of(self.ranks.rank, number) for number in range(found.share_of(self.ranks.rank))]
            run = range(batches[0].start, batches[-1].stop)
            steps = [LeasedStep(each.start, each.stop, self.num_samples, found, run) for each in batches]
            self._rounds.append((epoch, found, steps))
        self._end = Cursor(epoch, found.stop)
        return found

    def hand_over(self) -> None:
        """Count a batch that this rank has handed over."""
        _, first, steps = self._rounds[0]
        self._num_handed += 1
        self.ended = None
        if self._num_handed == len(steps):
            self._rounds.popleft()
            self._number, self._num_handed, self.ended = self._number + 1, 0, first

    @property
    def num_ahead(self) -> float:
        """Samples of the round in progress in proportion to the batches of this rank, for schedules by progress."""
        if not self._num_handed:
            return 0.0
        _, first, steps = self._rounds[0]
        return (first.stop - first.start) * self._num_handed / len(steps)

    def steps(self) -> Iterator[tuple[int, Sequence[Step]] | None]:
        """Yield the epoch and some steps that this rank is to read next, without end; None: no further is known."""
        number, start = self._number, self._num_handed
        while True:
            if number - self._number == len(self._rounds):
                yield None
                continue
            epoch, _, steps = self._rounds[number - self._number]
            for first in range(start, len(steps), _STEPS_PER_CALL):
                yield epoch, steps[first : first + _STEPS_PER_CALL]
            number, start = number + 1, 0

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.ranks.world_size


class LeasedBatches(SampleBatches):
    """One rank's batches of the rounds that a `RoundQueue` has; for the other arguments see the base class."""

    def __init__(self, *arguments: Any, rounds: RoundQueue, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rounds = rounds

    def stream(self, cursor: Cursor, picked: Sequence[PickedStep] = ()) -> Iterator[SampleBatch | None]:
        """Yield the batches of the known rounds from the loader's place on; None while no further round is known."""
        assert not picked, "rounds with leases are not continued without a replica"
        self._advance(cursor)
        for found in self._rounds.steps():
            if found is None:
                yield None
                continue
            epoch, steps = found
            # A batch of a run is all of this rank's. One that fills no global batch is divided among the ranks.
            is_leased = isinstance(steps[0], LeasedStep)
            rank, world_size = (0, 1) if is_leased else (self._rounds.ranks.rank, self._rounds.ranks.world_size)
            for located in locate_steps(self._locator, epoch, steps, rank=rank, world_size=world_size):
                yield self._read(epoch, located)


def open_batches(
    samples: Split | Mixture,
    order: OrderConfig,
    cache: Cache | str | Path | None,
    *,
    at_once: BatchesAtOnce,
    rank: int,
    rounds: RoundQueue | None,
    profiler: StepProfiler,
    **options: Any,
) -> tuple[list[PrefetchingShardStore], SampleBatches]:
    """Return the shard stores that use the cache ([] without a cache), and the batches of a loader.

    Args:
        samples: split or mixture of the loader.
        order: its order.
        cache: its cache.
        at_once: sizes of the loader, and batches in progress on all ranks.
        rank: data rank of this process.
        rounds: rounds to read; None: global batches.
        profiler: times the reads of shards.
        options: see `SampleBatches`.

    Raises:
        CacheFullError, ConfigError, CorruptDataError, UnavailableError: see `follow_splits` and `SampleBatches`.
    """
    cached: list[PrefetchingShardStore] = []
    world_size = at_once.num_ranks
    if cache is not None:
        ranks = DataRanks(rank, world_size)
        # A run has positions of all lanes.
        cached = follow_splits(samples, order, cache, ranks, batches=at_once, has_lanes=rounds is None)
    stores: Sequence[ShardStore] = cached or [split.origin for split in splits_of(samples)]
    make = SampleBatches if rounds is None else partial(LeasedBatches, rounds=rounds)
    return cached, make(
        samples,
        [TimedShards(store, profiler) for store in stores],
        order,
        batch_size=at_once.batch_size,
        rank=rank,
        world_size=world_size,
        tail=at_once.tail,
        **options,
    )
