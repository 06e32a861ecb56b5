"""`datasvc serve` and `datasvc top`: the process of a node, and a live view of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from datasvc.cli.nodes.cache import BudgetOption, CacheOption, open_existing_cache
from datasvc.cli.terminal.output import JsonOption, print_json, print_json_line

TokenOption = Annotated[
    Path | None, typer.Option(help="File with the token that callers must know; default the variable DATASVC_TOKEN.")
]
CaOption = Annotated[Path | None, typer.Option(help="Certificates that vouch for other nodes; default the system's.")]


def serve(
    cache: CacheOption,
    repo: Annotated[
        list[str], typer.Option("--repo", envvar="DATASVC_REPO", help="Repository to read from; repeat for more.")
    ],
    budget: BudgetOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine it needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8765,
    token_file: TokenOption = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of this node: talk HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of --tls-cert, not encrypted.")] = None,
    ca: CaOption = None,
    tls_name: Annotated[
        str | None, typer.Option(help="Name in the certificates of all nodes; default each host's.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="The nodes: http://a:8765,http://b:8765 or file:PATH or dns:NAME:PORT.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Which of --peers this node is; default looked up.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose quota is used.")] = "default",
    max_connections: Annotated[int, typer.Option(help="More are refused.")] = 256,
    peer_rate: Annotated[
        str | None, typer.Option(help="Most bytes a second to peers, such as 1GB; default no cap.")
    ] = None,
    origin_rate: Annotated[
        str | None, typer.Option(help="Most bytes a second from the repositories, such as 500MB; default no cap.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that transfers under way get at the end.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Serve this node's cache to other nodes, stage on request, and say how it is, until SIGTERM.

    Example: datasvc serve --cache /nvme/cache --repo s3://bucket/repo --budget 500GB

    Prints its address once it listens. One node alone needs no server.
    """
    from datasvc.node.http.auth import TOKEN_VARIABLE, load_token
    from datasvc.node.server import serve as run_server
    from datasvc.node.settings import NodeSettings
    from datasvc.sizes import parse_size

    settings = NodeSettings(
        folder=cache,
        repositories=tuple(repo),
        host=host,
        port=port,
        token=load_token(token_file, os.environ.get(TOKEN_VARIABLE)),
        certificate=tls_cert,
        certificate_key=tls_key,
        ca_file=ca,
        tls_name=tls_name,
        budget=budget,
        tenant=tenant,
        peers=peers,
        own_url=url,
        max_connections=max_connections,
        peer_rate_bytes_s=None if peer_rate is None else parse_size(peer_rate),
        origin_rate_bytes_s=None if origin_rate is None else parse_size(origin_rate),
        grace_s=grace,
    )

    def ready(address: str) -> None:
        if as_json:
            print_json_line({"url": address, "cache": str(cache), "process": os.getpid()})
        else:
            typer.echo(f"serving {cache} at {address}")
            sys.stdout.flush()

    if not run_server(settings, ready):
        # Threads that wait for others would keep the process for as long; a cache survives its end at any instant.
        sys.stdout.flush()
        os._exit(0)


def top(
    node: Annotated[
        str | None, typer.Option(help="URL of a node that serves, such as http://127.0.0.1:8765.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", envvar="DATASVC_CACHE", help="Or the folder of this machine's cache.")
    ] = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Watch a node: cache, staging, peers and the processes that use it; once only where the output is no terminal.

    Example: datasvc top --node http://127.0.0.1:8765
    """
    from datasvc.cli.nodes.top_view import status_text, watch
    from datasvc.errors import ConfigError

    if not interval > 0:
        raise ConfigError(f"an interval of {interval} s is out of range; expected more than 0")
    look = _looking(node, cache, token_file, ca)
    if as_json:
        print_json(look())
    elif sys.stdout.isatty():
        watch(look, interval_s=interval, stop=threading.Event())
    else:
        typer.echo(status_text(look()))


def _looking(
    node: str | None, cache: Path | None, token_file: Path | None, ca: Path | None
) -> Callable[[], dict[str, Any]]:
    """Return what asks a node, or reads a cache's folder where no node is named."""
    from datasvc.errors import ConfigError

    if node is not None:
        from datasvc.node.client import NodeClient
        from datasvc.node.http.auth import TOKEN_VARIABLE, load_token

        return NodeClient(node, token=load_token(token_file, os.environ.get(TOKEN_VARIABLE)), ca_file=ca).status
    if cache is None:
        raise ConfigError("what to watch? --node URL of one that serves, or --cache FOLDER on this machine")
    from datasvc.node.status import describe_cache

    opened = open_existing_cache(cache)
    return lambda: {"cache": describe_cache(opened.status())}
