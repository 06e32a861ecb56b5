"""Peak resident set of an ingest's workers: the same photos as class folders and as tars, 64 MiB shards.

python tools/bench/ingest_memory.py [--repeats 3] [--images 6000] [--folder WHERE] [--json]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ingest_samples import INGEST
from photos import write_photos
from report import ROOT, Report, make_parser

PER_TAR = 100
WORKERS = 2


def write_tars(photos: Path, folder: Path) -> None:
    """Pack the photos class by class into tars of `PER_TAR`."""
    folder.mkdir()
    paths = sorted(photos.glob("*/*.jpg"))
    for number, start in enumerate(range(0, len(paths), PER_TAR)):
        with tarfile.open(folder / f"train-{number:06d}.tar", "w") as packed:
            for path in paths[start : start + PER_TAR]:
                packed.add(path, f"{path.stem}.jpg")


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--folder", type=Path, help="default the folder for temporary files")
    arguments = parser.parse_args()
    report = Report(f"Peak resident set of {WORKERS} workers ingesting {arguments.images:,} photos, 64 MiB shards")
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        photos, tars = Path(name) / "photos", Path(name) / "tars"
        write_photos(photos, num_images=arguments.images)
        write_tars(photos, tars)
        for source in (photos, tars):
            peaks = []
            for _ in range(arguments.repeats):
                target, told = Path(name) / "repo", Path(name) / "peaks"
                words = [sys.executable, "-c", INGEST, str(target), str(source), str(told), str(WORKERS)]
                subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
                peaks.append(max(int(line) for line in told.read_text().split()) / 1024)
                shutil.rmtree(target)
                told.unlink()
            report.add_row(source.name, "MiB", peaks)
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
