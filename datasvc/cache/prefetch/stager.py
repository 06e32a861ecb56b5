"""The stager: a child process of a job that fetches shards ahead, so that I/O stays out of the training process.

The stager receives each new position of the job. It fetches the shards in the order in which the job needs them,
across the end of the epoch. It pauses when the next fetch would evict a shard that is needed sooner. A stager that is
late or has crashed only makes the job slower: the job fetches missing shards itself.

It is a program (`python -m datasvc.cache.prefetch.stager`) that exits when the job exits, see `ChildProcess`.
"""

from __future__ import annotations

import os
import pickle  # only between a job and its child process
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from datasvc.cache.catalogue.next_use import NeededShard, UseTimeline
from datasvc.cache.job import CacheJob, Outcome
from datasvc.cache.prefetch.window_budget import choose_ahead_bytes
from datasvc.child_process import ChildProcess
from datasvc.errors import DatasvcError
from datasvc.order import NextUse, OrderConfig
from datasvc.shards import Split

# A large shard is fetched by many ranged requests at once, a small one by few. So the bytes in transfer are limited,
# not the number of shards: to this size, and to 1/16 of the cache's budget, because they take space of the cache too.
_MAX_BYTES_AT_ONCE = 256 << 20
_BUDGET_DIVISOR = 16
# At least this many shards are fetched at once, even if they exceed the limits.
_MIN_SHARDS_AT_ONCE = 4


@dataclass(frozen=True)
class StagerJob:
    """The input of a stager: what a job reads, in which order, and where it starts.

    Attributes:
        cache: the job's handle on the cache. When the stager's process unpickles it, it opens the cache there.
        split: split that the job reads.
        config: parameters of the access order.
        lanes: lanes that the job reads; None: all.
        epoch: epoch in which the job starts.
        position: position in that epoch at which it starts.
        step_bytes: see `UseTimeline`.
    """

    cache: CacheJob
    split: Split
    config: OrderConfig
    lanes: Sequence[int] | None
    epoch: int
    position: int
    step_bytes: int | None = None


class Stager:
    """The job's handle on a running stager. The process starts at once; no call waits for it."""

    def __init__(self, job: StagerJob) -> None:
        self._program = ChildProcess(__name__, job)

    def advance(self, epoch: int, position: int) -> None:
        """Send the position before which all samples were served. Does nothing if the stager has exited."""
        self._program.send((epoch, position))

    def close(self) -> None:
        """End the stager and its fetches. Does nothing in a forked child, or if the stager is closed already."""
        self._program.close()


