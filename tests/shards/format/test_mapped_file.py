"""A shard's blobs are read from its file without touching the pages that are mapped."""

import gc
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.shards import Shard, ShardWriter, image_schema
from datasvc.shards.format.mapped_file import MappedFile

ROOT = Path(__file__).parents[3]
SIZE = 1 << 20
ROWS = np.arange(4)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shard"
    with path.open("wb") as sink, ShardWriter(sink, image_schema(labelled=True)) as writer:
        for number in range(4):
            image = bytes([number + 1]) * SIZE
            writer.append({"key": str(number), "image": image, "width": 1, "height": 1, "label": number})
    return path


def touched_bytes(path):
    """Return how much of a file this process has mapped and touched."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:.+\n)*?Rss: +(\d+) kB", maps)
    assert len(found) == 1
    return int(found[0]) * 1024


def forget_touched(shard):
    """Let go of the pages that opening a shard touched: of a file as small as here all of them."""
    shard._file.release_pages()


def test_blobs_are_read_and_none_of_the_pages_is_touched(path):
    shard = Shard.map(path)
    views = shard.blobs("image", ROWS)
    forget_touched(shard)
    buffer = np.empty(2 * SIZE, np.uint8)
    for number, view in enumerate(views):
        found = shard.read(view, buffer)
        assert found.base is buffer
        assert found.tobytes() == bytes([number + 1]) * SIZE
    assert touched_bytes(path) == 0
    assert int(views[3].max()) == 4
    assert touched_bytes(path) > 0


def test_an_empty_blob_is_read_as_nothing(path):
    shard = Shard.map(path)
    (missing,) = shard.blobs("thumbnail", np.array([0]))
    assert len(shard.read(missing, np.empty(8, np.uint8))) == 0


def test_blobs_in_memory_are_not_copied(path):
    shard = Shard.from_bytes(path.read_bytes(), "memory")
    (view,) = shard.blobs("image", np.array([2]))
    assert shard.read(view, np.empty(SIZE, np.uint8)) is view


def test_what_lies_outside_of_the_file_is_not_read_from_it(path):
    elsewhere = np.full(10, 7, np.uint8)
    assert MappedFile(path).read(elsewhere, np.empty(10, np.uint8)) is elsewhere


def test_a_file_that_was_truncated_is_an_error_and_the_process_lives(path):
    shard = Shard.map(path)
    view = shard.blobs("image", ROWS)[3]
    os.truncate(path, 2 * SIZE)
    with pytest.raises(CorruptDataError, match="was truncated while it was open"):
        shard.read(view, np.empty(SIZE, np.uint8))


def test_a_disk_that_does_not_answer_is_an_error(path, monkeypatch):
    shard = Shard.map(path)
    (view,) = shard.blobs("image", np.array([0]))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(UnavailableError, match=r"shard cannot be read: .*Input/output error; check the disk"):
        shard.read(view, np.empty(SIZE, np.uint8))


def test_a_short_read_is_continued(path, monkeypatch):
    shard = Shard.map(path)
    view = shard.blobs("image", ROWS)[2]
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:1000]], offset))
    assert shard.read(view, np.empty(SIZE, np.uint8)).tobytes() == b"\3" * SIZE


@pytest.mark.slow
def test_the_file_is_closed_with_the_shard_and_views_outlive_it(path):
    gc.collect()  # of earlier tests: what they left open is closed in its own time
    before = set(os.listdir("/proc/self/fd"))
    shard = Shard.map(path)
    views = shard.blobs("image", ROWS)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    del shard
    gc.collect()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1  # the mapping's own
    assert int(views[1].max()) == 2
    del views
    gc.collect()
    assert not set(os.listdir("/proc/self/fd")) - before


@pytest.fixture
def few_descriptors():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft, hard: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or limits[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_may_have_more_descriptors_takes_them(path, few_descriptors):
    num_open = len(os.listdir("/proc/self/fd"))
    few_descriptors(num_open + 8, None)
    files = [MappedFile(path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) >= num_open + 40
    assert all(len(file.mapping) for file in files)


def test_a_process_that_cannot_raise_its_limit_gets_an_error(path):
    code = """
import os, resource, sys
from datasvc.errors import UnavailableError
from datasvc.shards.format.mapped_file import MappedFile
most = len(os.listdir("/proc/self/fd")) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
try:
    files = [MappedFile(sys.argv[1]) for _ in range(20)]
except UnavailableError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "allow more open files with `ulimit -n`" in done.stdout


def test_a_file_that_is_empty_or_missing_is_no_shard(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(CorruptDataError, match="it is empty"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(NotFoundError, match="does not exist"):
        MappedFile(tmp_path / "missing")
