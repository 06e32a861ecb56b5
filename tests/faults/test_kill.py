"""kill -9 at many points of ingest, save and stage: nothing half-made is ever visible, and the next try works."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from datasvc.cache import Cache
from datasvc.errors import NotFoundError
from datasvc.models import restore, save
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.support import warm_python

ROOT = Path(__file__).parents[2]

# Dies at the N-th of the system calls that make something durable or visible.
PREAMBLE = """
import os, pathlib, signal, sys
left = int(sys.argv[1])
def dying(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
os.link, os.fsync, os.rename, os.unlink = map(dying, (os.link, os.fsync, os.rename, os.unlink))
"""
INGEST = """
from datasvc.repository import Repository
from datasvc.shards import ingest
ingest(Repository.open(sys.argv[2]), sys.argv[3], "pets", shard_bytes=4000)
"""
SAVE = """
import torch
from datasvc.models import save
from datasvc.repository import Repository
save(Repository.open(sys.argv[2]), "m", {"w": torch.full((40_000,), 2.0), "b": torch.ones(3)}, step=2)
"""
STAGE = """
from datasvc.cache import Cache
from datasvc.repository import Repository
from datasvc.shards import open_dataset
with Cache(sys.argv[3], budget=200_000) as cache:
    cache.stage(list(open_dataset(Repository.open(sys.argv[2]), "pets").values()))
"""


def die_at(point, program, *arguments):
    """Run `program` until its `point`-th durable step; returns whether it died there."""
    words = [warm_python.command(), "-c", PREAMBLE + program, str(point), *map(str, arguments)]
    status = subprocess.run(words, cwd=ROOT, check=False).returncode
    assert status in (0, -9)
    return status == -9


@pytest.mark.parametrize(
    "point", [1, 5, 20, *(pytest.param(point, marks=pytest.mark.slow) for point in (2, 3, 9, 14, 27, 35))]
)
def test_an_ingest_killed_anywhere_leaves_no_version_or_a_whole_one(tmp_path, folder, point):
    repository = Repository.create(str(tmp_path / "repo"))
    ingest(repository, str(folder), "reference", shard_bytes=4000)
    died = die_at(point, INGEST, repository.url, folder)
    expected = {name: split.digest for name, split in open_dataset(repository, "reference").items()}
    try:
        found = open_dataset(repository, "pets")
    except NotFoundError:
        assert died
        ingest(repository, str(folder), "pets", shard_bytes=4000)
        found = open_dataset(repository, "pets@1")
    assert {name: split.digest for name, split in found.items()} == expected
    assert sum(1 for split in found.values() for _ in split) == 26


@pytest.mark.parametrize(
    "point", [8, *(pytest.param(point, marks=pytest.mark.slow) for point in (1, 14))]
)  # every point of background saves: see test_save_faults.py
def test_a_save_killed_anywhere_leaves_the_last_version_restorable(tmp_path, point):
    repository = Repository.create(str(tmp_path / "repo"))
    save(repository, "m", {"w": torch.ones(40_000), "b": torch.ones(3)}, step=1)
    died = die_at(point, SAVE, repository.url)
    newest = restore(repository, "m")
    assert newest.version.version == newest.entry["step"]
    assert torch.equal(newest.state["w"], torch.full((40_000,), float(newest.entry["step"])))
    assert died or newest.version.version == 2
    assert save(repository, "m", {"w": torch.zeros(1)}, step=9).version == newest.version.version + 1


@pytest.mark.parametrize("point", [1, 4, *(pytest.param(point, marks=pytest.mark.slow) for point in (2, 3, 6, 9))])
def test_a_staging_killed_anywhere_leaves_a_usable_cache(tmp_path, folder, point):
    repository = Repository.create(str(tmp_path / "repo"))
    ingest(repository, str(folder), "pets", shard_bytes=1000)
    splits = list(open_dataset(repository, "pets").values())
    # Staging renames, unlinks and syncs little; renames and unlinks of pathlib go through os as well.
    die_at(point, STAGE, repository.url, tmp_path / "cache")
    with Cache(tmp_path / "cache", budget=200_000) as cache:
        report = cache.stage(splits)
        assert report.hit_bytes + report.fetched_bytes == sum(split.table.size_bytes for split in splits)
        status = cache.status()
        assert (status.reserved_bytes, status.held_bytes) == (0, 0)
        for split in splits:
            for info in split.table.shards():
                path, _ = cache.acquire(info, repository)
                assert repository.objects.local_path(info.digest).read_bytes() == path.read_bytes()
                cache.release(info.digest)
    assert os.listdir(tmp_path / "cache" / "incoming") == []
