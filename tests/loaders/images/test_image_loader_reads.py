"""How a loader reads encoded images on the CPU: from the file, not through the pages that it maps."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasvc.cache import Cache
from datasvc.errors import CorruptDataError
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.shards import ingest, open_dataset

SIDE = 256
NUM_IMAGES = 32


@pytest.fixture
def split(repository, tmp_path):
    """One shard of 2.5 MB."""
    chance = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = tmp_path / "images" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        Image.fromarray(chance.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(buffer, "JPEG", quality=95)
        path.write_bytes(buffer.getvalue())
    ingest(repository, str(tmp_path / "images"), "noise")
    return open_dataset(repository, "noise")["train"]


def make(split, cache):
    return ImageLoader(
        split, batch_size=4, training=True, cache=cache, size=32, decode=DecodeConfig(backend="cpu", num_threads=2)
    )


def touched_bytes(folder):
    """Return how much of the files in a folder this process has mapped and touched."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_inside = str(folder) in line
        elif is_inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.slow
def test_an_epoch_leaves_the_mapped_pages_of_its_shards_alone(split, tmp_path):
    objects = tmp_path / "cache" / "objects"
    with Cache(tmp_path / "cache", budget=10**8) as cache, make(split, cache) as loader:
        served, most = 0, 0
        for batch in loader:
            served += len(batch.images)
            most = max(most, touched_bytes(objects))
        assert str(objects) in Path("/proc/self/maps").read_text()
    assert served == NUM_IMAGES
    assert split.table.size_bytes > 2 * 10**6
    assert most < split.table.size_bytes / 4


def test_a_shard_that_is_truncated_under_the_loader_is_an_error(split, tmp_path):
    with Cache(tmp_path / "cache", budget=10**8) as cache:
        cache.stage([split])
        (shard,) = split.table.shards()
        (path,) = (tmp_path / "cache").rglob(shard.digest)
        with make(split, cache) as loader:
            batches = iter(loader)
            next(batches)
            os.chmod(path, 0o600)
            os.truncate(path, 4096)
            with pytest.raises(CorruptDataError, match="was truncated"):
                list(batches)
