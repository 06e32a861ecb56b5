"""Staging jobs of a node: each brings a data set into the cache in the background.

The routes of `/stage` start, list and cancel them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from datasvc.cache import Cache
from datasvc.cache.catalogue.tables import UnusableCatalogueError
from datasvc.errors import DatasvcError, NotFoundError, UnavailableError
from datasvc.progress import SourceCounter
from datasvc.shards.versions.dataset import Split

_logger = logging.getLogger(__name__)

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
_ENDED: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})

_NUM_SHARD_THREADS = 8  # few, so that a cancelled job ends soon


class StageJob:
    """One staging job.

    Attributes:
        id: identifier in URLs.
        labels: data set and repository as text, for `describe`.
        total_bytes: size of the different shards of the job.
        stop: event that cancels the job.
        state: current state; it changes under the lock of the job.
        future: done when `run` has ended in its thread; set by `StageJobs`.
    """

    def __init__(self, splits: Sequence[Split], labels: dict[str, str]) -> None:
        self.id = secrets.token_hex(8)
        self.splits = splits
        self.labels = labels
        self.total_bytes = sum(
            {info.digest: info.size_bytes for split in splits for info in split.table.cached_objects()}.values()
        )
        self.stop = threading.Event()
        self.future: Future[None]
        self.state: JobState = "waiting"
        self._error: DatasvcError | None = None
        self._arrived = SourceCounter()  # bytes by source
        self._started = self._ended = 0.0
        self._lock = threading.Lock()

    @property
    def _title(self) -> str:
        """Data set, split and repository, for the log."""
        labels = self.labels
        return f"{labels.get('ref')} {labels.get('split') or 'all splits'} of {labels.get('repo')}"

    @property
    def has_ended(self) -> bool:
        """Whether the job is done, failed or cancelled."""
        return self.state in _ENDED

    @property
    def error(self) -> DatasvcError | None:
        """Error of a job that has failed; None otherwise."""
        return self._error

    def describe(self) -> dict[str, Any]:
        """Return the job as JSON values: state, bytes by source, seconds, error."""
        arrived = self._arrived.bytes_by_source
        with self._lock:
            end = self._ended if self.has_ended else time.monotonic()
            return {
                "id": self.id,
                **self.labels,
                "state": self.state,
                "total_bytes": self.total_bytes,
                "done_bytes": arrived.total(),
                "bytes": {kind: arrived[kind] for kind in ("resident", "origin", "peer")},
                "seconds": round(end - self._started, 3) if self._started else 0.0,
                "error": None if self._error is None else str(self._error),
                "error_kind": None if self._error is None else type(self._error).__name__,
            }

    def run(self, cache: Cache) -> None:
        """Stage the data in the calling thread. A DatasvcError is stored for `describe` and not raised."""
        if not self._begin():
            return
        try:
            cache.stage(self.splits, self._arrived, num_threads=_NUM_SHARD_THREADS, stop=self.stop)
        except DatasvcError as error:
            self._end("cancelled" if self.stop.is_set() else "failed", error)
        except BaseException as error:
            # Store it too, so that the job does not stay in the state "running".
            self._end("failed", DatasvcError(f"{type(error).__name__}: {error}"))
            raise
        else:
            self._end("cancelled" if self.stop.is_set() else "done", None)

    def cancel(self) -> None:
        """Make the job end soon; objects that have arrived stay. A job that has ended keeps its state."""
        self.stop.set()
        with self._lock:
            if self.state == "waiting":
                self.state = "cancelled"
                _logger.info("staging job %s was cancelled before its start: %s", self.id, self._title)
                self.future.cancel()  # if a thread has taken the job, this has no effect: `_begin` sees the state

    def _begin(self) -> bool:
        with self._lock:
            # A job may be cancelled before a thread is free.
            if self.state != "waiting":
                return False
            self.state = "running"
            self._started = time.monotonic()
        _logger.info("staging job %s has begun: %s, %d bytes", self.id, self._title, self.total_bytes)
        return True

    def _end(self, state: JobState, error: DatasvcError | None) -> None:
        with self._lock:
            self.state = state
            # A cancelled job reports no error: it may only be a consequence of the cancellation.
            self._error = error if state == "failed" else None
            self._ended = time.monotonic()
            seconds = self._ended - self._started
        if state == "failed":
            _logger.error("staging job %s has failed after %.1f s: %s: %s", self.id, seconds, self._title, error)
        else:
            done_bytes = self._arrived.bytes_by_source.total()
            outcome = "is done" if state == "done" else "was cancelled"
            _logger.info(
                "staging job %s %s after %.1f s: %s, %d bytes resident",
                self.id,
                outcome,
                seconds,
                self._title,
                done_bytes,
            )


class StageJobs:
    """The staging jobs of a node. Thread-safe.

    Args:
        cache: cache that the jobs fill.
        stop_node: called in the thread of a job if the cache's catalogue cannot be used any more.
        num_at_once: maximum number of running jobs; each uses several threads and connections.
        max_unfinished: maximum number of waiting and running jobs; further ones are refused.
        max_ended: number of ended jobs that stay listed.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        stop_node: Callable[[UnusableCatalogueError], None] = lambda _error: None,
        num_at_once: int = 2,
        max_unfinished: int = 64,
        max_ended: int = 256,
    ) -> None:
        self._cache = cache
        self._stop_node = stop_node
        self._max_unfinished = max_unfinished
        self._max_ended = max_ended
        self._jobs: dict[str, StageJob] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_at_once, thread_name_prefix="datasvc-stage-job")

    def start(self, splits: Sequence[Split], labels: dict[str, str]) -> StageJob:
        """Stage `splits` in the background.

        Args:
            splits: splits of one data-set version.
            labels: text values that `StageJob.describe` includes.

        Raises:
            UnavailableError: there are too many unfinished jobs, or a table cannot be read.
            CorruptDataError: a table is damaged.
            NotFoundError: a table is missing.
        """
        job = StageJob(splits, labels)  # before the lock, because this may read shard tables from the origin
        with self._lock:
            if self._is_closed:
                raise UnavailableError("this node is stopping; try another node")
            if sum(not other.has_ended for other in self._jobs.values()) >= self._max_unfinished:
                raise UnavailableError(
                    f"{self._max_unfinished} staging jobs are unfinished; cancel some, or try later"
                )
            job.future = self._threads.submit(self._run, job)
            self._jobs[job.id] = job
            self._forget_oldest_ended()
        return job

    def find(self, job_id: str) -> StageJob:
        """Return a job. Raise NotFoundError if there is none with that id."""
        with self._lock:
            if job_id not in self._jobs:
                raise NotFoundError(
                    "there is no such staging job: it never existed, or ended long ago; /stage lists the jobs"
                )
            return self._jobs[job_id]

    def all(self) -> list[StageJob]:
        """Return the listed jobs, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def cancel_all(self) -> None:
        """Cancel all jobs, and start no more."""
        with self._lock:
            self._is_closed = True
        for job in self.all():
            job.cancel()
        self._threads.shutdown(wait=False)

    def close(self, timeout_s: float) -> bool:
        """Cancel all jobs; return whether they ended within `timeout_s` seconds."""
        self.cancel_all()
        return not wait([job.future for job in self.all()], timeout_s).not_done

    def _run(self, job: StageJob) -> None:
        job.run(self._cache)
        if isinstance(job.error, UnusableCatalogueError):
            self._stop_node(job.error)

    def _forget_oldest_ended(self) -> None:
        """Remove the oldest of the ended jobs from the list, so that `max_ended` of them stay."""
        ended = [job.id for job in self._jobs.values() if job.has_ended]
        for job_id in ended[: max(0, len(ended) - self._max_ended)]:
            del self._jobs[job_id]
