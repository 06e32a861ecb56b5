"""Stage ordinary remote files by URL, for scripts that read plain paths on the local disk: `datasvc stage URL`.

The content behind a URL may change, so the object of a staged file is named by the URL and the state that the store
reports (ETag, or time and size): a changed file is another object. The digest of the content is not known before the
transfer. That digest is computed on arrival and recorded in `CACHE/links/`, so that a scrub, or the first use after a
restart of the machine, can verify the file.

The returned path is a link with the original file name. Each object has a separate folder for its link, so that files
with equal names do not collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datasvc.cache.cache import Cache, use_cache
from datasvc.cache.catalogue.files import FileLink
from datasvc.cache.job import Outcome
from datasvc.cache.sources.remote_file import RemoteFile
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest
from datasvc.threads import map_in_threads

_MAX_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class StagedFile:
    """A staged file.

    Attributes:
        path: link to the file on this node, with the original file name.
        outcome: "resident" if the file was on the node already, else "origin".
    """

    url: str
    path: Path
    outcome: Outcome
    size_bytes: int


def stage_files(cache: Cache | str | Path, urls: Sequence[str], progress: Progress = NO_PROGRESS) -> list[StagedFile]:
    """Fetch files onto the node within the budget; after this call, they may be evicted.

    Args:
        cache: cache of the node, or the folder of one that has a budget.
        urls: URLs that fsspec reads, of one file each.
        progress: counts the bytes that arrive, by source.

    Returns:
        The files in the order of `urls`; a file exists until its space is needed.

    Raises:
        CacheFullError: the files do not fit into the cache at the same time.
        ConfigError, NotFoundError, UnavailableError: see `RemoteFile`.
        SourceChangedError: a file changed while it was read.
    """
    with use_cache(cache) as opened:
        return _stage(opened, urls, progress)


def _stage(cache: Cache, urls: Sequence[str], progress: Progress) -> list[StagedFile]:
    """See `stage_files`."""
    held: list[Digest] = []

    def stage_one(url: str) -> StagedFile:
        file = RemoteFile(url)
        link = FileLink(cache.folder, file.info.digest)
        acquired = cache.acquire(file.info, file, progress)
        held.append(file.info.digest)
        return StagedFile(url, link.make(file.file_name), acquired.outcome, file.info.size_bytes)

    try:
        return map_in_threads(stage_one, urls, _MAX_FILES_AT_ONCE)
    finally:
        # Held until all files have arrived, so that the fetch of one file does not evict another. No fetch runs here:
        # `map_in_threads` waits for its threads after an error too.
        for digest in held:
            cache.release(digest)
