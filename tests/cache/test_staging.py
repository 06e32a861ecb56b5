"""Many objects at once: all or a clear no."""

import threading

import pytest

from datasvc.cache import Cache, Quota
from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError, NotFoundError
from datasvc.shards import ingest, open_dataset
from tests.progress import RecordedProgress


@pytest.fixture
def splits(repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    return list(open_dataset(repository, "pets").values())


def needed_bytes(splits):
    return sum(footprint(info.size_bytes) for split in splits for info in split.table.shards())


def test_staging_more_than_the_budget_is_refused_before_anything_is_fetched(tmp_path, splits):
    needed = needed_bytes(splits)
    with Cache(tmp_path / "cache", budget=needed - 1) as cache:
        with pytest.raises(CacheFullError, match=f"needs {needed} bytes, and {needed - 1} of the budget"):
            cache.stage(splits)
        assert cache.status().resident_bytes == 0
    with Cache(tmp_path / "cache", budget=needed) as cache:
        first, second = cache.stage(splits), cache.stage(splits)
    size = sum(split.table.size_bytes for split in splits)
    assert (first.fetched_bytes, first.hit_bytes) == (size, 0)
    assert (second.fetched_bytes, second.hit_bytes) == (0, size)


def test_what_is_guaranteed_to_others_is_not_there_for_staging(tmp_path, splits):
    needed = needed_bytes(splits)
    with Cache(tmp_path / "cache", budget=needed) as cache:
        cache.set_quota("other", Quota(4096))
        with pytest.raises(CacheFullError, match=f"{needed - 4096} of the budget"):
            cache.stage(splits)


def test_staging_a_second_data_set_does_not_evict_what_it_has_just_staged(tmp_path, splits):
    """What an earlier staging left behind makes room for what is staged now."""
    first, second = splits
    with Cache(tmp_path / "cache", budget=needed_bytes([first]) + needed_bytes([second]) // 2) as cache:
        cache.stage([first])
        cache.stage([second])
        assert cache.stage([second]).fetched_bytes == 0


def test_staging_on_a_full_disk_leaves_nothing_free_for_a_guarantee_that_is_not_used(tmp_path, splits):
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        cache.set_quota("other", Quota(guaranteed_bytes=900_000))
        with cache._opened.catalogue._writing() as (tables, _):
            tables.limit_bytes = 500_000
        assert cache.stage(splits).num_left == 0


def test_staging_reports_every_byte_once(tmp_path, splits):
    size = sum(split.table.size_bytes for split in splits)
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        for kind in ("origin", "resident"):
            progress = RecordedProgress()
            cache.stage(splits, progress)
            assert (progress.totals, progress.by_source) == ([size], {kind: size})


def test_staging_that_is_stopped_begins_no_more_and_holds_nothing(tmp_path, splits):
    stop = threading.Event()
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        done = cache.stage(splits, RecordedProgress(on_advance=stop.set), num_threads=1, stop=stop)
        num_shards = sum(split.table.num_shards for split in splits)
        assert 0 < done.num_fetched < num_shards
        assert done.num_fetched + done.num_left == num_shards
        assert cache.status().held_bytes == 0
        assert cache.stage(splits).num_left == 0


def test_staging_that_fails_holds_nothing(tmp_path, splits, repository):
    gone = splits[1].table.shard(0)
    repository.objects.local_path(gone.digest).unlink()
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        with pytest.raises(NotFoundError):
            cache.stage(splits)
        status = cache.status()
        assert (status.held_bytes, status.reserved_bytes) == (0, 0)
