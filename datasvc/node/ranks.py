"""The nodes of a training job as each other's peers, found over the job's own process group.

Nothing has to be set up: the first rank of each node starts a server beside it, the addresses are gathered, and every
rank gets the same list. The servers end with the ranks that started them.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from datasvc.cache.catalogue.recovery import boot_id
from datasvc.cache.peers.membership import FixedMembership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, DatasvcError
from datasvc.node.embedded import EmbeddedNode
from datasvc.node.http.auth import is_loopback
from datasvc.node.settings import NodeSettings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_T = TypeVar("_T")


@dataclass(frozen=True)
class _RankNode:
    """Where a rank runs, and where its node's server would listen. Ranks of one machine and folder share one.

    Attributes:
        machine: boot of the machine.
        inode: device and number of the folder: in two containers equal paths may be different folders.
        folder: path of the cache.
        host: address of the machine.
        port: one that is free.
        token: rank 0's is everybody's.
    """

    machine: str
    inode: tuple[int, int]
    folder: str
    host: str
    port: int
    token: str = field(repr=False)

    @classmethod
    def of(cls, folder: str | Path, address: str | None) -> _RankNode:
        """Return this rank's. Raises OSError, ConfigError."""
        place = Path(folder).expanduser().resolve()
        place.mkdir(parents=True, exist_ok=True)
        status = place.stat()
        host = address or _address()
        inode = status.st_dev, status.st_ino
        return cls(boot_id(), inode, str(place), host, _free_port(host), secrets.token_hex(32))

    @property
    def url(self) -> str:
        """Of the server."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}"

    def is_one_cache(self, other: _RankNode) -> bool:
        """Return whether both are on one machine and in one folder."""
        return (self.machine, self.inode) == (other.machine, other.inode)


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
        self._node: EmbeddedNode | None = None
        plan = self._gathered(lambda: _RankNode.of(folder, address))
        rank, token = self._rank(), plan[0].token
        own = plan[rank]
        leaders = [min(number for number, each in enumerate(plan) if each.is_one_cache(place)) for place in plan]
        nodes = list(dict.fromkeys(plan[leader].url for leader in leaders))
        _check_reachable(plan, nodes)

        def start() -> None:
            if leaders[rank] != rank:
                return
            settings = NodeSettings(
                folder=Path(own.folder),
                repositories=repositories,
                host=own.host,
                port=own.port,
                token=token,
                budget=budget,
                peers=",".join(nodes),
                own_url=own.url,
            )
            self._node = EmbeddedNode(settings)

        try:
            self._gathered(start)
        except ConfigError:
            self.close()
            raise
        self.peers = Peers(FixedMembership(nodes, own=plan[leaders[rank]].url), PeerSettings(token=token))

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

    def _gathered(self, make: Callable[[], _T]) -> list[_T]:
        """Return what `make` gave on each rank. Raises ConfigError on every rank where it failed on any."""
        import torch.distributed as dist

        made: _T | None = None
        failure = ""
        try:
            made = make()
        except (DatasvcError, OSError) as error:
            failure = f"rank {self._rank()} on {socket.gethostname()}: {error}"
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, (made, failure), group=self._group)
        failures = [each for _, each in gathered if each]
        if failures:
            raise ConfigError(f"{len(failures)} ranks cannot serve their node's cache: {'; '.join(failures)}")
        return [each for each, _ in gathered]

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
    (family, _, _, _, there), *_ = socket.getaddrinfo(
        os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_reachable(plan: Sequence[_RankNode], nodes: Sequence[str]) -> None:
    """Refuse addresses that only mean something on one machine where there are several."""
    local = [place.url for place in plan if place.url in nodes and is_loopback(place.host)]
    if local and len({place.machine for place in plan}) > 1:
        raise ConfigError(
            f"{', '.join(local)} cannot be reached from the other machines: give each rank's `address`, or let "
            "MASTER_ADDR be an address that all machines reach"
        )
