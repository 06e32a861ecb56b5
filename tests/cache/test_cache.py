"""The cache with real files: budget, holds, verification."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from datasvc.cache import Cache
from datasvc.cache.fetch import boot_id
from datasvc.errors import CacheFullError, ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.shards import ingest, open_dataset

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "cache", budget=5000) as opened:
        yield opened


def files_bytes(folder):
    total = 0
    for path in Path(folder).rglob("*"):
        try:
            if path.is_file() and path.parts[-2] not in ("catalogue", "leases"):
                total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_miss_is_fetched_and_verified_and_a_hit_is_not_fetched_again(cache, origin):
    repository, infos = origin
    path, hit = cache.acquire(infos[0], repository)
    assert (path.read_bytes(), hit) == (b"\0" * 1000, False)
    cache.release(infos[0].digest)
    shutil.rmtree(repository.url)
    assert cache.acquire(infos[0], repository) == (path, True)


def test_the_budget_is_never_exceeded_and_what_nobody_holds_makes_room(cache, origin):
    repository, infos = origin
    for info in infos:
        path, _ = cache.acquire(info, repository)
        assert path.exists()
        usage = cache.status().usage
        assert usage.resident_bytes + usage.reserved_bytes <= 5000
        assert files_bytes(cache.folder) <= 5000
        cache.release(info.digest)
    assert cache.status().usage.num_resident == 5


def test_what_is_held_is_never_evicted_and_a_full_cache_says_by_how_much(cache, origin):
    repository, infos = origin
    paths = [cache.acquire(info, repository)[0] for info in infos[:5]]
    with pytest.raises(CacheFullError, match="raise the budget by at least 1000 bytes"):
        cache.acquire(infos[5], repository)
    assert all(path.exists() for path in paths)
    cache.release(infos[2].digest)
    cache.acquire(infos[5], repository)
    assert [path.exists() for path in paths] == [True, True, False, True, True]


def test_holds_are_counted_per_process(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository), cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    assert cache.status().usage.held_bytes == 1000
    cache.release(infos[0].digest)
    assert cache.status().usage.held_bytes == 0


def test_many_threads_that_want_one_object_fetch_it_once(cache, origin):
    repository, infos = origin
    hits, start = [], threading.Barrier(8)

    def acquire():
        start.wait()
        hits.append(cache.acquire(infos[0], repository)[1])

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert hits.count(False) == 1
    for _ in range(8):
        cache.release(infos[0].digest)
    assert cache.status().usage.held_bytes == 0


def test_a_changed_byte_at_the_origin_is_counted_and_never_served(cache, origin):
    repository, infos = origin
    repository.objects.local_path(infos[0].digest).write_bytes(b"\1" + b"\0" * 999)
    with pytest.raises(CorruptDataError, match="is corrupt"):
        cache.acquire(infos[0], repository)
    usage = cache.status().usage
    assert (usage.num_corrupt, usage.resident_bytes, usage.reserved_bytes, usage.held_bytes) == (2, 0, 0, 0)
    assert files_bytes(cache.folder) == 0


def test_a_byte_flipped_on_the_way_once_is_fetched_again(cache, origin, monkeypatch):
    repository, infos = origin
    real, calls = type(repository._storage).read_range, []

    def flipping(self, path, offset, length):
        calls.append(path)
        content = real(self, path, offset, length)
        return b"\x80" + content[1:] if len(calls) == 1 else content

    monkeypatch.setattr(type(repository._storage), "read_range", flipping)
    path, _ = cache.acquire(infos[0], repository)
    assert path.read_bytes() == b"\0" * 1000
    assert (len(calls), cache.status().usage.num_corrupt) == (2, 1)


def test_after_a_crash_of_the_machine_objects_are_verified_before_use(cache, origin, monkeypatch):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    path.write_bytes(b"\1" * 1000)  # what a power cut may leave
    monkeypatch.setattr(cache._node._fetcher, "_boot", f"after {boot_id()}")
    path, hit = cache.acquire(infos[0], repository)
    assert (path.read_bytes(), hit) == (b"\0" * 1000, False)
    assert cache.status().usage.num_corrupt == 1


def test_a_file_somebody_removed_is_fetched_again(cache, origin):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    path.unlink()
    path, hit = cache.acquire(infos[0], repository)
    assert (path.read_bytes(), hit) == (b"\0" * 1000, False)


def test_an_object_the_origin_lacks_leaves_no_reservation(cache, origin):
    repository, infos = origin
    repository.objects.local_path(infos[0].digest).unlink()
    with pytest.raises(NotFoundError):
        cache.acquire(infos[0], repository)
    assert cache.status().usage.reserved_bytes == 0


HOLDER = """
import sys
from datasvc.cache import Cache
from datasvc.repository import ObjectInfo, Repository
cache, repository = Cache(sys.argv[1]), Repository.open(sys.argv[2])
for digest in sys.argv[3:]:
    cache.acquire(ObjectInfo(digest, 1000), repository)
