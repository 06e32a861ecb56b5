"""Options that several commands for nodes and caches share.

An option without a name here is named after the parameter of the command: `token_file` becomes `--token-file`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
