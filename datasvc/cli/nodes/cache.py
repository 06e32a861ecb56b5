"""`datasvc stage` and `datasvc cache`: the cache of this node."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.nodes.cache_plan import plan
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json, print_table, staging_progress
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.cache import Cache, StageReport
    from datasvc.shards import Split

app = typer.Typer(no_args_is_help=True, help="The cache of this node.")
app.command()(plan)

CacheOption = Annotated[
    Path, typer.Option("--cache", envvar="DATASVC_CACHE", help="The cache's folder, on a local disk.")
]
BudgetOption = Annotated[str | None, typer.Option(help="Such as 50GB or 10%; kept for the node.")]
TenantOption = Annotated[
    str, typer.Option(envvar="DATASVC_TENANT", help="Whose quota is used, see `datasvc cache quota`.")
]
PeersOption = Annotated[
    str | None,
    typer.Option(
        envvar="DATASVC_PEERS",
        help="Nodes to ask before the origin: http://a:8765,http://b:8765, file:PATH or dns:NAME:PORT; the token is "
        "read from DATASVC_TOKEN.",
    ),
]
SplitOption = Annotated[str | None, typer.Option(help="One split; default all.")]
RefArgument = Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")]


def stage(
    wanted: Annotated[
        list[str], typer.Argument(metavar="REF|URL...", help="NAME, NAME@VERSION or NAME@TAG; or URLs of any files.")
    ],
    cache: CacheOption,
    repo: Annotated[
        str | None, typer.Option(envvar="DATASVC_REPO", help="Repository: a folder or any fsspec URL.")
    ] = None,
    budget: BudgetOption = None,
    split: SplitOption = None,
    tenant: TenantOption = "default",
    peers: PeersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring data sets, or ordinary files by their URLs, onto this node: verified, never over the budget.

    Files come out as plain paths, one a line, in the order of the URLs.

    Example: datasvc stage pets@1 --repo s3://bucket/repo --cache /nvme/cache --budget 200GB

    Example: datasvc stage s3://bucket/model.bin --cache /nvme/cache
    """
    from datasvc.errors import ConfigError

    are_files = {"://" in each for each in wanted}
    if are_files == {True, False}:
        raise ConfigError("data sets and files by URL are staged by a command each")
    if are_files == {True}:
        if split is not None:
            raise ConfigError("--split belongs to data sets")
        _stage_files(wanted, cache, budget, tenant, as_json=as_json)
        return
    if repo is None:
        raise ConfigError("a data set lies in a repository: name it with --repo or DATASVC_REPO")
    splits = [each for ref in wanted for each in _splits(repo, ref, split)]
    with _open(cache, budget=budget, tenant=tenant, peers=peers) as node:
        done = _stage_splits(node, splits, ", ".join(wanted))
    _print_staged(", ".join(wanted), done, as_json=as_json)


@app.command()
def status(cache: CacheOption, as_json: JsonOption = False) -> None:
    """Show how full the cache is, and who holds what.

    Example: datasvc cache status --cache /nvme/cache
    """
    from datasvc.sizes import format_size

    with open_existing_cache(cache) as node:
        found = node.status()
    if as_json:
        print_json({**asdict(found), "jobs": [job._asdict() for job in found.jobs]})
        return
    cut = (
        "" if found.limit_bytes == found.budget_bytes else f", the disk has room for {format_size(found.limit_bytes)}"
    )
    print_facts(
        {
            "folder": found.folder,
            "budget": f"{format_size(found.budget_bytes)}{cut}",
            "resident": f"{format_size(found.resident_bytes)} in {found.num_resident} objects",
            "reserved": format_size(found.reserved_bytes),
            "held by running jobs": format_size(found.held_bytes),
            "pinned": format_size(found.pinned_bytes),
            "in quarantine": format_size(found.quarantined_bytes),
            "corrupt objects found": found.num_corrupt,
        }
    )
    for name, pinned in found.pins.items():
        print_facts({"pin": f"{name}, {format_size(pinned)}"})
    rows = [
        (name, format_size(each.used_bytes), format_size(each.guaranteed_bytes), _maximum(each.maximum_bytes))
        for name, each in found.tenants.items()
    ]
    print_table(["tenant", "used", "guaranteed", "maximum"], rows)


