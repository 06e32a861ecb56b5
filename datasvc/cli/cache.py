"""`datasvc stage` and `datasvc cache status`: the cache of this node."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from datasvc.cli.output import JsonOption, RepoOption, byte_progress, print_facts, print_json

app = typer.Typer(no_args_is_help=True, help="The cache of this node.")

CacheOption = Annotated[
    Path, typer.Option("--cache", envvar="DATASVC_CACHE", help="The cache's folder, on a local disk.")
]


def stage(
    ref: Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")],
    repo: RepoOption,
    cache: CacheOption,
    budget: Annotated[str | None, typer.Option(help="Such as 50GB or 10%; kept for the node.")] = None,
    split: Annotated[str | None, typer.Option(help="One split; default all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a data set's shards onto this node, verified, never over the budget.

    Example: datasvc stage pets@1 --repo s3://bucket/repo --cache /nvme/cache --budget 200GB
    """
    from datasvc.cache import Cache
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.dataset import choose_split
    from datasvc.sizes import format_size

    splits = choose_split(open_dataset(Repository.open(repo), ref), split)
    with Cache(cache, budget=budget) as node, byte_progress(f"staging {ref}") as (set_total, advance):
        set_total(sum(each.table.size_bytes for each in splits))
        done = node.stage(splits, advance)
    if as_json:
        print_json(asdict(done))
    else:
        typer.echo(
            f"staged {ref}: {done.num_fetched} shards fetched ({format_size(done.fetched_bytes)}), "
            f"{done.num_hits} were there ({format_size(done.hit_bytes)})"
        )


@app.command()
def status(cache: CacheOption, as_json: JsonOption = False) -> None:
    """Show how full the cache is.

    Example: datasvc cache status --cache /nvme/cache
    """
    from datasvc.cache import Cache
    from datasvc.errors import NotFoundError
    from datasvc.sizes import format_size

    if not (cache / "catalogue").is_dir():
        raise NotFoundError(f"{cache} is no cache; `datasvc stage REF --cache {cache} --budget SIZE` makes one")
    with Cache(cache) as node:
        found = node.status()
    if as_json:
        print_json({"folder": found.folder, **asdict(found.usage)})
        return
    usage = found.usage
    print_facts(
        {
            "folder": found.folder,
            "budget": format_size(usage.budget_bytes),
            "resident": f"{format_size(usage.resident_bytes)} in {usage.num_resident} objects",
            "reserved": format_size(usage.reserved_bytes),
            "held by running jobs": format_size(usage.held_bytes),
            "corrupt objects found": usage.num_corrupt,
        }
    )
