"""Bring one object onto the node: reserve, fetch, verify, publish. Of many who want it at once, one fetches."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final, Literal

import numpy as np

from datasvc.cache.catalogue.catalogue import BUSY, GRANTED, LATER, Catalogue, NoSpaceYet
from datasvc.cache.catalogue.file_links import FileLink
from datasvc.cache.catalogue.files import Files
from datasvc.cache.catalogue.next_use import bias_owned
from datasvc.cache.fetch.transfer import FetchReport, transfer
from datasvc.cache.peers.peers import Peers
from datasvc.cache.sources.origin_source import ObjectSource, OriginSource, RequestPool
from datasvc.cache.sources.received_parts import ReceivedParts
from datasvc.cache.sources.remote_file import RemoteFile, Store
from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.order import NextUse
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.objects.objects import digest_of_file

Outcome = Literal["resident", "origin", "peer", "busy", "later"]
Report = Callable[[Outcome, int], None]
"""Learns how many bytes more have come from where."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Fetcher:
    """Fetches objects of repositories into one cache, for one tenant.

    Args:
        catalogue: of the cache.
        files: of the cache.
        lease_id: of this process.
        tenant: whose budget is used.
        requests: what this process may ask origins for at once.
        peers: other nodes; None: there are none.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        files: Files,
        lease_id: str,
        tenant: str,
        requests: RequestPool,
        peers: Peers | None,
    ) -> None:
        self._catalogue = catalogue
        self._files = files
        self._lease_id = lease_id
        self._tenant = tenant
        self._requests = requests
        self._peers = peers

    def fetch(
        self,
        info: ObjectInfo,
        repository: Store,
        report: Report | None = None,
        *,
        prefetch: NextUse | None = None,
        evict: bool = True,
        owner: str | None = None,
    ) -> Outcome:
        """Make an object resident.

        Args:
            info: the object, held by this process unless it is prefetched.
            repository: its origin.
            report: called as its bytes arrive.
            prefetch: when it is needed; then nothing that is needed sooner is evicted for it, and nothing waited for.
            evict: whether anything is evicted that anybody may need again.
            owner: the order that needs it, see `CacheFolder.new_owner`; None: this process.

        Returns:
            "resident": it was already. "origin", "peer": it came from there. Of a prefetch also "later": no room
            yet, and "busy": somebody else fetches it.

        Raises:
            CacheFullError: no room in the budget, or the disk is full and nothing can be evicted.
            CorruptDataError: wrong bytes from every source, and twice from the origin.
            NotFoundError, UnavailableError: see `transfer`.
        """
        owner = owner or self._lease_id
        try:
            return self._fetch(info, repository, report, prefetch, evict=evict, owner=owner)
        except OSError as error:
            raise UnavailableError(f"cannot write to the cache {self._files.folder}: {error}") from error
        finally:
            # Whatever happened, an interrupt at any line included: no reservation outlives this call.
            if self._files.is_locked_by_this_thread(info.digest):
                try:
                    self._catalogue.drop(info.digest, owner)
                finally:
                    self._files.unlock(info.digest)

    def weigh(self, digest: Digest, reuse: NextUse) -> NextUse:
        """Return a next use such that, among peers, what this node owns stays longer than what it does not."""
        if self._peers is None or self._peers.num_nodes <= 1:
            return reuse
        owned = np.array([self._peers.owns(digest)])
        return NextUse(reuse.now, int(bias_owned(np.array([reuse.next_use]), owned)[0]))

    def _fetch(
        self,
        info: ObjectInfo,
        repository: Store,
        report: Report | None,
        prefetch: NextUse | None,
        *,
        evict: bool,
        owner: str,
    ) -> Outcome:
        tenant = self._tenant
        while True:
            answer = self._catalogue.reserve(info, owner, tenant, prefetch=prefetch, evict=evict)
            if answer == BUSY and prefetch is not None:
                return "busy"
            if answer == BUSY:
                self._files.wait_for_incoming(info.digest)
            elif isinstance(answer, NoSpaceYet):
                # It ends whatever becomes of it, and each turn waits for another one: this goes on while others do.
                self._files.wait_for_incoming(answer.digest)
            else:
                break
        if answer != GRANTED:
            return "later" if answer == LATER else "resident"
        if self._is_intact(info.digest):
            # Found by a scan, or from a process killed between publishing and saying so.
            self._complete(info.digest, owner, prefetch, {"hits": 1}, publish=False)
            return "resident"
        done = self._transfer(info, repository, report)
        if isinstance(repository, RemoteFile):
            repository.check_unchanged()
            FileLink(self._files.folder, info.digest).note(done.content)
        counts = {f"{kind}_bytes": count for kind, count in done.bytes_by_kind.items()}
        counts |= {"misses": 1, "corrupt": done.num_corrupt}
        self._complete(info.digest, owner, prefetch, counts, publish=True)
        # Where an earlier fetch had brought all of it nobody knows from where it did.
        return done.kind or "origin"

    def _complete(
        self, digest: Digest, owner: str, prefetch: NextUse | None, counts: dict[str, int], *, publish: bool
    ) -> None:
        self._catalogue.complete(digest, owner, publish=publish, reuse=prefetch, counts=counts)
        self._files.unlock(digest)

    def _is_intact(self, digest: Digest) -> bool:
        """Check a file that lies there unverified; a bad one goes into quarantine."""
        path = self._files.object_path(digest)
        try:
            # Of a link nothing is believed: what it leads to may change at any time. What is fetched replaces it.
            found = None if path.is_symlink() else digest_of_file(path)
        except FileNotFoundError:
            return False
        wanted = FileLink(self._files.folder, digest).content or digest
        if found != wanted:
            self._catalogue.quarantine(digest)
        return found == wanted

    def _transfer(self, info: ObjectInfo, repository: Store, report: Report | None) -> FetchReport:
        descriptor = self._files.incoming(info.digest)
        while True:
            try:
                _allocate(descriptor, info.size_bytes)
                with ReceivedParts(self._files.parts_path(info.digest), info.size_bytes) as parts:
                    is_named = not isinstance(repository, RemoteFile)
                    sources = self._sources(info, repository)
                    return transfer(info, descriptor, parts, sources, report, is_named_by_content=is_named)
            except CorruptDataError:
                self._catalogue.count({"corrupt": 1})
                raise
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # Each turn evicts something, or gives up.
                self._catalogue.shrink(info.digest, os.fstat(descriptor).st_blocks * 512)

    def _sources(self, info: ObjectInfo, repository: Store) -> list[ObjectSource]:
        origin = OriginSource(repository.objects, info.digest, self._requests)
        if self._peers is None or isinstance(repository, RemoteFile):
            return [origin]  # no peer could be believed about bytes that have no digest
        return [*self._peers.sources(info, repository.url), origin, *self._peers.holders(info)]


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Take the room on the disk before a byte is fetched; a file system that cannot do so takes it while writing."""
    if size_bytes:
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno in _FULL:
                raise
            os.truncate(descriptor, size_bytes)
