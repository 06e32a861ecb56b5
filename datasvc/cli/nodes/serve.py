"""`datasvc serve` and `datasvc top`: run a node's server, and show its live status."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from datasvc.cli.nodes.cache import open_existing_cache
from datasvc.cli.nodes.options import BudgetOption, CacheOption, CaOption, TlsNameOption, TokenOption, open_node
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, print_json, print_json_line, print_line
from datasvc.errors import ConfigError
from datasvc.sizes import parse_size

GraceOption = Annotated[float, typer.Option(help="Seconds for running transfers to complete after a stop signal.")]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Lowest level of messages on standard error: peers, staging jobs, start and stop."),
]


@options_from(
    "node.settings.NodeSettings",
    in_order="cache repo budget host port token_file tls_cert tls_key ca tls_name peers url tenant tenants "
    "max_connections peer_rate "
    "origin_rate decode_threads grace log_level as_json",
)
def serve(
    cache: CacheOption,
    repo: Annotated[
        list[str],
        typer.Option("--repo", envvar="DATASVC_REPO", help="Repository to read from; may be given several times."),
    ],
    budget: BudgetOption = None,
    token_file: TokenOption = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of this node; enables HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of --tls-cert, not encrypted.")] = None,
    ca: CaOption = None,
    tls_name: TlsNameOption = None,
    url: Annotated[
        str | None,
        typer.Option(help="URL of this node among --peers; default: found by the addresses of this machine."),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tenants with tokens of their own, as JSON: their quotas, and the repositories that they may read.",
        ),
    ] = None,
    peer_rate: Annotated[
        str | None, typer.Option(help="Maximum bytes per second to peers, such as 1GB; default: no limit.")
    ] = None,
    origin_rate: Annotated[
        str | None,
        typer.Option(help="Maximum bytes per second from the repositories, such as 500MB; default: no limit."),
    ] = None,
    grace: GraceOption = 20.0,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Serve this node's cache to other nodes, stage data on request and report metrics, until SIGTERM.

    Example: datasvc serve --cache /nvme/cache --repo s3://bucket/repo --budget 500GB

    Prints its address once it accepts connections. A single node does not need a server.
    """
    from datasvc.cache.peers.peer_source import TOKEN_VARIABLE
    from datasvc.node.http.auth import load_tenants, load_token
    from datasvc.node.server import serve as run_server
    from datasvc.node.settings import NodeSettings

    def ready(address: str) -> None:
        # `print_line` flushes: a program may wait for the address at the end of a pipe.
        facts = {"url": address, "cache": str(cache), "process": os.getpid()}
        print_json_line(facts) if as_json else print_line(f"serving {cache} at {address}")

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("datasvc").setLevel(log_level.upper())
    settings = NodeSettings(
        folder=cache,
        repositories=tuple(repo),
        token=load_token(token_file, os.environ.get(TOKEN_VARIABLE)),
        tenants=() if tenants is None else load_tenants(tenants),
        certificate=tls_cert,
        certificate_key=tls_key,
        ca_file=ca,
        tls_name=tls_name,
        budget=budget,
        own_url=url,
        peer_rate_bytes_s=None if peer_rate is None else parse_size(peer_rate),
        origin_rate_bytes_s=None if origin_rate is None else parse_size(origin_rate),
        grace_s=grace,
        **options,
    )
    if not run_server(settings, ready):
        # A normal exit would wait for threads that still wait for other nodes. Exit at once: the files of a cache
        # stay valid at whatever point a process ends. What was printed is flushed already.
        os._exit(0)


def top(
    node: Annotated[str | None, typer.Option(help="URL of a node's server, such as http://127.0.0.1:8765.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", envvar="DATASVC_CACHE", help="Folder of a local cache, used without --node."),
    ] = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    tls_name: TlsNameOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between updates.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the live status of a node: its cache, staging jobs, peers, and the processes that use it.

    Example: datasvc top --node http://127.0.0.1:8765

    Prints the status once if the output is not a terminal.
    """
    from datasvc.cli.nodes.top_view import status_text, watch

    if not interval > 0:  # true for NaN too
        raise ConfigError(f"--interval {interval} is out of range; expected more than 0 seconds")
    read_status = _status_reader(node, cache, token_file, ca, tls_name)
    if as_json:
        print_json(read_status())
    elif sys.stdout.isatty():
        watch(read_status, interval_s=interval, stop=threading.Event())
    else:
        typer.echo(status_text(read_status()))


def _status_reader(
    node: str | None, cache: Path | None, token_file: Path | None, ca: Path | None, tls_name: str | None
) -> Callable[[], dict[str, Any]]:
    """Return a function that reads the status of a node, or of a local cache if no node is given."""
    if node is not None:
        return open_node(node, token_file, ca, tls_name).status
    if cache is None:
        raise ConfigError("nothing to show; give --node URL for a node's server, or --cache FOLDER for a local cache")
    from datasvc.node.service import describe_cache

    local_cache = open_existing_cache(cache)
    return lambda: {"cache": describe_cache(local_cache.status())}
