"""Executors for the units of an ingest: this process, worker processes on this machine, or a Ray cluster.

All executors call `build_unit` and return the same results, so that the committed version does not depend on the
executor. The caller commits. Worker processes exit when their parent process exits.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from typing import Any, Final, Literal

from datasvc.child_process import end_with_parent
from datasvc.errors import ConfigError, UnavailableError
from datasvc.extras import how_to_install
from datasvc.repository import Repository
from datasvc.shards.ingestion.build import BuiltShard, IngestProgress, IngestWork, Report, UnitResult
from datasvc.shards.ingestion.build_listed import build_listed
from datasvc.shards.ingestion.build_streamed import build_streamed
from datasvc.shards.ingestion.lean_memory import keep_lean
from datasvc.shards.ingestion.plan import IngestUnit

EngineName = Literal["local", "ray"]
EarlierByUnit = Mapping[int, Mapping[tuple[str, int], BuiltShard]]
OnResult = Callable[[UnitResult], None]

_QUEUED_PER_WORKER: Final = 2
_PROGRESS_INTERVAL_S: Final = 0.25
# Libraries whose threads or network clients do not work in a forked process.
_NOT_FORKABLE: Final = ("torch", "grpc", "ray", "s3fs", "aiohttp", "gcsfs", "adlfs", "duckdb")


def build_unit(
    work: IngestWork,
    unit: IngestUnit,
    repository: Repository,
    earlier: Mapping[tuple[str, int], BuiltShard],
    report: Report,
) -> UnitResult:
    """Build and store the shards of one unit, in the current process.

    Args:
        work: description of the ingest.
        unit: the unit to build.
        repository: the repository, opened by the current process.
        earlier: shards of the unit that an interrupted run stored, by split and ordinal.
        report: called with the progress.

    Raises:
        DatasvcError: as `build_listed` and `build_streamed`.
    """
    journal = repository.journal(work.name, work.fingerprint, work.attempt)
    if unit.files:
        return build_listed(work, unit, repository, journal, report)
    return build_streamed(work, unit, repository, journal, report, earlier)


def run_units(
    work: IngestWork,
    units: Sequence[IngestUnit],
    repository: Repository,
    earlier: EarlierByUnit,
    *,
    engine: EngineName,
    workers: int,
    report: Report,
    on_result: OnResult,
    cleanup: ExitStack,
) -> None:
    """Build all units and return when all are finished.

    Args:
        work: description of the ingest.
        units: the units to build.
        repository: the repository to store shards in.
        earlier: by unit, shards that an interrupted run stored.
        engine: "local" or "ray".
        workers: number of units to build at once.
        report: called with the progress, in this process.
        on_result: called with the result of each unit as soon as it is finished, in this process.
        cleanup: its close waits for the exit of the worker processes, which happens in the background.

    Raises:
        ConfigError: the engine is not installed.
        UnavailableError: a worker process died.
        DatasvcError: the first error of a unit; units in progress stop when `cleanup` is closed.
    """
    if engine == "ray":
        _run_ray(work, units, earlier, workers, report, on_result)
    elif min(workers, len(units)) <= 1:
        for unit in units:
            on_result(build_unit(work, unit, repository, earlier.get(unit.number, {}), report))
    else:
        _run_processes(work, units, earlier, min(workers, len(units)), report, on_result, cleanup)


def choose_start_method(*, is_local: bool) -> Literal["fork", "spawn"]:
    """Return the start method for worker processes.

    A fork takes milliseconds, but it is safe only if this process has no other threads and no library with threads or
    connections of its own, whose state would be copied in the middle of an operation. Otherwise: spawn.

    Args:
        is_local: whether source and repository are local files.
    """
    is_plain = threading.active_count() == 1 and not any(name in sys.modules for name in _NOT_FORKABLE)
    return "fork" if is_local and is_plain and sys.platform == "linux" else "spawn"


def _run_processes(
    work: IngestWork,
    units: Sequence[IngestUnit],
    earlier: EarlierByUnit,
    workers: int,
    report: Report,
    on_result: OnResult,
    cleanup: ExitStack,
) -> None:
    is_local = all("://" not in url for url in (work.repository_url, work.source.url))
    method = choose_start_method(is_local=is_local)
    context = multiprocessing.get_context(method)
    counters = _Counters(context, workers)
    # A forked worker has the listing in memory already: only unit numbers are sent to it.
    inherited = {unit.number: unit for unit in units} if method == "fork" else {}
    executor = ProcessPoolExecutor(workers, context, _start_worker, (work, counters, inherited))

    def submit(unit: IngestUnit) -> Future[UnitResult]:
        return executor.submit(_build_in_worker, unit.number if inherited else unit, earlier.get(unit.number, {}))

    try:
        for result in _run_bounded(submit, units, _QUEUED_PER_WORKER * workers, lambda: report(counters.read())):
            on_result(result)
        report(counters.read())
    except BrokenProcessPool as error:
        raise UnavailableError(
            "a worker process of the ingest died: it was killed, ran out of memory, or was started by a script "
            'without the guard `if __name__ == "__main__":`. Finished shards are kept: run the same command again, '
            "with fewer --workers if memory ran out"
        ) from error
    finally:
        # In a thread: the caller compares and commits while the worker processes exit.
        shutdown = threading.Thread(
            target=executor.shutdown, kwargs={"cancel_futures": True}, name="datasvc-executor-shutdown"
        )
        shutdown.start()
        cleanup.callback(shutdown.join)


def _run_bounded(
    submit: Callable[[IngestUnit], Future[UnitResult]],
    units: Sequence[IngestUnit],
    at_once: int,
    tick: Callable[[], None],
) -> Iterator[UnitResult]:
    """Keep at most `at_once` calls pending; yield results as they finish, and call `tick` a few times per second."""
    waiting = iter(units)
    pending = {submit(unit) for unit in islice(waiting, at_once)}
    while pending:
        # The time-out only updates the progress bar.
        done, pending = wait(pending, timeout=_PROGRESS_INTERVAL_S, return_when=FIRST_COMPLETED)
        tick()
        for future in done:
            unit = next(waiting, None)
            if unit is not None:
                pending.add(submit(unit))
            yield future.result()


class _Counters:
    """Progress counters of worker processes in shared memory. Each worker has its own slot, so no lock is needed."""

    def __init__(self, context: Any, workers: int) -> None:
        self._slots = context.SimpleQueue()
        for slot in range(workers):
            self._slots.put(slot)
        self._numbers = context.RawArray("q", 3 * workers)
        self._read = IngestProgress()

    def take_slot(self) -> Report:
        """Return the function that counts the progress of one worker. Each worker calls this once."""
        start = 3 * int(self._slots.get())

        def report(progress: IngestProgress) -> None:
            self._numbers[start] += progress.num_samples
            self._numbers[start + 1] += progress.size_bytes
            self._numbers[start + 2] += progress.num_shards

        return report

    def read(self) -> IngestProgress:
        """Return the progress since the last call."""
        numbers = self._numbers[:]
        total = IngestProgress(sum(numbers[0::3]), sum(numbers[1::3]), sum(numbers[2::3]))
        before, self._read = self._read, total
        return IngestProgress(
            total.num_samples - before.num_samples,
            total.size_bytes - before.size_bytes,
            total.num_shards - before.num_shards,
        )


_in_worker: tuple[IngestWork, Repository, Report, Mapping[int, IngestUnit]] | None = None


def _start_worker(work: IngestWork, counters: _Counters, inherited: Mapping[int, IngestUnit]) -> None:
    global _in_worker  # noqa: PLW0603 - the pool's initializer can pass state to tasks only through a global
    end_with_parent()
    keep_lean()
    _in_worker = (work, Repository.open(work.repository_url), counters.take_slot(), inherited)


def _build_in_worker(unit: IngestUnit | int, earlier: Mapping[tuple[str, int], BuiltShard]) -> UnitResult:
    assert _in_worker is not None
    work, repository, report, inherited = _in_worker
    return build_unit(work, inherited[unit] if isinstance(unit, int) else unit, repository, earlier, report)


def _run_ray(
    work: IngestWork,
    units: Sequence[IngestUnit],
    earlier: EarlierByUnit,
    workers: int,
    report: Report,
    on_result: OnResult,
) -> None:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray, which is not installed: {how_to_install('ray')}") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    # Stored once in Ray's object store instead of sent with every task.
    shared = ray.put(work)
    build = ray.remote(max_retries=3)(_build_on_ray)
    waiting = iter(units)
    pending: list[Any] = []
    try:
        _collect_from_ray(ray, build, shared, waiting, pending, earlier, workers, report, on_result)
    finally:
        for task in pending:
            ray.cancel(task, force=False)


def _collect_from_ray(
    ray: Any,
    build: Any,
    shared: Any,
    waiting: Iterator[IngestUnit],
    pending: list[Any],
    earlier: EarlierByUnit,
    workers: int,
    report: Report,
    on_result: OnResult,
) -> None:
    """Keep `workers` tasks in `pending` until all units are finished."""
    while True:
        while len(pending) < workers and (unit := next(waiting, None)) is not None:
            pending.append(build.remote(shared, unit, earlier.get(unit.number, {})))
        if not pending:
            return
        done, pending[:] = ray.wait(pending)
        for task in done:
            try:
                result, progress = ray.get(task)
            # The error of the unit itself, as the other executors raise it.
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise UnavailableError(
                    f"a Ray worker of the ingest failed: {error}; run the same command again"
                ) from error
            report(progress)
            on_result(result)


def _build_on_ray(
    work: IngestWork, unit: IngestUnit, earlier: Mapping[tuple[str, int], BuiltShard]
) -> tuple[UnitResult, IngestProgress]:
    done: list[IngestProgress] = []
    result = build_unit(work, unit, Repository.open(work.repository_url), earlier, done.append)
    total = IngestProgress(
        sum(progress.num_samples for progress in done),
        sum(progress.size_bytes for progress in done),
        sum(progress.num_shards for progress in done),
    )
    return result, total
