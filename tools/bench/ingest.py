"""MB/s of `datasvc.shards.ingest` beside `tar cf`, `cp -r` and ArrayRecord's writer on the same photos.

All read the same files from a warm page cache and write to a fresh folder; what earlier runs left unwritten is
synced before each. They do not do the same work:

- `datasvc ingest` parses every image's header, digests every sample and every shard, deals samples to shards by a
  permutation, writes an index, and syncs each shard to disk before the commit;
- `tar cf` and `cp -r` end when the bytes are in the page cache; `tar cf + fsync` when they are on the disk;
- ArrayRecord writes one uncompressed file in each of two processes, unsynced; it is left out where it is not
  installed (`pip install array-record`);
- the bare loop is what the machine can do: two processes that know their files, read each into a buffer that they use
  again, digest it with xxHash3, digest 4 MiB with BLAKE3, write them, and sync every 64 MiB. It lists, checks and
  commits nothing.

On a disk that writes slower than the rest works, all that sync measure that disk. `--folder /dev/shm` takes it
out of the comparison. Ratios are of speeds: above 1, datasvc is the faster.

    python tools/bench/ingest.py [--repeats 5] [--images 6000] [--folder WHERE_TO_WRITE] [--json]
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from photos import read_photos, write_photos
from report import Report, alternate, make_parser
from xxhash import xxh3_128_digest

from datasvc.repository import Repository
from datasvc.shards.ingestion.ingest import ingest

ONE, TWO = "datasvc ingest, 1 process", "datasvc ingest, 2 workers"
TAR, TAR_SYNCED, COPY, ARRAY_RECORD = "tar cf", "tar cf + fsync", "cp -r", "ArrayRecord, 2 processes"
BARE = "bare read + digest + write, 2 processes"
BATCH_BYTES, SHARD_BYTES = 4 << 20, 64 << 20

WRITE_ARRAY_RECORD = """
import sys
from pathlib import Path
from array_record.python.array_record_module import ArrayRecordWriter
number = int(sys.argv[3])
writer = ArrayRecordWriter(f"{sys.argv[2]}/{number}", "group_size:1,uncompressed")
for path in sorted(Path(sys.argv[1]).glob("*/*.jpg"))[number::2]:
    writer.write(path.read_bytes())
writer.close()
"""


def run_datasvc(photos: Path, target: Path, *, workers: int) -> float:
    """Ingest into a fresh repository; returns seconds."""
    repository = Repository.create(str(target))
    started = time.perf_counter()
    ingest(repository, str(photos), "photos", workers=workers)
    return time.perf_counter() - started


def run_tar(photos: Path, target: Path) -> float:
    """Pack with tar; returns seconds."""
    started = time.perf_counter()
    subprocess.run(["tar", "cf", str(target), "-C", str(photos), "."], check=True)
    return time.perf_counter() - started


def run_tar_synced(photos: Path, target: Path) -> float:
    """Pack with tar and wait for the disk; returns seconds."""
    started = time.perf_counter()
    run_tar(photos, target)
    with target.open("rb") as packed:
        os.fsync(packed.fileno())
    return time.perf_counter() - started


def run_copy(photos: Path, target: Path) -> float:
    """Copy the folder; returns seconds."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(photos), str(target)], check=True)
    return time.perf_counter() - started


def run_array_record(photos: Path, target: Path) -> float:
    """Write with ArrayRecord in two processes; returns seconds."""
    target.mkdir()
    started = time.perf_counter()
    words = [sys.executable, "-c", WRITE_ARRAY_RECORD, str(photos), str(target)]
    for process in [subprocess.Popen([*words, str(number)]) for number in range(2)]:
        assert process.wait() == 0
    return time.perf_counter() - started


def run_bare(photos: Path, target: Path) -> float:
    """Read, digest and write in two processes, and do nothing else; returns seconds."""
    target.mkdir()
    files = [(str(path), path.stat().st_size) for path in sorted(photos.glob("*/*.jpg"))]
    fork = multiprocessing.get_context("fork")  # nothing is to be imported: that is not what is measured
    started = time.perf_counter()
    processes = [fork.Process(target=copy_bare, args=(files[number::2], target / str(number))) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - started


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


def plan_contestants(photos: Path, folder: Path) -> dict[str, Callable[[], float]]:
    """Return the contestants, each with a fresh target that is removed afterwards."""

    def afresh(run: Callable[[Path, Path], float]) -> Callable[[], float]:
        def run_afresh() -> float:
            target = folder / "target"
            os.sync()
            seconds = run(photos, target)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            return seconds

        return run_afresh

    runs: dict[str, Callable[[Path, Path], float]] = {
        ONE: lambda photos, target: run_datasvc(photos, target, workers=1),
        TWO: lambda photos, target: run_datasvc(photos, target, workers=2),
        TAR: run_tar,
        TAR_SYNCED: run_tar_synced,
        COPY: run_copy,
        BARE: run_bare,
    }
    if importlib.util.find_spec("array_record") is not None:
        runs[ARRAY_RECORD] = run_array_record
    return {name: afresh(run) for name, run in runs.items()}


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default the folder for temporary files")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="datasvc-bench-") as source,
        tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name,
    ):
        photos = Path(source) / "photos"
        size_bytes = write_photos(photos, num_images=arguments.images)
        for _ in read_photos(photos):
            pass  # the page cache is warm now
        contestants = plan_contestants(photos, Path(name))
        alternate(contestants, 1)  # imports, and the disk's first allocations
        seconds = alternate(contestants, arguments.repeats)
    report = Report(
        f"Ingest of {arguments.images:,} photos, {size_bytes / 1e6:.0f} MB, from a warm page cache",
        "datasvc's time includes header checks, digests, indexes and fsync; the others do less, see the docstring.",
    )
    for contestant, values in seconds.items():
        report.add_row(contestant, "MB/s", [size_bytes / 1e6 / value for value in values])
    for ours in (ONE, TWO):
        for baseline in contestants:
            if baseline not in (ONE, TWO):
                report.add_ratio(f"{ours} / {baseline}", seconds[baseline], seconds[ours])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
