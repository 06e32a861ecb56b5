"""Settings of the page's server, from the options of `datasvc ui`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from datasvc.cache.peers.membership import parse_node
from datasvc.errors import ConfigError
from datasvc.node.http.auth import check_exposure
from datasvc.planning.cost import Prices

DEFAULT_PORT = 8766


@dataclass(frozen=True, kw_only=True)
class UiSettings:
    """Settings of the page's server, checked when they are created.

    Attributes:
        repository: URL of the repository that the pages show.
        nodes: URLs of the nodes whose status the pages show; here in the spelling that nodes have of each other.
        node_token: bearer token of these nodes; None if they require none.
        ledgers: folder with the ledgers of runs, for coverage and audits; None: no ledgers.
        host: address to listen on; an address other than loopback requires a token.
        port: port to listen on; 0: any free one.
        token: token that a user of the page needs; None: no token is required, so `host` must be a loopback address.
        thumbnails: folder of the cache of thumbnails; None: a folder below the user's cache folder.
        prices: TOML file with the prices of traffic for the Planner, see `Prices.read`; None: it shows no cost.

    Raises:
        ConfigError: a setting is out of range, the prices cannot be read, or other machines could read the page
            without a token.
    """

    repository: str
    nodes: tuple[str, ...] = ()
    node_token: str | None = field(default=None, repr=False)
    ledgers: Path | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = field(default=None, repr=False)
    thumbnails: Path | None = None
    prices: Path | None = None

    def __post_init__(self) -> None:
        # Each shard is assigned to a node by the text of its URL.
        object.__setattr__(self, "nodes", tuple(dict.fromkeys(map(parse_node, self.nodes))))
        check_exposure(self.host, self.token, how="--token-file")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is out of range; expected 0 to 65535")
        if self.prices is not None:
            Prices.read(self.prices)  # a mistake in the file is an error at the start, not one of the page
