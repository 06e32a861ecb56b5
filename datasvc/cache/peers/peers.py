"""The other nodes: who of them is asked for an object before its origin.

Only nodes that rank above this one are asked, see `placement`: they fetch the object from its origin if they lack it,
so that it leaves the origin once. The owner itself asks nobody. A node that is left alone after a failure counts as
gone, so the next in rank owns what was its own, for everybody who noticed. Where the origin fails, those that rank
below are asked for what they have.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from datasvc.cache.peers.membership import NodeMembership
from datasvc.cache.peers.peer_health import PeerHealth, PeerReport
from datasvc.cache.peers.peer_source import PeerSettings, PeerSource
from datasvc.cache.peers.placement import rank_nodes
from datasvc.errors import ConfigError
from datasvc.repository import Digest, ObjectInfo


class Peers:
    """The other nodes, and how each of them has behaved towards this process.

    Args:
        membership: who the nodes are.
        settings: how to talk to them.
        clock: seconds that never run backwards, for how long a peer is left alone.

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
            _ = self._tls  # wrong certificates are found now rather than at the first object

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process makes its own experience, and its own connections.
        return Peers, (self._membership, self._settings)

    def sources(self, info: ObjectInfo, origin_url: str) -> list[PeerSource]:
        """Return whom to ask for an object before its origin, the best first; [] where this node owns it.

        Args:
            info: the object.
            origin_url: the repository that has it, for a peer that does not.
        """
        above, _ = self._ranked(info.digest)
        return [self._source(url, info, origin_url) for url in above if self._health_of(url).may_ask()]

    def holders(self, info: ObjectInfo) -> list[PeerSource]:
        """Return whom to ask for an object when its origin has failed: those that rank below this node.

        They give it only if it is resident there, so nobody waits for anybody in a circle.
        """
        _, below = self._ranked(info.digest)
        return [self._source(url, info, None) for url in below]

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, this one counted."""
        return len(self._membership.nodes().urls)

    def owns(self, digest: Digest) -> bool:
        """Return whether this node is the owner of an object, were all nodes well."""
        nodes = self._membership.nodes()
        return rank_nodes(digest, nodes.urls)[0] == nodes.own

    def report(self) -> Mapping[str, PeerReport]:
        """Return what became of the requests to each peer that was ever asked, by its URL."""
        with self._lock:
            return {url: health.report for url, health in self._health.items()}

    @property
    def num_membership_failures(self) -> int:
        """See `NodeMembership.num_failures`."""
        return self._membership.num_failures

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return _tls_context(self._settings.ca_file)

    def _ranked(self, digest: Digest) -> tuple[list[str], list[str]]:
        """Return the nodes that rank above this one, and those below."""
        nodes = self._membership.nodes()
        ranked = rank_nodes(digest, nodes.urls)
        own = ranked.index(nodes.own) if nodes.own is not None else len(ranked)
        return ranked[:own], ranked[own + 1 :]

    def _source(self, url: str, info: ObjectInfo, origin_url: str | None) -> PeerSource:
        tls = self._tls if url.startswith("https:") else None
        return PeerSource(url, info.digest, origin_url, self._settings, self._health_of(url), tls=tls)

    def _health_of(self, url: str) -> PeerHealth:
        with self._lock:
            return self._health.setdefault(url, PeerHealth(self._clock))


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read certificates from {ca_file}: {error}") from error
