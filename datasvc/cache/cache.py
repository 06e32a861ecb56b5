"""A node's cache as its users see it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from datasvc.cache.budget import parse_budget
from datasvc.cache.catalogue import Catalogue, Usage
from datasvc.cache.fetch import Fetcher
from datasvc.cache.files import Files
from datasvc.cache.lease import Lease, sweep
from datasvc.errors import CacheFullError, ConfigError
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.shards.dataset import Split
from datasvc.shards.reader import Shard

_STAGING_THREADS = 4


@dataclass(frozen=True)
class StageReport:
    """What staging did: objects and bytes that were there already, and that came from the origin."""

    num_hits: int
    num_fetched: int
    hit_bytes: int
    fetched_bytes: int


@dataclass(frozen=True)
class CacheStatus:
    """What `datasvc cache status` prints."""

    folder: str
    usage: Usage


class _Node:
    """What all `Cache`s of this process on one folder share: LMDB may be open only once in a process."""

    def __init__(self, folder: Path) -> None:
        self.files = Files(folder)
        sweep(self.files.leases)
        self.catalogue = Catalogue(self.files)
        self._lease = Lease(self.files.leases)
        self._fetcher = Fetcher(self.catalogue, self.files, self._lease.id)
        self._holds: Counter[Digest] = Counter()
        self._ready: set[Digest] = set()
        self._lock = threading.Lock()
        self.process = os.getpid()
        self.num_users = 0

    def close(self) -> None:
        self._lease.close()
        self.catalogue.close()

    def acquire(
        self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None = None
    ) -> tuple[Path, bool]:
        self.check_process()
        with self._lock:
            # Counted before it is fetched: a release by another thread meanwhile must not drop our hold.
            self._holds[info.digest] += 1
            ready = info.digest in self._ready
        if ready:
            return self.files.object_path(info.digest), True
        try:
            hit = self._fetcher.acquire(info, repository, report)
        except BaseException:
            self.release(info.digest)
            raise
        with self._lock:
            self._ready.add(info.digest)
        return self.files.object_path(info.digest), hit

    def release(self, digest: Digest) -> None:
        self.check_process()
        with self._lock:
            if not self._holds[digest]:
                raise ConfigError(f"object {digest} was not acquired, or was released already")
            self._holds[digest] -= 1
            if not self._holds[digest]:
                del self._holds[digest]
                self._ready.discard(digest)
                self.catalogue.release(digest, self._lease.id)

    def check_process(self) -> None:
        if self.process != os.getpid():
            raise ConfigError(
                "this cache was opened before a fork, which no database survives; spawn processes instead"
            )


_nodes: dict[Path, _Node] = {}
_nodes_lock = threading.RLock()  # a finalizer may run while it is held


def _join_node(folder: Path) -> _Node:
    """Return the node of `folder`, which stays open until each `_join_node` was answered by `_leave_node`."""
    with _nodes_lock:
        if folder not in _nodes:
            _nodes[folder] = _Node(folder)
        node = _nodes[folder]
        node.check_process()
        node.num_users += 1
        return node


def _leave_node(folder: Path, node: _Node) -> None:
    if node.process != os.getpid():
        return  # a copy in a forked child: lease and database belong to the parent
    with _nodes_lock:
        node.num_users -= 1
        if not node.num_users:
            del _nodes[folder]
            node.close()


class Cache:
    """The cache of this node in `folder`; any number of processes may open it at once.

    What this process opens from it stays until released, or until the process ends however it ends.

    Args:
        folder: on a local disk, for the cache alone.
        budget: bytes, or such as "50GB" or "10%"; kept for the node. None: as set before.

    Raises:
        ConfigError: no budget was ever set, or it is out of range; the folder cannot be used.
        CorruptDataError: the catalogue is damaged.
    """

    def __init__(self, folder: str | Path, *, budget: int | str | None = None) -> None:
        self.folder = Path(folder).expanduser().resolve()
        wanted = None if budget is None else parse_budget(str(budget), self.folder)
        node = _join_node(self.folder)
        self._node: _Node | None = node
        self._leave = weakref.finalize(self, _leave_node, self.folder, node)
        if wanted is not None:
            node.catalogue.set_budget(wanted)
        elif not node.catalogue.budget():
            raise ConfigError(f"the cache {self.folder} has no budget yet; give one, such as budget='50GB'")

    @property
    def budget_bytes(self) -> int:
        """The node's budget."""
        return self._open_node().catalogue.budget()

    def shards(self, repository: Repository) -> CachedShards:
        """Return the shards of `repository`, read through this cache; usable for as long as they are kept."""
        self._open_node()
        return CachedShards(self.folder, repository)

    def acquire(
        self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None = None
    ) -> tuple[Path, bool]:
        """Make an object resident and hold it until `release`.

        Returns:
            Its file, and whether it was resident already.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Fetcher.acquire`.
            ConfigError: this cache is closed, or was opened before a fork.
        """
        return self._open_node().acquire(info, repository, report)

    def release(self, digest: Digest) -> None:
        """Give up one hold of this process; the object may be evicted when it was the last."""
        self._open_node().release(digest)

    def stage(
        self,
        splits: Sequence[Split],
        report: Callable[[int], None] | None = None,
    ) -> StageReport:
        """Bring all shards of `splits` onto the node; equal shards once.

        Args:
            splits: of any data sets.
            report: called with the bytes of each part that arrived or was there.

        Raises:
            CacheFullError: they do not fit into the budget, and nothing was fetched; or beside what jobs hold.
            CorruptDataError, NotFoundError, UnavailableError: see `Fetcher.acquire`.
        """
        wanted = {info.digest: (info, split) for split in splits for info in split.table.shards()}
        needed = sum(info.size_bytes for info, _ in wanted.values())
        if needed > self.budget_bytes:
            raise CacheFullError(
                f"staging needs {needed} bytes, the budget of {self.folder} is {self.budget_bytes}; raise it with "
                "--budget, or do not stage: a loader with shuffle='windowed' streams through a smaller cache"
            )

        def stage_one(info: ObjectInfo, split: Split) -> tuple[ObjectInfo, bool]:
            _, hit = self.acquire(info, split.repository, report)
            held.append(info.digest)
            if hit and report is not None:
                report(info.size_bytes)
            return info, hit

        held: list[Digest] = []
        try:
            with ThreadPoolExecutor(_STAGING_THREADS, thread_name_prefix="datasvc-stage") as pool:
                staged = list(pool.map(lambda pair: stage_one(*pair), wanted.values()))
        finally:
            # Held until all are there: staging must not evict what it has just staged.
            for digest in held:
                self.release(digest)
        hits = [info.size_bytes for info, hit in staged if hit]
        fetched = [info.size_bytes for info, hit in staged if not hit]
        return StageReport(len(hits), len(fetched), sum(hits), sum(fetched))

    def status(self) -> CacheStatus:
        """Return how full the cache is."""
        return CacheStatus(str(self.folder), self._open_node().catalogue.usage())

    def close(self) -> None:
        """Let go of the folder; closing again does nothing. What is held stays so until released."""
        self._node = None
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_node(self) -> _Node:
        if self._node is None:
            raise ConfigError(f"the cache {self.folder} was closed; open it again")
        self._node.check_process()
        return self._node


class CachedShards:
    """The shards of one repository through a node's cache: a `ShardStore`. Made by `Cache.shards`.

    What was not released is released when this object is dropped.
    """

    def __init__(self, folder: Path, repository: Repository) -> None:
        self._node = _join_node(folder)
        self._repository = repository
        self._held: Counter[Digest] = Counter()
        weakref.finalize(self, _abandon, folder, self._node, self._held)

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, mapped from the cache; never evicted before `release_shard`.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Cache.acquire`.
        """
        path, _ = self._node.acquire(info, self._repository)
        self._held[info.digest] += 1
        try:
            return Shard.map(path)
        except BaseException:
            self.release_shard(info)
            raise

    def release_shard(self, info: ObjectInfo) -> None:
        """Let the shard be evicted when space is needed; views of it that still exist stay readable."""
        self._node.release(info.digest)
        self._held[info.digest] -= 1


def _abandon(folder: Path, node: _Node, held: Counter[Digest]) -> None:
    """Release what a dropped `CachedShards` held, and leave the node."""
    if node.process == os.getpid():
        for digest in held.elements():
            node.release(digest)
    _leave_node(folder, node)
