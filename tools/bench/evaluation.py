"""Evaluation that equals torchvision's resize and crop beside the faster window, and beside training: images/s.

Each repeat reads all photos once, with a loader that is made afresh, from a local repository.

    python tools/bench/evaluation.py [--repeats 5] [--images 1000] [--json]
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

from photos import write_photos
from report import Report, alternate, make_parser

import datasvc
from datasvc.loaders import AugmentConfig, DecodeConfig, ImageLoader
from datasvc.shards import Split

BATCH = 64


def read_epoch(split: Split, threads: int, *, augment: AugmentConfig | None, training: bool) -> float:
    """Return the images per second of one epoch, without the making of the loader."""
    with ImageLoader(
        split,
        batch_size=BATCH,
        training=training,
        augment=augment,
        decode=DecodeConfig("cpu", num_threads=threads),
        seed=0,
    ) as loader:
        batches = iter(loader.numpy())
        next(batches)  # starts the threads
        started = time.perf_counter()
        num_images = sum(int(batch.mask.sum()) for batch in batches)
        return num_images / (time.perf_counter() - started)


def main() -> None:
    """Measure, and show the result."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--images", type=int, default=1000, help="photos; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="that decode; default: %(default)s")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-evaluation-") as folder:
        write_photos(Path(folder, "photos", "val"), num_images=settings.images)
        repo = datasvc.open(f"{folder}/repo", create=True)
        repo.datasets.ingest(f"{folder}/photos", "photos")
        split = repo.dataset("photos")["val"]
        read = partial(read_epoch, split, settings.threads)
        rates = alternate(
            {
                "torchvision": partial(read, augment=AugmentConfig(evaluation="torchvision"), training=False),
                "window": partial(read, augment=AugmentConfig(evaluation="window"), training=False),
                "training": partial(read, augment=None, training=True),
            },
            settings.repeats,
        )
    report = Report(f"Evaluation of {settings.images} photos of 500x375 at 224, {settings.threads} threads")
    for name, values in rates.items():
        report.add_row(name, "images/s", values)
    report.add_ratio("window / torchvision", rates["window"], rates["torchvision"])
    report.add_ratio("training / torchvision", rates["training"], rates["torchvision"])
    report.show(as_json=settings.as_json)


if __name__ == "__main__":
    main()
