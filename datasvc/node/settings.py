"""What a node is told when it starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from datasvc.cache.catalogue.quotas import DEFAULT_TENANT
from datasvc.errors import ConfigError
from datasvc.node.http.auth import check_exposure

DEFAULT_PORT = 8765


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of one node, checked when made.

    Attributes:
        folder: of the cache that it serves.
        repositories: the only origins that it reads from.
        host: address to listen on.
        port: 0 for any that is free.
        token: what a caller must know; None lets everybody in who can connect.
        certificate: PEM file of the node and its issuers; None for plain HTTP.
        certificate_key: PEM file of its private key.
        ca_file: certificates that vouch for peers with "https"; None takes the system's.
        tls_name: the name in the peers' certificates; None expects each to have its host's.
        budget: of the cache, as `Cache` takes it; None as it was.
        tenant: on whose account staging is.
        peers: the nodes, as text: a list of URLs, "file:PATH" or "dns:NAME:PORT".
        own_url: this node, spelled as in `peers`; None looks for this machine there.
        max_connections: more are refused at once.
        peer_rate_bytes_s: cap of what is sent to peers, all together; None for no cap.
        origin_rate_bytes_s: cap of what is read from the origins, all together; None for no cap.
        grace_s: what running transfers get to end when the node is told to stop.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
    """

    folder: Path
    repositories: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = field(default=None, repr=False)
    certificate: Path | None = None
    certificate_key: Path | None = None
    ca_file: Path | None = None
    tls_name: str | None = None
    budget: str | None = None
    tenant: str = DEFAULT_TENANT
    peers: str | None = None
    own_url: str | None = None
    max_connections: int = 256
    peer_rate_bytes_s: int | None = None
    origin_rate_bytes_s: int | None = None
    grace_s: float = 20.0

    def __post_init__(self) -> None:
        check_exposure(self.host, self.token)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is out of range: expected 0 to 65535")
        if self.max_connections < 1:
            raise ConfigError(f"{self.max_connections} connections let nobody in: expected 1 or more")
        for rate in (self.peer_rate_bytes_s, self.origin_rate_bytes_s):
            if rate is not None and rate < 1:
                raise ConfigError(f"a cap of {rate} bytes a second lets nothing through: leave it away for no cap")
        if self.grace_s < 0:
            raise ConfigError(f"a grace of {self.grace_s} s is out of range: expected 0 or more")
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        if self.peers is None and self.own_url is not None:
            raise ConfigError("--url says which of --peers this node is: give both")

    def tls(self) -> ssl.SSLContext | None:
        """Return what to listen with, None for plain HTTP. Raises ConfigError."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # No tickets: they would look like the beginning of an answer to a peer that listens for a sign of life.
        context.num_tickets = 0
        try:
            # Without a callback for the password OpenSSL would ask on the terminal.
            context.load_cert_chain(self.certificate, self.certificate_key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use the certificate {self.certificate} with the key {self.certificate_key}: {error}"
            ) from error
        return context


def _no_password() -> bytes:
    raise ssl.SSLError("the key is encrypted; give one that is not")
