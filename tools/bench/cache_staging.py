"""Staging from an origin that gives so much per request: N requests against N times that, and this machine's most."""

from __future__ import annotations

import argparse
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cache_store import Store, run_curl
from origin import Limits
from report import Report, alternate

from datasvc.cache import Cache
from datasvc.cache.fetch.fetch import Fetcher
from datasvc.cache.process_handle import join_folder, leave_folder
from datasvc.cache.sources.origin_source import RequestPool
from datasvc.cache.staging import stage_objects
from datasvc.progress import NO_PROGRESS
from datasvc.repository import ObjectInfo, Repository

RATE_BYTES_S = 35e6
LATENCY_S = 0.02
SHARDS_PER_REQUEST = 4
FREE = ", no limits"
CURL = "curl, many shards"


def stage(repository: Repository, infos: Sequence[ObjectInfo], requests: int, folder: Path) -> float:
    """Stage objects into a new cache with so many requests under way; returns seconds."""
    total_bytes = sum(info.size_bytes for info in infos)
    with Cache(folder / "cache", budget=2 * total_bytes) as cache:
        opened = join_folder(cache.folder)
        opened.fetcher = Fetcher(opened.catalogue, opened.files, RequestPool(requests))
        wanted = [(info, repository) for info in infos]
        started = time.perf_counter()
        found = stage_objects(cache, wanted, progress=NO_PROGRESS, num_threads=None, stop=threading.Event())
        seconds = time.perf_counter() - started
        assert found.origin_bytes == total_bytes, found
        leave_folder(cache.folder, opened)
    return seconds


@dataclass(frozen=True)
class Case:
    """Objects to stage, and with how many requests.

    Attributes:
        shape: what the objects are.
        requests: under way at once.
        infos: the objects.
    """

    shape: str
    requests: int
    infos: Sequence[ObjectInfo]

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return f"{self.shape}, {self.requests} requests"

    @property
    def size_bytes(self) -> int:
        """Of all objects."""
        return sum(info.size_bytes for info in self.infos)


def measure(folder: Path, arguments: argparse.Namespace) -> Report:
    """Return MB/s, and the share of N times the rate of a request."""
    store = Store(Repository.create(str(folder / "staging")), folder)
    cases = [case for requests in arguments.requests for case in _put_cases(store, requests, arguments.seconds)]
    largest = cases[-2:]
    with store.origin(Limits(RATE_BYTES_S, None, LATENCY_S)) as origin, store.origin(Limits()) as fastest:
        limited, unlimited = Repository.open(origin.url), Repository.open(fastest.url)
        contestants: dict[str, Callable[[], float]] = {}
        for case in cases:
            contestants[case.name] = partial(_run, store, partial(stage, limited, case.infos, case.requests))
        for case in largest:
            contestants[case.name + FREE] = partial(_run, store, partial(stage, unlimited, case.infos, case.requests))
        many = largest[-1]
        for label, url in (("", origin.url), (FREE, fastest.url)):
            contestants[CURL + label] = partial(_run, store, partial(_curl, url, many.infos, many.requests))
        seconds = alternate(contestants, arguments.repeats)
    report = Report(
        f"Staging from {RATE_BYTES_S / 1e6:.0f} MB/s per request and {LATENCY_S * 1e3:.0f} ms",
        f"The last ratios name this machine's ceiling: {many.requests} requests to an origin without limits.",
    )
    sizes = {case.name: case.size_bytes for case in cases}
    for name, values in seconds.items():
        size_bytes = sizes.get(name.removesuffix(FREE), many.size_bytes)
        report.add_row(name, "MB/s", [size_bytes / 1e6 / value for value in values])
    for case in cases:
        ideal = case.size_bytes / (case.requests * RATE_BYTES_S)
        name = f"{case.name} / {case.requests} x {RATE_BYTES_S / 1e6:.0f} MB/s"
        report.add_ratio(name, [ideal] * arguments.repeats, seconds[case.name])
    for case in largest:
        report.add_ratio(f"{case.name} / without limits", seconds[case.name + FREE], seconds[case.name])
        report.add_ratio(f"{case.name} / curl", seconds[CURL], seconds[case.name])
    return report


def _put_cases(store: Store, requests: int, seconds: float) -> list[Case]:
    """Put as much as takes so long at the full rate, in one object and in many."""
    total_bytes = int(requests * RATE_BYTES_S * seconds)
    num_shards = SHARDS_PER_REQUEST * requests

    def put(count: int) -> list[ObjectInfo]:
        return [store.repository.objects.put(secrets.token_bytes(total_bytes // count)) for _ in range(count)]

    return [Case("one shard", requests, put(1)), Case("many shards", requests, put(num_shards))]


def _run(store: Store, work: Callable[[Path], float]) -> float:
    with store.fresh_folder() as folder:
        return work(folder)


def _curl(url: str, infos: Sequence[ObjectInfo], requests: int, folder: Path) -> float:
    started = time.perf_counter()
    run_curl(url, infos, folder, requests=requests)
    return time.perf_counter() - started
