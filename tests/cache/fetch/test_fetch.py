"""One object onto the node: verified, once for all who want it, and nothing left behind where it fails."""

import os
import signal
import threading

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.records import RESERVED, UNVERIFIED, footprint
from datasvc.cache.sources.origin_source import PART_BYTES
from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.order import NextUse
from tests.cache.processes import die_while_fetching, disk_bytes, object_path, run_python


def mark_unverified(cache, info):
    """Let the catalogue think that a scan found the object."""
    catalogue = cache._opened.catalogue
    with catalogue._writing() as (rows, _):
        record = rows.get(info.digest)
        rows.put(info.digest, record, record._replace(state=UNVERIFIED))


def test_a_changed_byte_at_the_origin_is_counted_and_never_served(cache, origin):
    repository, infos = origin
    repository.objects.local_path(infos[0].digest).write_bytes(b"\1" + b"\0" * 4095)
    with pytest.raises(CorruptDataError, match="cannot fetch object"):
        cache.acquire(infos[0], repository)
    status = cache.status()
    assert status.num_corrupt > 0
    assert (status.resident_bytes, status.reserved_bytes, status.held_bytes) == (0, 0, 0)
    assert disk_bytes(cache.folder) == 0


def test_a_byte_flipped_on_the_way_once_is_fetched_again(cache, origin, monkeypatch):
    repository, infos = origin
    real, calls = repository.objects.read_range, []

    def flipping(digest, offset, length):
        calls.append(digest)
        content = real(digest, offset, length)
        return b"\x80" + content[1:] if len(calls) == 1 else content

    monkeypatch.setattr(repository.objects, "read_range", flipping)
    assert cache.acquire(infos[0], repository).path.read_bytes() == b"\0" * 4096
    assert (len(calls), cache.status().num_corrupt) == (2, 1)


def test_a_file_somebody_removed_is_fetched_again(cache, origin):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    path.unlink()
    assert cache.acquire(infos[0], repository) == (path, "origin")
    assert path.read_bytes() == b"\0" * 4096


def test_a_file_that_somebody_cut_short_goes_into_quarantine_and_is_fetched_again(cache, origin):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    path.write_bytes(b"\0" * 100)
    assert cache.acquire(infos[0], repository).outcome == "origin"
    assert path.read_bytes() == b"\0" * 4096
    status = cache.status()
    assert (status.num_corrupt, status.quarantined_bytes) == (1, 4096)


def test_an_object_the_origin_lacks_leaves_no_reservation(cache, origin):
    repository, infos = origin
    repository.objects.local_path(infos[0].digest).unlink()
    with pytest.raises(NotFoundError):
        cache.acquire(infos[0], repository)
    assert cache.status().reserved_bytes == 0


def test_an_acquire_that_failed_holds_nothing_later(cache, origin):
    repository, infos = origin
    path = repository.objects.local_path(infos[0].digest)
    path.unlink()
    with pytest.raises(NotFoundError):
        cache.acquire(infos[0], repository)
    path.write_bytes(b"\0" * 4096)
    cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    assert cache.status().held_bytes == 0


def test_what_was_verified_in_this_boot_is_not_read_again(cache, origin, monkeypatch):
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)

    def reading(*_arguments):
        raise AssertionError

    monkeypatch.setattr("datasvc.cache.fetch.fetch.digest_of_file", reading)
    assert cache.acquire(infos[0], repository) == (path, "resident")


def test_many_threads_that_want_one_object_fetch_it_once(cache, origin):
    repository, infos = origin
    outcomes, start = [], threading.Barrier(8)

    def acquire():
        start.wait()
        outcomes.append(cache.acquire(infos[0], repository).outcome)

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(outcomes) == ["origin"] + ["resident"] * 7
    for _ in range(8):
        cache.release(infos[0].digest)
    assert cache.status().held_bytes == 0


