"""Never over the budget: a watcher samples what really lies on the disk while six processes stage at once."""

import os
import subprocess
import sys

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.records import footprint
from tests.cache.processes import ROOT, disk_bytes
from tests.cache.test_full_disk import small_disk  # noqa: F401  a fixture

STAGER = """
import random, sys
from datasvc.cache import Cache
from datasvc.errors import CacheFullError
from datasvc.repository import ObjectInfo, Repository
cache, repository = Cache(sys.argv[1]), Repository.open(sys.argv[2])
generator = random.Random(int(sys.argv[3]))
for _ in range(int(sys.argv[4])):
    info = ObjectInfo(*generator.choice([(each[:64], int(each[65:])) for each in sys.argv[5:]]))
    try:
        path, _ = cache.acquire(info, repository)
    except CacheFullError:
        continue
    content = path.read_bytes()
    assert len(content) == info.size_bytes and len(set(content)) == 1
    del content
    cache.release(info.digest)
"""


def start_stagers(folder, repository, infos, *, num_objects):
    objects = [f"{info.digest}:{info.size_bytes}" for info in infos]
    return [
        subprocess.Popen(
            [sys.executable, "-c", STAGER, str(folder), repository.url, str(seed), str(num_objects), *objects],
            cwd=ROOT,
        )
        for seed in range(6)
    ]


@pytest.fixture
def many(origin):
    """Objects of one block to nine, and not whole ones: 60 blocks in all."""
    repository, _ = origin
    return repository, [repository.objects.put(bytes([number]) * (4096 * (number % 9) + 100)) for number in range(12)]


@pytest.mark.slow
def test_the_blocks_of_all_files_never_exceed_the_budget(tmp_path, many):
    """A look stops the catalogue for as long as it takes: nothing is published or evicted under it."""
    repository, infos = many
    budget = 20 * 4096
    with Cache(tmp_path / "cache", budget=budget) as cache:
        stagers, most = start_stagers(cache.folder, repository, infos, num_objects=60), 0
        while any(process.poll() is None for process in stagers):
            with cache._opened.catalogue._writing():
                most = max(most, disk_bytes(cache.folder))
        assert [process.returncode for process in stagers] == [0] * 6
        assert budget // 2 < most <= budget
        status = cache.status()
        assert (status.reserved_bytes, status.held_bytes) == (0, 0)
        assert disk_bytes(cache.folder) == status.resident_bytes


@pytest.mark.slow
def test_the_disk_itself_never_has_less_room_than_the_budget_leaves(small_disk, many):  # noqa: F811
    """Counted by the file system, at once and without a pause, files without a name included."""
    repository, infos = many
    budget = 20 * 4096
    with Cache(small_disk / "cache", budget=budget) as cache:
        empty, database = used_bytes(small_disk), database_bytes(cache)
        stagers, most = start_stagers(cache.folder, repository, infos, num_objects=60), 0
        while any(process.poll() is None for process in stagers):
            # Read after: the database only grows. Beside each object on its way lies a note of one block. Who
            # waits for room has another's incoming file open, which may come and go at once.
            most = max(most, used_bytes(small_disk) - (database_bytes(cache) - database))
        assert [process.returncode for process in stagers] == [0] * 6
        largest = max(footprint(info.size_bytes) for info in infos)
        assert budget // 2 < most - empty <= budget + 6 * (4096 + largest)


def used_bytes(place):
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def database_bytes(cache):
    return sum(path.stat().st_blocks * 512 for path in (cache.folder / "catalogue").iterdir())
