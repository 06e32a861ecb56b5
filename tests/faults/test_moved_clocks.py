"""The clocks of all machines move by hours at any file operation, forward and back, and nothing is lost or swept.

Files are dated by one clock, that of the store. That this clock is ahead by some hours from now on
is the same as that all files are older by them. Clocks that move one by one: test_repository_soak.py.
"""

import os
import shutil
import sys
from contextlib import contextmanager, suppress
from itertools import cycle

import pytest
import torch

import datasvc
from datasvc.api.gc import MIN_GRACE_S, gc
from datasvc.cache import Cache
from datasvc.models import RetentionPolicy
from datasvc.testing import encode_jpeg, small_dataset

HOUR = 3600
# The longest is a gc's shortest grace but for an hour: what a writer has made must not be swept within it.
JUMPS_S = [MIN_GRACE_S - HOUR, -MIN_GRACE_S, 5 * HOUR, -5 * HOUR]
EVENTS = {"open", "os.rename", "os.remove", "os.link", "os.utime", "os.mkdir"}
SHARD_BYTES = 4000


class FileOperations:
    """Calls a function at the n-th file operation below a folder; counts them. Has one hook for the whole process."""

    def __init__(self):
        self._folder, self._target, self._action, self.count = "", 0, None, 0
        self._has_hook = False

    @contextmanager
    def watch(self, folder, target=0, action=None):
        if not self._has_hook:
            sys.addaudithook(self._hook)
            self._has_hook = True
        self._folder, self._target, self._action, self.count = str(folder), target, action, 0
        try:
            yield self
        finally:
            self._folder = ""

    def _hook(self, event, args):
        if not self._folder or event not in EVENTS or not str(args[0]).startswith(self._folder):
            return
        self.count += 1
        if self.count == self._target:
            folder, self._folder = self._folder, ""  # what the action itself does is not counted
            self._action()
            self._folder = folder


FILE_OPERATIONS = FileOperations()


