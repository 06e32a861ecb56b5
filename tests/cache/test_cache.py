"""The cache with real files: hits and misses, budget, staging of many objects, who may have it open."""

import gc
import shutil
import threading

import pytest

from datasvc.cache import Cache, Quota
from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError, ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import ObjectInfo
from datasvc.shards import ingest, open_dataset
from tests.cache.processes import are_there, disk_bytes, in_a_fork
from tests.progress import RecordedProgress
from tests.shards.versions.shard_store_laws import ShardStoreLaws


class TestCachedShards(ShardStoreLaws):
    @pytest.fixture
    def store(self, split, tmp_path):
        with Cache(tmp_path / "cache", budget="1MB") as cache:
            yield cache.shards(split.repository)


def test_a_miss_is_fetched_and_verified_and_a_hit_is_not_fetched_again(cache, origin):
    repository, infos = origin
    path, outcome = cache.acquire(infos[0], repository)
    assert (path.read_bytes(), outcome) == (b"\0" * 4096, "origin")
    cache.release(infos[0].digest)
    shutil.rmtree(repository.url)
    assert cache.acquire(infos[0], repository) == (path, "resident")


def test_the_budget_is_never_exceeded_and_objects_without_holds_are_evicted(cache, origin):
    repository, infos = origin
    for info in infos:
        path, _ = cache.acquire(info, repository)
        assert path.exists()
        status = cache.status()
        assert status.resident_bytes + status.reserved_bytes <= 20480
        assert disk_bytes(cache.folder) <= 20480
        cache.release(info.digest)
    assert cache.status().num_resident == 5


def test_a_file_counts_as_the_blocks_that_it_takes(cache, origin):
    repository, _ = origin
    info = repository.objects.put(b"x" * 4097)
    cache.acquire(info, repository)
    assert cache.status().resident_bytes == 8192 == disk_bytes(cache.folder)


def test_an_empty_path_is_not_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the folder of the cache is empty; give its path"):
        Cache("", budget="1MB")
    assert not list(tmp_path.iterdir())


def test_an_empty_object_takes_nothing(cache, origin):
    repository, _ = origin
    info = repository.objects.put(b"")
    assert cache.acquire(info, repository).path.read_bytes() == b""
    assert cache.status().resident_bytes == 0


def test_what_is_held_is_never_evicted_and_a_full_cache_says_by_how_much(cache, origin):
    repository, infos = origin
    for info in infos[:5]:
        cache.acquire(info, repository)
    with pytest.raises(CacheFullError, match="raise the budget by at most 4096 bytes"):
        cache.acquire(infos[5], repository)
    assert all(are_there(cache, infos[:5]))
    cache.release(infos[2].digest)
    cache.acquire(infos[5], repository)
    assert are_there(cache, infos[:5]) == [True, True, False, True, True]
    assert cache.counters()["refused"] == 1


def test_holds_are_counted_per_process(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository), cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    assert cache.status().held_bytes == 4096
    cache.release(infos[0].digest)
    assert cache.status().held_bytes == 0


