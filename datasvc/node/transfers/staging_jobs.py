"""Staging jobs: bring data sets onto the node in the background, watched and cancelled from outside."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from datasvc.cache import Cache
from datasvc.errors import DatasvcError, NotFoundError, UnavailableError
from datasvc.shards.versions.dataset import Split

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
_ENDED: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})

_SHARDS_AT_ONCE = 8  # few, so that a job that is cancelled ends soon


class StageJob:
    """One staging job.

    Attributes:
        id: names it.
        what: data set and repository, for people.
        total_bytes: of all its shards, equal ones once.
        stop: set to cancel it.
        future: done when its thread is; set by `StageJobs`.
    """

    def __init__(self, splits: Sequence[Split], what: dict[str, str]) -> None:
        self.id = secrets.token_hex(8)
        self.splits = splits
        self.what = what
        self.total_bytes = sum(
            {info.digest: info.size_bytes for split in splits for info in split.table.shards()}.values()
        )
        self.stop = threading.Event()
        self.future: Future[None]
        self._state: JobState = "waiting"
        self._error: DatasvcError | None = None
        self._arrived: Counter[str] = Counter()
        self._started = self._ended = 0.0
        self._lock = threading.Lock()

    @property
    def state(self) -> JobState:
        """Where it stands."""
        return self._state

    @property
    def has_ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self._state in _ENDED

    def describe(self) -> dict[str, Any]:
        """Return the job as JSON values: state, bytes by where they came from, seconds, error."""
        with self._lock:
            until = self._ended if self.has_ended else time.monotonic()
            return {
                "id": self.id,
                **self.what,
                "state": self._state,
                "total_bytes": self.total_bytes,
                "done_bytes": self._arrived.total(),
                "bytes": {kind: self._arrived[kind] for kind in ("resident", "origin", "peer")},
                "seconds": round(until - self._started, 3) if self._started else 0.0,
                "error": None if self._error is None else str(self._error),
                "error_kind": None if self._error is None else type(self._error).__name__,
            }

    def run(self, cache: Cache) -> None:
        """Stage it, in the calling thread; what goes wrong is kept for whoever asks."""
        if not self._begin():
            return
        try:
            cache.stage(self.splits, self._report, num_threads=_SHARDS_AT_ONCE, stop=self.stop)
        except DatasvcError as error:
            self._end("cancelled" if self.stop.is_set() else "failed", error)
        except BaseException as error:
            self._end("failed", DatasvcError(f"{type(error).__name__}: {error}"))
            raise
        else:
            self._end("cancelled" if self.stop.is_set() else "done", None)

    def cancel(self) -> None:
        """Let it end soon; what has arrived stays. A job that has ended stays what it is."""
        self.stop.set()
        with self._lock:
            if self._state == "waiting":
                self._state = "cancelled"
                self.future.cancel()

    def _begin(self) -> bool:
        with self._lock:
            if self._state != "waiting":
                return False
            self._state = "running"
            self._started = time.monotonic()
            return True

    def _end(self, state: JobState, error: DatasvcError | None) -> None:
        with self._lock:
            self._state = state
            self._error = error if state == "failed" else None
            self._ended = time.monotonic()

    def _report(self, kind: str, num_bytes: int) -> None:
        with self._lock:
            self._arrived[kind] += num_bytes


class StageJobs:
    """The staging jobs of a node. Safe for threads.

    Args:
        cache: that they fill.
        num_at_once: run side by side; more wait. Each uses several threads and connections.
        max_unfinished: more are refused.
        max_ended: so many are remembered.
    """

    def __init__(self, cache: Cache, *, num_at_once: int = 2, max_unfinished: int = 64, max_ended: int = 256) -> None:
        self._cache = cache
        self._max_unfinished = max_unfinished
        self._max_ended = max_ended
        self._jobs: dict[str, StageJob] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_at_once, thread_name_prefix="datasvc-stage-job")

    def start(self, splits: Sequence[Split], what: dict[str, str]) -> StageJob:
        """Stage `splits` in the background.

        Args:
            splits: of one data set version.
            what: said of the job by `describe`.

        Raises:
            UnavailableError: too many are unfinished.
            CorruptDataError, NotFoundError, UnavailableError: their tables cannot be read.
        """
        job = StageJob(splits, what)
        with self._lock:
            if self._is_closed:
                raise UnavailableError("this node is stopping")
            if sum(not each.has_ended for each in self._jobs.values()) >= self._max_unfinished:
                raise UnavailableError(
                    f"{self._max_unfinished} staging jobs are unfinished; cancel some, or try later"
                )
            job.future = self._threads.submit(job.run, self._cache)
            self._jobs[job.id] = job
            self._forget_oldest()
        return job

    def find(self, job_id: str) -> StageJob:
        """Return a job. Raises NotFoundError."""
        with self._lock:
            if job_id not in self._jobs:
                raise NotFoundError("no such staging job: it never was, or ended long ago")
            return self._jobs[job_id]

    def all(self) -> list[StageJob]:
        """Return all that are remembered, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def cancel_all(self) -> None:
        """Cancel all, and start nothing more."""
        with self._lock:
            self._is_closed = True
        for job in self.all():
            job.cancel()
        self._threads.shutdown(wait=False)

    def close(self, timeout_s: float) -> bool:
        """Cancel all; returns whether they ended in time."""
        self.cancel_all()
        return not wait([job.future for job in self.all()], timeout_s).not_done

    def _forget_oldest(self) -> None:
        ended = [job.id for job in self._jobs.values() if job.has_ended]
        for job_id in ended[: max(0, len(ended) - self._max_ended)]:
            del self._jobs[job_id]
