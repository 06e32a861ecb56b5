"""Staging and epochs through a cache from a throttled origin: speed, first batch, and what later epochs ask for."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasvc.cache import Cache
from datasvc.cache.cache import stage_objects
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.fetch.fetch import Fetcher
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.process_handle import join_folder, leave_folder
from datasvc.cache.sources.origin_source import RequestPool
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import OrderConfig
from datasvc.progress import NO_PROGRESS
from datasvc.repository import ObjectInfo, Objects, Repository
from datasvc.shards import Split
from tools.bench.cache_store import Store, open_photos, time_curl
from tools.bench.origin import Limits, OriginProcess
from tools.bench.runner import Options, Report, run_rounds

LIMITS = Limits(None, 200e6, 0.02)
CURL_REQUESTS = 16
# A few places of the data set side by side, and small blocks: what a batch needs must fit the smallest cache.
COLD = OrderConfig(seed=1, shuffle="windowed", lanes=4, block=256)
REUSE = OrderConfig(seed=1, shuffle="windowed", lanes=2, block=64)
BATCH = 64
SHARES = (0.25, 0.5, 0.75, 1.0)
# Shards small against the smallest cache that is measured, as they are where there are thousands.
REUSE_SHARD_BYTES = 4 << 20
RATE_BYTES_S = 35e6
LATENCY_S = 0.02
SHARDS_PER_REQUEST = 4
FREE = ", no limits"
CURL = "curl, many shards"


@dataclass
class Run:
    """What was seen of one job.

    Attributes:
        opening_s: repository and data-set version.
        first_batch_s: from there to the first batch, its bytes in hand.
        epoch_s: each epoch, from there to its last batch.
        origin_bytes: of shards that left the origin in each epoch.
    """

    opening_s: float
    first_batch_s: float
    epoch_s: list[float]
    origin_bytes: list[int]


def run_job(origin: OriginProcess, folder: Path, order: OrderConfig, *, share: float, num_epochs: int) -> Run:
    """Serve a job some epochs through a new cache that has room for `share` of the data."""
    origin.forget()
    began = time.perf_counter()
    split = open_photos(Repository.open(origin.url))
    run = Run(time.perf_counter() - began, 0.0, [], [])
    paths = [f"/{Objects.path(info.digest)}" for info in split.table.shards()]
    budget = int(share * footprint(split.table.bytes_per_shard).sum())
    with Cache(folder / "cache", budget=budget) as cache:
        started, taken = time.perf_counter(), 0
        for epoch, is_last in _serve(split, cache, order, num_epochs):
            now = time.perf_counter()
            run.first_batch_s = run.first_batch_s or now - started
            if is_last:
                # Not the tables of the split: they are read when they are needed, at whatever time that is.
                counted = sum(origin.counts()["paths"].get(path, 0) for path in paths)
                run.epoch_s.append(now - started)
                run.origin_bytes.append(counted - taken)
                started, taken = time.perf_counter(), counted
            assert len(run.epoch_s) == epoch + is_last
    return run


def _serve(split: Split, cache: Cache, order: OrderConfig, num_epochs: int) -> Iterator[tuple[int, bool]]:
    """Yield the epoch of each batch, and whether it is the last of it, once all its bytes were looked at."""
    shards = PrefetchingShardStore(cache, split, order)
    # fmt: off
    batches = SampleBatches(
        split, shards, order, batch_size=BATCH, rank=0, world_size=1, tail="short", blob="image", columns=(),
    )
    # fmt: on
    for batch in batches.stream(Cursor(0, 0)):
        assert sum(int(blob[-1]) for blob in batch.blobs) > 0
        is_last = batch.after.position == len(split)
        batches.retire(batch)
        yield batch.epoch, is_last
        if is_last and batch.epoch == num_epochs - 1:
            break
    batches.close()
    shards.close()


def measure_cold(folder: Path, photos: Path, options: Options) -> Report:
    """Return the first batch and two epochs from an origin that is slow in all, beside curl of the same bytes."""
    stores = {mib: Store.of_photos(photos, folder, shard_bytes=mib << 20) for mib in options.shard_mib}
    title = f"Cold start from {LIMITS.total_rate / 1e6:.0f} MB/s in all and {LIMITS.latency_s * 1e3:.0f} ms"
    report = Report(
        title, "Every run has a new cache with room for all. Ratios are of times: below 1, ours is faster."
    )
    for mib, store in stores.items():
        infos = list(store.split.table.shards())
        data_bytes = sum(info.size_bytes for info in infos)

        def run_curl(store: Store = store, infos: list[ObjectInfo] = infos) -> float:
            with store.fresh_folder() as target:
                return time_curl(origin.url, infos, CURL_REQUESTS, target)

        with store.origin(LIMITS) as origin:
            arms = {"ours": partial(run_fresh, store, origin, COLD, 1.0, 2), "curl": run_curl}
            found = run_rounds(arms, options.repeats)
        runs, curl_s = found["ours"], found["curl"]
        name = f"{len(infos)} shards of {mib} MiB"
        report.add_row(f"{name}: opening the data set", "s", [run.opening_s for run in runs])
        report.add_row(f"{name}: first batch", "s", [run.first_batch_s for run in runs])
        report.add_row(f"{name}: first epoch", "s", [run.epoch_s[0] for run in runs])
        report.add_row(f"{name}: curl", "s", curl_s)
        report.add_row(f"{name}: second epoch", "s", [run.epoch_s[1] for run in runs])
        report.add_ratio(f"{name}: first epoch / curl", [run.epoch_s[0] for run in runs], curl_s)
        num = len(runs)
        report.add_ratio(f"{name}: origin bytes / data, first epoch", _bytes(runs, 0), [data_bytes] * num)
        report.add_ratio(f"{name}: origin bytes / data, second epoch", _bytes(runs, 1), [data_bytes] * num)
    return report


def measure_reuse(folder: Path, photos: Path, options: Options) -> Report:
    """Return the share of later epochs' bytes that came without the origin, by the share of the data that fits."""
    store = Store.of_photos(photos, folder, shard_bytes=REUSE_SHARD_BYTES)
    data_bytes = sum(info.size_bytes for info in store.split.table.shards())
    with store.origin(LIMITS) as origin:
        arms = {share: partial(run_fresh, store, origin, REUSE, share, 3) for share in SHARES}
        runs = run_rounds(arms, options.repeats)
    report = Report(
        f"Later epochs, {store.split.table.num_shards} shards of {REUSE_SHARD_BYTES >> 20} MiB",
        "Hits: 1 - bytes of shards that left the origin during the epoch / data. At best the share that fits.",
    )
    for share, found in runs.items():
        for epoch in range(3):
            report.add_row(f"{share:.0%} fit: epoch {epoch + 1}", "s", [run.epoch_s[epoch] for run in found])
        for epoch in (1, 2):
            hits = [data_bytes - run.origin_bytes[epoch] for run in found]
            report.add_ratio(f"{share:.0%} fit: hits, epoch {epoch + 1}", hits, [data_bytes] * len(found))
    return report