class JobPrefetcher:
    """Chooses the shards that one job needs next, and fetches them while the cache has space. Safe for threads.

    Attributes:
        num_at_once: maximum number of shards to fetch at the same time.
    """

    def __init__(self, job: StagerJob) -> None:
        self._cache_job = job.cache
        self._split = job.split
        self._timeline = UseTimeline(job.split.table, job.config, job.lanes, step_bytes=job.step_bytes)
        self._cursor = job.epoch, job.position  # all samples before it were served
        self._ahead_bytes = choose_ahead_bytes(job.split.table.bytes_per_shard, self._cache_job.budget_bytes)
        self.num_at_once = _choose_shards_at_once(job.split, self._cache_job.budget_bytes)
        self._waiting: deque[NeededShard] = deque()
        self._deferred: list[tuple[int, NeededShard]] = []  # each with the time (bytes served) at which to try again
        self._in_progress: set[int] = set()  # numbers of the shards that are being fetched
        self._is_blocked = False  # True after a fetch found no space, until the job advances
        self._lock = threading.Lock()

    def start(self) -> None:
        """Declare the next uses of shards that are resident already, and plan the fetches."""
        self._expect(passed_only=False)
        self._waiting = deque(self._timeline.needed_shards(*self._cursor))

    def advance(self, epoch: int, position: int) -> None:
        """Record a new position of the job, which may be an earlier one."""
        with self._lock:
            previous, self._cursor = self._cursor, (epoch, position)
            self._is_blocked = False
            now = self._timeline.clock(epoch, position)
            if epoch != previous[0] or self._cursor < previous:
                # A new epoch has begun, or an earlier state was restored: declare the next uses again. After a
                # restore, replace all uses: a shard may be needed sooner than declared. In a new epoch, replace only
                # passed uses: otherwise a shard that the job has skipped would seem to be needed now.
                self._expect(passed_only=self._cursor > previous)
                self._waiting = deque(self._timeline.needed_shards(epoch, position))
                self._deferred.clear()
            due = [needed for retry_at, needed in self._deferred if retry_at <= now]
            self._deferred = [(retry_at, needed) for retry_at, needed in self._deferred if retry_at > now]
            self._waiting.extendleft(reversed(due))
            # Uses that the job has passed need no fetch.
            while self._waiting and self._waiting[0].stop <= now:
                self._waiting.popleft()

    def next_shard(self) -> NeededShard | None:
        """Return the shard to fetch next; None if there is none until the job advances or another fetch ends."""
        with self._lock:
            if self._is_blocked or not self._waiting or len(self._in_progress) >= self.num_at_once:
                return None
            needed = self._waiting.popleft()
            self._in_progress.add(needed.shard)
            return needed

    def fetch(self, needed: NeededShard) -> None:
        """Fetch a shard that `next_shard` returned; queue it again if it has not arrived."""
        now = self._timeline.clock(*self._cursor)
        outcome: Outcome | None = None
        try:
            outcome = self._fetch(needed, now)
        except DatasvcError:
            # Not raised: if the error persists until the shard is needed, the job's own fetch reports it.
            with suppress(DatasvcError):
                self._cache_job.count("prefetch_failures", 1)
        finally:
            with self._lock:
                self._in_progress.discard(needed.shard)
                if outcome == "later":
                    # Try again when the job advances: then it releases shards, and this shard's use is nearer.
                    self._is_blocked = True
                    self._waiting.appendleft(needed)
                elif outcome == "busy":
                    # Another thread or process fetches the shard. When the job advances, check if it has arrived.
                    self._deferred.append((now + 1, needed))
                elif outcome is None:
                    # After a failure, wait longer: other shards come first.
                    self._deferred.append((now + self._ahead_bytes, needed))

    def _fetch(self, needed: NeededShard, now: int) -> Outcome:
        """Make a shard resident and declare its next use; return the outcome of `CacheJob.prefetch`."""
        info = self._split.table.shard(needed.shard)
        # If the shard is needed only after more than `_ahead_bytes`, it must not replace another one. That one may be
        # needed again by a running job, which is worth more than an early fetch.
        evict = needed.first - now <= self._ahead_bytes
        # A shard at the border of two lanes has several uses, and one of these may come before `needed`.
        next_use = self._timeline.next_use(needed.shard, *self._cursor)
        # A use that began before `now` is still in progress: the shard is needed now.
        reuse = NextUse(now, max(now, next_use))
        outcome = self._cache_job.prefetch(info, self._split.repository, reuse, evict=evict)
        if outcome == "resident":
            # `prefetch` has fetched nothing, so it has not declared the next use.
            self._cache_job.expect({info.digest: next_use}, now)
        return outcome

    def _expect(self, *, passed_only: bool) -> None:
        """Declare the next use of every shard that the job still needs; see `CacheJob.expect`."""
        next_uses, infos = self._timeline.next_uses(*self._cursor), self._split.table.shards()
        expected = {infos[shard].digest: next_use for shard, next_use in next_uses.items()}
        now = self._timeline.clock(*self._cursor)
        self._cache_job.expect(expected, now, passed_only=passed_only)


def _choose_shards_at_once(split: Split, budget_bytes: int) -> int:
    """Return how many shards to fetch in parallel."""
    largest = int(split.table.bytes_per_shard.max(initial=1))
    bytes_at_once = min(_MAX_BYTES_AT_ONCE, budget_bytes // _BUDGET_DIVISOR)
    return max(_MIN_SHARDS_AT_ONCE, bytes_at_once // largest)


def serve(pipe: BinaryIO) -> None:
    """Run a stager for the job at the other end of a pipe, until the pipe is closed."""
    job: StagerJob = pickle.load(pipe)  # noqa: S301 - from our own parent process
    events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, events), daemon=True, name="datasvc-job").start()
    with job.cache:
        prefetcher = JobPrefetcher(job)
        prefetcher.start()
        with ThreadPoolExecutor(prefetcher.num_at_once, thread_name_prefix="datasvc-ahead") as pool:
            while True:
                while (needed := prefetcher.next_shard()) is not None:
                    pool.submit(prefetcher.fetch, needed).add_done_callback(partial(_finished, events))
                event = events.get()  # a new position of the job, or None after a fetch
                if event is not None:
                    prefetcher.advance(*event)


def _finished(events: queue.SimpleQueue[tuple[int, int] | None], fetch: Future[None]) -> None:
    error = fetch.exception()
    if error is not None:
        traceback.print_exception(error)  # a bug in datasvc; the shard is deferred and tried again
    events.put(None)


def _listen(pipe: BinaryIO, events: queue.SimpleQueue[tuple[int, int] | None]) -> None:
    """Put the positions of the job into `events`. When the job has exited, exit at once, even during fetches."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            events.put(pickle.load(pipe))  # noqa: S301 - from our own parent process
    os._exit(0)  # the kernel releases locks and leases; the next fetch of a shard resumes the interrupted one


def main() -> None:
    """Run a stager for the job on standard input; report an error in one line on standard error."""
    try:
        serve(sys.stdin.buffer)
    except (DatasvcError, OSError) as error:
        sys.stderr.write(f"datasvc: nothing is fetched ahead: {error}\n")
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the top of this process
        traceback.print_exc()
    os._exit(1)  # without waiting for the threads of the fetches


if __name__ == "__main__":
    main()
