"""Room: what goes for whom, and who waits until what is on its way has come."""

import pytest

from datasvc.cache import Cache, Quota
from datasvc.cache.catalogue.catalogue import NoSpaceYet
from datasvc.cache.catalogue.files import Files
from datasvc.errors import CacheFullError
from datasvc.order import NEVER, NextUse
from datasvc.repository import Digest
from tests.cache.processes import are_there, hold_in_a_process, kill, start_python
from tests.support.gate import Gate
from tests.support.threads import in_thread, waits_in

BLOCK = 4096


def gate_of(repository, info, monkeypatch):
    """Return a gate that reads of one object wait at."""
    gate, real = Gate(), repository.objects.read_range

    def read_range(digest, *arguments):
        if digest == info.digest:
            gate.wait()
        return real(digest, *arguments)

    monkeypatch.setattr(repository.objects, "read_range", read_range)
    return gate


def test_who_finds_no_room_waits_for_a_prefetch_on_its_way_and_takes_its_place(cache, origin, monkeypatch):
    repository, infos = origin
    for info in infos[:4]:
        cache.acquire(info, repository)
    gate = gate_of(repository, infos[4], monkeypatch)
    fetching, came = in_thread(lambda: cache.prefetch(infos[4], repository, NextUse(0, 10)))
    assert gate.begun.wait(20)
    acquiring, got = in_thread(lambda: cache.acquire(infos[5], repository).outcome)
    assert waits_in(acquiring, Files.wait_for_incoming), got
    gate.open()
    fetching.join(), acquiring.join()
    assert (came, got) == (["origin"], ["origin"])
    assert are_there(cache, infos[:6]) == [True] * 4 + [False, True]
    assert "refused" not in cache.counters()


def test_who_waits_for_room_is_refused_when_what_came_is_held(cache, origin, monkeypatch):
    repository, infos = origin
    for info in infos[:4]:
        cache.acquire(info, repository)
    gate = gate_of(repository, infos[4], monkeypatch)
    fetching, _ = in_thread(lambda: cache.acquire(infos[4], repository))
    assert gate.begun.wait(20)
    many = [in_thread(lambda info=info: cache.acquire(info, repository)) for info in infos[5:9]]
    assert waits_in(many[0][0], Files.wait_for_incoming)
    gate.open()
    fetching.join()
    for thread, got in many:
        thread.join()
        assert isinstance(got[0], CacheFullError)


def test_who_fetches_itself_waits_for_no_room(cache, origin, monkeypatch):
    """Two that each had something on its way and waited for the other would wait for ever."""
    repository, infos = origin
    for info in infos[:3]:
        cache.acquire(info, repository)
    gate = gate_of(repository, infos[3], monkeypatch)
    fetching, _ = in_thread(lambda: cache.prefetch(infos[3], repository, NextUse(0, 10)))
    assert gate.begun.wait(20)
    catalogue, files = cache._opened.catalogue, cache._opened.files
    assert catalogue.reserve(infos[4], "1-me", "default") == "reserved"
    with pytest.raises(CacheFullError):
        catalogue.reserve(infos[5], "1-me", "default")
    catalogue.drop(infos[4].digest, "1-me")
    files.unlock(infos[4].digest)
    cache.acquire(infos[6], repository)
    assert catalogue.reserve(infos[5], "1-me", "default") == NoSpaceYet(infos[3].digest)
    gate.open()
    fetching.join()


def test_who_may_never_have_that_much_is_refused_at_once(cache, origin, monkeypatch):
    repository, infos = origin
    large = repository.objects.put(b"x" * 6 * BLOCK)
    gate = gate_of(repository, infos[0], monkeypatch)
    fetching, _ = in_thread(lambda: cache.prefetch(infos[0], repository, NextUse(0, 10)))
    assert gate.begun.wait(20)
    with pytest.raises(CacheFullError):
        cache.acquire(large, repository)
    gate.open()
    fetching.join()


# Prefetches an object and says so once its first byte is asked for; goes on when told to.
SLOW_PREFETCH = """
import sys
from datasvc.cache import Cache
from datasvc.order import NextUse
from datasvc.repository import ObjectInfo, Repository
repository = Repository.open(sys.argv[2])
real = repository.objects.read_range
def read_range(*arguments):
    print("fetching", flush=True)
    sys.stdin.readline()
    return real(*arguments)
repository.objects.read_range = read_range
Cache(sys.argv[1]).prefetch(ObjectInfo(sys.argv[3], 4096), repository, NextUse(0, 10))
"""


def test_room_that_another_process_has_on_its_way_is_waited_for_also_when_it_dies(cache, origin):
    repository, infos = origin
    for info in infos[:4]:
        cache.acquire(info, repository)
    process = start_python(SLOW_PREFETCH, cache.folder, repository.url, infos[4].digest)
    assert process.stdout.readline() == "fetching\n"
    acquiring, got = in_thread(lambda: cache.acquire(infos[5], repository).outcome)
    assert waits_in(acquiring, Files.wait_for_incoming), got
    kill(process)
    acquiring.join()
    assert got == ["origin"]


def test_a_prefetch_that_may_evict_nothing_of_use_evicts_objects_without_a_next_use(cache, origin):
    """What dead jobs left, and what is never used again."""
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:1])
    for info, next_use in zip(infos[1:5], [NEVER, 100_000, 100_000, None], strict=True):
        cache.acquire(info, repository)
        cache.release(info.digest, None if next_use is None else NextUse(0, next_use))
    kill(process)
    for info in infos[5:7]:
        assert cache.prefetch(info, repository, NextUse(0, 500), evict=False) == "origin"
    assert are_there(cache, infos[:5]) == [False, False, True, True, True]
    assert cache.prefetch(infos[7], repository, NextUse(0, 1), evict=False) == "later"


def test_only_what_would_help_is_seized(tmp_path, origin, monkeypatch):
    """A tenant at its maximum can evict its own objects alone: it must not lock all others of the node."""
    repository, infos = origin
    with Cache(tmp_path / "cache", budget=8 * BLOCK) as cache, Cache(tmp_path / "cache", tenant="team") as team:
        for info in infos[:6]:
            cache.acquire(info, repository)
            cache.release(info.digest)
        cache.set_quota("team", Quota(0, BLOCK))
        team.acquire(infos[6], repository)
        seized = []
        real = cache._opened.locks.try_lock_exclusive
        monkeypatch.setattr(
            cache._opened.locks, "try_lock_exclusive", lambda digest: (seized.append(digest), real(digest))[1]
        )
        with pytest.raises(
            CacheFullError, match="raise the maximum of tenant 'team' by at most 4096 bytes"
        ) as refused:
            team.acquire(infos[7], repository)
        assert "raise the budget" not in str(refused.value)  # which would not help
        assert seized == [infos[6].digest]


def test_an_object_is_known_to_be_needed_soon_at_the_instant_it_is_let_go(cache, origin, monkeypatch):
    repository, infos = origin
    for number, info in enumerate(infos[:5]):
        cache.acquire(info, repository)
        if number:
            cache.release(info.digest, NextUse(0, 1_000))
    seen = []
    real = cache._opened.locks.release
    catalogue = cache._opened.catalogue

    def release(digest: Digest):
        seen.append(catalogue.read(lambda tables: tables.get(digest)).next_use)
        return real(digest)

    monkeypatch.setattr(cache._opened.locks, "release", release)
    cache.release(infos[0].digest, NextUse(0, 7))
    assert seen == [7]
