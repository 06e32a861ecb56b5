"""What the catalogue costs: a hit, opening it with many objects in it, and reserving from several processes."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from datasvc.cache import Cache
from datasvc.cache.catalogue.files import ScannedFile
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT
from datasvc.cache.catalogue.recovery import boot_id
from datasvc.cache.process_handle import join_folder, leave_folder
from datasvc.repository import Digest, ObjectInfo
from datasvc.shards import Split
from datasvc.shards.format.mapped_file import MappedFile
from tools.bench import fresh
from tools.bench.cache_store import Store
from tools.bench.runner import ROOT, Options, Report, call_command, environment, run_rounds

ROUNDS = 50
WRITERS = 4
SHARD_BYTES = 4 << 20


def measure_hits(folder: Path, photos: Path, options: Options) -> Report:
    """Return microseconds per shard that is found resident."""
    store = Store.of_photos(photos, folder, shard_bytes=SHARD_BYTES)
    split = store.split
    infos = list(split.table.shards())
    with store.fresh_folder() as target, Cache(target / "cache", budget="1TB") as cache:
        cache.stage([split])
        times = run_rounds(_hits(cache, split, infos), options.repeats)
    report = Report(f"A hit, over {len(infos)} shards of {SHARD_BYTES >> 20} MiB, {ROUNDS} rounds")
    report.add_rows("us", times)
    names = list(times)
    for name in names[1:]:
        report.add_ratio(f"{name} / {names[0]}", times[name], times[names[0]])
    return report


def _hits(cache: Cache, split: Split, infos: Sequence[ObjectInfo]) -> dict[str, Callable[[], float]]:
    shards = cache.shards(split.repository)

    def acquire(info: ObjectInfo) -> None:
        cache.acquire(info, split.repository)

    mapped = []

    def acquire_and_map(info: ObjectInfo) -> None:
        # As loaders do; what is mapped is let go of when it is released.
        mapped.append(MappedFile(cache.hold(info, split.repository)[0]))

    def unmap(info: ObjectInfo) -> None:
        cache.release(info.digest)
        mapped.pop()

    def release(info: ObjectInfo) -> None:
        cache.release(info.digest)

    def timed(
        work: Callable[[ObjectInfo], object],
        after: Callable[[ObjectInfo], object] = lambda _: None,
        before: Callable[[ObjectInfo], object] = lambda _: None,
    ) -> Callable[[], float]:
        def run() -> float:
            seconds = 0.0
            for _ in range(ROUNDS):
                for info in infos:
                    before(info)
                started = time.perf_counter()
                for info in infos:
                    work(info)
                seconds += time.perf_counter() - started
                for info in infos:
                    after(info)
            return seconds / ROUNDS / len(infos) * 1e6

        return run

    return {
        "acquire": timed(acquire, release),
        "acquire and map": timed(acquire_and_map, unmap),
        "open as a shard": timed(shards.open_shard, shards.release_shard),
        "release": timed(release, before=acquire),
    }


def measure_catalogue(folder: Path, _: Path, options: Options) -> Report:
    """Return how long a catalogue of many objects takes to open, and reservations a second."""
    full = folder / "full"
    with Cache(full, budget="1TB"):
        opened = join_folder(full)
        found = [ScannedFile(Digest(secrets.token_hex(32)), 1 << 20, DEFAULT_TENANT) for _ in range(options.objects)]
        opened.catalogue.rebuild(opened.catalogue.read(lambda tables: tables.configuration), found, boot_id())
        leave_folder(full, opened)
    empty = folder / "empty"

    def run_open(cache: Path) -> float:
        started = time.perf_counter()
        with Cache(cache, budget="1TB" if cache == empty else None):
            return (time.perf_counter() - started) * 1e3

    run_open(empty)
    rates = run_rounds(
        {
            "open": lambda: run_open(full),
            "open, empty": lambda: run_open(empty),
            "1 process": lambda: run_writers(folder / secrets.token_hex(4), 1, options.reservations),
            "4 processes": lambda: run_writers(folder / secrets.token_hex(4), WRITERS, options.reservations),
        },
        options.repeats,
    )
    report = Report(f"The catalogue with {options.objects:,} objects", "A reservation: reserve, publish, complete.")
    report.add_row(f"open with {options.objects:,} objects", "ms", rates["open"])
    report.add_row("open, empty", "ms", rates["open, empty"])
    report.add_row("reservations from 1 process", "/s", rates["1 process"])
    report.add_row(f"reservations from {WRITERS} processes", "/s", rates["4 processes"])
    report.add_ratio(f"{WRITERS} processes / 1", rates["4 processes"], rates["1 process"])
    return report


def run_writers(folder: Path, num_processes: int, num_each: int) -> float:
    """Reserve and complete empty objects from some processes at once; returns how many a second in all."""
    with Cache(folder, budget="1TB"):
        pass
    for prefix in range(256):  # as in a cache that has been used
        (folder / "objects" / f"{prefix:02x}").mkdir()
    command = call_command(fresh.reserve, folder, num_each)
    writers = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(num_processes)
    ]
    _hear(writers, "ready")
    started = time.perf_counter()
    _say(writers)
    _hear(writers, "done")
    seconds = time.perf_counter() - started
    for writer in writers:
        writer.communicate("\n")
        assert not writer.returncode
    return num_processes * num_each / seconds


def _say(writers: Sequence[subprocess.Popen[str]]) -> None:
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()


def _hear(writers: Sequence[subprocess.Popen[str]], word: str) -> None:
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == f"{word}\n"
