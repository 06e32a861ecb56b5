"""The `BatchDecoder` of a job in a decode group: gets batches from the other jobs, or decodes them for all jobs.

A step is the place of a batch in the run, a `Cursor`. The folder of the group (`GroupFolder`) has one link for each
step that a job decodes or has decoded, so it shows how far each job is. `Pace` compares this with the job itself.
"""

from __future__ import annotations

import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from datasvc.errors import LagError
from datasvc.loaders.core.batches import BatchDecoder, Cursor, SampleBatch
from datasvc.loaders.decode_sharing.group_folder import GroupFolder, PendingStep
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.printable import count_text

B = TypeVar("B")

# A job that has used its waits for slow jobs (`DecodeGroup.patience`) gets one more after every 8 batches.
_BATCHES_PER_WAIT: Final = 8


@dataclass
class SharingCounts:
    """A job's counters of its decode group.

    Attributes:
        shared: batches that another job decoded.
        decoded: batches that this job decoded, for itself and for the others.
        behind: number of times that the job fell too far behind the others, see `Pace`.
        last_behind: distance to the fastest job at the last of these times, in batches.
        lost: number of failures: another job did not finish a batch within `silent_s`, or the group was not usable.
    """

    shared: int = 0
    decoded: int = 0
    behind: int = 0
    last_behind: int = 0
    lost: int = 0


class Pace:
    """Measures how far this job is from the others of its group, in steps, and decides when to wait for them.

    Args:
        group: settings of the group; `lag` limits the distance, and `patience` the number of waits.
        folder: the job's view of the group.
        counts: counters that this object increments.
        steps_per_epoch: number of steps in an epoch.
        global_batch: samples of a step over all ranks.
    """

    def __init__(
        self,
        group: DecodeGroup,
        folder: GroupFolder,
        counts: SharingCounts,
        *,
        steps_per_epoch: int,
        global_batch: int,
    ) -> None:
        self._group, self._folder, self._counts = group, folder, counts
        self._steps_per_epoch, self._global_batch = steps_per_epoch, global_batch
        self._patience_left = group.patience  # number of waits that this job has left, see `DecodeGroup.patience`
        self._num_steps = 0  # steps of this job
        self._is_behind = False  # whether this job has recorded that it is too far behind

    def is_kept(self, cursor: Cursor, current: Cursor) -> bool:
        """Return whether this job, now at the step `current`, keeps the batch at `cursor` for the other jobs."""
        return abs(self._ordinal(current) - self._ordinal(cursor)) <= self._group.lag

    def advance(self) -> None:
        """Record a step of this job."""
        self._num_steps += 1
        if self._num_steps % _BATCHES_PER_WAIT == 0:
            self._patience_left = min(self._group.patience, self._patience_left + 1)

    def catch_up(self) -> None:
        """Record that this job is not behind, because it got a batch of another job."""
        self._is_behind = False

    def wait_for_others(self, cursor: Cursor) -> None:
        """Before this job decodes the step at `cursor`, wait for jobs that are behind it by more than the lag.

        Each wait lets another job complete one step. There is no wait for a job that trains or is stopped, nor for
        one that is further behind than the number of waits left: it would not catch up. If another job is ahead of
        this one by more than the lag, this job does not wait, but records that it is behind.

        Raises:
            LagError: this job is too far behind the others, and the group has `when_behind="raise"`.
            OSError: the group cannot be used.
        """
        while True:
            # For the step of each other job: by how many steps it is ahead of `cursor`; negative if it is behind.
            distances = {other: self._ordinal(other) - self._ordinal(cursor) for other in self._folder.others()}
            ahead = [
                distance
                for other, distance in distances.items()
                if distance > self._group.lag and self._folder.is_alive(other)
            ]
            if ahead:
                self._record_lag(max(ahead))
                return
            self._is_behind = False
            # `any` stops after the first wait. During the wait, other jobs have moved on, so compare again.
            if not any(self._wait_for(other, -distance) for other, distance in sorted(distances.items())):
                return

    def _ordinal(self, cursor: Cursor) -> int:
        """Return the number of steps before `cursor` in a run that starts at position 0."""
        return cursor.epoch * self._steps_per_epoch + cursor.position // self._global_batch

    def _wait_for(self, other: Cursor, behind: int) -> bool:
        """Wait for the step of a job that is `behind` steps behind this job. Return False if there was no wait."""
        if not self._group.lag < behind <= self._patience_left:
            return False
        pending = self._folder.find(other)
        if not isinstance(pending, PendingStep):
            return False
        with pending:
            self._patience_left -= 1
            if not pending.wait(self._group.silent_s):
                self._folder.give_up(pending)
        return True

    def _record_lag(self, ahead: int) -> None:
        """Warn or raise if the fastest job, `ahead` steps ahead of this one, has no waits left for this job."""
        if ahead <= self._patience_left:
            # It still waits for this job. Both have the same `patience`, so use up a wait here too.
            self._patience_left -= 1
            return
        was_behind, self._is_behind = self._is_behind, True
        self._counts.last_behind = ahead
        self._counts.behind += not was_behind
        reason = (
            f"decode group {self._group.name!r}: this job is {count_text(ahead, 'batch', 'batches')} "
            "behind the fastest"
        )
        if self._group.when_behind == "raise":
            raise LagError(
                f"{reason}; give the group a larger lag or patience, or when_behind='alone' to decode in this job"
            )
        if not was_behind:
            warnings.warn(f"{reason}; it decodes alone until it catches up", RuntimeWarning, stacklevel=2)


