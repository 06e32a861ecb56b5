"""Make the nodes of a training job each other's peers, through the job's process group.

No configuration is needed: the ranks exchange their addresses, the first rank of each node starts a server, and every
rank gets the same list of servers. The servers end with the ranks that started them.
"""

from __future__ import annotations

import os
import pickle  # only between a job and its own child
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from datasvc.cache.catalogue.object_locks import PRIVATE_FOLDER
from datasvc.cache.catalogue.recovery import boot_id
from datasvc.cache.peers.membership import FixedMembership, bracketed
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.child_process import ChildProcess, end_with_input
from datasvc.errors import ConfigError, DatasvcError
from datasvc.node.http.auth import is_loopback
from datasvc.node.settings import NodeSettings
from datasvc.printable import count_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_T = TypeVar("_T")


@dataclass(frozen=True)
class _RankNode:
    """Machine, cache folder and server address of a rank. Ranks with the same machine and folder share one server.

    Attributes:
        machine: boot id of the machine.
        inode: device and inode of the folder, because equal paths of two containers may be different folders.
        folder: path of the cache.
        host: address of the machine.
        port: a free port.
        token: random token; all ranks use that of rank 0.
    """

    machine: str
    inode: tuple[int, int]
    folder: str
    host: str
    port: int
    token: str = field(repr=False)

    @classmethod
    def of(cls, folder: str | Path, address: str | None) -> _RankNode:
        """Return the `_RankNode` of the calling rank. Raise OSError or ConfigError."""
        path = Path(os.path.realpath(os.path.expanduser(folder)))
        # Create the folder, because its inode is needed before `Cache` opens it.
        path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        status = path.stat()
        host = address or _address()
        inode = status.st_dev, status.st_ino
        return cls(boot_id(), inode, str(path), host, _free_port(host), secrets.token_hex(32))

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{bracketed(self.host)}:{self.port}"

    def shares_cache(self, other: _RankNode) -> bool:
        """Return whether both ranks are on the same machine and use the same folder."""
        return (self.machine, self.inode) == (other.machine, other.inode)


class RankNodes:
    """The servers of a job's nodes. Collective: every rank must create it, in the same order among collective calls.

    Args:
        folder: cache folder of this node.
        repositories: repositories that the nodes may read for each other.
        budget: budget of the cache, see `Cache`.
        group: process group of all ranks of the job, over a backend that gathers objects (gloo); None creates one.
        address: address of this node for other nodes; None: the local address on the route to the job's first rank.

    Attributes:
        peers: for `Cache(folder, peers=...)` on this rank.

    Raises:
        ConfigError: there is no process group, or a server of any node did not start; raised on every rank.
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
        self._server: EmbeddedNode | None = None
        # Every rank computes the same leaders and URLs from the same list, without further messages.
        nodes_by_rank = self._gather(lambda: _RankNode.of(folder, address))
        rank = self._rank()
        token = nodes_by_rank[0].token
        local = nodes_by_rank[rank]
        # The leader of a node is its first rank, which starts the server. List the leader of each rank.
        leaders = [
            min(number for number, other in enumerate(nodes_by_rank) if other.shares_cache(node))
            for node in nodes_by_rank
        ]
        urls = list(dict.fromkeys(nodes_by_rank[leader].url for leader in leaders))
        _check_reachable(nodes_by_rank, urls)

        def start() -> None:
            if leaders[rank] != rank:
                return
            settings = NodeSettings(
                folder=Path(local.folder),
                repositories=repositories,
                host=local.host,
                port=local.port,
                token=token,
                budget=budget,
                peers=",".join(urls),
                own_url=local.url,
            )
            self._server = EmbeddedNode(settings)

        try:
            self._gather(start)  # also waits until all servers accept connections
        except ConfigError:
            # The server of this rank may run, although that of another node did not start.
            self.close()
            raise
        self.peers = Peers(
            FixedMembership(urls, local_url=nodes_by_rank[leaders[rank]].url), PeerSettings(token=token)
        )

    def close(self) -> None:
        """Stop the server that this rank started, if any; other ranks then read from the origin."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _gather(self, make: Callable[[], _T]) -> list[_T]:
        """Return the results of `make` on all ranks. Raise ConfigError on every rank if it failed on any."""
        import torch.distributed as dist

        result: _T | None = None
        failure = ""
        try:
            result = make()
        except (DatasvcError, OSError) as error:
            failure = f"rank {self._rank()} on {socket.gethostname()}: {error}"
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        # Gather failures too: if a rank raised its own error here, the others would wait for it in the collective.
        dist.all_gather_object(gathered, (result, failure), group=self._group)
        failures = [failure for _, failure in gathered if failure]
        if failures:
            raise ConfigError(
                f"{count_text(len(failures), 'rank')} cannot serve the cache of the node: {'; '.join(failures)}"
            )
        return [result for result, _ in gathered]

    def _rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self._group)


def _new_group() -> ProcessGroup:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError("the ranks connect through torch.distributed: call init_process_group or hvd.init first")
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group


def _address() -> str:
    """Return this machine's address on the route to the job's first rank."""
    # The route does not depend on the port. Take the first of the addresses.
    (family, _, _, _, first_rank), *_ = socket.getaddrinfo(
        os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(first_rank)  # for a datagram socket, this chooses the route and sends nothing
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    # Another process may bind the port before the server does; then every rank raises the same error.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_reachable(nodes_by_rank: Sequence[_RankNode], urls: Sequence[str]) -> None:
    """Raise ConfigError if a job of several machines has a server at a loopback address; `urls`: all servers."""
    local = [node.url for node in nodes_by_rank if node.url in urls and is_loopback(node.host)]
    if local and len({node.machine for node in nodes_by_rank}) > 1:
        raise ConfigError(
            f"{', '.join(local)} cannot be reached from the other machines: set `address` on each rank, or set "
            "MASTER_ADDR to an address that all machines can reach"
        )


# The child is a program of its own (`python -m datasvc.node.ranks`) and exits with the job: see `ChildProcess`.


class EmbeddedNode:
    """A running server of this machine's cache.

    Args:
        settings: settings of the node.

    Attributes:
        url: URL of the server, which accepts connections already.

    Raises:
        ConfigError: the server did not start; the reason is on standard error.
        OSError: the process cannot be created.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._program = ChildProcess(__name__, settings, answers=True)
        self.url = self._program.read_line()
        if not self.url:
            self.close()
            raise ConfigError(
                f"the server of the cache {settings.folder} did not start; the reason is on standard error. If "
                "`datasvc serve` is already running, pass the URLs of the nodes instead"
            )

    def close(self) -> None:
        """Stop the server; a second call does nothing, nor does a call in a forked child."""
        self._program.close()


def main() -> None:
    """Serve with the pickled settings on standard input."""
    # Only the child serves: the ranks of a job, which import this module too, need no web server.
    from datasvc.node.server import serve

    settings: NodeSettings = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
    end_with_input()  # exit when the job ends; this may be at any time, because the cache survives a kill
    try:
        has_ended = serve(settings, lambda url: print(url, flush=True))  # noqa: T201 - the parent reads this line
    except DatasvcError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    if not has_ended:
        os._exit(0)  # do not wait for the threads that still run


if __name__ == "__main__":
    main()
