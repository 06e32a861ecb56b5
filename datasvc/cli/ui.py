"""`datasvc ui`: the page in the browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json_line, print_line
from datasvc.extras import explain_missing


@options_from(
    "ui.settings.UiSettings",
    in_order="repo node runs host port token_file node_token_file prices open_browser as_json",
    prices=typer.Option(metavar="FILE.toml"),
)
def ui(
    repo: RepoOption,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="URL of a node's server to show; may be given several times."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", help="Folder with the ledgers of runs (--ledger of the training program)."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that users of the page need."),
    ] = None,
    node_token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the nodes; by default DATASVC_TOKEN.")
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser of this machine.")
    ] = True,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Show data sets, models, runs and nodes in the browser, until Ctrl-C. The page changes nothing.

    Example: datasvc ui --repo ./repo

    Prints its address once it accepts connections.
    """
    hide_pandas()
    from datasvc.cache.peers.peer_source import TOKEN_VARIABLE
    from datasvc.node.http.auth import load_token
    from datasvc.shards.ingestion.executors import keep_lean
    from datasvc.ui.settings import UiSettings

    with explain_missing("the page"):
        from datasvc.ui.server import serve

    settings = UiSettings(
        repository=repo,
        nodes=tuple(node or ()),
        node_token=load_token(node_token_file, os.environ.get(TOKEN_VARIABLE)),
        ledgers=runs,
        token=load_token(token_file, None),
        **options,
    )

    def ready(address: str) -> None:
        if as_json:
            print_json_line({"url": address, "process": os.getpid()})
            return
        print_line(f"the page is at {address}; stop with Ctrl-C")
        sys.stdout.flush()  # a program may wait for the address at the other end of a pipe
        if open_browser and sys.stdout.isatty():
            import threading
            import webbrowser

            # In a thread: a browser in the terminal, or a slow start of one, must not delay the first page.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    keep_lean()
    serve(settings, ready)


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:  # noqa: ARG002
        """Raise ModuleNotFoundError for pandas; other finders find the other modules."""
        # Not `sys.modules["pandas"] = None`: Arrow is compiled, and would take None for the module.
        if name == "pandas":
            raise ModuleNotFoundError("pandas is hidden from this program", name=name)


def hide_pandas() -> None:
    """Let no later import of this process find pandas. Only for a program that never needs it, before its imports."""
    sys.meta_path.insert(0, _NoPandas())
