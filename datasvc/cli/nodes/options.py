"""Options that several commands for nodes and caches share.

An option without a name here is named after the parameter of the command: `token_file` becomes `--token-file`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datasvc.node.client import NodeClient

CacheOption = Annotated[
    Path, typer.Option("--cache", envvar="DATASVC_CACHE", help="The cache's folder, on a local disk.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(help="Size of the cache, such as 50GB, or 10% for a part of the disk; stored in the cache."),
]
TenantOption = Annotated[
    str, typer.Option(envvar="DATASVC_TENANT", help="Tenant whose quota is used, see `datasvc cache quota`.")
]
PeersOption = Annotated[
    str | None,
    typer.Option(
        envvar="DATASVC_PEERS",
        help="Nodes to fetch from before the origin: http://a:8765,http://b:8765, file:PATH or dns:NAME:PORT; "
        "their token is read from DATASVC_TOKEN.",
    ),
]
TokenOption = Annotated[
    Path | None, typer.Option(help="File with the access token; default: the environment variable DATASVC_TOKEN.")
]
CaOption = Annotated[
    Path | None,
    typer.Option(envvar="DATASVC_CA", help="CA certificates that verify other nodes; default: those of the system."),
]
TlsNameOption = Annotated[
    str | None,
    typer.Option(
        envvar="DATASVC_TLS_NAME", help="Host name in the certificates of all nodes; default: each node's own."
    ),
]


def open_node(url: str, token_file: Path | None, ca: Path | None, tls_name: str | None) -> NodeClient:
    """Return a client of a node's server, with the token of the file, or of DATASVC_TOKEN."""
    return open_nodes([url], token_file, ca, tls_name)[url]


def open_nodes(
    urls: Iterable[str], token_file: Path | None, ca: Path | None, tls_name: str | None
) -> dict[str, NodeClient]:
    """Return a client for each URL. The file of the token is read once: it may be a pipe."""
    from datasvc.cache.peers.peer_source import TOKEN_VARIABLE
    from datasvc.node.client import NodeClient
    from datasvc.node.http.auth import load_token

    token = load_token(token_file, os.environ.get(TOKEN_VARIABLE))
    return {url: NodeClient(url, token=token, ca_file=ca, tls_name=tls_name) for url in urls}
