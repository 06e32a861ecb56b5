"""The versions of a model on the disk of one node: each is a folder, which has the form of a repository.

A version is written into a folder whose name begins with a dot, the incoming folder. Its log entry is written last: a
version with an entry is *prepared*, it has all that its node must keep. When all nodes have prepared it, each renames
its folder to the final name, which *publishes* the version. A kill can leave a version published on some nodes and
prepared on others; all of it is there then, so both count.

Together, the nodes have all objects of the version; the folder of one node has the entry, the tensor table and the
state, and only some of the chunks. Several processes of a node use the same folder. Only one of them, which holds the
lock, publishes and removes.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from datasvc.durable import create_file, fsync_folder, make_folder, write_file
from datasvc.errors import BusyError, ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.local.local_saves import LocalVersion
from datasvc.models.local.restore_choice import LOCAL_FORMAT, NodeBranch
from datasvc.models.tensors.tensor_table import TensorRecord, read_table
from datasvc.models.versions.entry_fields import objects_of_entry
from datasvc.repository import Digest, Repository, Storage
from datasvc.repository.logs.log import decode_entry, encode_entry
from datasvc.repository.objects.intact import is_damage
from datasvc.repository.objects.objects import Objects, digest_of_file
from datasvc.repository.store.retries import map_exceptions

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_INCOMING: Final = ".incoming-"
_NODE, _BRANCH, _LOCK = ".node.json", ".branch.json", ".lock"
_MACHINE: Final = Path("/proc/sys/kernel/random/boot_id")


_MAX_TEXT_BYTES = 512


class NodeName(NamedTuple):
    """The disk of a node and its machine: the id of the folder, the id of the boot of the machine, and its name."""

    id: str
    boot: str
    host: str


class NeededObjects(NamedTuple):
    """What a version has: its entry, the records of its tensors, and its objects with their sizes; None: unknown."""

    entry: Mapping[str, Any]
    records: tuple[TensorRecord, ...]
    sizes: Mapping[Digest, int | None]


class NodeStorage(Storage):
    """Storage of a version on this node. A bad sector is damage: another node may have a copy of what is there."""

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """See `Storage`."""
        with _reading(self.location(path)):
            return super().read(path, max_bytes)

    def read_start(self, path: str, length: int) -> bytes:
        """See `Storage`."""
        with _reading(self.location(path)):
            return super().read_start(path, length)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """See `Storage`."""
        with _reading(self.location(path)):
            return super().read_range(path, offset, length)

    def read_into(self, path: str, offset: int, out: memoryview) -> int:
        """See `Storage`."""
        with _reading(self.location(path)):
            return super().read_into(path, offset, out)


@contextmanager
def _reading(location: str) -> Iterator[None]:
    """Convert exceptions as `map_exceptions` does, but those of a bad sector to CorruptDataError."""
    try:
        with map_exceptions("read", location):
            yield
    except UnavailableError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and is_damage(cause):
            raise CorruptDataError(str(error)) from error
        raise


class LocalFolder:
    """The versions of one model on the disk of this node.

    Args:
        root: folder of the node, for any number of models.
        name: name of the model.

    Raises:
        UnavailableError: the folder cannot be written.
    """

    def __init__(self, root: str | Path, name: str) -> None:
        self._root = Path(os.path.realpath(os.path.expanduser(root)))
        self._name = name
        self._folder = self._root / name
        with map_exceptions("write", str(self._folder)):
            make_folder(self._folder)

    def __str__(self) -> str:
        return str(self._folder)

    def lock(self) -> FolderLock:
        """Lock the versions of this model on this node. For errors see `FolderLock`."""
        return FolderLock(self._folder / _LOCK)

    def node_name(self) -> NodeName:
        """Return the name of this node, the same for all processes that use this folder.

        Raises:
            CorruptDataError: the file of the id is damaged.
            ConfigError: it has a later format.
        """
        path = self._root / _NODE
        content = encode_entry({"format": LOCAL_FORMAT, "id": secrets.token_hex(8)})
        with map_exceptions("write", str(path)), suppress(FileExistsError):
            create_file(path, content)
        record = self._read(path)
        assert record is not None
        boot = _MACHINE.read_text(encoding="ascii").strip() if _MACHINE.exists() else socket.gethostname()
        return NodeName(str(record.get("id")), boot, socket.gethostname())

    def read_branch(self) -> NodeBranch:
        """Return the branch that this node has recorded; generation 0: none. For errors see `node_name`."""
        path = self._folder / _BRANCH
        record = self._read(path)
        return NodeBranch() if record is None else NodeBranch.from_record(record, path)

    def write_branch(self, branch: NodeBranch) -> None:
        """Record the branch durably, in place of the one before."""
        path = self._folder / _BRANCH
        with map_exceptions("write", str(path)):
            write_file(path, encode_entry(branch.to_record()))

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            with _reading(str(path)):
                raw = path.read_bytes()
        except NotFoundError:
            return None
        return decode_entry(raw, str(path))

    def versions(self) -> dict[LocalVersion, bool]:
        """Return the versions that this node has published or prepared, oldest first, and whether each is published.

        Of the chunks the node may have only some.
        """
        with map_exceptions("read", str(self._folder)):
            names = os.listdir(self._folder)
        found: dict[LocalVersion, bool] = {}
        for name in names:
            is_published = not name.startswith(_INCOMING)
            version = LocalVersion.of_folder(self._name, name.removeprefix(_INCOMING))
            if version is None:
                continue
            if is_published or self._entry_path(self._incoming(version)).exists():
                found[version] = found.get(version, False) or is_published
        return dict(sorted(found.items()))

    def path(self, version: LocalVersion) -> Path:
        """Return the folder of a version: the published one, else the incoming one, whether or not it exists."""
        final = self._folder / version.folder_name
        return final if final.exists() else self._incoming(version)

    def repository(self, version: LocalVersion) -> Repository:
        """Open the folder of a version as a repository, in which it is version 1; create it if it does not exist."""
        path = self.path(version)
        # Do not read the marker of an existing folder: it may be damaged, and the version is complete without it.
        if not path.exists():
            Repository.create(str(path))
        return Repository(NodeStorage(str(path)))

    def entry(self, version: LocalVersion) -> Mapping[str, Any] | None:
        """Return the log entry of a version; None if this node has none, or a damaged one."""
        with suppress(CorruptDataError, NotFoundError):
            path = self._entry_path(self.path(version))
            record = self._read(path)
            return record if record is None else {**record}
        return None

    def prepare(self, version: LocalVersion, entry: Mapping[str, Any]) -> None:
        """Write the entry of a version, whose objects are all written and synced; not over an intact one."""
        if self.entry(version) is None:
            path = self._entry_path(self.path(version))
            with map_exceptions("write", str(path)):
                path.unlink(missing_ok=True)  # a damaged one
            self.repository(version).versions("models", self._name).append(lambda _: entry, head=0)

    def objects(self, version: LocalVersion) -> dict[Digest, int]:
        """Return the objects in the folder of a version, with their sizes in bytes; {} without the folder."""
        folder = self.path(version)
        with map_exceptions("read", str(folder)):
            files = [path for path in (folder / "objects").glob("??/*") if _DIGEST.fullmatch(path.name)]
            return {Digest(path.name): path.stat().st_size for path in files}

    def needed_objects(self, version: LocalVersion) -> NeededObjects | None:
        """Return what a version consists of; None if its entry or its tensor table is missing or damaged here.

        Raises UnavailableError: the disk cannot be read.
        """
        entry = self.entry(version)
        if entry is None:
            return None
        # The disk of another node may have them intact.
        with suppress(CorruptDataError, NotFoundError, ConfigError):
            refs = objects_of_entry(entry, version)
            records = read_table(self.repository(version).objects, refs.tensors)
            chunks = [link.info for record in records for chunk in record.chunks for link in chunk.chain]
            sizes = dict.fromkeys(refs.all, None) | {info.digest: info.size_bytes for info in chunks}
            return NeededObjects(entry, records, sizes)
        return None

    def remove_damaged(self, version: LocalVersion) -> None:
        """Remove the objects of a version that are damaged or unreadable, so that other nodes send their copies."""
        for digest in self.objects(version):
            path = self.path(version) / Objects.path(digest)
            try:
                with _reading(str(path)):
                    is_intact = digest_of_file(path) == digest
            except CorruptDataError:
                is_intact = False
            if not is_intact:
                with map_exceptions("write", str(path)):
                    path.unlink(missing_ok=True)

    def publish(self, version: LocalVersion) -> None:
        """Give the folder of a prepared version its final name. Does nothing if it has that."""
        final = self._folder / version.folder_name
        if final.exists():
            return
        with map_exceptions("write", str(final)):
            # Publish after the objects and the entry are synced, which the repository does: this is the commit.
            self._incoming(version).rename(final)
            fsync_folder(self._folder)

    def size_bytes(self, version: LocalVersion) -> int:
        """Return the bytes of the objects in the folder of a version."""
        return sum(self.objects(version).values())

    def make_space(self, older: Sequence[LocalVersion], new_bytes: int, limit_bytes: int) -> int:
        """Remove the first of `older` until a new version fits into the limit; the last of them stays.

        Args:
            older: versions, the first to remove first.
            new_bytes: bytes of the new version.
            limit_bytes: bytes that all may have.

        Returns:
            The bytes of the new version and of those that stay; above the limit if it does not fit beside the last.
        """
        sizes = {old: self.size_bytes(old) for old in older}
        for old in older[:-1]:
            if new_bytes + sum(sizes.values()) > limit_bytes:
                self.remove([old])
                del sizes[old]
        return new_bytes + sum(sizes.values())

    def remove(self, versions: Collection[LocalVersion]) -> None:
        """Remove versions. A folder loses its final name first, so that no part of a version is taken for it."""
        for version in versions:
            doomed = self._folder / f"{_INCOMING}{secrets.token_hex(8)}"
            for path in (self._folder / version.folder_name, self._incoming(version)):
                with suppress(OSError):  # most versions have only one of the two
                    path.rename(doomed)
                    shutil.rmtree(doomed, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what is left of versions that were not published, and of removals."""
        for folder in list(self._folder.glob(f"{_INCOMING}*")):
            shutil.rmtree(folder, ignore_errors=True)

    def _incoming(self, version: LocalVersion) -> Path:
        return self._folder / f"{_INCOMING}{version.folder_name}"

    def _entry_path(self, folder: Path) -> Path:
        return folder / "models" / self._name / "versions" / "00000001.json"


