"""Streams from an S3 bucket: obstore against s3fs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from datasvc.repository import Storage
from datasvc.repository.store.obstore_loop import CancellationToken
from tools.bench.runner import Options, Report, bench, column, run_rounds

OBSTORE, S3FS = "obstore", "s3fs"


@bench(
    repeats=5,
    positional={"url": {"help": "folder in a bucket, in which a new folder is made and deleted"}},
    streams={"type": int, "nargs": "+", "default": [1, 2, 4, 8, 16], "help": "default: %(default)s"},
    object_mb=(64.0, "size of an object in MB"),
)
def store_streams(options: Options) -> Report:
    """Streams from an S3 bucket: obstore against s3fs, with N reads of one object each at once.

    Both run in this process, in turn. Each stream passes a whole object on as it arrives, as the cache fetches it,
    and drops it. The processor time is that of this process. The environment has the credentials and the endpoint.
    """
    size_bytes = int(options.object_mb * 1e6)
    report = Report("Streams from S3", f"Objects of {options.object_mb:g} MB; each stream reads one.")
    with stored_objects(options.url, max(options.streams), size_bytes) as (folder, names):
        clients = open_clients(folder)
        for storage in clients.values():
            read_streams(storage, names[:1], size_bytes)
        runs = {_title(client, streams): (client, streams) for streams in options.streams for client in clients}
        arms = {
            title: partial(read_streams, clients[client], names[:streams], size_bytes)
            for title, (client, streams) in runs.items()
        }
        found = run_rounds(arms, options.repeats)
    seconds = {title: column(values, "seconds") for title, values in found.items()}
    for title, (_, streams) in runs.items():
        run_bytes = streams * size_bytes
        report.add_row(title, "MB/s", [run_bytes / 1e6 / each for each in seconds[title]])
        processor_s = column(found[title], "processor_s")
        report.add_row(f"{title}, processor", "s/GB", [each / run_bytes * 1e9 for each in processor_s])
    for streams in options.streams:
        own, other = (_title(client, streams) for client in (OBSTORE, S3FS))
        report.add_ratio(f"{own} / {S3FS}", seconds[other], seconds[own])
    return report


@contextmanager
def stored_objects(url: str, count: int, size_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Put objects into a new folder, and yield the folder and their names; the folder is deleted afterwards."""
    folder = f"{url.rstrip('/')}/streams-{secrets.token_hex(4)}"
    storage, names = Storage(folder), [str(number) for number in range(count)]
    try:
        for name in names:
            storage.put_bytes(name, secrets.token_bytes(size_bytes))
        yield folder, names
    finally:
        storage.delete_folder("")


def open_clients(folder: str) -> dict[str, Storage]:
    """Return both clients of a folder. Raises SystemExit if one of them would not be used."""
    clients = {OBSTORE: Storage(folder)}
    os.environ["DATASVC_STORE_CLIENT"] = "fsspec"
    clients[S3FS] = Storage(folder)
    del os.environ["DATASVC_STORE_CLIENT"]
    for name, start in ((OBSTORE, "obstore"), (S3FS, "S3FileSystem")):
        if not clients[name].client.startswith(start):
            raise SystemExit(f"{folder} is read by {clients[name].client}, not by {name}")
    return clients


def read_streams(storage: Storage, names: Sequence[str], size_bytes: int) -> dict[str, float]:
    """Read objects at once, each by one stream; returns seconds, by the clock and of the processor."""
    received = [0] * len(names)

    def read(number: int) -> None:
        def take(view: memoryview) -> None:
            received[number] += len(view)

        storage.stream_range(names[number], 0, size_bytes, take, CancellationToken())

    with ThreadPoolExecutor(len(names)) as threads:
        started, started_processor = time.perf_counter(), time.process_time()
        list(threads.map(read, range(len(names))))
        seconds = time.perf_counter() - started
    processor_s = time.process_time() - started_processor
    assert received == [size_bytes] * len(names), received
    return {"seconds": seconds, "processor_s": processor_s}


def _title(client: str, streams: int) -> str:
    return f"{client}, {streams} streams"
