"""Kill a process before each of its steps: every call that touches the disk, a lock or the database.

Run as a program it goes through one scenario and prints a line per step. Everything happens in forked children of a
process that never opened a cache itself, which is a hundred times faster than to start one for each step.
"""

import os
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from itertools import count
from pathlib import Path

from datasvc.cache import Cache, Quota
from datasvc.cache.catalogue.records import RESERVED
from datasvc.cache.catalogue.tables import CatalogueTables
from datasvc.errors import DatasvcError
from datasvc.repository import Repository
from tests.cache.processes import disk_bytes, object_path

BLOCK = 4096
# All of these change something that outlives the process, or a lock.
TOUCHING = {
    *("open", "close", "rename", "unlink", "rmdir", "mkdir", "truncate", "ftruncate", "write", "pwrite"),
    *("posix_fallocate", "fsync", "flock", "fcntl", "put", "delete", "begin", "commit", "abort", "__exit__", "link"),
}


def kill_before(step):
    """Kill this process before its call number `step`, from 1, of those that touch anything."""
    steps = count(1)

    def profile(_frame, event, function):
        if event == "c_call" and function.__name__ in TOUCHING and _touches(function) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)


def _touches(function):
    owner = getattr(function, "__self__", None)
    return (
        function.__module__ in {"posix", "fcntl"}
        or type(owner).__module__.startswith(("lmdb", "_lmdb"))
        or (type(owner).__name__ in {"Transaction", "Environment", "FileIO", "BufferedWriter"})
    )


def in_child(work):
    """Return how a forked child that does `work` ended: 0, or minus the signal."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read(cache, repository, info):
    path, _ = cache.acquire(info, repository)
    assert path.read_bytes() == repository.objects.read(info.digest)
    cache.release(info.digest)


def fill(cache, repository, infos):
    for info in infos[:5]:
        read(cache, repository, info)


def leave_unverified(folder, number, infos, content=None):
    """What a reboot leaves: no catalogue, and perhaps wrong bytes."""
    shutil.rmtree(folder / "catalogue")
    (folder / "catalogue").mkdir()
    if content is not None:
        (folder / "objects" / infos[number].digest[:2] / infos[number].digest).write_bytes(content)


def fetch_and_evict(cache, repository, infos):
    read(cache, repository, infos[5])


def fetch_two_for_one(cache, repository, infos):
    info = repository.objects.put(b"x" * (2 * BLOCK))
    read(cache, repository, info)


def verify(cache, repository, infos):
    read(cache, repository, infos[1])


def fail(cache, repository, infos):
    repository.objects.local_path(infos[6].digest).rename(repository.url + "/away")
    with suppress(DatasvcError):
        cache.acquire(infos[6], repository)
    Path(repository.url + "/away").rename(repository.objects.local_path(infos[6].digest))


def configure(cache, repository, infos):
    cache.set_quota("team", Quota(2 * BLOCK))


def scrub(cache, repository, infos):
    object_path(cache, infos[2]).write_bytes(b"bad!" * 1024)
    cache.scrub()


def nothing(cache, repository, infos):
    pass


def half_fetched(folder, repository, infos):
    """A fetch of another process died before."""

    def die():
        repository.objects.read_range = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        Cache(folder).acquire(infos[5], repository)

    in_child(die)


# What was before, what is killed, and whether that includes opening the cache.
SCENARIOS = {
    "fetch and evict": (None, fetch_and_evict, False),
    "fetch and evict two": (None, fetch_two_for_one, False),
    "take over a dead fetch": (half_fetched, fetch_and_evict, False),
    "sweep a dead fetch": (half_fetched, fetch_two_for_one, False),
    "fail to fetch": (None, fail, False),
    "verify": (lambda folder, _, infos: leave_unverified(folder, 1, infos), verify, False),
    "quarantine and fetch again": (
        lambda folder, _, infos: leave_unverified(folder, 1, infos, b"bad!" * 1024),
        verify,
        False,
    ),
    "configure": (None, configure, False),
    "scrub": (None, scrub, False),
    "open": (None, nothing, True),
    "make the catalogue again": (lambda folder, _, infos: leave_unverified(folder, 1, infos), nothing, True),
}


def check(folder, repository, infos):
    """Open the cache after a crash: nothing is uncounted, over the budget, or wrong."""
    with Cache(folder) as cache:
        account, records = (
            cache._opened.catalogue.read(CatalogueTables.account),
            cache._opened.catalogue.objects(),
        )
        used = {}
        for record in records.values():
            used[record.tenant] = used.get(record.tenant, 0) + record.used_bytes
        assert account.used_bytes == used, "the sums differ from the records"
        assert account.total_bytes <= 5 * BLOCK, "over the budget"
        assert disk_bytes(folder) <= account.total_bytes, "bytes that nothing counts"
        for path in (folder / "objects").rglob("*/*"):
            assert path.name in records, f"{path} is in no record"
        for path in (folder / "incoming").iterdir():
            known = records.get(path.name.removesuffix(".parts"))
            reserved = known is not None and known.state == RESERVED
            assert reserved or path.stat().st_blocks == 0, f"{path} is in no record"
        for info in reversed(infos):
            read(cache, repository, info)
            assert disk_bytes(folder) <= 5 * BLOCK
        # Now that all room was needed, nothing is left of what was under way.
        records = cache._opened.catalogue.objects()
        assert {record.state for record in records.values()} == {1}
        assert disk_bytes(folder) == sum(record.used_bytes for record in records.values()) == cache.budget_bytes
        assert {path.name for path in (folder / "objects").rglob("*/*")} == set(records)
        assert list((folder / "quarantine").iterdir()) == []


def run(name, place):
    """Kill a process at each step of a scenario; returns how many there are."""
    prepare, action, opens_too = SCENARIOS[name]
    repository = Repository.create(str(place / "origin"))
    infos = [repository.objects.put(bytes([number]) * BLOCK) for number in range(8)]
    start = place / "start"

    def make():
        with Cache(start, budget=5 * BLOCK) as cache:
            fill(cache, repository, infos)

    assert in_child(make) == 0
    for step in count(1):
        folder = place / f"step{step}"
        shutil.copytree(start, folder)
        if prepare is not None:
            prepare(folder, repository, infos)

        def act(folder=folder, step=step):
            if opens_too:
                kill_before(step)
            cache = Cache(folder)
            if not opens_too:
                kill_before(step)
            action(cache, repository, infos)
            sys.setprofile(None)
            threading.setprofile(None)
            os._exit(0)

        ended = in_child(act)
        if (away := place / "origin" / "away").exists():
            away.rename(repository.objects.local_path(infos[6].digest))
        assert in_child(lambda folder=folder: check(folder, repository, infos)) == 0, f"{name}: killed at step {step}"
        shutil.rmtree(folder)
        if ended == 0:
            return step - 1
        assert ended == -signal.SIGKILL, f"{name}: step {step} ended with {ended}"
    raise AssertionError


if __name__ == "__main__":
    os.fsync = lambda _descriptor: None  # no power is cut here
    sys.stdout.write(f"{run(sys.argv[1], Path(sys.argv[2]))}\n")
