"""Executors for the units of an ingest: this process, worker processes on this machine, or a Ray cluster.

All of them call `build_unit`, so the committed version does not depend on the executor.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from itertools import islice
from operator import sub
from typing import Any, Final, Literal

import pyarrow as pa

from datasvc.child_process import end_with_parent
from datasvc.errors import ConfigError, UnavailableError
from datasvc.extras import how_to_install
from datasvc.progress import Progress
from datasvc.repository import Repository
from datasvc.shards.ingestion.build import EarlierShards, IngestWork, UnitResult
from datasvc.shards.ingestion.build_listed import build_listed
from datasvc.shards.ingestion.build_streamed import build_streamed
from datasvc.shards.ingestion.plan import IngestUnit

EngineName = Literal["local", "ray"]

_QUEUED_PER_WORKER: Final = 2  # the unit in progress and the next one, so that the worker never waits for a unit
_PROGRESS_INTERVAL_S: Final = 0.25
# Libraries whose threads or network clients do not work in a forked process.
_NOT_FORKABLE: Final = ("torch", "grpc", "ray", "s3fs", "obstore", "aiohttp", "gcsfs", "adlfs", "duckdb")


_MMAP_THRESHOLD_OPTION: Final = -3  # number of the option of `mallopt`, from glibc's malloc.h
_THRESHOLD_BYTES: Final = 256 << 10
_lock = threading.Lock()
_num_inside = 0
_previous_pool: pa.MemoryPool | None = None


def build_unit(
    work: IngestWork, unit: IngestUnit, repository: Repository, earlier: EarlierShards, progress: Progress
) -> UnitResult:
    """Build and store the shards of one unit in this process, which must have opened `repository` itself."""
    if unit.files:  # a unit of a streamed source has parts instead
        return build_listed(work, unit, repository, progress)
    return build_streamed(work, unit, repository, progress, earlier)


def run_units(
    work: IngestWork,
    units: Sequence[IngestUnit],
    repository: Repository,
    earlier: Mapping[int, EarlierShards],
    *,
    engine: EngineName,
    workers: int,
    progress: Progress,
    cleanup: ExitStack,
) -> Iterator[UnitResult]:
    """Build all units in `workers` processes, and yield the result of each one as soon as it is finished.

    Shards in `earlier`, by number of the unit, are not built again. `progress` counts bytes, samples and shards of
    all workers. When the caller closes `cleanup`, this waits until all worker processes have exited.

    Raises:
        ConfigError: the engine is not installed.
        UnavailableError: a worker process died.
        DatasvcError: the first error of a unit. Units in progress may continue; closing `cleanup` waits for them.
    """
    if engine == "ray":
        return _run_ray(work, units, earlier, workers, progress)
    workers = min(workers, len(units))
    if workers <= 1:
        return (build_unit(work, unit, repository, earlier.get(unit.number, {}), progress) for unit in units)
    return _run_processes(work, units, earlier, workers, progress, cleanup)


def choose_start_method(*, is_local: bool) -> Literal["fork", "spawn"]:
    """Return the start method for worker processes. `is_local`: source and repository are local files."""
    # `fork` takes milliseconds, but it copies only the calling thread: a lock that another thread holds stays locked
    # in the copy. So use `spawn` if there are other threads, or libraries that may have threads or network clients.
    is_plain = threading.active_count() == 1 and not any(name in sys.modules for name in _NOT_FORKABLE)
    return "fork" if is_local and is_plain and sys.platform == "linux" else "spawn"


def _run_processes(
    work: IngestWork,
    units: Sequence[IngestUnit],
    earlier: Mapping[int, EarlierShards],
    workers: int,
    progress: Progress,
    cleanup: ExitStack,
) -> Iterator[UnitResult]:
    """Build the units in worker processes of this machine; see `run_units`."""
    is_local = all("://" not in url for url in (work.repository_url, work.source.url))
    method = choose_start_method(is_local=is_local)
    context = multiprocessing.get_context(method)
    counters = _Counters(context, workers)
    # A forked worker inherits all units in memory, so only their numbers are sent to it.
    inherited_units = {unit.number: unit for unit in units} if method == "fork" else {}
    executor = ProcessPoolExecutor(workers, context, _start_worker, (work, counters, inherited_units))
    unsubmitted = iter(units)
    pending: set[Future[UnitResult]] = set()
    try:
        while True:
            for unit in islice(unsubmitted, _QUEUED_PER_WORKER * workers - len(pending)):
                unit_or_number: IngestUnit | int = unit.number if inherited_units else unit
                pending.add(executor.submit(_build_in_worker, unit_or_number, earlier.get(unit.number, {})))
            if not pending:
                return
            # The time-out ends the wait regularly, so that progress is also reported while no unit finishes.
            done, pending = wait(pending, timeout=_PROGRESS_INTERVAL_S, return_when=FIRST_COMPLETED)
            counters.report_to(progress)
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise UnavailableError(
            "a worker process of the ingest died: it was killed, ran out of memory, or was started by a script "
            'without the guard `if __name__ == "__main__":`. Finished shards are kept: run the same command again, '
            "with fewer --workers if memory ran out"
        ) from error
    finally:
        # Wait in a thread, so that the caller can commit while the workers exit.
        shutdown = threading.Thread(
            target=executor.shutdown, kwargs={"cancel_futures": True}, name="datasvc-executor-shutdown"
        )
        shutdown.start()
        cleanup.callback(shutdown.join)


class _Counters:
    """Progress of the worker processes, in shared memory. Each worker has its own slot, so no lock is needed."""

    def __init__(self, context: Any, workers: int) -> None:
        self._slots = context.SimpleQueue()
        for slot in range(workers):
            self._slots.put(slot)
        self._counts = context.RawArray("q", 3 * workers)  # each slot: bytes, samples, shards
        self._reported = (0, 0, 0)

    def take_slot(self) -> _WorkerProgress:
        """Assign a free slot to the calling worker; return the progress that counts in it. Call once per worker."""
        return _WorkerProgress(self._counts, 3 * int(self._slots.get()))

    def report_to(self, progress: Progress) -> None:
        """Advance `progress` by the counts that the workers added since the last call."""
        counts = self._counts[:]
        totals = (sum(counts[0::3]), sum(counts[1::3]), sum(counts[2::3]))
        size_bytes, num_samples, num_shards = map(sub, totals, self._reported)
        self._reported = totals
        progress.advance(size_bytes, num_samples=num_samples, num_shards=num_shards)


class _WorkerProgress(Progress):
    """Adds bytes, samples and shards to three elements of `counts`, from index `start`. Ignores other arguments."""

    def __init__(self, counts: Any, start: int) -> None:
        self.counts, self._start = counts, start

    def advance(self, amount: int, *, num_samples: int = 0, num_shards: int = 0, **_: object) -> None:
        for index, count in enumerate((amount, num_samples, num_shards), self._start):
            self.counts[index] += count


_worker_state: tuple[IngestWork, Repository, Progress, Mapping[int, IngestUnit]] | None = None


def _start_worker(work: IngestWork, counters: _Counters, inherited_units: Mapping[int, IngestUnit]) -> None:
    global _worker_state  # noqa: PLW0603 - the pool's initializer can pass state to tasks only through a global
    end_with_parent()  # exit when the parent process exits
    keep_lean()  # return freed memory to the operating system at once
    _worker_state = (work, Repository.open(work.repository_url), counters.take_slot(), inherited_units)


def _build_in_worker(unit_or_number: IngestUnit | int, earlier: EarlierShards) -> UnitResult:
    assert _worker_state is not None
    work, repository, progress, inherited_units = _worker_state
    unit = inherited_units[unit_or_number] if isinstance(unit_or_number, int) else unit_or_number
    return build_unit(work, unit, repository, earlier, progress)


def _run_ray(
    work: IngestWork,
    units: Sequence[IngestUnit],
    earlier: Mapping[int, EarlierShards],
    workers: int,
    progress: Progress,
) -> Iterator[UnitResult]:
    """Build the units as tasks of a Ray cluster; see `run_units`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray, which is not installed: {how_to_install('ray')}") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    # Put the work into Ray's object store once, so that it is not sent with every task.
    shared = ray.put(work)
    build = ray.remote(max_retries=3)(_build_on_ray)
    unsubmitted = iter(units)
    pending: list[Any] = []
    try:
        while True:
            units_to_start = islice(unsubmitted, workers - len(pending))
            pending += [build.remote(shared, unit, earlier.get(unit.number, {})) for unit in units_to_start]
            if not pending:
                return
            done, pending = ray.wait(pending)
            for task in done:
                result, (size_bytes, num_samples, num_shards) = ray.get(task)
                progress.advance(size_bytes, num_samples=num_samples, num_shards=num_shards)
                yield result
    except ray.exceptions.RayTaskError as error:
        # Raise the error of the unit itself, as the other executors do.
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise UnavailableError(f"a Ray worker of the ingest failed: {error}; run the same command again") from error
    finally:
        for task in pending:
            ray.cancel(task, force=False)