print("holding", flush=True)
sys.stdin.read()
"""


def hold_in_a_process(cache, repository, infos):
    arguments = [str(cache.folder), repository.url, *(info.digest for info in infos)]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout.readline() == "holding\n"
    return process


def test_holds_of_a_killed_process_are_gone_at_the_next_reservation(cache, origin):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:5])
    with pytest.raises(CacheFullError):
        cache.acquire(infos[5], repository)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    cache.acquire(infos[5], repository)
    assert cache.status().usage.held_bytes == 1000


def test_a_mapped_object_of_another_process_is_not_evicted(cache, origin):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:2])
    for info in infos[2:]:
        cache.acquire(info, repository)
        cache.release(info.digest)
    assert all(cache._node.files.object_path(info.digest).exists() for info in infos[:2])
    process.communicate("")


FETCHER = """
import os, signal, sys
from datasvc.cache import Cache
from datasvc.repository import ObjectInfo, Repository
repository = Repository.open(sys.argv[2])
real = type(repository._storage).read_range
def dying(self, *arguments):
    os.kill(os.getpid(), signal.SIGKILL)
type(repository._storage).read_range = dying
Cache(sys.argv[1]).acquire(ObjectInfo(sys.argv[3], 1000), repository)
"""


def test_a_fetch_killed_half_way_is_taken_over_and_its_space_is_free_again(cache, origin):
    repository, infos = origin
    command = [sys.executable, "-c", FETCHER, str(cache.folder), repository.url, infos[0].digest]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    assert cache.status().usage.reserved_bytes == 1000
    path, hit = cache.acquire(infos[0], repository)
    assert (path.read_bytes(), hit) == (b"\0" * 1000, False)
    assert cache.status().usage.reserved_bytes == 0
    assert os.listdir(cache.folder / "incoming") == []


STAGER = """
import random, sys
from datasvc.cache import Cache
from datasvc.errors import CacheFullError
from datasvc.repository import ObjectInfo, Repository
cache, repository = Cache(sys.argv[1]), Repository.open(sys.argv[2])
generator = random.Random(int(sys.argv[3]))
for _ in range(60):
    info = ObjectInfo(generator.choice(sys.argv[4:]), 1000)
    try:
        path, _ = cache.acquire(info, repository)
    except CacheFullError:
        continue
    assert len(set(path.read_bytes())) == 1
    cache.release(info.digest)
