"""The versions of a model on the disk of one node: each is a folder, which has the form of a repository.

A version is written into a folder whose name begins with a dot. The rename to its final name publishes it, after all
nodes have all their objects. So a folder with a final name has what its node must keep, even after a kill.
Together, the nodes have all objects of the version; the folder of one node has the entry, the tensor table and the
state, and only some of the chunks. Several processes of a node use the same folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from datasvc.durable import create_file, fsync_folder, make_folder
from datasvc.errors import ConfigError
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.entry_refs import objects_of_entry
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects.objects import Objects, digest_of_file
from datasvc.repository.store.retries import map_exceptions
from datasvc.sizes import parse_size

_NAME: Final = re.compile(r"(\d{10,})-([0-9a-f]{16})")
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_INCOMING: Final = ".incoming-"
_NODE: Final = "node-id"


@dataclass(frozen=True)
class LocalSaves:
    """Where and how many versions each node keeps: `manager(..., local=LocalSaves("/nvme/ckpt"), every_local=50)`.

    Attributes:
        folder: folder on a disk of the node; the same path may be another folder on each node.
        keep: number of versions to keep, at least 1. While one more is written, the folder has one more.
        max_bytes: bytes that these versions may take on a node, or text such as "200GB"; None: no limit. Older
            versions are then removed before `keep` is reached; the newest one is never removed for a new one that
            may not be complete, so there must be space for two.
        copies: number of nodes that have each object: with 2, the loss of one node leaves all objects.
    """

    folder: str | Path
    keep: int = 2
    max_bytes: int | str | None = None
    copies: int = 2

    def __post_init__(self) -> None:
        if not str(self.folder):
            raise ConfigError("the folder of local versions is empty; give its path, such as /nvme/ckpt")
        for name in ("keep", "copies"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a number of at least 1")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(f"max_bytes is {self.max_bytes!r}; expected at least one byte, or None")

    @property
    def limit_bytes(self) -> int | None:
        """`max_bytes` as a number."""
        return parse_size(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes


@dataclass(frozen=True)
class LocalVersion(Resolved):
    """A version that only the nodes have; its `version` is 0, which no version of a repository has.

    Attributes:
        step: number of optimizer steps of the weights.
        session: random text, the same for all versions of one manager.
    """

    step: int = 0
    session: str = ""

    def __str__(self) -> str:
        return f"{self.name}, step {self.step}, on the nodes"

    def __lt__(self, other: LocalVersion) -> bool:
        return (self.step, self.session) < (other.step, other.session)

    @property
    def folder_name(self) -> str:
        """Name of the folder of the version."""
        return f"{self.step:010d}-{self.session}"


class LocalFolder:
    """The versions of one model on the disk of this node.

    Args:
        root: folder of the node, for any number of models.
        name: name of the model.

    Raises:
        UnavailableError: the folder cannot be written.
    """

    def __init__(self, root: str | Path, name: str) -> None:
        self._root = Path(root).expanduser().resolve()
        self._name = name
        self._folder = self._root / name
        with map_exceptions("write", str(self._folder)):
            make_folder(self._folder)

    def __str__(self) -> str:
        return str(self._folder)

    def node_id(self) -> str:
        """Return a text that is the same for all processes of this node, and another one on each node."""
        path = self._root / _NODE
        with map_exceptions("write", str(path)), suppress(FileExistsError):
            create_file(path, secrets.token_hex(16).encode())
        with map_exceptions("read", str(path)):
            return path.read_text(encoding="ascii", errors="replace")

    def versions(self) -> list[LocalVersion]:
        """Return the versions that this node has, oldest step first."""
        with map_exceptions("read", str(self._folder)):
            matches = [_NAME.fullmatch(name) for name in os.listdir(self._folder)]
        found = [(int(match[1]), match[2]) for match in matches if match is not None]
        return [LocalVersion("models", self._name, 0, step, session) for step, session in sorted(found)]

    def repository(self, version: LocalVersion, *, is_incoming: bool = False) -> Repository:
        """Open the folder of a version as a repository, in which it is version 1. See `Repository.create`."""
        if is_incoming:
            return Repository.create(str(self._incoming(version)))
        return Repository.open(str(self._folder / version.folder_name))

    def objects(self, version: LocalVersion, *, is_incoming: bool = False) -> dict[Digest, int]:
        """Return the objects in the folder of a version, with their sizes in bytes; {} without the folder."""
        folder = self._incoming(version) if is_incoming else self._folder / version.folder_name
        with map_exceptions("read", str(folder)):
            files = [path for path in (folder / "objects").glob("??/*") if _DIGEST.fullmatch(path.name)]
            return {Digest(path.name): path.stat().st_size for path in files}

    def needed_objects(self, version: LocalVersion) -> dict[Digest, int | None]:
        """Return all objects of a version of this node, with their sizes in bytes; None: unknown.

        Raises CorruptDataError: the entry or the tensor table is damaged or missing.
        """
        repository = self.repository(version)
        refs = objects_of_entry(repository.versions("models", self._name).read(1).content, version)
        records = read_table(repository.objects, refs.tensors)
        chunks = [link.info for record in records for chunk in record.chunks for link in chunk.chain]
        return dict.fromkeys(refs.all, None) | {info.digest: info.size_bytes for info in chunks}

    def remove_damaged(self, version: LocalVersion) -> None:
        """Remove the objects of a version whose bytes have changed, so that they are copied from other nodes."""
        for digest in self.objects(version):
            path = self._folder / version.folder_name / Objects.path(digest)
            with map_exceptions("read", str(path)):
                if digest_of_file(path) != digest:
                    path.unlink()

    def publish(self, version: LocalVersion) -> None:
        """Give the folder of an incoming version its final name, so that the version survives any kill."""
        final = self._folder / version.folder_name
        with map_exceptions("write", str(final)):
            # Publish after the objects and the entry are synced, which the repository does: this is the commit.
            self._incoming(version).rename(final)
            fsync_folder(self._folder)

    def make_space(self, version: LocalVersion, older: Sequence[LocalVersion], limit_bytes: int | None) -> None:
        """Remove the first of `older` until the incoming version fits into the limit; the last of them stays.

        Raises ConfigError: the incoming version does not fit beside it.
        """
        if limit_bytes is None:
            return
        sizes = {old: sum(self.objects(old).values()) for old in older}
        new_bytes = sum(self.objects(version, is_incoming=True).values())
        for old in older[:-1]:
            if new_bytes + sum(sizes.values()) > limit_bytes:
                self.remove([old])
                del sizes[old]
        total_bytes = new_bytes + sum(sizes.values())
        if total_bytes > limit_bytes:
            raise ConfigError(
                f"{version} and the version before it take {total_bytes} bytes in {self}, and max_bytes is "
                f"{limit_bytes}; raise it, or leave it out"
            )

    def remove(self, versions: Collection[LocalVersion]) -> None:
        """Remove versions. A folder loses its final name first, so that no part of a version is taken for it."""
        for version in versions:
            doomed = self._folder / f"{_INCOMING}{secrets.token_hex(8)}"
            with suppress(OSError):  # another process of the node removes it too, or it is gone
                (self._folder / version.folder_name).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def remove_incoming(self, version: LocalVersion | None = None) -> None:
        """Remove what is left of an unfinished version; None: of all."""
        folders = [self._incoming(version)] if version is not None else self._folder.glob(f"{_INCOMING}*")
        for folder in list(folders):
            shutil.rmtree(folder, ignore_errors=True)

    def _incoming(self, version: LocalVersion) -> Path:
        return self._folder / f"{_INCOMING}{version.folder_name}"