def test_many_holders_that_find_a_bad_file_at_once_all_get_a_good_one(cache, origin):
    repository, infos = origin
    for attempt in range(10):
        path, _ = cache.acquire(infos[0], repository)
        cache.release(infos[0].digest)
        path.unlink() if attempt % 2 else path.write_bytes(b"\1" * 4096)
        mark_unverified(cache, infos[0])
        found, start = [], threading.Barrier(6)

        def acquire(start=start, found=found):
            start.wait()
            try:
                found.append(cache.acquire(infos[0], repository).path.read_bytes())
            except BaseException as error:
                found.append(error)

        threads = [threading.Thread(target=acquire) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert found == [b"\0" * 4096] * 6
        for _ in range(6):
            cache.release(infos[0].digest)


def test_a_fetch_killed_half_way_is_taken_over_and_its_space_counts_until_then(cache, origin):
    repository, infos = origin
    die_while_fetching(cache, repository, infos[0])
    assert cache.status().reserved_bytes == 4096 == disk_bytes(cache.folder)
    assert cache.acquire(infos[0], repository).path.read_bytes() == b"\0" * 4096
    assert cache.status().reserved_bytes == 0
    assert os.listdir(cache.folder / "incoming") == []


def test_the_space_of_a_fetch_killed_half_way_is_free_for_other_objects(cache, origin):
    repository, infos = origin
    die_while_fetching(cache, repository, infos[0])
    for info in infos[1:6]:
        cache.acquire(info, repository)
    status = cache.status()
    assert (status.resident_bytes, status.reserved_bytes) == (20480, 0)
    assert os.listdir(cache.folder / "incoming") == []


def test_a_process_killed_between_publishing_and_saying_so_leaves_a_usable_object(cache, origin):
    """The file is in place, the record still says reserved: it is verified and taken over, not fetched."""
    repository, infos = origin
    path, _ = cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    with cache._opened.catalogue._writing() as (rows, _):
        record = rows.get(infos[0].digest)
        rows.put(infos[0].digest, record, record._replace(state=RESERVED, job_id="0-gone"))
    assert cache.acquire(infos[0], repository) == (path, "resident")


def test_an_interrupt_right_after_the_reservation_leaves_none(cache, origin, monkeypatch):
    repository, infos = origin

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._opened.fetcher, "is_intact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.acquire(infos[0], repository)
    monkeypatch.undo()
    assert cache.status().reserved_bytes == 0
    assert cache.acquire(infos[0], repository).path.read_bytes() == b"\0" * 4096


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_publication_leaves_no_byte_that_nothing_counts(cache, origin, monkeypatch, moment):
    repository, infos = origin
    files = cache._opened.files
    real = files.publish

    def interrupted(*arguments):
        if moment == "after":
            real(*arguments)
        raise KeyboardInterrupt

    for info in infos[:3]:
        monkeypatch.setattr(files, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.acquire(info, repository)
    monkeypatch.undo()
    assert disk_bytes(cache.folder) == 0
    assert cache.status().reserved_bytes == 0


def test_two_threads_on_one_object_of_which_one_fails_do_not_harm_each_other(cache, origin, monkeypatch):
    """The first fetch fails, and frees its lock only after the second thread has reserved anew."""
    repository, infos = origin
    catalogue = cache._opened.catalogue
    real_drop, dropped, reserved = catalogue.drop, threading.Event(), threading.Event()
    real_transfer, calls = cache._opened.fetcher.fetch, []

    def transfer(*arguments):
        calls.append(threading.get_ident())
        if len(calls) == 1:
            raise UnavailableError("503")
        reserved.set()
        return real_transfer(*arguments)

    def drop(*arguments):
        real_drop(*arguments)
        if threading.get_ident() == calls[0]:
            dropped.set()
            assert reserved.wait(20)

    monkeypatch.setattr(cache._opened.fetcher, "fetch", transfer)
    monkeypatch.setattr(catalogue, "drop", drop)

    def fail():
        with pytest.raises(UnavailableError):
            cache.acquire(infos[0], repository)

    failing = threading.Thread(target=fail)
    failing.start()
    assert dropped.wait(20)
    path, _ = cache.acquire(infos[0], repository)
    failing.join()
    assert path.read_bytes() == b"\0" * 4096
    assert cache.status().reserved_bytes == 0


def test_a_prefetch_is_not_held_and_evicts_nothing_that_is_needed_sooner(cache, origin):
    repository, infos = origin
    for number, info in enumerate(infos[:5]):
        cache.acquire(info, repository)
        cache.release(info.digest, NextUse(0, 100 * (number + 1)))
    assert cache.prefetch(infos[5], repository, NextUse(0, 600)) == "later"
    assert cache.prefetch(infos[5], repository, NextUse(0, 450)) == "origin"
    assert not object_path(cache, infos[4]).exists()
    assert cache.status().held_bytes == 0
    assert cache.prefetch(infos[5], repository, NextUse(0, 450)) == "resident"


def test_a_prefetch_does_not_wait_for_a_fetch_in_progress(cache, origin, monkeypatch):
    repository, infos = origin
    real, answers = repository.objects.read_range, []

    def reading(*arguments):
        answers.append(cache.prefetch(infos[0], repository, NextUse(0, 1)))
        return real(*arguments)

    monkeypatch.setattr(repository.objects, "read_range", reading)
    cache.acquire(infos[0], repository)
    assert answers == ["busy"]


def test_a_cache_that_a_disk_refuses_to_write_says_so(cache, origin, monkeypatch):
    repository, infos = origin

    def broken(*_arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(UnavailableError, match=r"cannot write to the cache .* Input/output error"):
        cache.acquire(infos[0], repository)
    monkeypatch.undo()
    assert cache.status().reserved_bytes == 0


# Dies when the second range has been asked for, and the first has been noted.
DIES_HALF_WAY = """
import os, signal, sys, time
from datasvc.cache import Cache
from datasvc.cache.sources.origin_source import ReceivedParts
from datasvc.repository import ObjectInfo, Repository
repository = Repository.open(sys.argv[2])
real = ReceivedParts.add
def add(self, number):
    real(self, number)
    if len(self.arrived) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
ReceivedParts.add = add
Cache(sys.argv[1]).acquire(ObjectInfo(sys.argv[3], int(sys.argv[4])), repository)
"""


def test_what_had_arrived_when_a_fetch_was_killed_is_not_asked_for_again(tmp_path, origin):
    repository, _ = origin
    content = os.urandom(5 * PART_BYTES)  # of equal parts: which two arrive first is left to chance
    info = repository.objects.put(content)
    with Cache(tmp_path / "large", budget=8 * PART_BYTES) as cache:
        code = run_python(DIES_HALF_WAY, cache.folder, repository.url, info.digest, info.size_bytes)
        assert code == -signal.SIGKILL
        assert cache.status().reserved_bytes == disk_bytes(cache.folder) == footprint(info.size_bytes)
        asked = []
        real = repository.objects.read_range
        repository.objects.read_range = lambda *call: (asked.append(call[1:]), real(*call))[1]
        path, outcome = cache.acquire(info, repository)
        assert (path.read_bytes(), outcome) == (content, "origin")
        assert sum(length for _, length in asked) == info.size_bytes - 2 * PART_BYTES
        assert cache.counters()["origin_bytes"] == info.size_bytes - 2 * PART_BYTES
        assert os.listdir(cache.folder / "incoming") == []


def test_what_had_arrived_wrong_when_a_fetch_was_killed_is_not_trusted(tmp_path, origin):
    repository, _ = origin
    content = os.urandom(5 * PART_BYTES)
    info = repository.objects.put(content)
    with Cache(tmp_path / "large", budget=8 * PART_BYTES) as cache:
        run_python(DIES_HALF_WAY, cache.folder, repository.url, info.digest, info.size_bytes)
        with (cache.folder / "incoming" / info.digest).open("r+b") as file:
            file.write(bytes(5 * PART_BYTES))
        assert cache.acquire(info, repository).path.read_bytes() == content
        assert cache.status().num_corrupt == 1
