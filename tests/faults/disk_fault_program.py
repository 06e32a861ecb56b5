"""Runs operations on a repository and a cache, and fails or ends them once at each of their file operations.

Started with LD_PRELOAD by test_disk_faults.py (see disk_faults.c). Arguments: a folder to work in, the operation, the
faults as JSON (error numbers, or names in `ENDS`), and whether every point gets every fault ("all"), the faults in
turn ("turns"), or only every third point gets one ("some"). Each point runs in a forked child on a fresh copy of the
files. Prints one JSON object: points, outcomes, what is wrong, and which faults had no turn.
"""

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import torch

import datasvc
from datasvc.cache import Cache
from datasvc.errors import DatasvcError
from datasvc.testing import encode_jpeg, small_dataset

torch.set_num_threads(1)
SHIM = ctypes.CDLL(None)
SHIM.fault_count.restype = ctypes.c_long
FOLDER = Path(sys.argv[1]).resolve()
SHORT_WRITE = -errno.ENOSPC  # half of a write succeeds, the next call finds a full disk
TIMEOUT_S = 60
# How a program ends: Ctrl-C, SIGTERM, `kill -9`, and an exception or `sys.exit` in its own signal handler.
ENDS = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "exception": signal.SIGUSR1,
    "exit": signal.SIGUSR2,
}
SHARD_BYTES = 4000


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(300, generator=generator), "v": torch.randn(40_000, generator=generator), "step": step}


class Repositories:
    """A data set, a model of two versions, and an empty second repository."""

    def __init__(self, folder):
        self.root = folder
        self.repo = folder / "repo"
        self.other = folder / "other"
        self.cache = folder / "cache"

    def make(self):
        repo = datasvc.open(str(self.repo), create=True)
        datasvc.open(str(self.other), create=True)
        small_dataset(repo, "pets", samples=12, shard_bytes=SHARD_BYTES)
        write_images(self.root.parent / "more", 100, 8)
        for step in (1, 2):
            repo.models.save("m", state(step), step=step)
        repo.models.tag("m@2", "best")
        small_dataset(repo, "dogs", samples=12, shard_bytes=SHARD_BYTES)
        repo.datasets.branch("dogs", "work")
        repo.datasets.delete("dogs@work", where="label = 0")
        small_dataset(repo, "cats", samples=30, image_size=40, shard_bytes=SHARD_BYTES)
        with Cache(self.cache, budget=400_000) as cache:
            cache.stage(list(repo.dataset("pets").values()))

    def open(self):
        return datasvc.open(str(self.repo))


def write_images(folder, start, count):
    for number in range(start, start + count):
        path = folder / "train" / f"class{number % 4}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_jpeg(32, 32, seed=number))


def versions_of(repo):
    """Return the data and models of a repository by version, everything read and verified."""
    content = {}
    for name in repo.datasets.names():
        content[f"lines of {name}"] = {
            "": str(repo.datasets.resolve(name)),
            **{branch: str(state.head) for branch, state in repo.datasets.branches(name).items()},
        }
        for version in repo.datasets.versions(name):
            splits = repo.dataset(str(version))
            content[str(version)] = {split: [dict(sample) for sample in splits[split]] for split in splits}
    for name in repo.models.names():
        for version in repo.models.versions(name):
            found = repo.models.restore(str(version)).state
            content[str(version)] = {
                key: value.tolist() if torch.is_tensor(value) else value for key, value in found.items()
            }
        content[f"tags of {name}"] = {tag: int(number) for tag, number in repo.models.tags(name).items()}
    return content


# Each operation: what it does, and what must be true after it has succeeded.


def ingest(at):
    at.open().datasets.ingest(str(at.root.parent / "more"), "new", shard_bytes=SHARD_BYTES)


def append(at):
    at.open().datasets.ingest(
        str(at.root.parent / "more"), "pets", append=True, on_common="drop", shard_bytes=SHARD_BYTES
    )


def delete(at):
    at.open().datasets.delete("pets@1", where="label = 1")


def branch(at):
    at.open().datasets.branch("dogs@2", "more")


def grow(at):
    at.open().datasets.delete("dogs@work", where="label = 1")


def merge(at):
    at.open().datasets.merge("dogs@work", "dogs")


def save(at):
    with at.open().models.manager("m") as manager:
        manager.save(state(3), step=3)


def tag(at):
    at.open().models.tag("m@1", "best")


def push(at):
    at.open().models.push(str(at.other), ["m@1", "m@2"])


def remove(at):
    at.open().models.remove(["m@1"])


def gc(at):
    at.open().gc(grace_s=0, no_writers=True, dry_run=False)


def stage(at):
    with Cache(at.cache) as cache:
        cache.stage(list(at.open().dataset("cats").values()))


def evict(at):
    with Cache(at.cache, budget=60_000) as cache:
        cache.stage(list(at.open().dataset("cats").values()))


DONE = {
    ingest: lambda old, new: "new@1" in new,
    append: lambda old, new: "pets@2" in new,
    delete: lambda old, new: "pets@2" in new,
    branch: lambda old, new: new["lines of dogs"].get("more") == "dogs@2",
    grow: lambda old, new: new["lines of dogs"] == {"": "dogs@1", "work": "dogs@3"},
    merge: lambda old, new: new["lines of dogs"] == {"": "dogs@3", "work": "dogs@2"},
    save: lambda old, new: "m@3" in new,
    tag: lambda old, new: new["tags of m"]["best"] == 1,
    remove: lambda old, new: "m@1" not in new,
}


