"""MB/s of `datasvc.shards.ingest` beside `tar cf`, `cp -r` and ArrayRecord's writer on the same photos.

All read the same files from a warm page cache and write to a fresh folder; what earlier runs left unwritten is
synced before each. They do not do the same work:

- `datasvc ingest` parses every image's header, digests every sample and every shard, deals samples to shards by a
  permutation, writes an index, and syncs each shard to disk before the commit;
- `tar cf` and `cp -r` end when the bytes are in the page cache; `tar cf + fsync` when they are on the disk;
- ArrayRecord writes one uncompressed file in each of two processes, unsynced; it is left out where it is not
  installed (`pip install array-record`).

On a disk that writes slower than the rest works, all that sync measure that disk. `--folder /dev/shm` takes it
out of the comparison. Ratios are of speeds: above 1, datasvc is the faster.

    python tools/bench/ingest.py [--repeats 5] [--images 6000] [--folder WHERE_TO_WRITE] [--json]
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from photos import read_photos, write_photos
from report import Report, alternate, make_parser

from datasvc.repository import Repository
from datasvc.shards.ingest import ingest

ONE, TWO = "datasvc ingest, 1 process", "datasvc ingest, 2 workers"
TAR, TAR_SYNCED, COPY, ARRAY_RECORD = "tar cf", "tar cf + fsync", "cp -r", "ArrayRecord, 2 processes"

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
