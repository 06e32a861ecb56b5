"""MB/s, samples/s and memory of an ingest, beside `tar cf`, `cp -r`, ArrayRecord's writer and bare reading."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from xxhash import xxh3_128_digest

from datasvc.repository import Repository
from datasvc.shards.ingestion.ingest import ingest as ingest_photos
from tools.bench import fresh
from tools.bench.photos import read_photos, write_photos, write_tars
from tools.bench.runner import (
    ROOT,
    Options,
    Report,
    bench,
    call_apart,
    call_command,
    column,
    environment,
    run_rounds,
    timed,
)

BATCH_BYTES, SHARD_BYTES = 4 << 20, 64 << 20
SAMPLE_BYTES, FILES = 1000, 10
PHOTOS_PER_TAR = 100
WORKERS = 2


@bench(repeats=5, images=6000)
def ingest(options: Options) -> Report:
    """MB/s of `datasvc.shards.ingest` beside `tar cf`, `cp -r` and ArrayRecord's writer on the same photos.

    All read the same files from a warm page cache and write to a fresh folder; what earlier runs left unwritten is
    synced before each. They do not do the same work:

    - `datasvc ingest` parses every image's header, digests every sample and every shard, deals samples to shards by a
      permutation, writes an index, and syncs each shard to disk before the commit;
    - `tar cf` and `cp -r` end when the bytes are in the page cache; `tar cf + fsync` when they are on the disk;
    - ArrayRecord writes one uncompressed file in each of two processes, unsynced; it is left out where it is not
      installed (`pip install array-record`);
    - the bare loop is what the machine can do: two processes that know their files, read each into a buffer that they
      use again, digest it with xxHash3, digest 4 MiB with BLAKE3, write them, and sync every 64 MiB. It lists, checks
      and commits nothing.

    On a disk that writes slower than the rest works, all that sync measure that disk. `--folder /dev/shm` takes it
    out of the comparison. Ratios are of speeds: above 1, datasvc is the faster.
    """
    target = options.folder / "target"
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as source:
        photos = Path(source) / "photos"
        size_bytes = write_photos(photos, num_images=options.images)
        for _ in read_photos(photos):
            pass  # the page cache is warm now

        def run_datasvc(workers: int) -> float:
            repository = Repository.create(str(target))
            return timed(lambda: ingest_photos(repository, str(photos), "photos", workers=workers))

        def run_command(*words: object) -> float:
            return timed(lambda: subprocess.run(list(map(str, words)), check=True))

        tar = partial(run_command, "tar", "cf", target, "-C", photos, ".")
        arms = {
            "datasvc ingest, 1 process": lambda: run_datasvc(1),
            "datasvc ingest, 2 workers": lambda: run_datasvc(2),
            "tar cf": tar,
            "tar cf + fsync": lambda: tar() + timed(lambda: _sync(target)),
            "cp -r": partial(run_command, "cp", "-r", photos, target),
            "bare read + digest + write, 2 processes": lambda: run_bare(photos, target),
        }
        ours = list(arms)[:2]
        if importlib.util.find_spec("array_record") is not None:
            arms["ArrayRecord, 2 processes"] = lambda: run_array_record(photos, target)

        def afresh(run: Callable[[], float]) -> float:
            os.sync()
            seconds = run()
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            return seconds

        # The first round pays for imports, and for the disk's first allocations.
        each_afresh = {name: partial(afresh, run) for name, run in arms.items()}
        seconds = run_rounds(each_afresh, options.repeats, warm_up=True)
    report = Report(
        f"Ingest of {options.images:,} photos, {size_bytes / 1e6:.0f} MB, from a warm page cache",
        "datasvc's time includes header checks, digests, indexes and fsync; the others do less, see --help.",
    )
    report.add_rows("MB/s", seconds, lambda value: size_bytes / 1e6 / value)
    for own in ours:
        for baseline in list(arms)[2:]:
            report.add_ratio(f"{own} / {baseline}", seconds[baseline], seconds[own])
    return report


def run_array_record(photos: Path, target: Path) -> float:
    """Write with ArrayRecord in two processes; returns seconds."""
    target.mkdir()

    def write() -> None:
        commands = [call_command(fresh.write_array_record, photos, target, number) for number in range(WORKERS)]
        for process in [subprocess.Popen(command, cwd=ROOT, env=environment()) for command in commands]:
            assert process.wait() == 0

    return timed(write)


def run_bare(photos: Path, target: Path) -> float:
    """Read, digest and write in two processes, and do nothing else; returns seconds."""
    target.mkdir()
    files = [(str(path), path.stat().st_size) for path in sorted(photos.glob("*/*.jpg"))]
    fork = multiprocessing.get_context("fork")  # nothing is to be imported: that is not what is measured

    def copy() -> None:
        processes = [
            fork.Process(target=copy_bare, args=(files[number::WORKERS], target / str(number)))
            for number in range(WORKERS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0

    return timed(copy)


def copy_bare(files: list[tuple[str, int]], target: Path) -> None:
    """Do what no ingest can do without; `files` are paths and their bytes."""
    buffer = memoryview(bytearray(BATCH_BYTES + max(size_bytes for _, size_bytes in files)))
    for start in range(
        0, len(files), per_shard := max(1, SHARD_BYTES * len(files) // sum(size for _, size in files))
    ):
        shard, digest, used = os.open(f"{target}-{start}", os.O_WRONLY | os.O_CREAT | os.O_EXCL), blake3(), 0
        for path, size_bytes in files[start : start + per_shard]:
            place = buffer[used : used + size_bytes]
            descriptor = os.open(path, os.O_RDONLY)
            assert os.readv(descriptor, [place]) == size_bytes
            os.close(descriptor)
            xxh3_128_digest(place)
            used += size_bytes
            if used >= BATCH_BYTES:
                digest.update(buffer[:used])
                assert os.write(shard, buffer[:used]) == used
                used = 0
        digest.update(buffer[:used])
        assert os.write(shard, buffer[:used]) == used
        os.fsync(shard)
        os.close(shard)


def _sync(target: Path) -> None:
    with target.open("rb") as packed:
        os.fsync(packed.fileno())


@bench(repeats=5, samples=1_000_000)
def ingest_samples(options: Options) -> Report:
    """Samples/s and memory of `datasvc.shards.ingest` on many small samples: a million of 1 kB in Parquet files.

    Beside it pyarrow's own reading of the same files, column by column, which makes no samples of them. Each ingest
    is a fresh process, so that its time holds the start of its workers, and the peak resident set of each worker can
    be read.
    """
    source = options.folder / "source"
    source.mkdir()
    write_samples(source, options.samples)

    def run_ingest(workers: int) -> dict[str, float]:
        os.sync()
        found = ingest_apart(options.folder / "repo", source, workers)
        assert found["samples"] == options.samples
        return found

    def read() -> None:
        for path in sorted(source.iterdir()):
            for _ in pq.ParquetFile(path).iter_batches(4096, use_threads=False):
                pass

    one, two = "1 process", "2 workers"
    found = run_rounds(
        {
            one: lambda: run_ingest(1),
            two: lambda: run_ingest(2),
            "pyarrow reads": lambda: {"seconds": timed(read)},
        },
        options.repeats,
    )
    report = Report(
        f"Ingest of {options.samples:,} samples of {SAMPLE_BYTES} bytes from {FILES} Parquet files",
        "The start of the workers is counted.",
    )
    seconds = {name: column(values, "seconds") for name, values in found.items()}
    report.add_rows("samples/s", seconds, lambda value: options.samples / value)
    report.add_row("peak resident set of one of 2 workers", "MiB", column(found[two], "peak_mib"))
    report.add_row("peak resident set of 1 process", "MiB", column(found[one], "peak_mib"))
    report.add_ratio("2 workers / 1 process", seconds[one], seconds[two])
    return report


@bench(repeats=3, images=6000)
def ingest_memory(options: Options) -> Report:
    """Peak resident set of an ingest's workers: the same photos as class folders and as tars, 64 MiB shards."""
    photos, tars = options.folder / "photos", options.folder / "tars"
    write_photos(photos, num_images=options.images)
    write_tars(sorted(photos.glob("*/*.jpg")), tars, PHOTOS_PER_TAR)
    report = Report(f"Peak resident set of {WORKERS} workers ingesting {options.images:,} photos, 64 MiB shards")
    arms = {source.name: partial(ingest_apart, options.folder / "repo", source, WORKERS) for source in (photos, tars)}
    for name, found in run_rounds(arms, options.repeats).items():
        report.add_row(name, "MiB", column(found, "peak_mib"))
    return report


def ingest_apart(target: Path, source: Path, workers: int) -> dict[str, float]:
    """Ingest in a fresh process, and remove the repository; returns seconds, samples and the peak of a worker."""
    found: dict[str, float] = call_apart(fresh.ingest_samples, target, source, workers)
    shutil.rmtree(target)
    return found


def write_samples(folder: Path, num_samples: int) -> None:
    """Write `FILES` Parquet files of samples with a blob, a label and a text."""
    generator = np.random.default_rng(0)
    count = num_samples // FILES
    for number in range(FILES):
        content = pa.py_buffer(generator.bytes(count * SAMPLE_BYTES))
        offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int64) * SAMPLE_BYTES)
        blobs = pa.Array.from_buffers(pa.large_binary(), count, [None, offsets, content])
        table = pa.table(
            {
                "blob": blobs,
                "label": generator.integers(0, 100, count),
                "text": [f"sample {number * count + each}" for each in range(count)],
            }
        )
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=20_000)