def _build_on_ray(work: IngestWork, unit: IngestUnit, earlier: EarlierShards) -> tuple[UnitResult, list[int]]:
    """Build a unit in a Ray worker; return its result, and the numbers of bytes, samples and shards for progress."""
    worker_progress = _WorkerProgress([0, 0, 0], 0)
    result = build_unit(work, unit, Repository.open(work.repository_url), earlier, worker_progress)
    return result, worker_progress.counts


# An ingest processes much data in batches of different sizes. Allocators would cache the memory of a batch, but it
# does not fit the next batch. The process that calls `ingest` uses `lean_arrow`, whose setting ends with the call.
# Worker processes (not those of Ray) use `keep_lean`, whose settings last until they exit; so does the server of
# `datasvc ui`, each page of which reads other data.


@contextmanager
def lean_arrow() -> Iterator[None]:
    """Make Arrow use the system's allocator inside the block, because Arrow's own pools keep freed memory.

    Processes that are forked inside the block inherit the setting. Several threads may be inside at once.
    """
    global _num_inside, _previous_pool  # noqa: PLW0603 - Arrow has one default pool per process
    with _lock:
        if not _num_inside:
            _previous_pool = pa.default_memory_pool()
            pa.set_memory_pool(pa.system_memory_pool())
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                pa.set_memory_pool(_previous_pool)


def keep_lean() -> None:
    """Make a process that builds shards, or serves pages, return freed memory to the operating system at once."""
    # With the system's pool, glibc maps each allocation above a threshold separately, and unmaps it when it is freed.
    # By default, glibc raises the threshold after the first free. It then caches freed memory in blocks that do not
    # fit later batches, and the process needs a quarter more memory. So the threshold is fixed here.
    pa.set_memory_pool(pa.system_memory_pool())
    set_option: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # only glibc has this option; other C libraries do not need it
        set_option(_MMAP_THRESHOLD_OPTION, _THRESHOLD_BYTES)
