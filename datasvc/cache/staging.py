"""Staging: make many objects resident, several in parallel; an object that is listed twice is fetched once.

`Cache.stage` uses it, and through it `datasvc stage`, pins and the staging jobs of a node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from datasvc.cache.catalogue.records import footprint
from datasvc.cache.job import CacheJob, Outcome
from datasvc.errors import CacheFullError
from datasvc.progress import Progress
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.threads import run_in_threads

_MIN_THREADS = 8
_MAX_THREADS = 64
_BYTES_AT_ONCE = 512 << 20  # about the total size of the objects that are fetched at once


@dataclass(frozen=True)
class StageReport:
    """Result of staging: objects and bytes that were resident already (hits), or came from the origin or other nodes.

    `num_left` is the number of objects that were not staged because staging was stopped.
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
        """Number of objects from origin and other nodes."""
        return self.num_from_origin + self.num_from_peers

    @property
    def fetched_bytes(self) -> int:
        """Bytes from origin and other nodes."""
        return self.origin_bytes + self.peer_bytes


def stage_objects(
    job: CacheJob,
    requests: Iterable[tuple[ObjectInfo, Repository]],
    *,
    progress: Progress,
    num_threads: int | None,
    stop: threading.Event,
) -> StageReport:
    """Make objects resident; see `Cache.stage`. Each is held until all have arrived, so that no fetch evicts it."""
    objects = {info.digest: (info, repository) for info, repository in requests}
    needed_bytes = sum(footprint(info.size_bytes) for info, _ in objects.values())
    # Checked before the first fetch: a set above this limit can never fit, and would evict other data for nothing.
    # A smaller set may fail later, because pinned objects and objects in use are not subtracted here.
    available_bytes = job.budget_bytes
    if needed_bytes > available_bytes:
        raise CacheFullError(
            f"staging needs {needed_bytes} bytes, and {available_bytes} of the budget of {job.folder} "
            "are available; raise the budget with --budget, or do not stage: a loader with shuffle='windowed' "
            "streams through a smaller cache"
        )
    progress.begin(sum(info.size_bytes for info, _ in objects.values()))
    held: list[Digest] = []
    arrived: list[tuple[Outcome, int]] = []

    def stage_one(info: ObjectInfo, repository: Repository) -> None:
        if stop.is_set():
            return
        _, outcome = job.hold(info, repository, progress)
        held.append(info.digest)
        arrived.append((outcome, info.size_bytes))

    try:
        # After an error, `run_in_threads` waits for the fetches in progress, and starts no others.
        run_in_threads(stage_one, list(objects.values()), num_threads or _choose_threads(len(objects), needed_bytes))
    finally:
        for digest in held:
            job.release(digest)
    return _summary(arrived, len(objects))


def _choose_threads(num_objects: int, needed_bytes: int) -> int:
    """Return how many objects to fetch at once: more if they are small, because a small object has few requests."""
    mean_bytes = max(1, needed_bytes // max(1, num_objects))
    return min(max(_MIN_THREADS, _BYTES_AT_ONCE // mean_bytes), _MAX_THREADS)


def _summary(arrived: list[tuple[Outcome, int]], num_objects: int) -> StageReport:
    sizes: dict[Outcome, list[int]] = {"resident": [], "origin": [], "peer": []}
    for outcome, size_bytes in arrived:
        sizes[outcome].append(size_bytes)
    return StageReport(
        num_hits=len(sizes["resident"]),
        num_from_origin=len(sizes["origin"]),
        num_from_peers=len(sizes["peer"]),
        num_left=num_objects - len(arrived),
        hit_bytes=sum(sizes["resident"]),
        origin_bytes=sum(sizes["origin"]),
        peer_bytes=sum(sizes["peer"]),
    )
