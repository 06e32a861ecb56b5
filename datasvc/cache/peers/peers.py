"""The other nodes, as sources of objects: before the origin and, if it fails, after it.

For each object, `placement` ranks the nodes; the first one is the owner. A node requests an object only from nodes
that rank above itself: of many nodes, first from one that may have a copy; then from the owner. An owner that does
not have the object fetches it first. So the object is read from the origin once, by its owner. Other nodes skip a
peer that is paused after a failure, and use the next node in rank as the owner. If the origin fails, the nodes that
rank below the requesting node send the objects that they have.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from datasvc.cache.peers.membership import NodeMembership
from datasvc.cache.peers.peer_health import PeerHealth, PeerReport
from datasvc.cache.peers.peer_source import PeerSettings, PeerSource, tls_context
from datasvc.cache.peers.placement import choose_copy, order_for_node, rank_nodes, spreads_load
from datasvc.repository import Digest, ObjectInfo


class Peers:
    """The other nodes, and the health of each, as the requests of this process have shown it. Safe for threads.

    Args:
        membership: list of nodes.
        settings: connection settings.
        clock: monotonic clock in seconds, for the pauses after failures.

    Raises:
        ConfigError: the certificates cannot be read.
    """

    def __init__(
        self,
        membership: NodeMembership,
        settings: PeerSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._settings = settings or PeerSettings()
        self._clock = clock
        self._health: dict[str, PeerHealth] = {}
        self._lock = threading.Lock()
        if self._settings.ca_file is not None:
            _ = self._tls  # reports invalid certificates now, instead of at the first object

    def __reduce__(self) -> tuple[Any, ...]:
        # Health is not pickled: another process has its own connections, and its own failures.
        return Peers, (self._membership, self._settings)

    def sources(self, info: ObjectInfo, origin_url: str) -> list[PeerSource]:
        """Return the peers to read an object from before its origin, the best first; [] if this node owns it.

        A peer that does not have the object reads it from the repository at `origin_url`. Only the first peer may be
        one that sends the object if it is resident there, and otherwise answers at once that it is not.
        """
        higher, _ = self._ranked(info.digest)
        higher = [url for url in higher if self._health_of(url).may_request()]
        sources = [self._source(url, info, origin_url) for url in higher]
        nodes = self._membership.nodes()
        local_url = nodes.local_url
        if local_url is not None and len(higher) > 1 and spreads_load(len(nodes.urls)):
            copy = choose_copy(info.digest, higher, local_url)
            if copy != higher[0]:
                sources.insert(0, self._source(copy, info, origin_url, may_fetch=False))
        return sources

    def stage_order(self, digests: Iterable[Digest]) -> list[Digest]:
        """Return objects in the order in which this node stages them: their own, or that of `order_for_node`."""
        nodes = self._membership.nodes()
        if nodes.local_url is None or not spreads_load(len(nodes.urls)):
            return list(digests)
        return order_for_node(digests, nodes.local_url)

    def fallback_sources(self, info: ObjectInfo, origin_url: str) -> list[PeerSource]:
        """Return the peers to read an object from when its origin has failed: those that rank below this node.

        These peers send the object only if it is resident there, so requests never wait for each other in a cycle.
        """
        _, lower = self._ranked(info.digest)
        return [self._source(url, info, origin_url, may_fetch=False) for url in lower]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, this one included."""
        return len(self._membership.nodes().urls)

    def owns(self, digest: Digest) -> bool:
        """Return whether this node is the owner of an object when all nodes work."""
        nodes = self._membership.nodes()
        return rank_nodes(digest, nodes.urls)[0] == nodes.local_url

    def report(self) -> Mapping[str, PeerReport]:
        """Return the results of the requests to each peer, by its URL."""
        with self._lock:
            return {url: health.report for url, health in self._health.items()}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return tls_context(self._settings.ca_file)

    def _ranked(self, digest: Digest) -> tuple[list[str], list[str]]:
        """Return the nodes that rank above this node for an object, and those below it."""
        nodes = self._membership.nodes()
        ranked = rank_nodes(digest, nodes.urls)
        # A node that is not in the list ranks below all others, so it reads from them and gets no requests.
        rank = ranked.index(nodes.local_url) if nodes.local_url is not None else len(ranked)
        return ranked[:rank], ranked[rank + 1 :]

    def _source(self, url: str, info: ObjectInfo, origin_url: str, *, may_fetch: bool = True) -> PeerSource:
        tls = self._tls if url.startswith("https:") else None
        health = self._health_of(url)
        return PeerSource(url, info.digest, origin_url, self._settings, health, may_fetch=may_fetch, tls=tls)

    def _health_of(self, url: str) -> PeerHealth:
        with self._lock:
            if url not in self._health:  # of 1,000 nodes, a new one for each look-up took a third of the time
                self._health[url] = PeerHealth(self._clock, name=url)
            return self._health[url]
