"""A disk that is full before the budget is: the budget shrinks, what can go goes, the run goes on."""

import subprocess
from contextlib import suppress

import pytest

from datasvc.cache import Cache
from datasvc.errors import CacheFullError
from datasvc.order import NextUse
from datasvc.repository import Repository
from tests.cache.processes import disk_bytes

MIB = 1 << 20


def mounted_disk(place, options):
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "datasvc-test", str(place)]
    with suppress(FileNotFoundError):
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            yield place
            subprocess.run(["umount", "-l", str(place)], check=True)
            return
    pytest.skip("this user may not mount a tmpfs")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MiB."""
    yield from mounted_disk(tmp_path / "disk", "size=8m")


@pytest.fixture
def megabytes(tmp_path):
    """A repository with 20 objects of 1 MiB."""
    repository = Repository.create(str(tmp_path / "origin"))
    return repository, [repository.objects.put(b"%08d" % number * (MIB // 8)) for number in range(20)]


def read_all(cache, repository, infos):
    for info in infos:
        path, _ = cache.acquire(info, repository)
        assert path.read_bytes() == repository.objects.read(info.digest)
        cache.release(info.digest)


def test_a_budget_larger_than_the_disk_shrinks_and_all_objects_are_read(small_disk, megabytes):
    repository, infos = megabytes
    with Cache(small_disk / "cache", budget=100 * MIB) as cache:
        read_all(cache, repository, infos)
        status = cache.status()
        assert 4 * MIB <= status.resident_bytes <= status.limit_bytes < 8 * MIB
        assert (status.budget_bytes, status.reserved_bytes) == (100 * MIB, 0)
        assert status.resident_bytes == disk_bytes(cache.folder)
        read_all(cache, repository, infos)


def test_a_disk_that_others_fill_shrinks_the_budget_which_counts_in_full_when_it_is_set_again(small_disk, megabytes):
    repository, infos = megabytes
    with Cache(small_disk / "cache", budget=7 * MIB) as cache:
        read_all(cache, repository, infos[:2])
        (small_disk / "other").write_bytes(bytes(4 * MIB))
        read_all(cache, repository, infos)
        assert cache.status().limit_bytes < 4 * MIB
        (small_disk / "other").unlink()
        assert cache.status().limit_bytes < 4 * MIB
        Cache(cache.folder, budget=7 * MIB).close()
        assert cache.status().limit_bytes == 7 * MIB
        read_all(cache, repository, infos)
        assert cache.status().resident_bytes >= 6 * MIB


def test_a_disk_that_has_no_room_beside_what_is_held_is_a_full_cache(small_disk, megabytes):
    repository, infos = megabytes
    with Cache(small_disk / "cache", budget=100 * MIB) as cache:
        with pytest.raises(CacheFullError, match=r"disk of the cache .* is full at .*free space on the disk"):
            for info in infos:
                cache.acquire(info, repository)
        status = cache.status()
        assert (status.reserved_bytes, status.resident_bytes) == (0, status.held_bytes)
        for info in infos[: status.num_resident]:
            cache.release(info.digest)
        read_all(cache, repository, infos)


def test_a_disk_full_to_the_last_block_still_lets_the_cache_evict(small_disk, megabytes):
    repository, infos = megabytes
    with Cache(small_disk / "cache", budget=7 * MIB) as cache:
        read_all(cache, repository, infos[:4])
        with pytest.raises(OSError, match="No space left"), (small_disk / "other").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        read_all(cache, repository, infos[4:])
        assert cache.status().num_resident > 0


@pytest.fixture
def disk_with_few_inodes(tmp_path):
    """A disk with space for all objects, and with inodes for some of them."""
    yield from mounted_disk(tmp_path / "disk", "size=64m,nr_inodes=120")


def use_all_inodes(disk):
    with pytest.raises(OSError, match="No space left"):
        for number in range(200):
            (disk / str(number)).touch()


def test_a_disk_without_inodes_makes_the_cache_evict_and_all_objects_are_read(disk_with_few_inodes, megabytes):
    repository, infos = megabytes
    with Cache(disk_with_few_inodes / "cache", budget=50 * MIB) as cache:
        read_all(cache, repository, infos)
        status = cache.status()
        assert 0 < status.num_resident < len(infos)
        assert (status.limit_bytes, status.reserved_bytes) == (50 * MIB, 0)
        read_all(cache, repository, infos)


def test_a_disk_without_inodes_beside_what_is_held_is_a_full_cache(disk_with_few_inodes, megabytes):
    repository, infos = megabytes
    with Cache(disk_with_few_inodes / "cache", budget=50 * MIB) as cache:
        with pytest.raises(CacheFullError, match=r"has no inodes left .*df -i"):
            for info in infos:
                cache.acquire(info, repository)
        held = infos[: cache.status().num_resident]
        use_all_inodes(disk_with_few_inodes)
        assert cache.prefetch(infos[-1], repository, NextUse(1, 0)) == "later"
        for info in held:
            cache.release(info.digest)
        read_all(cache, repository, infos)


def test_a_cache_opens_on_a_disk_without_inodes(disk_with_few_inodes, megabytes):
    repository, infos = megabytes
    folder = disk_with_few_inodes / "cache"
    with Cache(folder, budget=50 * MIB) as cache:
        read_all(cache, repository, infos[:3])
    use_all_inodes(disk_with_few_inodes)
    with Cache(folder) as cache:
        assert cache.status().num_resident == 2
