"""The nodes of a training job as each other's peers, found over the job's own process group.

Nothing has to be set up: the first rank of each node starts a server beside it, the addresses are gathered, and every
rank gets the same list. The servers end with the ranks that started them.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from datasvc.cache import parse_budget
from datasvc.cache.membership import FixedMembership
from datasvc.cache.peer_source import PeerSettings
from datasvc.cache.peers import Peers
from datasvc.cache.recovery import boot_id
from datasvc.errors import ConfigError
from datasvc.node.embedded import EmbeddedNode
from datasvc.node.settings import NodeSettings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _Place:
    """Where a rank runs: ranks of one machine and folder share a cache, and so a server."""

    machine: str
    folder: str


class RankNodes:
    """The servers of a job's nodes. Every rank makes one, in the same order among its collectives.

    Args:
        folder: of this node's cache.
        repositories: what the nodes may read for each other.
        budget: of the cache, as `Cache` takes it.
        group: process group of all ranks of the job, over any backend that gathers objects (gloo); None makes one.
        address: that other nodes reach this one at; None asks the way to the job's first rank.

    Attributes:
        peers: for `Cache(folder, peers=...)` of this rank.

    Raises:
        ConfigError: there is no process group; or a server did not start, on any node: then on every rank.
    """

    def __init__(
        self,
        folder: str | Path,
        repositories: tuple[str, ...],
        *,
        budget: str | None = None,
        group: ProcessGroup | None = None,
        address: str | None = None,
    ) -> None:
        self._group = group or _new_group()
        place = _Place(boot_id(), str(Path(folder).expanduser().resolve()))
        if budget is not None:
            parse_budget(budget, Path(place.folder))
        places = self._gather((place, secrets.token_hex(32)))
        rank = self._rank()
        leader = min(number for number, (each, _) in enumerate(places) if each == place)
        token = places[0][1]
        host = address or _address()
        ports = self._gather(_free_port(host) if rank == leader else None)
        urls = self._gather(_url(host, ports[rank]) if rank == leader else None)
        own = urls[leader]
        nodes = [url for url in urls if url is not None]
        self._node: EmbeddedNode | None = None
        failure = ""
        if rank == leader:
            settings = NodeSettings(
                folder=Path(place.folder),
                repositories=repositories,
                host=host,
                port=ports[rank],
                token=token,
                budget=budget,
                peers=",".join(nodes),
                own_url=own,
            )
            try:
                self._node = EmbeddedNode(settings)
            except ConfigError as error:
                failure = f"{own}: {error}"
        failures = [each for each in self._gather(failure) if each]
        if failures:
            self.close()
            raise ConfigError(f"{len(failures)} of {len(nodes)} nodes have no server: {'; '.join(failures)}")
        self.peers = Peers(FixedMembership(nodes, own=own), PeerSettings(token=token))

    def close(self) -> None:
        """End the server that this rank started, if it did; other ranks then go to the origin."""
        if self._node is not None:
            self._node.close()
            self._node = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self._group)


def _new_group() -> ProcessGroup:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError(
            "the ranks find each other over torch.distributed: call init_process_group or hvd.init first"
        )
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group


def _address() -> str:
    """Return this machine's address on the way to the job's first rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _url(host: str, port: int) -> str:
    return f"http://{host}:{port}"