"""


def test_six_processes_at_once_never_exceed_the_budget_on_the_disk(cache, origin):
    """A watcher samples what really lies on the disk, and stops the catalogue for as long as a look takes."""
    repository, infos = origin
    arguments = [str(cache.folder), repository.url]
    digests = [info.digest for info in infos]
    stagers = [
        subprocess.Popen([sys.executable, "-c", STAGER, *arguments, str(seed), *digests], cwd=ROOT)
        for seed in range(6)
    ]
    most = 0
    while any(process.poll() is None for process in stagers):
        with cache._node.catalogue._writing():
            most = max(most, files_bytes(cache.folder))
    assert [process.returncode for process in stagers] == [0] * 6
    assert 0 < most <= 5000
    usage = cache.status().usage
    assert (usage.reserved_bytes, usage.held_bytes) == (0, 0)
    assert files_bytes(cache.folder) == usage.resident_bytes


def test_staging_more_than_the_budget_is_refused_before_anything_is_fetched(tmp_path, repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    splits = list(open_dataset(repository, "pets").values())
    needed = sum(split.table.size_bytes for split in splits)
    with Cache(tmp_path / "cache", budget=needed - 1) as cache:
        with pytest.raises(CacheFullError, match=f"needs {needed} bytes, the budget of .* is {needed - 1}"):
            cache.stage(splits)
        assert cache.status().usage.resident_bytes == 0
    with Cache(tmp_path / "cache", budget=needed) as cache:
        first, second = cache.stage(splits), cache.stage(splits)
    assert (first.fetched_bytes, first.hit_bytes) == (needed, 0)
    assert (second.fetched_bytes, second.hit_bytes) == (0, needed)


def test_equal_shards_of_two_data_sets_are_stored_once(tmp_path, repository, folder):
    for name in ("one", "two"):
        ingest(repository, str(folder), name)
    splits = [open_dataset(repository, name)["train"] for name in ("one", "two")]
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        assert cache.stage(splits).fetched_bytes == splits[0].table.size_bytes


def test_a_cache_without_a_budget_asks_for_one(tmp_path):
    with pytest.raises(ConfigError, match="has no budget yet"):
        Cache(tmp_path / "cache")


def test_a_budget_is_kept_for_the_node_and_may_be_changed(tmp_path):
    Cache(tmp_path / "cache", budget="3kB").close()
    assert Cache(tmp_path / "cache").budget_bytes == 3000
    Cache(tmp_path / "cache", budget=4000).close()
    assert Cache(tmp_path / "cache").budget_bytes == 4000


def test_a_file_where_the_cache_shall_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="as a cache"):
        Cache(tmp_path / "file", budget=1)


def test_a_damaged_catalogue_says_what_to_do(tmp_path):
    (tmp_path / "cache" / "catalogue").mkdir(parents=True)
    (tmp_path / "cache" / "catalogue" / "data.mdb").write_bytes(b"\xff" * 10_000)
    with pytest.raises(CorruptDataError, match=r"is damaged.*remove the whole cache folder and stage again"):
        Cache(tmp_path / "cache", budget=1000)


def test_a_catalogue_of_a_later_format_is_refused(tmp_path):
    cache = Cache(tmp_path / "cache", budget=1000)
    with cache._node.catalogue._writing() as txn:
        txn.put(b"format", b"2", db=cache._node.catalogue._meta)
    cache.close()
    with pytest.raises(ConfigError, match="format 2; this datasvc reads up to 1"):
        Cache(tmp_path / "cache")


def test_a_cache_from_before_a_fork_is_refused_in_the_child(cache, origin):
    repository, infos = origin
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache.acquire(infos[0], repository)
        except ConfigError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert b"opened before a fork" in os.read(reading, 1000)
    os.close(reading)
    assert cache.acquire(infos[0], repository)[1] is False  # the parent's is unharmed


def test_staging_a_second_data_set_does_not_evict_what_it_has_just_staged(tmp_path, repository, folder):
    """What an earlier staging left behind makes room for what is staged now."""
    ingest(repository, str(folder), "pets", shard_bytes=1000)
    first, second = open_dataset(repository, "pets")["train"], open_dataset(repository, "pets")["val"]
    budget = first.table.size_bytes + second.table.size_bytes // 2
    with Cache(tmp_path / "cache", budget=budget) as cache:
        cache.stage([first])
        cache.stage([second])
        assert cache.stage([second]).fetched_bytes == 0


def test_many_holders_that_find_a_bad_file_at_once_all_get_a_good_one(cache, origin, monkeypatch):
    """Every thread sees an object of another boot whose file is damaged, or gone."""
    repository, infos = origin
    for attempt in range(20):
        path, _ = cache.acquire(infos[0], repository)
        cache.release(infos[0].digest)
        path.unlink() if attempt % 2 else path.write_bytes(b"\1" * 1000)
        monkeypatch.setattr(cache._node._fetcher, "_boot", f"boot {attempt}")
        found, start = [], threading.Barrier(6)

        def acquire(start=start, found=found):
            start.wait()
            try:
                found.append(cache.acquire(infos[0], repository)[0].read_bytes())
            except BaseException as error:
                found.append(error)

        threads = [threading.Thread(target=acquire) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert found == [b"\0" * 1000] * 6
        for _ in range(6):
            cache.release(infos[0].digest)


def test_an_interrupt_right_after_the_reservation_leaves_none(cache, origin, monkeypatch):
    repository, infos = origin

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._node._fetcher, "_is_intact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.acquire(infos[0], repository)
    monkeypatch.undo()
    assert cache.status().usage.reserved_bytes == 0
    assert cache.acquire(infos[0], repository)[0].read_bytes() == b"\0" * 1000


def test_a_process_killed_between_publishing_and_saying_so_leaves_a_usable_object(cache, origin):
    """The file is in place, the record still says reserved: it is verified and taken over, not fetched."""
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    catalogue = cache._node.catalogue
    with catalogue._writing() as txn:
        record = catalogue._get(txn, infos[0].digest)
        catalogue._put(txn, infos[0].digest, replace(record, state="reserved", owner="0-gone"))
    assert cache.acquire(infos[0], repository) == (path, True)


def test_lowering_the_budget_evicts_at_once_what_nobody_holds(cache, origin):
    repository, infos = origin
    for info in infos[:5]:
        cache.acquire(info, repository)
    for info in infos[:3]:
        cache.release(info.digest)
    Cache(cache.folder, budget=3500).close()
    assert cache.status().usage.resident_bytes == 3000
    Cache(cache.folder, budget=100).close()
    assert cache.status().usage.resident_bytes == 2000  # held by this process


def test_killed_readers_do_not_make_the_catalogue_grow_for_ever(cache, origin):
    code = "import os, signal, sys; from datasvc.cache import Cache\n"
    code += "cache = Cache(sys.argv[1]); txn = cache._node.catalogue._env.begin()\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code, str(cache.folder)], cwd=ROOT, check=False)
    assert "no active readers" not in cache._node.catalogue._env.readers()
    repository, infos = origin
    for info in infos:  # full: the sweep looks for dead readers too
        cache.acquire(info, repository)
        cache.release(info.digest)
    pids = [line.split()[0] for line in cache._node.catalogue._env.readers().splitlines()[1:]]
    assert set(pids) <= {str(os.getpid())}


def test_a_closed_cache_says_so_and_closing_again_is_harmless(tmp_path):
    cache = Cache(tmp_path / "cache", budget=1000)
    cache.close()
    cache.close()
    with pytest.raises(ConfigError, match="was closed; open it again"):
        cache.status()


def test_a_full_disk_is_a_full_cache(cache, origin, monkeypatch):
    repository, infos = origin

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repository.objects, "fetch", full)
    with pytest.raises(CacheFullError, match=r"disk of the cache .* is full"):
        cache.acquire(infos[0], repository)
    assert cache.status().usage.reserved_bytes == 0


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_publication_leaves_no_byte_that_nothing_counts(cache, origin, monkeypatch, moment):
    repository, infos = origin
    real = cache._node.files.publish

    def interrupted(digest):
        if moment == "after":
            real(digest)
        raise KeyboardInterrupt

    for info in infos[:3]:
        monkeypatch.setattr(cache._node.files, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.acquire(info, repository)
    monkeypatch.undo()
    assert files_bytes(cache.folder) == 0
    assert cache.status().usage.reserved_bytes == 0


def test_caches_opened_and_closed_by_many_threads_do_not_close_each_other(tmp_path):
    Cache(tmp_path / "cache", budget=1000).close()
    failed = []

    def open_and_close():
        for _ in range(200):
            try:
                with Cache(tmp_path / "cache") as cache:
                    cache.status()
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=open_and_close) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failed == []


def test_what_dropped_shards_held_is_released(tmp_path, repository, folder):
    ingest(repository, str(folder), "pets")
    split = open_dataset(repository, "pets")["train"]
    with Cache(tmp_path / "cache", budget="1MB") as cache:
        shards = cache.shards(repository)
        shard = shards.open_shard(split.table.shard(0))
        assert cache.status().usage.held_bytes > 0
        del shards
        gc.collect()
        assert cache.status().usage.held_bytes == 0
        assert shard.sample(0)  # its mapping lives on


def test_releasing_what_is_not_held_is_refused(cache, origin):
    with pytest.raises(ConfigError, match="was not acquired"):
        cache.release(origin[1][0].digest)


def test_two_threads_on_one_object_of_which_one_fails_do_not_harm_each_other(cache, origin, monkeypatch):
    """The first fetch fails, and frees its lock only after the second thread has reserved anew."""
    repository, infos = origin
    real_drop, dropped, reserved = cache._node.catalogue.drop, threading.Event(), threading.Event()
    real_fetch, calls = repository.objects.fetch, []

    def fetch(*arguments, **options):
        calls.append(threading.get_ident())
        if len(calls) == 1:
            raise UnavailableError("503")
        reserved.set()
        return real_fetch(*arguments, **options)

    def drop(*arguments):
        real_drop(*arguments)
        if threading.get_ident() == calls[0]:
            dropped.set()
            assert reserved.wait(20)

    monkeypatch.setattr(repository.objects, "fetch", fetch)
    monkeypatch.setattr(cache._node.catalogue, "drop", drop)

    def fail():
        with pytest.raises(UnavailableError):
            cache.acquire(infos[0], repository)

    failing = threading.Thread(target=fail)
    failing.start()
    assert dropped.wait(20)
    path, _ = cache.acquire(infos[0], repository)
    failing.join()
    assert path.read_bytes() == b"\0" * 1000
    assert cache.status().usage.reserved_bytes == 0


def test_a_hit_is_held_like_a_miss(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    cache.acquire(infos[0], repository)
    assert cache.status().usage.held_bytes == 1000


@pytest.mark.parametrize("backwards", [False, True])
def test_what_was_released_last_makes_room_first(cache, origin, backwards):
    repository, infos = origin
    for info in infos[:5]:
        cache.acquire(info, repository)
    for info in infos[4::-1] if backwards else infos[:5]:
        cache.release(info.digest)
    cache.acquire(infos[5], repository)
    exist = [cache._node.files.object_path(info.digest).exists() for info in infos[:5]]
    assert exist == ([False] + [True] * 4 if backwards else [True] * 4 + [False])


def test_what_a_dead_process_fetched_belongs_to_whoever_released_it_last(cache, origin):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:1])
    process.kill()
    process.communicate()
    for info in infos[:5]:
        cache.acquire(info, repository)
        cache.release(info.digest)
    cache.acquire(infos[5], repository)
    exist = [cache._node.files.object_path(info.digest).exists() for info in infos[:5]]
    assert exist == [True] * 4 + [False]


def test_the_space_of_a_fetch_killed_half_way_is_free_for_other_objects(cache, origin):
    repository, infos = origin
    command = [sys.executable, "-c", FETCHER, str(cache.folder), repository.url, infos[0].digest]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    for info in infos[1:6]:
        cache.acquire(info, repository)
    usage = cache.status().usage
    assert (usage.resident_bytes, usage.reserved_bytes) == (5000, 0)
    assert os.listdir(cache.folder / "incoming") == []


def test_what_was_verified_in_this_boot_is_not_read_again(cache, origin, monkeypatch):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)

    def reading(*_arguments):
        raise AssertionError

    monkeypatch.setattr("datasvc.cache.fetch.digest_of_file", reading)
    assert cache.acquire(infos[0], repository) == (path, True)


def test_an_acquire_that_failed_holds_nothing_later(cache, origin):
    repository, infos = origin
    path = repository.objects.local_path(infos[0].digest)
    path.unlink()
    with pytest.raises(NotFoundError):
        cache.acquire(infos[0], repository)
    path.write_bytes(b"\0" * 1000)
    cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    assert cache.status().usage.held_bytes == 0


def in_a_fork(work):
    """Return what `work` returns in a forked child, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(work()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def test_a_forked_child_that_lets_go_of_the_cache_takes_nothing_from_the_parent(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    assert in_a_fork(cache.close) == "None"
    assert cache.status().usage.held_bytes == 1000


def test_a_forked_child_is_told_to_spawn_whatever_it_tries(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)

    def reopen():
        cache.close()
        return Cache(cache.folder)

    for attempt in (reopen, lambda: Cache(cache.folder), lambda: cache.acquire(infos[0], repository)):
        assert "opened before a fork" in in_a_fork(attempt)
    assert cache.status().usage.held_bytes == 1000


def test_an_object_that_is_no_shard_is_not_held(cache, origin):
    repository, infos = origin
    with pytest.raises(CorruptDataError, match="no Arrow IPC file"):
        cache.shards(repository).open_shard(infos[0])
    assert cache.status().usage.held_bytes == 0
