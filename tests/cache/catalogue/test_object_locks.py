"""Holds are locks of the kernel: they end with their holder, and nobody seizes what is held."""

import errno
import os
import re
import resource
import signal
import threading

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.object_locks import ObjectLocks, TransactionLock
from datasvc.errors import CacheFullError, ConfigError, UnavailableError
from datasvc.repository.objects.objects import digest_of
from tests.cache.processes import are_there, hold_in_a_process, in_a_fork, kill, object_path, start_python
from tests.support.threads import waits_in

ONE, OTHER = digest_of(b"one"), digest_of(b"other")


@pytest.fixture
def holds(tmp_path):
    opened = ObjectLocks(tmp_path / "holds")
    yield opened
    opened.close()


def test_what_this_process_holds_it_cannot_seize_itself(holds):
    holds.acquire(ONE)
    assert holds.is_held(ONE)
    assert not holds.try_lock_exclusive(ONE)
    assert holds.try_lock_exclusive(OTHER)
    holds.unlock(OTHER)
    holds.release(ONE)
    assert not holds.is_held(ONE)
    assert holds.try_lock_exclusive(ONE)


def test_a_hold_lasts_until_it_is_released_as_often_as_it_was_acquired(holds):
    holds.acquire(ONE)
    holds.acquire(ONE)
    holds.release(ONE)
    assert not holds.try_lock_exclusive(ONE)
    holds.release(ONE)
    assert holds.try_lock_exclusive(ONE)


def test_two_processes_hold_one_object(tmp_path, holds):
    other = ObjectLocks(tmp_path / "holds")  # descriptors of its own, as another process has
    holds.acquire(ONE)
    other.acquire(ONE)
    holds.release(ONE)
    assert holds.is_held(ONE)
    other.close()
    assert not holds.is_held(ONE)


def test_a_hold_waits_until_the_exclusive_lock_is_released(tmp_path, holds):
    other = ObjectLocks(tmp_path / "holds")
    assert other.try_lock_exclusive(ONE)
    acquired = threading.Event()
    waiting = threading.Thread(target=lambda: (holds.acquire(ONE), acquired.set()))
    waiting.start()
    assert not acquired.is_set()
    other.unlock(ONE)
    assert acquired.wait(20)
    waiting.join()
    other.close()


def test_what_is_abandoned_while_the_locks_are_busy_is_released_after(holds):
    holds.acquire(ONE)
    with holds._lock:
        holds.abandon([ONE])
        assert holds.is_held(ONE)
    holds.acquire(OTHER)
    assert not holds.is_held(ONE)


def test_a_folder_that_cannot_hold_locks_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot lock files in .*File exists.*check the permissions") as refused:
        ObjectLocks(tmp_path / "file")
    assert "local disk" not in str(refused.value)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOLCK, "put the cache on a local disk"),
        (errno.EINVAL, "put the cache on a local disk"),
        (errno.EMFILE, "raise the limit of open files"),
        (errno.EACCES, "check the permissions and the disk"),
    ],
)
def test_the_advice_fits_the_error(tmp_path, monkeypatch, number, advice):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("datasvc.cache.catalogue.object_locks.fcntl.fcntl", fail)
    with pytest.raises(ConfigError, match=rf"{re.escape(os.strerror(number))}; {advice}"):
        ObjectLocks(tmp_path / "holds")


def test_many_files_share_few_descriptors(holds):
    for number in range(1000):
        holds.acquire(digest_of(b"%d" % number))
    assert len(holds._hold_files) <= 64
    assert holds.try_lock_exclusive(ONE)


def test_holds_of_a_killed_process_are_gone_at_the_next_reservation(cache, origin):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:5])
    with pytest.raises(CacheFullError):
        cache.acquire(infos[5], repository)
    kill(process)
    cache.acquire(infos[5], repository)
    assert cache.status().held_bytes == 4096


def test_a_mapped_object_of_another_process_is_not_evicted(cache, origin):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:2])
    for info in infos[2:]:
        cache.acquire(info, repository)
        cache.release(info.digest)
    assert all(are_there(cache, infos[:2]))
    process.communicate("")


def test_this_process_never_evicts_what_another_of_its_threads_holds(cache, origin):
    repository, infos = origin
    held = threading.Thread(target=lambda: cache.acquire(infos[0], repository))
    held.start()
    held.join()
    for info in infos[1:]:
        cache.acquire(info, repository)
        cache.release(info.digest)
    assert object_path(cache, infos[0]).exists()


FORKER = """
import os, signal, sys
from datasvc.cache import Cache
from datasvc.repository import ObjectInfo, Repository
cache, repository = Cache(sys.argv[1]), Repository.open(sys.argv[2])
cache.acquire(ObjectInfo(sys.argv[3], 4096), repository)
if len(sys.argv) > 4:  # fork in the middle of a fetch
    real = repository.objects.read_range
    def forking(*arguments):
        fork_and_die()
    repository.objects.read_range = forking
def fork_and_die():
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        signal.alarm(60)  # nobody's child if the test dies
        signal.pause()
    else:
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
if len(sys.argv) > 4:
    cache.acquire(ObjectInfo(sys.argv[4], 4096), repository)
fork_and_die()
"""


@pytest.mark.parametrize("fetching", [False, True])
def test_a_forked_child_keeps_nothing_locked_after_its_parent_died(cache, origin, fetching):
    repository, infos = origin
    process = start_python(
        FORKER, cache.folder, repository.url, infos[0].digest, *([infos[1].digest] if fetching else [])
    )
    child = int(process.stdout.readline())
    try:
        assert cache.status().held_bytes >= 4096
        process.stdin.write("die\n")
        process.stdin.flush()
        assert process.wait(20) == -signal.SIGKILL
        os.kill(child, 0)  # lives on
        status = cache.status()
        assert (status.held_bytes, len(status.jobs)) == (0, 1)
        assert cache.acquire(infos[1], repository).path.read_bytes() == b"\1" * 4096
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()


def test_a_child_gives_up_nothing_of_its_parent(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    assert in_a_fork(lambda: "nothing") == "nothing"
    assert cache.status().held_bytes == 4096


def test_one_thread_of_a_process_at_a_time_has_exclusive_locks(cache, origin, monkeypatch):
    """Both use one descriptor: letting go would free what the other has just seized, under its eviction."""
    repository, infos = origin
    for info in infos[:2]:
        cache.acquire(info, repository)
        cache.release(info.digest)
    catalogue, holds, order = cache._opened.catalogue, cache._opened.locks, []
    real = holds.unlock

    def write():
        with catalogue._writing():
            order.append("writes")

    writer = threading.Thread(target=write)

    def unlock(digest):
        monkeypatch.undo()
        writer.start()
        waits_in(writer, TransactionLock._locked)  # or ends, too early
        real(digest)
        order.append("let go")

    monkeypatch.setattr(holds, "unlock", unlock)
    Cache(cache.folder, budget=4096).close()  # seizes both, evicts one
    writer.join()
    assert order == ["let go", "writes"]


def test_a_process_that_may_open_no_more_files_gets_advice(tmp_path):
    holds = ObjectLocks(tmp_path / "holds")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open("/dev/null", os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
    try:
        with pytest.raises(UnavailableError, match="ulimit -n"):
            holds.acquire(digest_of(b"x"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    holds.acquire(digest_of(b"x"))
    holds.close()
