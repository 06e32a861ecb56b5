"""Settings of a node, from the options of `datasvc serve` or a job that runs its own nodes; and of its peers."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from datasvc.cache.catalogue.quotas import DEFAULT_TENANT
from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import TOKEN_VARIABLE, PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError
from datasvc.node.http.auth import Tenant, check_exposure, load_token

DEFAULT_PORT = 8765


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of one node, checked when they are created.

    Attributes:
        folder: folder of the cache that the node serves.
        repositories: URLs of the origins; the node reads no other repositories.
        host: address to listen on; an address other than loopback requires a token.
        port: port to listen on; 0: any free one.
        token: bearer token of all requests; None: no token is required.
        tenants: tenants with tokens of their own, see `load_tenants`; they require that the node has one.
        certificate: PEM file of the node's certificate and its issuers; None: plain HTTP.
        certificate_key: PEM file of the private key.
        ca_file: CA certificates for peers with "https"; None: those of the system.
        tls_name: name in the certificates of all peers; None: each certificate has the name of the peer's host.
        budget: budget of the cache, see `Cache`; None: unchanged.
        tenant: tenant whose quota is charged for the objects that the node fetches.
        peers: all nodes: http://a:8765,http://b:8765, file:PATH or dns:NAME:PORT.
        own_url: URL of this node as in `peers`; None: found by the addresses of this machine.
        max_connections: maximum number of open connections; further ones are refused.
        peer_rate_bytes_s: limit for sending to all peers together; None: no limit.
        origin_rate_bytes_s: limit for reading from all origins together; None: no limit.
        decode_threads: threads that decode images for the loaders of other machines; 0: none does.
        grace_s: time for running transfers to end after a request to stop.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
    """

    folder: Path
    repositories: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = field(default=None, repr=False)
    tenants: tuple[Tenant, ...] = ()
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
    decode_threads: int = 0
    grace_s: float = 20.0

    def __post_init__(self) -> None:
        check_exposure(self.host, self.token)
        if self.tenants and self.token is None:
            raise ConfigError("--tenants needs the token of the node too: give --token-file")
        if self.token in {tenant.token for tenant in self.tenants}:
            raise ConfigError("a tenant has the token of the node, which may read everything; make a new one")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is out of range; expected 0 to 65535")
        if self.max_connections < 1:
            raise ConfigError(f"the limit of {self.max_connections} connections is out of range; expected 1 or more")
        for rate in (self.peer_rate_bytes_s, self.origin_rate_bytes_s):
            if rate is not None and rate < 1:
                raise ConfigError(
                    f"the limit of {rate} bytes per second is out of range; expected 1 or more, or leave it out"
                )
        if self.decode_threads < 0:
            raise ConfigError(f"decode_threads is {self.decode_threads}; expected 0 or more")
        if self.grace_s < 0:
            raise ConfigError(f"the grace period of {self.grace_s} s is out of range; expected 0 or more")
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("TLS needs both --tls-cert and --tls-key; give both or neither")
        if self.peers is None and self.own_url is not None:
            raise ConfigError("--url identifies this node among --peers; give --peers too, or leave out --url")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of the listener; None for plain HTTP. Raise ConfigError if a file is not usable."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # No session tickets: a peer that waits for the first byte of a response would mistake a ticket for this byte.
        context.num_tickets = 0
        try:
            # Without a password callback, OpenSSL would prompt on the terminal.
            context.load_cert_chain(self.certificate, self.certificate_key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use the certificate {self.certificate} with the key {self.certificate_key}: {error}; "
                "expected PEM files that match"
            ) from error
        return context


def _no_password() -> bytes:
    raise ssl.SSLError("the key is encrypted; use an unencrypted key")


def open_peers(
    text: str, *, token_file: Path | None = None, ca_file: Path | None = None, tls_name: str | None = None
) -> Peers:
    """Return the peers that `text` lists, for `Cache(peers=...)`.

    Args:
        text: URLs of the nodes, "file:PATH" or "dns:NAME:PORT", see `parse_membership`.
        token_file: file with the token of the nodes; None: the variable `DATASVC_TOKEN`.
        ca_file: CA certificates that verify nodes with "https"; None: the variable `DATASVC_CA`, else the system's.
        tls_name: name in the certificates of all nodes; None: the variable `DATASVC_TLS_NAME`, else each node's host.

    Raises:
        ConfigError: `text`, the token or the certificates are not valid.
        UnavailableError: see `parse_membership`.
    """
    given = PeerSettings.from_environment()
    settings = PeerSettings(
        token=load_token(token_file, os.environ.get(TOKEN_VARIABLE)),
        ca_file=ca_file or given.ca_file,
        tls_name=tls_name or given.tls_name,
    )
    return Peers(parse_membership(text), settings)
