"""Holds are locks of the kernel, which end with their holder; one is the lock of the catalogue, in containers too."""

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue import object_locks
from datasvc.cache.catalogue.object_locks import SETLK, Lease, ObjectLocks, TransactionLock, is_held, sweep
from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import CacheFullError, ConfigError, UnavailableError
from datasvc.repository.objects.objects import digest_of
from tests.cache.crash_steps import check
from tests.cache.processes import ROOT, are_there, hold_in_a_process, in_a_fork, kill, object_path, start_python
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


CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# Reads, fetches and evicts, and prints a line after each round.
USER = """
import os, random, sys
from datasvc.cache import Cache
from datasvc.repository import ObjectInfo, Repository
folder, url, seed, rounds, *digests = sys.argv[1:]
assert os.getpid() == 1
chosen, repository = random.Random(seed), Repository.open(url)
contents = {digest: repository.objects.read(digest) for digest in digests}
with Cache(folder) as cache:
    for _ in range(int(rounds)):
        for digest in chosen.sample(digests, 4):
            path, _ = cache.acquire(ObjectInfo(digest, 4096), repository)
            assert path.read_bytes() == contents[digest]
            cache.release(digest)
        status = cache.status()
        assert status.resident_bytes + status.reserved_bytes <= status.budget_bytes
        print("round", flush=True)
"""

# Has the catalogue open with LMDB's own locks until its standard input ends.
EARLIER_VERSION = """
import lmdb, sys
with lmdb.open(sys.argv[1], max_dbs=8) as env, env.begin():
    print("open", flush=True)
    sys.stdin.read()
"""


def can_unshare():
    try:
        return subprocess.run([*CONTAINER, "true"], check=False, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="unshare cannot create PID namespaces here")
def test_containers_with_equal_process_ids_share_a_cache_and_one_is_killed(cache, origin):
    repository, infos = origin

    def start(seed, rounds):
        words = [cache.folder, repository.url, seed, rounds, *(info.digest for info in infos)]
        command = [*CONTAINER, sys.executable, "-c", USER, *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    lasting, killed = [start(seed, 15) for seed in range(2)], start(2, 10**6)
    assert [killed.stdout.readline() for _ in range(3)] == ["round\n"] * 3
    kill(killed)
    assert [(each.communicate()[0], each.returncode) for each in lasting] == [("round\n" * 15, 0)] * 2
    cache.close()
    check(cache.folder, repository, infos[:8])


def test_no_earlier_version_opens_the_catalogue_beside_this_one(cache):
    catalogue = cache.folder / "catalogue"
    command = [sys.executable, "-c", EARLIER_VERSION, str(catalogue)]
    refused = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "LockError" in refused.stderr
    cache.close()
    process = start_python(EARLIER_VERSION, catalogue)
    assert process.stdout.readline() == "open\n"
    with pytest.raises(UnavailableError, match="a process of an earlier version"):
        Cache(cache.folder)
    kill(process)
    Cache(cache.folder).close()


def test_no_reader_begins_while_a_writer_waits(tmp_path):
    (tmp_path / "catalogue").mkdir()
    reader, writer, probe = (TransactionLock(tmp_path / "catalogue" / "lock.mdb") for _ in range(3))
    written = threading.Event()

    def write():
        with writer.exclusive():
            written.set()

    with reader.shared():
        assert can_read(probe)
        thread = threading.Thread(target=write)
        thread.start()
        while can_read(probe):  # until the writer waits; the time limit of the test ends what never does
            pass
        assert not written.is_set()
    thread.join()
    assert written.is_set()
    assert can_read(probe)
    for lock in (reader, writer, probe):
        lock.close()


def test_a_transaction_inside_of_another_is_refused_and_a_close_inside_ends_it(tmp_path):
    (tmp_path / "catalogue").mkdir()
    lock, other = (TransactionLock(tmp_path / "catalogue" / "lock.mdb") for _ in range(2))
    with lock.exclusive():
        with pytest.raises(UnavailableError, match="has not ended in this thread"), lock.shared():
            pass
        assert not can_read(other)
        lock.close()
        assert can_read(other)
    with pytest.raises(UnavailableError, match="was closed"), lock.shared():
        pass
    other.close()


def can_read(lock):
    """Return whether a reader could begin without waiting; it ends at once."""
    try:
        fcntl.fcntl(lock._descriptor, SETLK, object_locks._READ)
    except BlockingIOError:
        return False
    fcntl.fcntl(lock._descriptor, SETLK, object_locks._UNLOCK)
    return True


def test_a_forked_child_does_not_keep_the_lock_of_a_parent(cache):
    descriptor = cache._opened.catalogue._lock._descriptor
    with cache._opened.catalogue._lock.exclusive():
        assert in_a_fork(lambda: is_open(descriptor)) == "False"


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_lease_is_held_until_closed(tmp_path):
    lease = Lease(tmp_path)
    assert is_held(tmp_path, lease.id)
    lease.close()
    lease.close()
    assert not is_held(tmp_path, lease.id)
    assert os.listdir(tmp_path) == []


def lease_in_a_process(folder):
    code = "import sys, pathlib; from datasvc.cache.catalogue.object_locks import Lease\n"
    code += "lease = Lease(pathlib.Path(sys.argv[1])); print(lease.id, flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def test_the_kernel_drops_the_lease_of_a_killed_process(tmp_path):
    process, lease_id = lease_in_a_process(tmp_path)
    assert is_held(tmp_path, lease_id)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_held(tmp_path, lease_id)


def test_a_sweep_removes_dead_leases_and_no_living_one(tmp_path):
    process, dead = lease_in_a_process(tmp_path)
    process.kill()
    process.communicate()
    lease = Lease(tmp_path)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == [lease.id] != [dead]
    lease.close()


def test_a_folder_that_cannot_hold_leases_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot lock a file in"):
        Lease(tmp_path / "missing")


def test_what_a_process_killed_while_it_took_a_lease_left_is_swept(tmp_path):
    (tmp_path / f"{TEMPORARY_PREFIX}7-abc").touch()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
