"""What a loader maps of its shards is let go of again, and nobody who holds a view of it notices."""

import re
from pathlib import Path

import numpy as np
import pytest

from datasvc.shards import Shard, ShardWriter, image_schema
from loaders.mapped_pages import MappedPages

SIZE = 1 << 20


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shard"
    with path.open("wb") as sink, ShardWriter(sink, image_schema(labelled=True)) as writer:
        for number in range(4):
            image = bytes([number + 1]) * SIZE
            writer.append({"key": str(number), "image": image, "width": 1, "height": 1, "label": number})
    return path


def resident_bytes(path):
    """Return how much of a file this process has mapped and touched."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:.+\n)*?Rss: +(\d+) kB", maps)
    assert len(found) == 1
    return int(found[0]) * 1024


def test_pages_of_samples_that_were_read_go_with_later_ones_and_views_stay(path):
    shard, pages = Shard.map(path), MappedPages()
    views = shard.blobs("image", np.arange(4))
    pages.read([shard], 64)
    assert [int(view.max()) for view in views] == [1, 2, 3, 4]
    assert resident_bytes(path) >= 4 * SIZE
    pages.read([], 64)
    assert resident_bytes(path) == 0
    assert [view.tobytes() for view in views] == [bytes([number + 1]) * SIZE for number in range(4)]


def test_pages_stay_until_enough_samples_were_read(path):
    shard, pages = Shard.map(path), MappedPages()
    for _ in range(3):
        pages.read([shard], 20)
        assert int(shard.blobs("image", np.arange(4))[3].max()) == 4
    assert resident_bytes(path) >= SIZE


def test_a_shard_in_memory_is_left_alone(path):
    shard, pages = Shard.from_bytes(path.read_bytes(), "memory"), MappedPages()
    for _ in range(3):
        pages.read([shard], 64)
    assert [int(view.min()) for view in shard.blobs("image", np.arange(4))] == [1, 2, 3, 4]
