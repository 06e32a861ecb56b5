"""Staging from an origin that gives so much per request: N requests against N times that, and this machine's most."""

from __future__ import annotations

import argparse
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cache_store import Store, run_curl
from origin import Limits
from report import Report, alternate

from datasvc.cache import Cache
from datasvc.cache.folder import join_folder, leave_folder
from datasvc.cache.sources import RequestPool
from datasvc.cache.staging import stage_objects
from datasvc.repository import ObjectInfo, Repository

REQUESTS = (1, 4, 8, 16)
RATE_BYTES_S = 35e6
LATENCY_S = 0.02
SHARDS_PER_REQUEST = 4
_SHAPES = ("one large shard", "many shards")


def stage(repository: Repository, infos: Sequence[ObjectInfo], folder: Path, *, requests: int) -> float:
    """Stage objects into a new cache with so many requests under way; returns seconds."""
    total_bytes = sum(info.size_bytes for info in infos)
    with Cache(folder / "cache", budget=2 * total_bytes) as cache:
        opened = join_folder(cache.folder)
        opened.requests = RequestPool(requests)
        fetcher = opened.fetcher(cache.tenant, None)
        wanted = [(info, repository) for info in infos]
        started = time.perf_counter()
        found = stage_objects(
            opened, fetcher, wanted, tenant=cache.tenant, report=None, num_threads=8, stop=threading.Event()
        )
        seconds = time.perf_counter() - started
        assert found.origin_bytes == total_bytes, found
        leave_folder(cache.folder, opened)
    return seconds


def measure(folder: Path, arguments: argparse.Namespace) -> Report:
    """Return MB/s, and the share of N times the rate of a request."""
    store = Store(Repository.create(str(folder / "staging")), folder)
    objects = store.repository.objects
    infos = {}
    for requests in arguments.requests:
        # So much that each run takes as long: the first bytes of a run come late.
        total_bytes = int(requests * RATE_BYTES_S * arguments.seconds)
        num_shards = SHARDS_PER_REQUEST * requests
        infos[_SHAPES[0], requests] = [objects.put(secrets.token_bytes(total_bytes))]
        infos[_SHAPES[1], requests] = [
            objects.put(secrets.token_bytes(total_bytes // num_shards)) for _ in range(num_shards)
        ]
    most = max(arguments.requests)
    sizes = {case: sum(info.size_bytes for info in found) for case, found in infos.items()}
    with (
        store.origin(Limits(RATE_BYTES_S, None, LATENCY_S)) as origin,
        store.origin(Limits()) as fastest,
    ):
        limited, unlimited = Repository.open(origin.url), Repository.open(fastest.url)
        contestants: dict[str, Callable[[], float]] = {}
        bytes_of: dict[str, int] = {}

        def add(name: str, case: tuple[str, int], run: Callable[[Path], float]) -> None:
            def run_afresh() -> float:
                with store.fresh_folder() as target:
                    return run(target)

            contestants[name], bytes_of[name] = run_afresh, sizes[case]

        for case, found in infos.items():
            shape, n = case
            add(
                f"{shape}, {n} requests",
                case,
                lambda target, found=found, n=n: stage(limited, found, target, requests=n),  # type: ignore[misc]
            )
        for shape in _SHAPES:
            case = (shape, most)
            add(
                f"{shape}, {most} requests, no limit",
                case,
                lambda target, found=infos[case]: stage(unlimited, found, target, requests=most),  # type: ignore[misc]
            )
        case = (_SHAPES[1], most)
        for label, url in (("", origin.url), (", no limit", fastest.url)):
            add(
                f"curl, {most} requests{label}",
                case,
                lambda target, url=url: _time_curl(url, infos[case], target, most),  # type: ignore[misc]
            )
        seconds = alternate(contestants, arguments.repeats)
    report = Report(
        f"Staging from {RATE_BYTES_S / 1e6:.0f} MB/s per request and {LATENCY_S * 1e3:.0f} ms",
        "Ratios are of N times the rate of a request, where N is the number of requests.",
    )
    for name, values in seconds.items():
        report.add_row(name, "MB/s", [bytes_of[name] / 1e6 / value for value in values])
    for (shape, n), size_bytes in sizes.items():
        name = f"{shape}, {n} requests"
        ideal = size_bytes / (n * RATE_BYTES_S)
        report.add_ratio(f"{name} / {n} x 35 MB/s", [ideal] * arguments.repeats, seconds[name])
    for shape in _SHAPES:
        name = f"{shape}, {most} requests"
        report.add_ratio(f"{name} / without limit", seconds[f"{name}, no limit"], seconds[name])
        report.add_ratio(f"{name} / curl", seconds[f"curl, {most} requests"], seconds[name])
    return report


def _time_curl(url: str, infos: Sequence[ObjectInfo], folder: Path, requests: int) -> float:
    started = time.perf_counter()
    run_curl(url, infos, folder, requests=requests)
    return time.perf_counter() - started