def test_a_hit_is_held_like_a_miss(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    cache.acquire(infos[0], repository)
    assert cache.status().held_bytes == 4096


def test_releasing_what_is_not_held_is_refused(cache, origin):
    with pytest.raises(ConfigError, match="was not acquired"):
        cache.release(origin[1][0].digest)


def test_a_wrong_size_in_a_table_is_refused_and_the_object_stays(cache, origin):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    with pytest.raises(CorruptDataError, match="has 4096 bytes, but 99 were requested"):
        cache.acquire(ObjectInfo(infos[0].digest, 99), repository)
    assert path.exists()
    assert cache.status().held_bytes == 4096


def test_hits_and_misses_are_counted_over_all_processes(cache, origin):
    repository, infos = origin
    for _ in range(3):
        cache.acquire(infos[0], repository)
    counters = cache.counters()
    assert (counters["misses"], counters["hits"], counters["origin_bytes"]) == (1, 2, 4096)


@pytest.mark.parametrize("backwards", [False, True])
def test_what_was_released_last_makes_room_first(cache, origin, backwards):
    repository, infos = origin
    for info in infos[:5]:
        cache.acquire(info, repository)
    for info in infos[4::-1] if backwards else infos[:5]:
        cache.release(info.digest)
    cache.acquire(infos[5], repository)
    assert are_there(cache, infos[:5]) == ([False] + [True] * 4 if backwards else [True] * 4 + [False])


def test_an_object_is_served_to_peers_only_while_it_is_resident(cache, origin):
    repository, infos = origin
    with cache.resident(infos[0].digest) as path:
        assert path is None
    cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    with cache.resident(infos[0].digest) as path:
        assert path.read_bytes() == b"\0" * 4096
        assert cache.status().held_bytes == 4096
    assert cache.status().held_bytes == 0


def test_equal_shards_of_two_data_sets_are_stored_once(tmp_path, repository, folder):
    for name in ("one", "two"):
        ingest(repository, str(folder), name)
    splits = [open_dataset(repository, name)["train"] for name in ("one", "two")]
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        assert cache.stage(splits).fetched_bytes == splits[0].table.size_bytes


def test_what_dropped_shards_held_is_released(tmp_path, repository, folder):
    ingest(repository, str(folder), "pets")
    split = open_dataset(repository, "pets")["train"]
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        shards = cache.shards(repository)
        shard = shards.open_shard(split.table.shard(0))
        assert cache.status().held_bytes > 0
        del shards
        gc.collect()
        assert cache.status().held_bytes == 0
        assert shard.sample(0)  # its mapping lives on


@pytest.mark.slow
def test_shards_that_the_garbage_collector_finds_in_the_middle_of_anything_are_released(
    tmp_path, repository, folder, monkeypatch
):
    """A finalizer runs inside any call of its thread: here while that writes to the catalogue, and while it holds."""
    ingest(repository, str(folder), "pets")
    info = open_dataset(repository, "pets")["train"].table.shard(0)
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        opened = cache._opened
        for target, name in ((opened.locks, "_set"), (opened.files, "lock_incoming")):
            shards = [cache.shards(repository)]
            shards[0].open_shard(info)
            real = getattr(target, name)

            def collecting(*arguments, real=real, shards=shards):
                shards.clear()
                gc.collect()
                return real(*arguments)

            monkeypatch.setattr(target, name, collecting)
            other = repository.objects.put(name.encode())
            cache.acquire(other, repository)
            cache.release(other.digest)
            monkeypatch.undo()
            assert not shards
            assert cache.status().held_bytes == 0


def test_an_object_that_is_no_shard_is_not_held(cache, origin):
    repository, infos = origin
    with pytest.raises(CorruptDataError, match="is not an Arrow IPC file"):
        cache.shards(repository).open_shard(infos[0])
    assert cache.status().held_bytes == 0


def test_a_closed_cache_says_so_and_closing_again_is_harmless(tmp_path):
    cache = Cache(tmp_path / "cache", budget=1000)
    cache.close()
    cache.close()
    with pytest.raises(ConfigError, match="was closed; open it again"):
        cache.status()


def test_caches_opened_and_closed_by_many_threads_do_not_close_each_other(tmp_path):
    Cache(tmp_path / "cache", budget=1000).close()
    failed = []

    def open_and_close():
        for _ in range(100):
            try:
                with Cache(tmp_path / "cache") as cache:
                    cache.status()
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=open_and_close) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failed == []


def test_a_cache_from_before_a_fork_is_refused_in_the_child(cache, origin):
    repository, infos = origin
    assert "opened before a fork" in in_a_fork(lambda: cache.acquire(infos[0], repository))
    assert cache.acquire(infos[0], repository).outcome == "origin"  # the parent's is unharmed


def test_a_forked_child_that_closes_the_cache_takes_nothing_from_the_parent(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    assert in_a_fork(cache.close) == "None"
    assert cache.status().held_bytes == 4096


def test_every_call_in_a_forked_child_is_refused_with_advice_to_spawn(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)

    def reopen():
        cache.close()
        return Cache(cache.folder)

    for attempt in (reopen, lambda: Cache(cache.folder), lambda: cache.acquire(infos[0], repository)):
        assert "opened before a fork" in in_a_fork(attempt)
    assert cache.status().held_bytes == 4096


def test_a_child_forked_while_another_thread_opens_a_cache_does_not_hang(tmp_path):
    from datasvc.cache import process_handle

    with process_handle._folders_lock:
        opening = threading.Thread(target=lambda: Cache(tmp_path / "cache", budget=4096).close())
        opening.start()
        thread_has_it = in_a_fork_of_a_thread(lambda: Cache(tmp_path / "other", budget=4096).budget_bytes)
    opening.join()
    assert thread_has_it == "4096"


def in_a_fork_of_a_thread(work):
    """Fork from another thread than the one that has locks."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(in_a_fork(work)))
    thread.start()
    thread.join()
    return answers[0]


def test_a_cache_dropped_while_another_of_its_folder_is_opened_does_not_close_it_under_that(tmp_path, monkeypatch):
    """The garbage collector may run, and find one, between any two steps of opening."""
    from datasvc.cache import process_handle

    dropped = [Cache(tmp_path / "cache", budget=4096)]
    real = process_handle.CacheFolder.check_process

    def collecting(self):
        dropped.clear()
        gc.collect()
        return real(self)

    monkeypatch.setattr(process_handle.CacheFolder, "check_process", collecting)
    with Cache(tmp_path / "cache") as cache:
        monkeypatch.undo()
        assert cache.status().budget_bytes == 4096


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


def test_a_node_with_peers_stages_in_the_order_that_they_give(tmp_path, splits, monkeypatch):
    class Backwards:
        def stage_order(self, digests):
            return sorted(digests, reverse=True)

        def sources(self, *_):
            return []

        fallback_sources = sources

    held = []
    hold = Cache.hold
    monkeypatch.setattr(
        Cache, "hold", lambda cache, info, *more: held.append(info.digest) or hold(cache, info, *more)
    )
    with Cache(tmp_path / "cache", budget="1MB", peers=Backwards()) as cache:
        cache.stage(splits, num_threads=1)
    assert held == sorted(held, reverse=True)
    assert len(held) > 1


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
