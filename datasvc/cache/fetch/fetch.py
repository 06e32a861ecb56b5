"""Fetch one object onto the node: reserve space, transfer, verify, publish.

At most one call per node transfers an object at a time. Other calls for the object wait, then find it resident or
transfer it themselves; a prefetch returns instead. Objects of a repository are verified by their digest. The content
digest of a remote file is unknown, so the state that its store reports is compared before and after the transfer.
"""

from __future__ import annotations

import errno
import os
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
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.objects.objects import digest_of_file

Outcome = Literal["resident", "origin", "peer", "busy", "later"]

_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Fetcher:
    """Fetches objects of repositories into one cache, for one tenant.

    Args:
        catalogue: catalogue of the cache.
        files: files of the cache.
        lease_id: lease of this process.
        tenant: tenant whose quota is charged.
        requests: requests to origins, shared by all fetches of this process.
        peers: other nodes; None: no other nodes.
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
        progress: Progress = NO_PROGRESS,
        *,
        prefetch: NextUse | None = None,
        evict: bool = True,
        job_id: str | None = None,
    ) -> Outcome:
        """Make an object resident.

        Args:
            info: the object; this process has a hold on it unless it is prefetched.
            repository: origin of the object.
            progress: counts the bytes that arrive, by source.
            prefetch: next use of a prefetched object: nothing needed sooner is evicted for it, and the call does not
                wait for other fetches.
            evict: whether objects that a job may need again can be evicted.
            job_id: access order that needs the object, see `CacheFolder.new_job`; None: this process.

        Returns:
            "resident": the object was there already. "origin" or "peer": its source. A prefetch also returns "later"
            if there is no space yet, and "busy" if another thread or process fetches the object.

        Raises:
            CacheFullError: the budget has no space for the object, or the disk is full and nothing can be evicted.
            CorruptDataError: every source sent wrong bytes, the origin twice.
            NotFoundError, UnavailableError: see `transfer`.
        """
        job_id = job_id or self._lease_id
        try:
            return self._fetch(info, repository, progress, prefetch, evict=evict, job_id=job_id)
        except OSError as error:
            raise UnavailableError(
                f"cannot write to the cache {self._files.folder}: {error}; check its disk and its permissions"
            ) from error
        finally:
            # After any error, or an interrupt at any line: a reservation never outlives this call.
            if self._files.is_locked_by_this_thread(info.digest):
                try:
                    self._catalogue.drop(info.digest, job_id)
                finally:
                    self._files.unlock(info.digest)

    def bias_to_owned(self, digest: Digest, reuse: NextUse) -> NextUse:
        """Return a next use such that a node with peers keeps the objects it owns longer than others."""
        if self._peers is None or self._peers.num_nodes <= 1:
            return reuse
        owned = np.array([self._peers.owns(digest)])
        return NextUse(reuse.now, int(bias_owned(np.array([reuse.next_use]), owned)[0]))

    def _fetch(
        self,
        info: ObjectInfo,
        repository: Store,
        progress: Progress,
        prefetch: NextUse | None,
        *,
        evict: bool,
        job_id: str,
    ) -> Outcome:
        tenant = self._tenant
        while True:
            reservation = self._catalogue.reserve(info, job_id, tenant, prefetch=prefetch, evict=evict)
            if reservation == BUSY and prefetch is not None:
                return "busy"
            if reservation == BUSY:
                self._files.wait_for_incoming(info.digest)
            elif isinstance(reservation, NoSpaceYet):
                # A fetch always ends, successful or not. Then the reservation may succeed, or name another fetch.
                self._files.wait_for_incoming(reservation.digest)
            else:
                break
        if reservation != GRANTED:
            return "later" if reservation == LATER else "resident"
        if self._is_intact(info.digest):
            # Found by a scan, or published by a process that was killed before its commit.
            self._complete(info.digest, job_id, prefetch, {"hits": 1}, publish=False)
            return "resident"
        report = self._transfer(info, repository, progress)
        if isinstance(repository, RemoteFile):
            # The file may have changed between two ranges. The digest names its state at the first request.
            repository.check_unchanged()
            FileLink(self._files.folder, info.digest).record_content(report.content)
        counts = {f"{kind}_bytes": count for kind, count in report.bytes_by_kind.items()}
        counts |= {"misses": 1, "corrupt": report.num_corrupt}
        self._complete(info.digest, job_id, prefetch, counts, publish=True)
        # If an earlier fetch had received all bytes, their source is not known: count them for the origin.
        return report.kind or "origin"

    def _complete(
        self, digest: Digest, job_id: str, prefetch: NextUse | None, counts: dict[str, int], *, publish: bool
    ) -> None:
        self._catalogue.complete(digest, job_id, publish=publish, reuse=prefetch, counts=counts)
        self._files.unlock(digest)

    def _is_intact(self, digest: Digest) -> bool:
        """Return whether an unverified file exists and is intact; quarantine it if it is corrupt."""
        path = self._files.object_path(digest)
        try:
            # The target of a link may change at any time, so a link is never intact; the fetched file replaces it.
            file_digest = None if path.is_symlink() else digest_of_file(path)
        except FileNotFoundError:
            return False
        is_intact = file_digest == (FileLink(self._files.folder, digest).content or digest)
        if not is_intact:
            self._catalogue.quarantine(digest)
        return is_intact

    def _transfer(self, info: ObjectInfo, repository: Store, progress: Progress) -> FetchReport:
        descriptor = self._files.incoming(info.digest)
        while True:
            try:
                _allocate(descriptor, info.size_bytes)
                with ReceivedParts(self._files.parts_path(info.digest), info.size_bytes) as parts:
                    is_verifiable = not isinstance(repository, RemoteFile)
                    sources = self._sources(info, repository)
                    return transfer(info, descriptor, parts, sources, progress, is_named_by_content=is_verifiable)
            except CorruptDataError:
                self._catalogue.count({"corrupt": 1})
                raise
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                # Each call frees space, by evictions or by removing leftovers, or raises: the loop ends.
                self._catalogue.shrink(info.digest, os.fstat(descriptor).st_blocks * 512)

    def _sources(self, info: ObjectInfo, repository: Store) -> list[ObjectSource]:
        origin = OriginSource(repository.objects, info.digest, self._requests)
        if self._peers is None or isinstance(repository, RemoteFile):
            return [origin]  # no peers: the digest of a remote file is unknown, so their bytes cannot be verified
        # First nodes that rank higher for this object: the highest one reads it from the origin, the others from it.
        # Nodes that rank lower receive a request only after the origin has failed.
        return [*self._peers.sources(info, repository.url), origin, *self._peers.fallback_sources(info)]


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate disk space before the transfer; a file system without this feature allocates while it is written."""
    if size_bytes:
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise
            os.truncate(descriptor, size_bytes)
