"""What runs in a fresh process by `call_apart`. Each function imports what it needs, since imports are measured."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def peak_bytes() -> int:
    """Return the largest resident set of this process so far; pages of mapped files count too."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


class Laps:
    """Seconds from one mark to the next, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def mark(self, name: str) -> None:
        """End a part; the next one begins."""
        now = time.perf_counter()
        self.seconds[name], self._began = now - self._began, now


def open_huge(url: str) -> dict[str, float]:
    """Open `huge@1`, make the order of an epoch, and locate a batch in it."""
    laps = Laps()
    import numpy as np

    from datasvc.order import AccessOrder, OrderConfig
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset

    laps.mark("import")
    split = open_dataset(Repository.open(url), "huge@1")["train"]
    number = len(split)
    laps.mark("open")
    order = AccessOrder(split.table.samples_per_shard, OrderConfig(seed=1), 0)
    order.locate(np.arange(8192) + number // 2)
    laps.mark("locate")
    return laps.seconds | {"samples": number, "peak_gb": peak_bytes() / 1e9}


def open_view(url: str, digest: str) -> dict[str, float]:
    """Open a view by the digest of its table, and find the stored rows of a batch of an epoch."""
    laps = Laps()
    import numpy as np

    from datasvc.order import OrderConfig
    from datasvc.repository import Repository
    from datasvc.shards import Split

    laps.mark("import")
    imported_s = time.process_time()
    view = Split("train", "huge@1", Repository.open(url), digest)
    number = len(view)
    laps.mark("open")
    shards, rows = view.access_order(OrderConfig(seed=1), 0).locate(np.arange(1024) + number // 2)
    for shard, row in zip(shards.tolist(), rows, strict=True):
        view.stored_rows(shard, row[None])
    laps.mark("locate")
    processor_s = time.process_time() - imported_s
    return laps.seconds | {"samples": number, "processor": processor_s, "peak_gb": peak_bytes() / 1e9}


def resume_huge(url: str, shuffle: str, share: float) -> dict[str, float]:
    """Take a first batch of `huge@1`, then one from a state of another epoch, at this share of the samples."""
    from datasvc.loaders import TokenLoader
    from datasvc.order import OrderConfig
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset

    order = OrderConfig() if shuffle == "global" else OrderConfig(shuffle="windowed", lanes=8, block=8192)
    laps = Laps()
    split = open_dataset(Repository.open(url), "huge@1")["train"]
    loader = TokenLoader(split, batch_size=64, training=True, order=order)
    laps.mark("open")
    next(loader.numpy())
    laps.mark("start")
    position = int(len(split) * share)
    loader.load_state_dict(loader.state_dict() | {"epoch": 3, "position": position})
    batch = next(loader.numpy())
    laps.mark("resume")
    assert (batch.epoch, int(batch.positions[0])) == (3, position)
    next(loader.numpy())
    laps.mark("next")
    loader.close()
    return laps.seconds | {"samples": len(split), "peak_mb": peak_bytes() / 1e6}


def find_all_consumers(url: str, keys_file: str) -> dict[str, float]:
    """Find every time that samples were consumed; the file has a key a line."""
    laps = Laps()
    from datasvc.models import find_consumers
    from datasvc.repository import Repository

    laps.mark("import")
    keys = Path(keys_file).read_text(encoding="utf-8").split()
    found = find_consumers(Repository.open(url), keys=keys)
    laps.mark("answer")
    sightings = sum(len(chunk.served.keys) for chunk in found.chunks)
    assert not found.gaps
    assert found.versions[-1].num_samples == len(keys)
    return laps.seconds | {"peak_gb": peak_bytes() / 1e9, "sightings": sightings, "versions": len(found.versions)}


def ingest_samples(url: str, source: str, workers: int) -> dict[str, float]:
    """Ingest into a new repository; returns seconds, samples, and the largest peak of a worker's resident set."""
    import tempfile

    import datasvc.cli  # noqa: F401 - settles Arrow's memory, as for the command
    from datasvc.repository import Repository
    from datasvc.shards import ingest
    from datasvc.shards.ingestion import executors

    build = executors.build_unit
    with tempfile.NamedTemporaryFile("a+", encoding="ascii") as peaks:

        def build_unit(*arguments: Any) -> Any:
            result = build(*arguments)
            with open(peaks.name, "a", encoding="ascii") as file:
                file.write(f"{peak_bytes()}\n")
            return result

        executors.build_unit = build_unit
        laps = Laps()
        report = ingest(Repository.create(url), source, "samples", workers=workers)
        laps.mark("seconds")
        peak = max(map(int, peaks.read().split()))
    return laps.seconds | {"samples": report.num_samples["train"], "peak_mib": peak / 2**20}


def write_array_record(photos: str, target: str, number: int) -> None:
    """Write every second photo with ArrayRecord's writer."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(f"{target}/{number}", "group_size:1,uncompressed")
    for path in sorted(Path(photos).glob("*/*.jpg"))[number::2]:
        writer.write(path.read_bytes())
    writer.close()


def train_with_loader(repository: str, cache_folder: str, settings: dict[str, int], num_steps: int) -> None:
    """Print a line at the first batch, take some steps, then print how long a start and a resume take."""
    import datasvc
    from datasvc.cache import Cache
    from datasvc.loaders import DecodeConfig, ImageLoader

    split = next(iter(datasvc.open(repository).dataset("photos@1").values()))
    decode = DecodeConfig(num_threads=settings["threads"])
    sizes = {"batch_size": settings["batch"], "size": settings["size"]}
    with Cache(cache_folder) as cache:

        def make() -> ImageLoader:
            return ImageLoader(split, training=True, cache=cache, decode=decode, **sizes)

        with make() as loader:
            next(iter(loader))
            print("first batch", flush=True)
            for number, _ in enumerate(loader):
                if number == num_steps:
                    break
            state = loader.state_dict()
        state |= {"position": len(split) * 5 // 6}  # sample 5,000 of 6,000
        times = {}
        for name in ("start_ms", "resume_ms"):
            with make() as loader:
                started = time.perf_counter()
                if name == "resume_ms":
                    loader.load_state_dict(state)
                next(iter(loader))
                times[name] = (time.perf_counter() - started) * 1e3
    print(json.dumps(times))


def reserve(folder: str, number: int) -> None:
    """Print a line, wait for one, reserve and complete empty objects, print a line, and wait for the end."""
    import secrets

    from datasvc.cache.catalogue.object_locks import Lease
    from datasvc.cache.process_handle import CacheFolder
    from datasvc.repository import Digest, ObjectInfo

    cache = CacheFolder(Path(folder))
    lease = Lease(cache.files.leases)
    cache.catalogue.register(lease.id, "")
    infos = [ObjectInfo(Digest(secrets.token_hex(32)), 0) for _ in range(number)]
    print("ready", flush=True)
    sys.stdin.readline()
    for info in infos:
        assert cache.catalogue.reserve(info, lease.id, "default") == "reserved"
        cache.catalogue.complete(info.digest, lease.id, publish=True)
        cache.files.unlock(info.digest)
    print("done", flush=True)
    sys.stdin.readline()


def send_files(paths: list[str], buffer_bytes: int) -> None:
    """Print a port, and send the files to each client, by pread and sendall."""
    import os
    import socket

    buffer = memoryview(bytearray(buffer_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            for path in paths:
                file = os.open(path, os.O_RDONLY)
                offset = 0
                while count := os.preadv(file, [buffer], offset):
                    connection.sendall(buffer[:count])
                    offset += count
                os.close(file)
