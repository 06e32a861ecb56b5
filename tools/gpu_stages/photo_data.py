"""Generated photos of 110 kB as a data set, for the stages that read images."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasvc
from datasvc.shards import Split
from tools.bench.photos import write_photos

NUM_PHOTOS = (4000, 12)  # with and without a GPU, the same for all stages


def make_photos(folder: Path, *, num_images: int) -> tuple[Path, Split]:
    """Write photos, and ingest them, once in a folder; returns their folder and the split of the repository there.

    Three stages read the same photos, and writing them takes longer than some of these.
    """
    photos, repository = folder / "photos", folder / "repository"
    done = folder / f"{num_images}-photos"
    if not done.exists():
        for left in (photos, repository):  # of a stage that was ended
            shutil.rmtree(left, ignore_errors=True)
        write_photos(photos, num_images=num_images)
        datasvc.open(str(repository), create=True).datasets.ingest(str(photos), "photos")
        done.touch()
    return photos, next(iter(datasvc.open(str(repository)).dataset("photos@1").values()))