class SharedDecoder(Generic[B]):
    """A `BatchDecoder` that shares its batches with the other jobs of a decode group.

    A separate thread finishes and publishes the batches that this job decodes, so that the other jobs never wait for
    the training of this job.

    Args:
        inner: decoder of the batches that no other job decodes. One thread feeds it, and another one takes from it.
        pace: the pace of this job.
        folder, group, counts: see `Pace`.
        profiler: profiler of the loader; waits for other jobs count as waits for decoding.
    """

    def __init__(
        self,
        inner: BatchDecoder[B],
        *,
        folder: GroupFolder,
        pace: Pace,
        group: DecodeGroup,
        counts: SharingCounts,
        profiler: StepProfiler,
    ) -> None:
        self._decoder = inner
        self._folder, self._pace, self._group = folder, pace, group
        self._counts, self._profiler = counts, profiler
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="datasvc-publish")
        # Each batch that was fed, and what is known of its result: the decoded batch of another job, a future if this
        # job decodes it, or None if another job is decoding it.
        self._fed: deque[tuple[SampleBatch, Any]] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`. Raises ConfigError, LagError: see `GroupFolder.join` and `Pace.wait_for_others`."""
        self._pace.advance()
        result = self._find_or_decode(batch)
        if isinstance(result, PendingStep):
            # Close the pending step: its pipe must not stay open for each prefetched batch. `take` finds it again.
            with result:
                result = None
        self._fed.append((batch, result))

    def take(self) -> B:
        """See `BatchDecoder`."""
        batch, result = self._fed[0]
        # The job that is decoding the step may abandon it, and a third job may claim it. So repeat the search.
        while result is None or isinstance(result, PendingStep):
            if result is not None:
                self._wait(result)
            result = self._find_or_decode(batch)
        if isinstance(result, Future):
            with self._profiler.waiting(Stage.DECODE):
                result = result.result()
            self._counts.decoded += 1
        else:
            self._counts.shared += 1
            self._pace.catch_up()
        self._fed.popleft()
        finished: B = result
        return finished

    def close(self) -> None:
        """See `BatchDecoder`. Other jobs can then claim the steps that this job has not finished."""
        self._publisher.shutdown(wait=False, cancel_futures=True)
        self._decoder.close()  # ends the wait of the publisher for the batch in progress
        self._publisher.shutdown(wait=True)
        # End all claims, not only those of `_fed`: an interrupt may come between a claim and the append to `_fed`.
        self._folder.abandon_all()
        self._fed.clear()

    def _wait(self, pending: PendingStep) -> None:
        """Wait for another job's step; after `silent_s`, give up so that this job can decode the step."""
        with pending, self._profiler.waiting(Stage.DECODE):
            if not pending.wait(self._group.silent_s):
                self._folder.give_up(pending)
                self._record_loss(f"a job did not finish a batch for {self._group.silent_s:g} s")

    def _find_or_decode(self, batch: SampleBatch) -> Any:
        """Return the batch of another job, its pending step, or the future of the batch that this job decodes."""
        cursor = batch.before
        try:
            self._folder.join()
            self._folder.retire(lambda kept: self._pace.is_kept(kept, cursor))
            result = self._folder.find(cursor)
            if result is None:
                with self._profiler.waiting(Stage.DECODE):
                    self._pace.wait_for_others(cursor)
                # Search again before the claim, because another job may have decoded the step during the wait.
                result = self._folder.find_or_claim(cursor)
        except OSError as error:
            # The group cannot be used, for example at the limit of open files: this job decodes the batch alone.
            self._folder.leave()
            self._record_loss(str(error))
            result = None
        return self._decode(batch) if result is None else result

    def _decode(self, batch: SampleBatch) -> Future[B]:
        try:
            self._decoder.feed(batch)
        except BaseException:
            self._folder.abandon(batch.before)  # so that other jobs do not wait for this step
            raise
        return self._publisher.submit(self._finish, batch.before)

    def _finish(self, cursor: Cursor) -> B:
        """Take the oldest batch from the decoder, and publish it. Runs in the publishing thread."""
        try:
            finished = self._decoder.take()
        except BaseException:
            self._folder.abandon(cursor)
            raise
        with suppress(OSError):
            # If memory or descriptors run out, `publish` still ends the claim, and another job decodes the step.
            self._folder.publish(cursor, finished)
        return finished

    def _record_loss(self, reason: str) -> None:
        self._counts.lost += 1
        warnings.warn(
            f"decode group {self._group.name!r}: {reason}; this job decodes the batch itself",
            RuntimeWarning,
            stacklevel=2,
        )
