"""The catalogue in containers whose processes have equal ids, and beside earlier versions, which use LMDB's locks."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue import object_locks
from datasvc.cache.catalogue.object_locks import SETLK, TransactionLock
from datasvc.errors import UnavailableError
from tests.cache.crash_steps import check
from tests.cache.processes import ROOT, in_a_fork, kill, start_python

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
