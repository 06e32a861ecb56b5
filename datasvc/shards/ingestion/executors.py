"""Who builds the units of an ingest: this process, worker processes on this machine, or a Ray cluster.

All call `build_unit` and give back the same results, so the engine never shows in what is committed. The commit is
the caller's. Workers stop when whoever started them is gone.
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

from datasvc.errors import ConfigError, UnavailableError
from datasvc.extras import how_to_install
from datasvc.orphans import end_with_parent
from datasvc.repository import Repository
from datasvc.shards.ingestion.build import BuiltShard, IngestProgress, IngestWork, Report, UnitResult
from datasvc.shards.ingestion.build_listed import build_listed
from datasvc.shards.ingestion.build_streamed import build_streamed
from datasvc.shards.ingestion.lean_memory import keep_lean
from datasvc.shards.ingestion.plan import IngestUnit

EngineName = Literal["local", "ray"]
Earlier = Mapping[int, Mapping[tuple[str, int], BuiltShard]]
OnResult = Callable[[UnitResult], None]

_QUEUED_PER_WORKER: Final = 2
_TICK_S: Final = 0.25
# Libraries whose threads or clients do not survive a fork.
_NOT_FORKABLE: Final = ("torch", "grpc", "ray", "s3fs", "aiohttp", "gcsfs", "adlfs", "duckdb")


def build_unit(
    work: IngestWork,
    unit: IngestUnit,
    repository: Repository,
    earlier: Mapping[tuple[str, int], BuiltShard],
    report: Report,
) -> UnitResult:
    """Store the shards of one unit, in whatever process this runs.

    Args:
        work: what is done.
        unit: which part of it.
        repository: opened by this process.
        earlier: shards of the unit that an interrupted run has stored.
        report: told of progress.

    Raises:
        DatasvcError: see `build_listed` and `build_streamed`.
    """
    journal = repository.journal(work.name, work.fingerprint, work.attempt)
    if unit.files:
        return build_listed(work, unit, repository, journal, report)
    return build_streamed(work, unit, repository, journal, report, earlier)


def run_units(
    work: IngestWork,
    units: Sequence[IngestUnit],
    repository: Repository,
    earlier: Earlier,
    *,
    engine: EngineName,
    workers: int,
    report: Report,
    on_result: OnResult,
    until: ExitStack,
) -> None:
    """Build all units; returns when all are done.

    Args:
        work: what is done.
        units: what is left of it.
        repository: where shards are stored.
        earlier: by unit, shards that an interrupted run has stored.
        engine: "local" or "ray".
        workers: units built at once.
        report: told of progress, in this process.
        on_result: called with each unit's result as it comes, in this process.
        until: when it is closed, worker processes are gone; they end while the caller goes on.

    Raises:
        ConfigError: the engine is not installed.
        UnavailableError: a worker process died.
        DatasvcError: the first that a unit raised; units under way end when `until` is closed.
    """
    if engine == "ray":
        _run_ray(work, units, earlier, workers, report, on_result)
    elif min(workers, len(units)) <= 1:
        for unit in units:
            on_result(build_unit(work, unit, repository, earlier.get(unit.number, {}), report))
    else:
        _run_processes(work, units, earlier, min(workers, len(units)), report, on_result, until)


def choose_start_method(*, is_local: bool) -> Literal["fork", "spawn"]:
    """Return how worker processes are started.

    A fork starts in milliseconds, and is safe only where nothing in this process could be copied half-way: no other
    thread runs, and no library with threads or connections of its own is loaded. Everywhere else: spawn.

    Args:
        is_local: source and repository are local files.
    """
    is_plain = threading.active_count() == 1 and not any(name in sys.modules for name in _NOT_FORKABLE)
    return "fork" if is_local and is_plain and sys.platform == "linux" else "spawn"


def _run_processes(
    work: IngestWork,
    units: Sequence[IngestUnit],
    earlier: Earlier,
    workers: int,
    report: Report,
    on_result: OnResult,
    until: ExitStack,
) -> None:
    is_local = all("://" not in url for url in (work.repository_url, work.source.url))
    method = choose_start_method(is_local=is_local)
    context = multiprocessing.get_context(method)
    counters = _Counters(context, workers)
    # A fork inherits the listing: only numbers need to travel.
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
            "a worker process of the ingest died: killed, out of memory, or started by a script without the guard "
            '`if __name__ == "__main__":`. What is done is kept: run the same command again, with fewer --workers '
            "if memory was short"
        ) from error
    finally:
        ending = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}, name="datasvc-ending")
        ending.start()
        until.callback(ending.join)


def _run_bounded(
    submit: Callable[[IngestUnit], Future[UnitResult]],
    units: Sequence[IngestUnit],
    at_once: int,
    tick: Callable[[], None],
) -> Iterator[UnitResult]:
    """Keep a bounded number of calls under way; yields results as they come, calls `tick` now and then."""
    waiting = iter(units)
    under_way = {submit(unit) for unit in islice(waiting, at_once)}
    while under_way:
        # The time-out decides nothing: it lets a progress bar move.
        done, under_way = wait(under_way, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        tick()
        for future in done:
            unit = next(waiting, None)
            if unit is not None:
                under_way.add(submit(unit))
            yield future.result()


class _Counters:
    """Progress of worker processes in shared memory: each writes its own numbers, so nothing is locked."""

    def __init__(self, context: Any, workers: int) -> None:
        self._slots = context.SimpleQueue()
        for slot in range(workers):
            self._slots.put(slot)
        self._numbers = context.RawArray("q", 3 * workers)
        self._read = IngestProgress()

    def take_slot(self) -> Report:
        """Return the function that counts one worker's progress. Called once in each worker."""
        start = 3 * int(self._slots.get())

        def report(progress: IngestProgress) -> None:
            self._numbers[start] += progress.num_samples
            self._numbers[start + 1] += progress.size_bytes
            self._numbers[start + 2] += progress.num_shards

        return report

    def read(self) -> IngestProgress:
        """Return what was counted since the last call."""
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
    global _in_worker  # noqa: PLW0603 - the one place where a worker process keeps what it works on
    end_with_parent()
    keep_lean()
    _in_worker = (work, Repository.open(work.repository_url), counters.take_slot(), inherited)


