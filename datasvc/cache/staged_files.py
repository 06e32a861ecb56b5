"""Ordinary remote files, staged by URL: old scripts get plain paths on the local disk.

What a URL gives may change, so a staged file is named by URL and what the store says of its state (ETag, or time and
size): a changed file is another object. Its bytes have no digest beforehand; the one found on arrival is kept beside,
in `CACHE/links/`, so that `scrub` and a restart can check it. The path that comes out is a link with the file's own
name, in a folder of its own: two files of one name never meet.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from datasvc.cache.cache import Cache
from datasvc.cache.catalogue.file_links import FileLink
from datasvc.cache.fetch.fetch import Outcome, Report
from datasvc.cache.sources.remote_file import RemoteFile
from datasvc.repository import Digest

_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class StagedFile:
    """A file that is on the node.

    Attributes:
        url: where it came from.
        path: where it lies.
        outcome: "resident" where it was there already, else "origin".
        size_bytes: of it.
    """

    url: str
    path: Path
    outcome: Outcome
    size_bytes: int


def stage_files(cache: Cache, urls: Sequence[str], report: Report | None = None) -> list[StagedFile]:
    """Bring files onto the node, never over the budget; nobody holds them afterwards.

    Args:
        cache: of the node.
        urls: any that fsspec reads, each of one file.
        report: called with where bytes come from and how many.

    Returns:
        In the order of `urls`; a path stays until its room is needed.

    Raises:
        CacheFullError: they do not fit beside each other.
        ConfigError, NotFoundError, UnavailableError: see `RemoteFile`.
        SourceChangedError: a file changed while it was read.
    """
    held: list[Digest] = []
    lock = threading.Lock()

    def stage_one(url: str) -> StagedFile:
        file = RemoteFile(url)
        link = FileLink(cache.folder, file.info.digest)
        acquired = cache.acquire(file.info, file, report)
        with lock:
            held.append(file.info.digest)
        if acquired.outcome == "resident" and report is not None:
            report("resident", file.info.size_bytes)
        return StagedFile(url, link.make(file.file_name), acquired.outcome, file.info.size_bytes)

    try:
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="datasvc-files") as pool:
            return list(pool.map(stage_one, urls))
    finally:
        for digest in held:
            cache.release(digest)