def move_clocks(folder, ahead_s):
    """Age all files below a folder, as seen by a clock that is ahead by `ahead_s` seconds from now on."""
    moved = set()  # by inode: a file may have two names
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another thread of the operation removes its temporary files
            status = path.lstat()
            if status.st_ino not in moved:
                times = (status.st_atime_ns - ahead_s * 10**9, status.st_mtime_ns - ahead_s * 10**9)
                os.utime(path, ns=times, follow_symlinks=False)
                moved.add(status.st_ino)


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(3000, generator=generator), "frozen": torch.ones(30_000), "step": step}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with a repository, an empty second one, a cache, and images for an ingest."""
    folder = tmp_path_factory.mktemp("clocks")
    repo = datasvc.open(str(folder / "repo"), create=True)
    datasvc.open(str(folder / "other"), create=True)
    small_dataset(repo, "pets", samples=12, shard_bytes=SHARD_BYTES)
    small_dataset(repo, "cats", samples=30, image_size=40, shard_bytes=SHARD_BYTES)
    for step in (1, 2, 3, 4):
        repo.models.save("net", state(step), step=step, metrics={"top1": step % 3})
    repo.models.tag("net@1", "best")
    with Cache(folder / "cache", budget=400_000) as cache:
        cache.stage(list(repo.dataset("pets").values()))
    for number in range(8):
        path = folder / "more" / "train" / f"class{number % 4}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_jpeg(32, 32, seed=number))
    move_clocks(folder / "repo", 10 * 24 * HOUR)  # only references keep the objects from gc
    return folder


def ingest(repo, folder):
    repo.datasets.ingest(str(folder / "more"), "new", shard_bytes=SHARD_BYTES)
    return ["new@1"]


def append(repo, folder):
    repo.datasets.ingest(str(folder / "more"), "pets", append=True, on_common="drop", shard_bytes=SHARD_BYTES)
    return ["pets@2"]


def delete(repo, _folder):
    repo.datasets.delete("pets@1", where="label = 1")
    return ["pets@2"]


def rename(repo, _folder):
    repo.datasets.rename("pets", "animals")
    return ["animals@1"]


def save(repo, _folder):
    with repo.models.manager("net") as manager:
        manager.save(state(5), step=5)
    return ["net@5"]


def retain(repo, _folder):
    # Retention removes by number and metric: the newest, the best and the tagged version stay, whatever the time is.
    policy = RetentionPolicy(last=1, best=1, metric="top1", mode="max")
    _, plan = repo.models.retain("net", policy, dry_run=False)
    assert plan.removed == (3,)
    return ["net@1", "net@2", "net@4"]


def push(repo, folder):
    repo.models.push(str(folder / "other"), ["net@1", "net@4"])
    assert not datasvc.open(str(folder / "other")).models.verify(["net@1", "net@2"]).problems
    return ["net@4"]


def stage(repo, folder):
    with Cache(folder / "cache") as cache:
        cache.stage(list(repo.dataset("cats").values()))
    return ["cats@1"]


def evict(repo, folder):
    with Cache(folder / "cache", budget=60_000) as cache:
        shards = [
            info
            for name in ("cats", "pets")
            for split in repo.dataset(name).values()
            for info in split.table.shards()
        ]
        held, _ = cache.acquire(shards[0], repo.repository)
        for info in shards[1:]:
            path, _ = cache.acquire(info, repo.repository)
            assert path.read_bytes() == repo.repository.objects.local_path(info.digest).read_bytes()
            cache.release(info.digest)
        # The hold is a kernel lock: whatever the time is, the shard stays resident.
        assert held.read_bytes() == repo.repository.objects.local_path(shards[0].digest).read_bytes()
        cache.release(shards[0].digest)
        assert cache.status().resident_bytes <= 60_000
    return ["cats@1"]


def collect(repo, _folder):
    repo.gc(grace_s=MIN_GRACE_S, dry_run=False)
    return ["net@4"]


OPERATIONS = [ingest, append, delete, rename, save, retain, push, stage, evict, collect]


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_clocks_that_move_together_at_a_file_operation_lose_and_sweep_nothing_live(
    prepared, tmp_path, operation, every
):
    num_operations = attempt(operation, prepared, tmp_path / "0", 0, 0)
    assert num_operations > 5
    for point, ahead_s in zip(range(1, num_operations + 1, every), cycle(JUMPS_S), strict=False):
        attempt(operation, prepared, tmp_path / str(point), point, ahead_s)


def attempt(operation, prepared, folder, point, ahead_s):
    """Run an operation on a copy of the files; at one point, move the clocks and run gc on another machine."""
    shutil.copytree(prepared, folder, symlinks=True)

    def move_and_collect():
        # Not the source: that its files have other times than when they were listed would mean that they changed.
        for name in ("repo", "other", "cache"):
            move_clocks(folder / name, ahead_s)
        for name in ("repo", "other"):
            gc(datasvc.open(str(folder / name)).repository, grace_s=MIN_GRACE_S, dry_run=False)

    repo = datasvc.open(str(folder / "repo"))
    with FILE_OPERATIONS.watch(folder, point, move_and_collect):
        new = operation(repo, folder)
        num_operations = FILE_OPERATIONS.count
    check_all(repo)
    for ref in new:
        check(repo, ref)
    # The next gc still has nothing live to delete.
    gc(repo.repository, grace_s=0, no_writers=True, dry_run=False)
    check(repo, "net@4")
    return num_operations


def check_all(repo):
    for kind in (repo.datasets, repo.models):
        for name in kind.names():
            for version in kind.versions(name):
                check(repo, str(version))


def check(repo, ref):
    if ref.startswith("net"):
        assert not repo.models.verify([ref]).problems, ref
    else:
        assert not repo.datasets.verify(ref, deep=True).problems, ref