@app.command()
def pin(
    ref: RefArgument,
    repo: RepoOption,
    cache: CacheOption,
    budget: BudgetOption = None,
    split: SplitOption = None,
    tenant: TenantOption = "default",
    peers: PeersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stage a data set and keep it on this node until `datasvc cache unpin`.

    Example: datasvc cache pin pets@1 --repo s3://bucket/repo --cache /nvme/cache
    """
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.versions.dataset import choose_split

    dataset = open_dataset(Repository.open(repo), ref)
    ref = str(dataset.resolved)
    name = ref if split is None else f"{ref}/{split}"
    with _open(cache, budget=budget, tenant=tenant, peers=peers) as node:
        done = _stage_splits(node, choose_split(dataset, split), name, pinned=True)
    _print_staged(name, done, as_json=as_json, what_was_done="pinned")


@app.command()
def unpin(
    name: Annotated[str, typer.Argument(metavar="REF", help="As `datasvc cache status` lists it.")],
    cache: CacheOption,
    as_json: JsonOption = False,
) -> None:
    """Let what was pinned be evicted when its room is needed.

    Example: datasvc cache unpin pets@1 --cache /nvme/cache
    """
    from datasvc.sizes import format_size

    with open_existing_cache(cache) as node:
        done = node.unpin(name)
    if as_json:
        print_json({"pin": name, "num_objects": len(done.objects), "size_bytes": done.size_bytes})
    else:
        typer.echo(f"unpinned {name}: {len(done.objects)} objects, {format_size(done.size_bytes)}")


@app.command()
def scrub(cache: CacheOption, as_json: JsonOption = False) -> None:
    """Read every cached object again; those whose bytes have changed are moved away and fetched when wanted.

    The exit status is 3 where any was found.

    Example: datasvc cache scrub --cache /nvme/cache
    """
    from datasvc.errors import CorruptDataError
    from datasvc.sizes import format_size

    with open_existing_cache(cache) as node, byte_progress("scrubbing") as (set_total, advance):
        set_total(node.status().resident_bytes)
        done = node.scrub(advance)
        folder = node.folder
    if as_json:
        print_json(asdict(done))
    else:
        typer.echo(f"read {done.num_checked} objects, {format_size(done.checked_bytes)}: {len(done.corrupt)} corrupt")
    if done.corrupt:
        mapped = f"; running jobs had {len(done.held)} of them mapped" if done.held else ""
        raise CorruptDataError(
            f"{len(done.corrupt)} cached objects had changed bytes{mapped}; they lie in {folder / 'quarantine'} and "
            "are fetched again when they are wanted. Look at the disk: it may be failing"
        )


@app.command()
def quota(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    cache: CacheOption,
    guaranteed: Annotated[str, typer.Option(help="What is its own, used or not, such as 100GB or 20%.")] = "0",
    maximum: Annotated[str | None, typer.Option(help="Its most; default: as much as there is.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Set what a tenant is guaranteed and may use at most. Nobody is evicted below the guarantee.

    Example: datasvc cache quota vision --guaranteed 100GB --maximum 200GB --cache /nvme/cache
    """
    from datasvc.cache import Quota, parse_budget
    from datasvc.sizes import format_size

    with open_existing_cache(cache) as node:
        least = 0 if guaranteed == "0" else parse_budget(guaranteed, node.folder)
        most = None if maximum is None else parse_budget(maximum, node.folder)
        node.set_quota(tenant, Quota(least, most))
    if as_json:
        print_json({"tenant": tenant, "guaranteed_bytes": least, "maximum_bytes": most})
    else:
        typer.echo(f"tenant {tenant}: {format_size(least)} guaranteed, at most {_maximum(most)}")


def _open(cache: Path, *, budget: str | None, tenant: str, peers: str | None = None) -> Cache:
    from datasvc.cache import Cache

    if peers is None:
        return Cache(cache, budget=budget, tenant=tenant)
    from datasvc.node.peers import open_peers

    return Cache(cache, budget=budget, tenant=tenant, peers=open_peers(peers))


def open_existing_cache(cache: Path) -> Cache:
    """Return the cache in a folder. Raises NotFoundError: there is none, and looking at it shall not make one."""
    from datasvc.errors import NotFoundError

    if not (cache / "catalogue").is_dir():
        raise NotFoundError(f"{cache} is no cache; `datasvc stage REF --cache {cache} --budget SIZE` makes one")
    return _open(cache, budget=None, tenant="default")


def _splits(repo: str, ref: str, split: str | None) -> list[Split]:
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.versions.dataset import choose_split

    return choose_split(open_dataset(Repository.open(repo), ref), split)


def _stage_splits(node: Cache, splits: list[Split], what: str, *, pinned: bool = False) -> StageReport:
    with staging_progress(f"staging {what}", sum(each.table.size_bytes for each in splits)) as report:
        return node.pin(what, splits, report) if pinned else node.stage(splits, report)


def _stage_files(urls: list[str], cache: Path, budget: str | None, tenant: str, *, as_json: bool) -> None:
    from datasvc.cache.staged_files import stage_files

    with (
        _open(cache, budget=budget, tenant=tenant) as node,
        staging_progress(f"staging {len(urls)} files", None) as report,
    ):
        staged = stage_files(node, urls, report)
    if as_json:
        print_json([{**asdict(each), "path": str(each.path)} for each in staged])
    else:
        typer.echo("\n".join(str(each.path) for each in staged))


def _print_staged(what: str, done: StageReport, *, as_json: bool, what_was_done: str = "staged") -> None:
    from datasvc.sizes import format_size

    if as_json:
        facts: dict[str, Any] = {**asdict(done), "num_fetched": done.num_fetched, "fetched_bytes": done.fetched_bytes}
        print_json(facts)
        return
    peers = f", of which {format_size(done.peer_bytes)} from peers" if done.num_from_peers else ""
    typer.echo(
        f"{what_was_done} {what}: {done.num_fetched} shards fetched ({format_size(done.fetched_bytes)}{peers}), "
        f"{done.num_hits} were there ({format_size(done.hit_bytes)})"
    )


def _maximum(maximum_bytes: int | None) -> str:
    from datasvc.sizes import format_size

    return "all there is" if maximum_bytes is None else format_size(maximum_bytes)
