"""Build the status of a node: one JSON document for `/status`, `/metrics` and `datasvc top`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from datasvc.cache import Cache, CacheStatus
from datasvc.node.transfers.sending import Sent
from datasvc.node.transfers.staging_jobs import StageJobs


def describe_cache(status: CacheStatus) -> dict[str, Any]:
    """Return a cache's status as JSON values."""
    return {**asdict(status), "jobs": [job._asdict() for job in status.jobs]}


class StatusSource:
    """Builds the status document; it blocks on the cache, so call it in a thread.

    Args:
        cache: cache of the node.
        jobs: staging jobs of the node.
        sent: counters of the sender.
        traffic: returns the current connections and fetches.
        peers: returns the reports of the peers by URL.
    """

    def __init__(
        self,
        cache: Cache,
        jobs: StageJobs,
        sent: Sent,
        traffic: Callable[[], dict[str, int]],
        peers: Callable[[], dict[str, Any]],
    ) -> None:
        self._cache = cache
        self._jobs = jobs
        self._sent = sent
        self._traffic = traffic
        self._peers = peers
        self._started = time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Return the document. Raise UnavailableError if the catalogue does not respond."""
        return {
            "version": version("datasvc"),
            "process": os.getpid(),
            "up_s": round(time.monotonic() - self._started, 3),
            "cache": describe_cache(self._cache.status()),
            "serving": {**asdict(self._sent), **self._traffic()},
            "peers": self._peers(),
            "jobs": [job.describe() for job in self._jobs.all()],
        }