def check_repository(at, old, operation, succeeded):
    """All that was there is still there, or what the operation removes; all that is visible is complete."""
    new = versions_of(at.open())
    for ref, value in old.items():
        if ref.startswith("lines of "):
            # All is as before or as after: a version is on its line as soon as it is there at all.
            assert new[ref] == value or (operation in DONE and DONE[operation](old, new)), new[ref]
            continue
        if operation is remove and ref in ("m@1", "tags of m"):
            continue
        if operation is tag and ref == "tags of m":
            assert new[ref]["best"] in (1, 2), new[ref]
            continue
        assert new.get(ref) == value, f"{ref} changed"
    is_done = operation in DONE and DONE[operation](old, new)
    assert is_done or not succeeded or operation not in DONE, "it reported success, but its result is not there"
    if operation is push:
        other = datasvc.open(str(at.other))
        there = versions_of(other)
        assert all(old[ref] == value for ref, value in there.items() if "@" in ref), (
            f"the copy differs: {list(there)}"
        )
        is_done = "m@2" in there
        assert is_done or not succeeded
    return is_done


def check_cache(at):
    """The cache opens, has nothing half-made, and its files are those of the repository."""
    repo = at.open()
    with Cache(at.cache) as cache:
        shards = [
            info
            for name in ("pets", "cats")
            for split in repo.dataset(name).values()
            for info in split.table.shards()
        ]
        for info in shards:
            path, _ = cache.acquire(info, repo.repository)
            try:
                assert path.read_bytes() == repo.repository.objects.local_path(info.digest).read_bytes(), (
                    "other bytes"
                )
            finally:
                cache.release(info.digest)
        status = cache.status()
        assert (status.reserved_bytes, status.held_bytes) == (0, 0), status
    assert not os.listdir(at.cache / "incoming")


class EndedError(Exception):
    """The program's own handler of a signal raised this."""


def raise_in_handler(number, _frame):
    raise EndedError if number == ENDS["exception"] else SystemExit(1)


def run_in_child(at, operation, arm):
    """Run the operation in a child; return (kind, text, calls); kind: ok, refused, ended, foreign, signal or hang."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        kind, text, calls = "ok", "", 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (ENDS["exception"], ENDS["exit"]):
            signal.signal(number, raise_in_handler)
        try:
            arm()
            try:
                operation(at)
            finally:
                calls = SHIM.fault_count()
                SHIM.fault_arm(b"", 0, 0, 0, 0)
        except (KeyboardInterrupt, EndedError, SystemExit):
            kind = "ended"
        except DatasvcError as error:
            kind, text = "refused", f"{type(error).__name__}: {error}"
        except BaseException:  # the parent reports it
            kind, text = "foreign", traceback.format_exc()
        os.write(writer, json.dumps([kind, text[-3000:], calls]).encode())
        os._exit(0)
    os.close(writer)
    ready = wait([reader], TIMEOUT_S)
    if not ready:
        os.kill(pid, signal.SIGABRT)
    answer = b""
    while part := os.read(reader, 1 << 16):
        answer += part
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not ready:
        return "hang", "", 0
    if status or not answer:
        return "signal", f"exit status {status}", 0
    return tuple(json.loads(answer))


def describe(fault):
    if fault in ENDS:
        return fault
    return f"{errno.errorcode[abs(fault)]}{' after half a write' if fault < 0 else ''}"


def main():
    operation = globals()[sys.argv[2]]
    faults, choice = json.loads(sys.argv[3]), sys.argv[4]
    is_cache = operation in (stage, evict)
    base = Repositories(FOLDER / "base")
    base.make()
    old = versions_of(base.open())
    work = Repositories(FOLDER / "work")
    watched = work.cache if is_cache else work.other if operation is push else work.repo
    wrong, kinds, examples = [], {}, {}

    def attempt(point, fault):
        shutil.rmtree(work.root, ignore_errors=True)
        shutil.copytree(base.root, work.root, symlinks=True)

        def arm():
            if fault in ENDS:
                SHIM.fault_arm(str(watched).encode(), point, 0, 0, ENDS[fault])
            else:
                SHIM.fault_arm(str(watched).encode(), point, abs(fault), int(fault < 0), 0)

        kind, text, calls = run_in_child(work, operation, arm)
        kinds[kind] = kinds.get(kind, 0) + 1
        where = f"call {point}, {describe(fault)}"
        if kind == "signal" and fault in ("terminate", "kill") and text == f"exit status {-ENDS[fault]}":
            kinds["ended"] = kinds.get("ended", 0) + 1
        elif kind in ("foreign", "signal", "hang") or (kind == "ended" and fault not in ENDS):
            wrong.append(f"{where}: {kind}: {text}")
        if kind == "refused":
            examples.setdefault(text.split(":")[0], text)
        try:
            if is_cache:
                check_cache(work)
                operation(work)
                check_cache(work)
            elif not check_repository(work, old, operation, kind == "ok"):
                operation(work)  # the next try works
                check_repository(work, old, operation, succeeded=True)
        except Exception:  # reported with the point
            wrong.append(f"{where}, then: {traceback.format_exc()[-2500:]}")
        return calls

    calls, tried = attempt(0, errno.EIO), set()
    for turn, point in enumerate(range(1, calls + 1, 3 if choice == "some" else 1)):
        for fault in faults if choice == "all" else [faults[turn % len(faults)]]:
            attempt(point, fault)
            tried.add(fault)
    found = {"points": calls, "kinds": kinds, "examples": examples, "wrong": wrong}
    json.dump({**found, "untried": [fault for fault in faults if fault not in tried]}, sys.stdout)


main()
