"""Fetch one object into its incoming file, and verify it. `CacheJob` does so for each object that is not resident.

Before the fetch, the caller has reserved the object's space in the catalogue, and has locked the incoming file.

An object of a repository is verified by its digest. The content digest of a remote file is unknown, so the state that
its store reports is compared before and after the transfer.
"""

from __future__ import annotations

import os

from datasvc.cache.catalogue.catalogue import Catalogue
from datasvc.cache.catalogue.files import DISK_FULL, FileLink, Files
from datasvc.cache.fetch.transfer import transfer
from datasvc.cache.peers.peers import Peers
from datasvc.cache.sources.built_source import BuiltSource
from datasvc.cache.sources.origin_source import Kind, ObjectSource, OriginSource, ReceivedParts, RequestPool
from datasvc.cache.sources.remote_file import RemoteFile, Store
from datasvc.errors import CorruptDataError
from datasvc.progress import Progress
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.objects.objects import digest_of_file


class Fetcher:
    """Fills the incoming files of objects whose space the caller has reserved.

    All fetches of a process share `requests`, which limits their requests to origins.
    """

    def __init__(self, catalogue: Catalogue, files: Files, requests: RequestPool) -> None:
        self._catalogue = catalogue
        self._files = files
        self._requests = requests

    def is_intact(self, digest: Digest) -> bool:
        """Return whether the file of an object that this thread has reserved exists and has the right digest.

        A corrupt file is moved to the quarantine, or removed.
        """
        path = self._files.object_path(digest)
        try:
            # The target of a link may change at any time, so a link is never intact; the fetched file replaces it.
            file_digest = None if path.is_symlink() else digest_of_file(path)
        except FileNotFoundError:
            return False
        # Only a staged remote file has a content digest on record; the name of any other object is its digest.
        intact = file_digest == (FileLink(self._files.folder, digest).content_digest or digest)
        if not intact:
            self._catalogue.quarantine(digest)
        return intact

    def fetch(
        self, info: ObjectInfo, repository: Store, peers: Peers | None, progress: Progress
    ) -> tuple[Kind, dict[str, int]]:
        """Fill the incoming file of an object that this thread has reserved, and verify it.

        Args:
            info: the object.
            repository: origin of the object: a repository, or a remote file.
            peers: other nodes; None: no other nodes.
            progress: counts the bytes that arrive, by source.

        Returns:
            The kind of source that sent most bytes; and the numbers to add to counters when the object is published.

        Raises:
            CacheFullError: the disk is full and nothing can be evicted.
            CorruptDataError, NotFoundError, ConfigError, UnavailableError: see `transfer`.
            SourceChangedError: a remote file changed while it was read.
            OSError: the file cannot be written.
        """
        descriptor = self._files.incoming(info.digest)
        while True:
            try:
                _allocate(descriptor, info.size_bytes)
                with ReceivedParts(self._files.parts_path(info.digest), info.size_bytes) as parts:
                    sources = self._sources(info, repository, peers)
                    report = transfer(
                        info,
                        descriptor,
                        parts,
                        sources,
                        progress,
                        is_named_by_content=not isinstance(repository, RemoteFile),
                    )
                break
            except CorruptDataError:
                self._catalogue.count({"corrupt": 1})
                raise
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                # Each call of `shrink` frees space or raises, so the loop ends.
                self._catalogue.shrink(info.digest, os.fstat(descriptor).st_blocks * 512)  # blocks of 512 bytes
        if isinstance(repository, RemoteFile):
            # The file may have changed between two ranges. Its object is named by its state before the first range.
            repository.check_unchanged()
            FileLink(self._files.folder, info.digest).record_content(report.content)
        counts = {f"{kind}_bytes": count for kind, count in report.bytes_by_kind.items()}
        # If an earlier fetch received all bytes, their source is unknown, and "origin" is reported.
        return report.kind or "origin", counts | {"misses": 1, "corrupt": report.num_corrupt}

    def _sources(self, info: ObjectInfo, repository: Store, peers: Peers | None) -> list[ObjectSource]:
        origin = OriginSource(repository.objects, info.digest, self._requests)
        if isinstance(repository, RemoteFile):
            return [origin]  # bytes from peers could not be verified: the digest of a remote file is unknown
        built = BuiltSource(origin, repository.objects)
        if peers is None:
            return [built]
        # First come the nodes that rank above this one for the object (see `placement`): the node with the highest
        # rank reads the object from the origin, and the others read it from that node. Nodes that rank below this one
        # receive a request only after the origin has failed.
        return [*peers.sources(info, repository.url), built, *peers.fallback_sources(info, repository.url)]


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate disk space, so that a full disk is reported before the transfer; or else set only the file's size."""
    if size_bytes:
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            os.truncate(descriptor, size_bytes)
