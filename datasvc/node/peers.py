"""Open the peers that an option of a command or a recipe lists, with the settings of the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.node.http.auth import TOKEN_VARIABLE, load_token

CA_VARIABLE: Final = "DATASVC_CA"
TLS_NAME_VARIABLE: Final = "DATASVC_TLS_NAME"


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
    # An empty variable counts as not set.
    ca_variable = os.environ.get(CA_VARIABLE)
    settings = PeerSettings(
        token=load_token(token_file, os.environ.get(TOKEN_VARIABLE)),
        ca_file=ca_file or (Path(ca_variable) if ca_variable else None),
        tls_name=tls_name or os.environ.get(TLS_NAME_VARIABLE) or None,
    )
    return Peers(parse_membership(text), settings)
