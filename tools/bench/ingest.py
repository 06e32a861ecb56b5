"""MB/s of `datasvc.shards.ingest` beside `tar cf` and `cp -r` of the same photos, on the same disk.

All read the same files from a warm page cache and write to a fresh folder; what earlier runs left unwritten is synced
before each. The four do not do the same work:

- `datasvc ingest` parses every image's header, digests every byte, checks what it wrote and syncs each shard to disk;
- `tar cf` and `cp -r` end when the bytes are in the page cache;
- `tar cf + fsync` ends when they are on the disk, as a data set must be before it is called committed.

Ratios are of speeds: above 1, datasvc is the faster.

    python tools/bench/ingest.py [--repeats 5] [--images 6000] [--folder WHERE_TO_WRITE] [--json]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from photos import read_photos, write_photos
from report import Report, alternate, make_parser

from datasvc.repository import Repository
from datasvc.shards.ingest import ingest

OURS, TAR, TAR_SYNCED, COPY = "datasvc ingest", "tar cf", "tar cf + fsync", "cp -r"


def run_datasvc(photos: Path, target: Path) -> float:
    """Ingest into a fresh repository; returns seconds."""
    repository = Repository.create(str(target))
    started = time.perf_counter()
    ingest(repository, str(photos), "photos")
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


def plan_contestants(photos: Path, folder: Path) -> dict[str, Callable[[], float]]:
    """Return the four, each with a fresh target that is removed afterwards."""

    def afresh(run: Callable[[Path, Path], float]) -> Callable[[], float]:
        def run_afresh() -> float:
            target = folder / "target"
            os.sync()
            seconds = run(photos, target)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            return seconds

        return run_afresh

    runs = {OURS: run_datasvc, TAR: run_tar, TAR_SYNCED: run_tar_synced, COPY: run_copy}
    return {name: afresh(run) for name, run in runs.items()}


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default the folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        photos = Path(name) / "photos"
        size_bytes = write_photos(photos, num_images=arguments.images)
        for _ in read_photos(photos):
            pass  # the page cache is warm now
        contestants = plan_contestants(photos, Path(name))
        alternate(contestants, 1)  # imports, and the disk's first allocations
        seconds = alternate(contestants, arguments.repeats)
    report = Report(
        f"Ingest of {arguments.images:,} photos, {size_bytes / 1e6:.0f} MB, from a warm page cache to disk",
        "datasvc's time includes header checks, digests and fsync; tar cf and cp -r leave the bytes in memory.",
    )
    for contestant, values in seconds.items():
        report.add_row(contestant, "MB/s", [size_bytes / 1e6 / value for value in values])
    for baseline in (TAR, TAR_SYNCED, COPY):
        report.add_ratio(f"{OURS} / {baseline}", seconds[baseline], seconds[OURS])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
