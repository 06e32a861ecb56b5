"""Reads the status of the nodes while the page's server runs, and keeps a bounded history of each.

A node keeps no history of its own. So the pages show the time since their server has started, an hour at most.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import DatasvcError
from datasvc.node.client import NodeClient

INTERVAL_S: Final = 5.0
MAX_SAMPLES: Final = 720
"""Samples that are kept of each node: an hour."""
_NODES_AT_ONCE: Final = 16
_CACHE_NUMBERS: Final = (
    "budget_bytes", "limit_bytes", "resident_bytes", "reserved_bytes", "quarantined_bytes", "pinned_bytes",
    "num_resident",
)  # fmt: skip
_PEER_NUMBERS: Final = ("num_ok", "num_missing", "num_failed", "num_lying", "bytes_received")
_COUNTERS: Final = ("hits", "misses", "origin_bytes", "peer_bytes", "served_bytes", "evicted_bytes")


@dataclass(frozen=True, slots=True)
class NodeSample:
    """The numbers of a node at one time.

    Attributes:
        time_s: when they were read, in seconds since 1970.
        used_bytes: bytes of resident and quarantined objects, and of those being fetched.
        counters: numbers since the node's catalogue was created, in the order of `_COUNTERS`.
    """

    time_s: float
    used_bytes: int
    counters: tuple[int, ...]

    def counter(self, name: str) -> int:
        """Return a counter of the status document, such as "hits"."""
        return self.counters[_COUNTERS.index(name)]


@dataclass(frozen=True)
class NodeState:
    """What is known of a node.

    Attributes:
        url: base URL of the node.
        status: its newest status document; None if it has never responded.
        read_s: when `status` was read, in seconds since 1970.
        error: why the newest attempt to read the status has failed; None if it has not.
        tried_s: time of the newest attempt.
        samples: history, oldest first.
    """

    url: str
    status: Mapping[str, Any] | None = None
    read_s: float | None = None
    error: str | None = None
    tried_s: float = 0.0
    samples: tuple[NodeSample, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the status document, or for a node that fails the error with the last document and its time."""
        if self.error is None:
            return dict(self.status or {})
        return {"error": self.error, "tried": self.tried_s, "last": self.status, "read": self.read_s}


class NodeMonitor:
    """Reads the status of nodes. Thread-safe.

    Args:
        urls: base URLs of the nodes.
        token: bearer token of the nodes; None if they require none.

    Attributes:
        num_readings: number of readings of nodes since `run` runs.

    Raises:
        ConfigError: a URL is not valid.
    """

    def __init__(self, urls: Iterable[str], *, token: str | None = None) -> None:
        self.num_readings = 0
        self._clients = {url: NodeClient(url, token=token) for url in urls}
        self._states = {url: NodeState(url) for url in self._clients}
        self._samples: dict[str, deque[NodeSample]] = {url: deque(maxlen=MAX_SAMPLES) for url in self._clients}
        self._lock = threading.Lock()
        # Separate threads: a node that does not respond must not delay the pages.
        self._threads = ThreadPoolExecutor(_NODES_AT_ONCE, thread_name_prefix="datasvc-ui-nodes")

    def states(self) -> list[NodeState]:
        """Return the states of all nodes; a node that was never tried is read now."""
        list(self._threads.map(self.sample, [url for url, state in self._states.items() if not state.tried_s]))
        with self._lock:
            return [self._states[url] for url in self._clients]

    def sample(self, url: str) -> None:
        """Read the status of a node, and add it to the history."""
        status, error = None, None
        try:
            status = self._clients[url].status()
            check_status(status)
        except DatasvcError as failure:
            status, error = None, str(failure)
        except (KeyError, TypeError, AttributeError) as failure:
            # Any JSON may come, from another program or another version. It must not end the monitoring of all nodes.
            status, error = None, f"{url} sent no status of a node ({type(failure).__name__}: {failure})"
        now = time.time()
        with self._lock:
            old = self._states[url]
            if status is None:
                self._states[url] = NodeState(url, old.status, old.read_s, error, now, old.samples)
            else:
                self._samples[url].append(_to_sample(status, now))
                self._states[url] = NodeState(url, status, now, None, now, tuple(self._samples[url]))

    async def run(self) -> None:
        """Read all nodes at each interval, until the task is cancelled."""
        loop = asyncio.get_running_loop()

        async def follow(url: str) -> None:
            while True:
                await loop.run_in_executor(self._threads, self.sample, url)
                self.num_readings += 1
                await asyncio.sleep(INTERVAL_S)

        try:
            await asyncio.gather(*map(follow, self._clients))
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


def check_status(status: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or AttributeError if a document lacks what the pages read of a node's status."""
    cache = status["cache"]
    usages, jobs, peers = cache["tenants"].values(), status.get("jobs", ()), status.get("peers", {}).values()
    numbers = [cache[name] for name in _CACHE_NUMBERS]
    numbers += cache["counters"].values()
    numbers += [usage[name] for usage in usages for name in ("used_bytes", "guaranteed_bytes")]
    numbers += [usage["maximum_bytes"] or 0 for usage in usages]
    numbers += [process["clock_bytes"] for process in cache["jobs"]]
    numbers += [job[name] for job in jobs for name in ("total_bytes", "done_bytes")]
    numbers += [job["bytes"][name] for job in jobs for name in ("resident", "origin", "peer")]
    numbers += [peer[name] for peer in peers for name in _PEER_NUMBERS]
    texts = [cache["folder"], *(process["lease_id"] for process in cache["jobs"])]
    texts += [job[name] for job in jobs for name in ("ref", "state")]
    texts += [str(job["error"]) + str(job["split"]) for job in jobs]
    if not all(type(number) in {int, float} for number in numbers) or not all(
        isinstance(text, str) for text in texts
    ):
        raise TypeError("a number or a text has another type")


def _to_sample(status: Mapping[str, Any], time_s: float) -> NodeSample:
    cache = status["cache"]
    return NodeSample(time_s, used_bytes(cache), tuple(cache["counters"].get(name, 0) for name in _COUNTERS))


def used_bytes(cache: Mapping[str, Any]) -> int:
    """Return the bytes of a cache's budget that are in use, from its status."""
    return int(cache["resident_bytes"] + cache["reserved_bytes"] + cache["quarantined_bytes"])
