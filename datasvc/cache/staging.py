"""Staging: bring many objects onto the node, at once and none twice."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from datasvc.cache.catalogue.records import footprint
from datasvc.cache.fetch.fetch import Fetcher, Outcome, Report
from datasvc.cache.process_handle import CacheFolder
from datasvc.errors import CacheFullError
from datasvc.repository import Digest, ObjectInfo, Repository

_MIN_THREADS = 8
_MAX_THREADS = 64
_BYTES_AT_ONCE = 512 << 20


@dataclass(frozen=True)
class StageReport:
    """What staging did.

    Attributes:
        num_hits: objects that were there already.
        num_from_origin: that came from the origin.
        num_from_peers: that came from other nodes.
        num_left: that were not looked at any more when it was told to stop.
        hit_bytes: of the first.
        origin_bytes: of the second.
        peer_bytes: of the third.
    """

    num_hits: int
    num_from_origin: int
    num_from_peers: int
    num_left: int
    hit_bytes: int
    origin_bytes: int
    peer_bytes: int

    @property
    def num_fetched(self) -> int:
        """Objects that came from anywhere."""
        return self.num_from_origin + self.num_from_peers

    @property
    def fetched_bytes(self) -> int:
        """Bytes that came from anywhere."""
        return self.origin_bytes + self.peer_bytes


def stage_objects(
    folder: CacheFolder,
    fetcher: Fetcher,
    wanted: Iterable[tuple[ObjectInfo, Repository]],
    *,
    tenant: str,
    report: Report | None,
    num_threads: int | None,
    stop: threading.Event,
) -> StageReport:
    """Make objects resident, held until all are there so that none evicts another; see `Cache.stage`."""
    objects = {info.digest: (info, repository) for info, repository in wanted}
    needed = sum(footprint(info.size_bytes) for info, _ in objects.values())
    account = folder.catalogue.account()
    if needed > account.available(tenant):
        raise CacheFullError(
            f"staging needs {needed} bytes, and {account.available(tenant)} of the budget of {folder.files.folder} "
            "may be used for it; raise the budget with --budget, or do not stage: a loader with shuffle='windowed' "
            "streams through a smaller cache"
        )
    held: list[Digest] = []
    came: list[tuple[Outcome, int]] = []

    def stage_one(info: ObjectInfo, repository: Repository) -> None:
        if stop.is_set():
            return
        outcome = folder.acquire(info, repository, fetcher, report)
        held.append(info.digest)
        came.append((outcome, info.size_bytes))
        if outcome == "resident" and report is not None:
            report("resident", info.size_bytes)

    try:
        threads = num_threads or _choose_threads(len(objects), needed)
        with ThreadPoolExecutor(threads, thread_name_prefix="datasvc-stage") as pool:
            futures = [pool.submit(stage_one, *pair) for pair in objects.values()]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                # One failure ends the whole: what has not begun is not begun any more.
                for future in futures:
                    future.cancel()
                raise
    finally:
        for digest in held:
            folder.release(digest)
    return _summary(came, len(objects))


def _choose_threads(num_objects: int, needed_bytes: int) -> int:
    """Return how many objects to fetch at once: of small ones more, to keep all requests busy."""
    mean_bytes = max(1, needed_bytes // max(1, num_objects))
    return min(max(_MIN_THREADS, _BYTES_AT_ONCE // mean_bytes), _MAX_THREADS)


def _summary(came: list[tuple[Outcome, int]], num_wanted: int) -> StageReport:
    sizes: dict[Outcome, list[int]] = {"resident": [], "origin": [], "peer": []}
    for outcome, size_bytes in came:
        sizes[outcome].append(size_bytes)
    return StageReport(
        num_hits=len(sizes["resident"]),
        num_from_origin=len(sizes["origin"]),
        num_from_peers=len(sizes["peer"]),
        num_left=num_wanted - len(came),
        hit_bytes=sum(sizes["resident"]),
        origin_bytes=sum(sizes["origin"]),
        peer_bytes=sum(sizes["peer"]),
    )
