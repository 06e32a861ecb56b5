"""The stager: a process beside a job that fetches ahead of its order, so that I/O stays out of the training process.

It follows what the job says of its position, fetches the shards in the order in which they are needed, across the end
of the epoch, and stops where the next one would push out what is needed sooner. The job fetches by itself what it
finds missing, so a stager that is late, or dead, costs time and nothing else.

It is a program of its own (`python -m datasvc.cache.prefetch.stager`) and ends when the job ends: see `ChildProcess`.
"""

from __future__ import annotations

import os
import pickle  # between a job and its own child
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
from pathlib import Path
from typing import BinaryIO

from datasvc.cache.cache import Cache
from datasvc.cache.fetch.fetch import Outcome
from datasvc.cache.peers.peers import Peers
from datasvc.cache.prefetch.timeline import NeededShard, UseTimeline
from datasvc.cache.prefetch.window_budget import choose_ahead_bytes
from datasvc.errors import DatasvcError
from datasvc.order import NextUse, OrderConfig
from datasvc.orphans import ChildProcess
from datasvc.shards import Split

# Each shard is fetched by many ranged requests; of small ones it takes more to have as many under way.
_SHARDS_AT_ONCE = 4
_BYTES_AT_ONCE = 256 << 20
_SHARE_AT_ONCE = 16


@dataclass(frozen=True)
class StagerJob:
    """What a stager needs to know.

    Attributes:
        folder: of the cache.
        tenant: whose quota is used.
        peers: other nodes.
        split: the samples.
        config: the order's parameters.
        lanes: those that the job is served from; None: all.
        epoch: where the job stands.
        position: likewise.
        owner: the name under which the job says when it needs what, see `Cache.new_owner`.
        step_bytes: see `UseTimeline`.
    """

    folder: Path
    tenant: str
    peers: Peers | None
    split: Split
    config: OrderConfig
    lanes: Sequence[int] | None
    epoch: int
    position: int
    owner: str
    step_bytes: int | None = None


class Stager:
    """A running stager, seen from the job. Starts at once, and does its work without being waited for.

    Args:
        job: what to do.
    """

    def __init__(self, job: StagerJob) -> None:
        self._program = ChildProcess(__name__, job)

    def advance(self, epoch: int, position: int) -> None:
        """Say that everything before a position was served. Does nothing once the stager is gone."""
        self._program.send((epoch, position))

    def close(self) -> None:
        """End the stager; fetches under way are given up. Closing again does nothing, nor does a forked child."""
        self._program.close()


