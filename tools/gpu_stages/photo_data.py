"""Generated photos of 110 kB as a data set, for the stages that read images."""

from __future__ import annotations

from pathlib import Path

from photos import write_photos

import datasvc
from datasvc.shards import Split


def make_photos(folder: Path, *, num_images: int) -> tuple[Path, Split]:
    """Write photos, and ingest them; returns their folder and the split, whose repository lies beside it."""
    photos = folder / "photos"
    write_photos(photos, num_images=num_images)
    repository = datasvc.open(str(folder / "repository"), create=True)
    repository.datasets.ingest(str(photos), "photos")
    return photos, next(iter(repository.dataset("photos@1").values()))