def run_fresh(store: Store, origin: OriginProcess, order: OrderConfig, share: float, num_epochs: int) -> Run:
    """Serve a job through a cache in a fresh folder."""
    with store.fresh_folder() as target:
        return run_job(origin, target, order, share=share, num_epochs=num_epochs)


def _bytes(runs: list[Run], epoch: int) -> list[float]:
    return [run.origin_bytes[epoch] for run in runs]


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


def measure_staging(folder: Path, _: Path, options: Options) -> Report:
    """Return MB/s, and the share of N times the rate of a request."""
    store = Store(Repository.create(str(folder / "staging")), folder)
    cases = [case for requests in options.requests for case in _put_cases(store, requests, options.seconds)]
    largest = cases[-2:]
    with store.origin(Limits(RATE_BYTES_S, None, LATENCY_S)) as origin, store.origin(Limits()) as fastest:
        limited, unlimited = Repository.open(origin.url), Repository.open(fastest.url)
        arms: dict[str, Callable[[], float]] = {}
        for case in cases:
            arms[case.name] = partial(_run, store, partial(stage, limited, case.infos, case.requests))
        for case in largest:
            arms[case.name + FREE] = partial(_run, store, partial(stage, unlimited, case.infos, case.requests))
        many = largest[-1]
        for label, url in (("", origin.url), (FREE, fastest.url)):
            arms[CURL + label] = partial(_run, store, partial(time_curl, url, many.infos, many.requests))
        seconds = run_rounds(arms, options.repeats)
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
        report.add_ratio(name, [ideal] * options.repeats, seconds[case.name])
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