def _build_in_worker(unit: IngestUnit | int, earlier: Mapping[tuple[str, int], BuiltShard]) -> UnitResult:
    assert _in_worker is not None
    work, repository, report, inherited = _in_worker
    return build_unit(work, inherited[unit] if isinstance(unit, int) else unit, repository, earlier, report)


def _run_ray(
    work: IngestWork, units: Sequence[IngestUnit], earlier: Earlier, workers: int, report: Report, on_result: OnResult
) -> None:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray: {how_to_install('ray')}") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    shared = ray.put(work)
    build = ray.remote(max_retries=3)(_build_on_ray)
    waiting = iter(units)
    under_way: list[Any] = []
    try:
        _collect_from_ray(ray, build, shared, waiting, under_way, earlier, workers, report, on_result)
    finally:
        for task in under_way:
            ray.cancel(task, force=False)


def _collect_from_ray(
    ray: Any,
    build: Any,
    shared: Any,
    waiting: Iterator[IngestUnit],
    under_way: list[Any],
    earlier: Earlier,
    workers: int,
    report: Report,
    on_result: OnResult,
) -> None:
    """Keep `workers` tasks in `under_way` until none is left."""
    while True:
        while len(under_way) < workers and (unit := next(waiting, None)) is not None:
            under_way.append(build.remote(shared, unit, earlier.get(unit.number, {})))
        if not under_way:
            return
        done, under_way[:] = ray.wait(under_way)
        for each in done:
            try:
                result, progress = ray.get(each)
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
        sum(each.num_samples for each in done),
        sum(each.size_bytes for each in done),
        sum(each.num_shards for each in done),
    )
    return result, total
