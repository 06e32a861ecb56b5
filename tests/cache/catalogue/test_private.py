"""Other users can neither lock the files of a cache nor stop its processes, even if they may enter its folder."""

import os
import stat

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue import recovery
from datasvc.errors import UnavailableError
from tests.cache.processes import kill, start_python

BLOCK = 4096

# Locks what it may open of a folder, as another user if it can become one, until its standard input ends.
STRANGER = """
import fcntl, os, pathlib, sys
os.chdir(sys.argv[1])
paths = sorted(path for path in pathlib.Path().rglob("*") if path.is_file())
if len(sys.argv) > 2:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
files, locked = [], []
for path in paths:
    try:
        files.append(open(path, "rb"))
    except PermissionError:
        continue
    fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(files[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
    locked.append(str(path))
print(*locked, flush=True)
sys.stdin.read()
"""

# Locks one file until its standard input ends.
LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask():
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.mark.usefixtures("open_umask")
def test_a_new_cache_and_all_that_is_locked_in_it_are_closed_to_others(tmp_path, origin):
    repository, infos = origin
    with Cache(tmp_path / "cache", budget=5 * BLOCK) as cache:
        cache.acquire(infos[0], repository)
        assert mode_of(cache.folder) == 0o700
        folders = {path.name: mode_of(path) for path in cache.folder.iterdir() if path.is_dir()}
        objects = folders.pop("objects")
        assert (set(folders.values()), objects) == ({0o700}, 0o777)
        assert {mode_of(cache.folder / name) for name in ("open.lock", "opening.lock")} == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("open_umask")
def test_a_stranger_who_may_enter_the_folder_freezes_nothing(tmp_path, origin):
    repository, infos = origin
    with Cache(tmp_path / "cache", budget=5 * BLOCK) as cache:
        for info in infos[:5]:
            cache.acquire(info, repository)
            cache.release(info.digest)
    # As an earlier version left it.
    for path in (cache.folder, *cache.folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    Cache(cache.folder).close()
    stranger = start_python(STRANGER, cache.folder, "as another user")
    locked = stranger.stdout.readline().split()
    assert [path for path in locked if not path.startswith("objects/")] == ["cache.json"]
    with Cache(cache.folder) as cache:
        for info in infos[5:]:  # each evicts one
            cache.acquire(info, repository)
            cache.release(info.digest)
        assert cache.counters()["evicted"] == 5
    kill(stranger)


@pytest.mark.parametrize("name", ["opening.lock", "open.lock"])
def test_a_lock_that_is_never_released_is_an_error_that_names_its_file(tmp_path, monkeypatch, name):
    folder = tmp_path / "cache"
    Cache(folder, budget=BLOCK).close()
    locker = start_python(LOCKER, folder / name)
    assert locker.stdout.readline() == "locked\n"
    monkeypatch.setattr(recovery, "_MAX_WAIT_S", 0.05)
    with pytest.raises(UnavailableError, match=f"has locked .*{name} for more than .*fuser"):
        Cache(folder)
    kill(locker)
    Cache(folder).close()
