"""`datasvc models find`: search model versions by their metadata."""

from __future__ import annotations

from typing import Annotated

import typer

from datasvc.cli.models.listing import print_versions
from datasvc.cli.terminal.output import JsonOption, RepoOption
from datasvc.progress import entry_progress


def find(
    condition: Annotated[
        str, typer.Argument(metavar="CONDITION", help="Condition, such as \"top1 > 0.75 and tag = 'prod'\".")
    ],
    repo: RepoOption,
    by: Annotated[str | None, typer.Option(metavar="FIELD", help="Sort by this field, highest first.")] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Sort lowest first.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of versions; 0: all.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Find model versions by metrics, configuration, data, tag, code, step or message.

    Example: datasvc models find "top1 > 0.75 and data = 'imagenet@3'" --repo ./repo

    Comparisons are = != < <= > >=, like 'a%', in ('a', 'b'), is null, is nan, joined by and, or, not and
    parentheses. Fields: name, version, step, created, message, parent, data, tag, code, code.dirty, removed,
    metrics.*, config.*, environment.*; metrics and configuration need no prefix.
    """
    from datasvc.models.registry.registry import describe_versions
    from datasvc.models.search import find_versions
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    with entry_progress("indexing versions") as progress:
        versions = find_versions(repository, condition, order_by=by, ascending=ascending, progress=progress)
    shown = versions[: limit or None]
    print_versions(describe_versions(repository, shown), as_json=as_json)
    if len(shown) < len(versions):
        typer.echo(f"{len(versions) - len(shown)} more: --limit 0 prints all", err=True)
