"""Streams from an S3 bucket: obstore against s3fs, with N reads of one object each at once.

Both run in this process, in turn. Each stream passes a whole object on as it arrives, as the cache fetches it, and
drops it. The processor time is that of this process. The environment has the credentials and the endpoint.

    python tools/bench/store_streams.py s3://bucket/folder [--streams 1 2 4 8 16] [--object-mb 64] [--repeats 5]
                                        [--json]
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from report import Report, alternate, make_parser

from datasvc.repository import Storage
from datasvc.repository.store.cancellation import CancellationToken

OBSTORE, S3FS = "obstore", "s3fs"


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


def read_streams(storage: Storage, names: Sequence[str], size_bytes: int, processor_s: list[float]) -> float:
    """Read objects at once, each by one stream; add the processor time to `processor_s`, and return the seconds."""
    received = [0] * len(names)

    def read(number: int) -> None:
        def take(view: memoryview) -> None:
            received[number] += len(view)

        storage.stream_range(names[number], 0, size_bytes, take, CancellationToken())

    with ThreadPoolExecutor(len(names)) as threads:
        started, started_processor = time.perf_counter(), time.process_time()
        list(threads.map(read, range(len(names))))
        seconds = time.perf_counter() - started
    processor_s.append(time.process_time() - started_processor)
    assert received == [size_bytes] * len(names), received
    return seconds


def measure(arguments: argparse.Namespace) -> Report:
    """Return MB/s and processor time of both clients, and the ratios of their speeds."""
    size_bytes = int(arguments.object_mb * 1e6)
    report = Report("Streams from S3", f"Objects of {arguments.object_mb:g} MB; each stream reads one.")
    with stored_objects(arguments.url, max(arguments.streams), size_bytes) as (folder, names):
        clients = open_clients(folder)
        for storage in clients.values():
            read_streams(storage, names[:1], size_bytes, [])
        runs = {(client, streams): [] for streams in arguments.streams for client in clients}
        seconds = alternate(
            {
                _title(*run): partial(read_streams, clients[run[0]], names[: run[1]], size_bytes, processor_s)
                for run, processor_s in runs.items()
            },
            arguments.repeats,
        )
    for run, processor_s in runs.items():
        run_bytes = run[1] * size_bytes
        report.add_row(_title(*run), "MB/s", [run_bytes / 1e6 / each for each in seconds[_title(*run)]])
        report.add_row(f"{_title(*run)}, processor", "s/GB", [each / run_bytes * 1e9 for each in processor_s])
    for streams in arguments.streams:
        own, other = (_title(client, streams) for client in (OBSTORE, S3FS))
        report.add_ratio(f"{own} / {S3FS}", seconds[other], seconds[own])
    return report


def _title(client: str, streams: int) -> str:
    return f"{client}, {streams} streams"


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("url", help="folder in a bucket, in which a new folder is made and deleted")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="default: %(default)s")
    parser.add_argument("--object-mb", type=float, default=64, help="size of an object in MB; default: %(default)s")
    arguments = parser.parse_args()
    measure(arguments).show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