# The kernel releases the lock when the process ends, so a killed job leaves none behind. The lock belongs to the open
# file: a second manager of the same process is refused too.


class FolderLock:
    """Lock of the file `path`, which is created. `close` releases it.

    Raises:
        BusyError: another process, or another manager of this one, holds the lock; the message says which.
        ConfigError: the file system has no locks.
        UnavailableError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        with map_exceptions("write", str(path)):
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self._acquire(path)
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self)

    def _acquire(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, _MAX_TEXT_BYTES, 0).decode("utf-8", "replace").strip()
            raise BusyError(
                f"{path.parent} is in use by {holder or 'another process'}: another job keeps its versions of model "
                f"{path.parent.name!r} there. Wait for its end or end it, or give this job another folder or model "
                "name; nothing was changed"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock {path}: {error}; use a local disk, whose file system has locks"
            ) from error
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        with map_exceptions("write", str(path)):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{text}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. Closing again does nothing."""
        if self._descriptor >= 0:
            # Closing alone would not release it while a forked child has a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor, such as the copy of a forked child. Others that have it open keep the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _held.discard(self)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()
"""Locks that this process holds."""


def _abandon_all() -> None:
    # A child that outlives its killed parent, such as a worker of a loader, must not hold the lock of the job.
    for lock in list(_held):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)
