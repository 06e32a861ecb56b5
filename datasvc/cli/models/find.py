"""`datasvc models find`: versions by what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from datasvc.cli.models.listing import print_versions
from datasvc.cli.terminal.output import JsonOption, RepoOption


def find(
    condition: Annotated[str, typer.Argument(metavar="CONDITION", help="Such as \"top1 > 0.75 and tag = 'prod'\".")],
    repo: RepoOption,
    by: Annotated[str | None, typer.Option(metavar="FIELD", help="Highest first by this field.")] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Lowest first instead.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Print so many; 0: all.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Find versions of any model by metrics, configuration, data, tag, code, step or message.

    Example: datasvc models find "top1 > 0.75 and data = 'imagenet@3'" --repo ./repo

    Comparisons are = != < <= > >=, like 'a%', in ('a', 'b'), is null, is nan, joined by and, or, not and
    parentheses. Fields: name, version, step, created, message, parent, data, tag, code, code.dirty, removed,
    metrics.*, config.*, environment.*; metrics and configuration need no prefix.
    """
    from datasvc.models.registry.registry import describe_versions
    from datasvc.models.search import find_versions
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    with _progress() as report:
        found = find_versions(repository, condition, order_by=by, ascending=ascending, report=report)
    shown = found[: limit or None]
    print_versions(describe_versions(repository, shown), as_json=as_json)
    if len(shown) < len(found):
        typer.echo(f"{len(found) - len(shown)} more: --limit 0 prints all", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of entries while an index is made, on a terminal."""
    import sys

    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("indexing versions", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
