"""`datasvc models find | sql`: search and query model versions by their metadata."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datasvc.cli.models.listing import print_versions
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    CsvOption,
    JsonOption,
    QueryArgument,
    RepoOption,
    check_one_format,
    print_line,
    print_query_result,
)
from datasvc.progress import entry_progress


@options_from(
    "models.search.query.find_versions",
    by=typer.Option(metavar="METRIC|EXPRESSION"),
    ascending=typer.Option("--ascending/--descending", help="Sort lowest or highest first."),
)
def find(
    repo: RepoOption,
    condition: Annotated[
        str, typer.Argument(metavar="[CONDITION]", help='SQL condition, such as "metrics.top1 > 0.75"; default: all.')
    ] = "true",
    *,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of versions; 0: all.")] = 50,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Find model versions by metrics, configuration, data, tags, code, step or message.

    Example: datasvc models find "metrics.top1 > 0.75 and 'imagenet@3' in data" --by loss --repo ./repo

    The condition is SQL over the columns model, version, created, tags, step, epoch, message, metrics, config,
    environment, execution, code, modules, ops, data, evaluation, parents, size_bytes, stored_bytes, num_tensors and
    num_nonfinite. modules and ops count classes of modules and operators: "ops.conv2d > 50".
    """
    from datasvc.models.registry.registry import describe_versions
    from datasvc.models.search import find_versions
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    with entry_progress("indexing versions") as progress:
        versions = find_versions(repository, condition, progress=progress, **options)
    shown = versions[: limit or None]
    print_versions(describe_versions(repository, shown), as_json=as_json)
    if len(shown) < len(versions):
        print_line(f"{len(versions) - len(shown)} more: --limit 0 prints all", err=True)


def sql(
    query: QueryArgument,
    repo: RepoOption,
    as_csv: CsvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Query the versions of all models with SQL.

    Example: datasvc models sql "select model, max(metrics.top1) from versions group by model" --repo ./repo

    The table `versions` has the columns that `datasvc models find --help` lists. The table `all_versions` also has
    removed versions, and a column `removed`.
    """
    from datasvc.models.search import query_versions
    from datasvc.repository import Repository

    check_one_format(as_csv=as_csv, as_json=as_json)
    with entry_progress("indexing versions") as progress:
        result = query_versions(Repository.open(repo), query, progress=progress)
    print_query_result(result, as_csv=as_csv, as_json=as_json)