class JobPrefetcher:
    """Fetches ahead of one job, as far as there is room.

    Args:
        cache: the node's.
        job: whose order is followed.

    Attributes:
        num_at_once: shards that are fetched side by side.
    """

    def __init__(self, cache: Cache, job: StagerJob) -> None:
        self._cache = cache
        self._split = job.split
        self._owner = job.owner
        self._timeline = UseTimeline(job.split.table, job.config, job.lanes, step_bytes=job.step_bytes)
        self._cursor = job.epoch, job.position
        self._ahead_bytes = choose_ahead_bytes(job.split.table.bytes_per_shard, cache.budget_bytes)
        self.num_at_once = _choose_shards_at_once(job.split, cache.budget_bytes)
        self._waiting: deque[NeededShard] = deque()
        self._set_aside: list[tuple[int, NeededShard]] = []  # with the clock at which to try again
        self._under_way: set[int] = set()
        self._is_blocked = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Tell the cache what of the job's data is here already, and when it is needed."""
        self._expect(passed_only=False)
        self._waiting = deque(self._timeline.pieces(*self._cursor))

    def advance(self, epoch: int, position: int) -> None:
        """Follow the job."""
        with self._lock:
            before, self._cursor = self._cursor, (epoch, position)
            self._is_blocked = False
            now = self._timeline.clock(epoch, position)
            if epoch != before[0] or self._cursor < before:
                # Another epoch, or a state was loaded: what was fetched and not used must not wait for ever.
                self._expect(passed_only=self._cursor > before)
                self._waiting = deque(self._timeline.pieces(epoch, position))
                self._set_aside.clear()
            due = [piece for when, piece in self._set_aside if when <= now]
            self._set_aside = [each for each in self._set_aside if each[0] > now]
            self._waiting.extendleft(reversed(due))
            while self._waiting and self._waiting[0].stop <= now:
                self._waiting.popleft()

    def next_piece(self) -> NeededShard | None:
        """Return what to fetch next; None where that must wait until the job goes on."""
        with self._lock:
            if self._is_blocked or not self._waiting or len(self._under_way) >= self.num_at_once:
                return None
            piece = self._waiting.popleft()
            self._under_way.add(piece.shard)
            return piece

    def fetch(self, piece: NeededShard) -> None:
        """Fetch a piece that `next_piece` gave, or put it back where there is no room, or aside where it failed."""
        now = self._timeline.clock(*self._cursor)
        outcome: Outcome | None = None
        try:
            outcome = self._fetch(piece, now)
        except DatasvcError:
            # The job meets the same error when it needs the shard, and says so; until then it may have passed.
            with suppress(DatasvcError):
                self._cache.count("prefetch_failures", 1)
        finally:
            with self._lock:
                self._under_way.discard(piece.shard)
                if outcome == "later":
                    self._is_blocked = True
                    self._waiting.appendleft(piece)
                elif outcome == "busy":
                    # Somebody else fetches it: look again whether it came, once the job has gone on.
                    self._set_aside.append((now + 1, piece))
                elif outcome is None:
                    self._set_aside.append((now + self._ahead_bytes, piece))

    def _fetch(self, piece: NeededShard, now: int) -> Outcome:
        info = self._split.table.shard(piece.shard)
        # Further ahead only where there is room to spare: what it would evict is worth more.
        evict = piece.first - now <= self._ahead_bytes
        # Of a shard that comes in pieces an earlier one may be yet to come.
        next_use = self._timeline.next_use(piece.shard, *self._cursor)
        reuse = NextUse(now, max(now, next_use))
        outcome = self._cache.prefetch(info, self._split.repository, reuse, evict=evict, owner=self._owner)
        if outcome == "resident":
            self._cache.expect({info.digest: next_use}, now, owner=self._owner)
        return outcome

    def _expect(self, *, passed_only: bool) -> None:
        next_uses, infos = self._timeline.next_uses(*self._cursor), self._split.table.shards()
        expected = {infos[shard].digest: next_use for shard, next_use in next_uses.items()}
        now = self._timeline.clock(*self._cursor)
        self._cache.expect(expected, now, passed_only=passed_only, owner=self._owner)


def _choose_shards_at_once(split: Split, budget_bytes: int) -> int:
    """Return how many shards to fetch side by side: what is on its way takes room too, so a small share of it."""
    largest = int(split.table.bytes_per_shard.max(initial=1))
    return max(_SHARDS_AT_ONCE, min(_BYTES_AT_ONCE, budget_bytes // _SHARE_AT_ONCE) // largest)


def serve(pipe: BinaryIO) -> None:
    """Do what the job on the other end of a pipe asks, until the pipe ends."""
    job: StagerJob = pickle.load(pipe)  # noqa: S301 - from our own parent process
    events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, events), daemon=True, name="datasvc-job").start()
    with Cache(job.folder, tenant=job.tenant, peers=job.peers) as cache:
        ahead = JobPrefetcher(cache, job)
        ahead.begin()
        with ThreadPoolExecutor(ahead.num_at_once, thread_name_prefix="datasvc-ahead") as pool:
            while True:
                while (piece := ahead.next_piece()) is not None:
                    pool.submit(ahead.fetch, piece).add_done_callback(partial(_finished, events))
                event = events.get()
                if event is not None:
                    ahead.advance(*event)


def _finished(events: queue.SimpleQueue[tuple[int, int] | None], fetch: Future[None]) -> None:
    error = fetch.exception()
    if error is not None:
        traceback.print_exception(error)  # ours to mend; the piece was set aside
    events.put(None)


def _listen(pipe: BinaryIO, events: queue.SimpleQueue[tuple[int, int] | None]) -> None:
    """Hand on what the job says; when it is gone, so is everything here, whatever it is doing."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            events.put(pickle.load(pipe))  # noqa: S301 - from our own parent process
    os._exit(0)  # locks and leases go with the process; a fetch that is cut off is continued by whoever wants it


def main() -> None:
    """Serve the job on standard input; what goes wrong is one line on standard error."""
    try:
        serve(sys.stdin.buffer)
    except (DatasvcError, OSError) as error:
        sys.stderr.write(f"datasvc: nothing is fetched ahead: {error}\n")
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the end of this process, with the thread that reads still at it
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
