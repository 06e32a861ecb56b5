"""Epochs through a cache from a throttled origin: the first batch, the first epoch, and what later ones ask for."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache_store import Store, open_photos, run_curl
from origin import Limits, OriginProcess
from report import Report, alternate

from datasvc.cache import Cache
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import OrderConfig
from datasvc.repository import ObjectInfo, Objects, Repository
from datasvc.shards import Split

LIMITS = Limits(None, 200e6, 0.02)
CURL_REQUESTS = 16
# A few places of the data set side by side, and small blocks: what a batch needs must fit the smallest cache.
COLD = OrderConfig(seed=1, shuffle="windowed", lanes=4, block=256)
REUSE = OrderConfig(seed=1, shuffle="windowed", lanes=2, block=64)
BATCH = 64
SHARES = (0.25, 0.5, 0.75, 1.0)
# Shards small against the smallest cache that is measured, as they are where there are thousands.
REUSE_SHARD_BYTES = 4 << 20


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


def measure_cold(folder: Path, photos: Path, arguments: argparse.Namespace) -> Report:
    """Return the first batch and two epochs from an origin that is slow in all, beside curl of the same bytes."""
    stores = {mib: Store.of_photos(photos, folder, shard_bytes=mib << 20) for mib in arguments.shard_mib}
    title = f"Cold start from {LIMITS.total_rate / 1e6:.0f} MB/s in all and {LIMITS.latency_s * 1e3:.0f} ms"
    report = Report(
        title, "Every run has a new cache with room for all. Ratios are of times: below 1, ours is faster."
    )
    for mib, store in stores.items():
        infos = list(store.split.table.shards())
        data_bytes = sum(info.size_bytes for info in infos)
        runs: list[Run] = []

        def run_ours(store: Store = store, runs: list[Run] = runs) -> float:
            with store.fresh_folder() as target:
                runs.append(run_job(origin, target, COLD, share=1.0, num_epochs=2))
            return runs[-1].epoch_s[0]

        def run_theirs(store: Store = store, infos: list[ObjectInfo] = infos) -> float:
            with store.fresh_folder() as target:
                started = time.perf_counter()
                run_curl(origin.url, infos, target, requests=CURL_REQUESTS)
                return time.perf_counter() - started

        with store.origin(LIMITS) as origin:
            seconds = alternate({"ours": run_ours, "curl": run_theirs}, arguments.repeats)
        name = f"{len(infos)} shards of {mib} MiB"
        report.add_row(f"{name}: opening the data set", "s", [run.opening_s for run in runs])
        report.add_row(f"{name}: first batch", "s", [run.first_batch_s for run in runs])
        report.add_row(f"{name}: first epoch", "s", seconds["ours"])
        report.add_row(f"{name}: curl", "s", seconds["curl"])
        report.add_row(f"{name}: second epoch", "s", [run.epoch_s[1] for run in runs])
        report.add_ratio(f"{name}: first epoch / curl", seconds["ours"], seconds["curl"])
        num = len(runs)
        report.add_ratio(f"{name}: origin bytes / data, first epoch", _bytes(runs, 0), [data_bytes] * num)
        report.add_ratio(f"{name}: origin bytes / data, second epoch", _bytes(runs, 1), [data_bytes] * num)
    return report


def measure_reuse(folder: Path, photos: Path, arguments: argparse.Namespace) -> Report:
    """Return the share of later epochs' bytes that came without the origin, by the share of the data that fits."""
    store = Store.of_photos(photos, folder, shard_bytes=REUSE_SHARD_BYTES)
    data_bytes = sum(info.size_bytes for info in store.split.table.shards())
    runs: dict[float, list[Run]] = defaultdict(list)

    def run_share(share: float) -> float:
        with store.fresh_folder() as target:
            runs[share].append(run_job(origin, target, REUSE, share=share, num_epochs=3))
        return runs[share][-1].epoch_s[-1]

    with store.origin(LIMITS) as origin:
        contestants = {f"{share:.0%} fit": (lambda share=share: run_share(share)) for share in SHARES}
        alternate(contestants, arguments.repeats)
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


def _bytes(runs: list[Run], epoch: int) -> list[float]:
    return [run.origin_bytes[epoch] for run in runs]
