"""`datasvc stage` and `datasvc cache`: stage data on this node and manage its cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from datasvc.cli.nodes.options import (
    BudgetOption,
    CacheOption,
    CaOption,
    PeersOption,
    TenantOption,
    TlsNameOption,
    TokenOption,
    open_node,
    open_nodes,
)
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import (
    JsonOption,
    RepoOption,
    SamplesArgument,
    SplitOption,
    print_facts,
    print_json,
    print_line,
    print_result,
    print_table,
)
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.printable import count_text
from datasvc.progress import byte_progress
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from datasvc.cache import Cache, StageReport
    from datasvc.cache.peers.peers import Peers
    from datasvc.shards import Split

NodeOption = Annotated[
    str | None,
    typer.Option(
        "--node", "--url", help="Stage on the node with this URL, by its server, such as http://node1:8765."
    ),
]
_TLS_OPTIONS: Final = ("ca", "tls_name")

app = typer.Typer(no_args_is_help=True, help="The cache of this node.")


def stage(
    context: typer.Context,
    refs_or_urls: Annotated[
        list[str],
        reference("NAME, NAME@VERSION, NAME@TAG; REF[CONDITION] or REF[VIEW]; or URLs of any files.", "REF|URL..."),
    ],
    cache: Annotated[
        Path | None,
        typer.Option("--cache", envvar="DATASVC_CACHE", help="The cache's folder, on a local disk; without --node."),
    ] = None,
    repo: Annotated[
        str | None, typer.Option(envvar="DATASVC_REPO", help="Repository: a folder or any fsspec URL.")
    ] = None,
    budget: BudgetOption = None,
    split: SplitOption = None,
    tenant: TenantOption = "default",
    peers: PeersOption = None,
    node: NodeOption = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    tls_name: TlsNameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy data sets, or any files by URL, into this node's cache; all bytes are verified, and the budget is kept.

    For files, the local paths are printed, one per line, in the order of the URLs.

    Example: datasvc stage pets@1 --repo s3://bucket/repo --cache /nvme/cache --budget 200GB

    Example: datasvc stage s3://bucket/model.bin --cache /nvme/cache

    Example: datasvc stage pets@1 --node http://node1:8765 --token-file token
    """
    from datasvc.cache import Cache

    num_urls = sum("://" in argument for argument in refs_or_urls)
    if 0 < num_urls < len(refs_or_urls):
        raise ConfigError("data sets and URLs cannot be staged by one command; run one command for each")
    if node is not None:
        _check_remote(context, node, num_urls)
        _stage_on_node(
            node, refs_or_urls, repo, split, token_file=token_file, ca=ca, tls_name=tls_name, as_json=as_json
        )
        return
    if cache is None:
        raise ConfigError("nowhere to stage; give --cache FOLDER for this machine, or --node URL for a node's server")
    if num_urls:
        if split is not None:
            raise ConfigError(f"--split {split} is given with URLs, which have no splits; leave it out")
        reason = "does not apply to URLs, which no peer is asked for"
        _refuse_options(context, ("peers", "token_file", *_TLS_OPTIONS), reason)
        _stage_files(refs_or_urls, Cache(cache, budget=budget, tenant=tenant), as_json=as_json)
        return
    if repo is None:
        raise ConfigError("no repository is given for the data set; use --repo or DATASVC_REPO")
    nodes = _open_peers(context, peers, token_file, ca, tls_name)
    title = ", ".join(refs_or_urls)
    splits = [each for ref in refs_or_urls for each in _open_splits(repo, ref, split)[1]]
    with (
        Cache(cache, budget=budget, tenant=tenant, peers=nodes) as opened,
        byte_progress(f"staging {title}") as progress,
    ):
        report = opened.stage(splits, progress)
    _print_staged(title, report, as_json=as_json)


def _stage_on_node(
    node: str,
    refs: Sequence[str],
    repo: str | None,
    split: str | None,
    *,
    token_file: Path | None,
    ca: Path | None,
    tls_name: str | None,
    as_json: bool,
) -> None:
    """Stage data sets on a node one after the other. Print a line for each, or all results as one JSON list."""
    client = open_node(node, token_file, ca, tls_name)
    jobs = []
    for ref in refs:
        with byte_progress(f"staging {ref} on {node}") as progress:
            job = client.stage(ref, repo=repo, split=split, progress=progress)
        jobs.append(job)
        if not as_json:
            sizes = {source: format_size(size_bytes) for source, size_bytes in job["bytes"].items()}
            print_line(
                f"staged {job['ref']} on {node}: {sizes['origin']} from the origin, {sizes['peer']} from peers, "
                f"{sizes['resident']} already in the cache"
            )
    if as_json:
        print_json(jobs)


def _check_remote(context: typer.Context, node: str, num_urls: int) -> None:
    """Raise ConfigError if the command line has what the server of a node does not take."""
    if num_urls:
        raise ConfigError("a node stages data sets, no files; leave out --node for URLs of files")
    _refuse_options(
        context, ("cache", "budget", "tenant", "peers"), "does not apply with --node, whose server has its own"
    )
    if node.lower().startswith("http://"):
        _refuse_options(context, _TLS_OPTIONS, f"does not apply to {node}, which has no TLS")


def _refuse_options(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Raise ConfigError if the command line has one of these parameters; `reason` says why it has no effect."""
    # Values from the environment are ignored: they may be meant for other commands.
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} {reason}; leave it out")


@app.command()
def status(cache: CacheOption, as_json: JsonOption = False) -> None:
    """Show the fill level of the cache, its pins, and the bytes of each tenant.

    Example: datasvc cache status --cache /nvme/cache
    """
    with open_existing_cache(cache) as opened:
        state = opened.status()
    if as_json:
        # `asdict` does not convert the jobs: they are named tuples, which JSON stores without the field names.
        print_json({**asdict(state), "jobs": [job._asdict() for job in state.jobs]})
        return
    disk_limit = ""
    if state.limit_bytes != state.budget_bytes:
        disk_limit = f", the disk has room for {format_size(state.limit_bytes)}"
    print_facts(
        {
            "folder": state.folder,
            "budget": f"{format_size(state.budget_bytes)}{disk_limit}",
            "resident": f"{format_size(state.resident_bytes)} in {count_text(state.num_resident, 'object')}",
            "reserved": format_size(state.reserved_bytes),
            "in use by running jobs": format_size(state.held_bytes),
            "pinned": format_size(state.pinned_bytes),
            "in quarantine": format_size(state.quarantined_bytes),
            "corrupt objects found": state.num_corrupt,
            "disk": f"{format_size(state.free_disk_bytes)} free of {format_size(state.disk_bytes)}",
        }
    )
    for name, pinned_bytes in state.pins.items():
        print_facts({"pin": f"{name}, {format_size(pinned_bytes)}"})
    rows = [
        (name, format_size(usage.used_bytes), format_size(usage.guaranteed_bytes), _maximum_text(usage.maximum_bytes))
        for name, usage in state.tenants.items()
    ]
    print_table(["tenant", "used", "guaranteed", "maximum"], rows)


@app.command()
def pin(
    context: typer.Context,
    ref: SamplesArgument,
    repo: RepoOption,
    cache: CacheOption,
    budget: BudgetOption = None,
    split: SplitOption = None,
    tenant: TenantOption = "default",
    peers: PeersOption = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    tls_name: TlsNameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stage a data set and protect it from eviction until `datasvc cache unpin`.

    Example: datasvc cache pin pets@1 --repo s3://bucket/repo --cache /nvme/cache
    """
    from datasvc.cache import Cache

    nodes = _open_peers(context, peers, token_file, ca, tls_name)
    version, splits = _open_splits(repo, ref, split)
    # Name the pin by the version, because a tag may move and `datasvc cache unpin` must still find the pin.
    name = version if split is None else f"{version}/{split}"
    with (
        Cache(cache, budget=budget, tenant=tenant, peers=nodes) as opened,
        byte_progress(f"staging {name}") as progress,
    ):
        report = opened.pin(name, splits, progress)
    _print_staged(name, report, as_json=as_json, verb="pinned")


@app.command()
def unpin(
    name: Annotated[str, typer.Argument(metavar="REF", help="Name of the pin, as listed by `datasvc cache status`.")],
    cache: CacheOption,
    as_json: JsonOption = False,
) -> None:
    """Remove a pin: its objects may be evicted again when space is needed.

    Example: datasvc cache unpin pets@1 --cache /nvme/cache
    """
    with open_existing_cache(cache) as opened:
        pinned = opened.unpin(name)
    facts = {"pin": name, "num_objects": len(pinned.objects), "size_bytes": pinned.size_bytes}
    line = f"unpinned {name}: {count_text(len(pinned.objects), 'object')}, {format_size(pinned.size_bytes)}"
    print_result(facts, line, as_json=as_json)


@app.command()
def scrub(cache: CacheOption, as_json: JsonOption = False) -> None:
    """Read and verify every cached object; corrupt ones are moved to quarantine, and fetched again when needed.

    The exit status is 3 if a corrupt object was found.

    Example: datasvc cache scrub --cache /nvme/cache
    """
    with open_existing_cache(cache) as opened, byte_progress("scrubbing") as progress:
        result = opened.scrub(progress)
        folder = opened.folder
    size = f"{count_text(result.num_checked, 'object')}, {format_size(result.checked_bytes)}"
    print_result(asdict(result), f"read {size}: {len(result.corrupt)} corrupt", as_json=as_json)
    if result.corrupt:
        mapped = f"; running jobs had {len(result.held)} of them mapped" if result.held else ""
        raise CorruptDataError(
            f"{count_text(len(result.corrupt), 'cached object')} did not match the digest{mapped}; moved to "
            f"{folder / 'quarantine'}, and fetched again when needed. Check the disk: it may be failing"
        )


@app.command()
def quota(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    cache: CacheOption,
    guaranteed: Annotated[
        str, typer.Option(help="Space reserved for the tenant even if unused, such as 100GB or 20%.")
    ] = "0",
    maximum: Annotated[
        str | None, typer.Option(help="Upper limit for the tenant; default: the whole budget.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Set the guaranteed and the maximum space of a tenant. Other tenants cannot evict objects within the guarantee.

    Example: datasvc cache quota vision --guaranteed 100GB --maximum 200GB --cache /nvme/cache
    """
    from datasvc.cache import Quota, parse_budget

    with open_existing_cache(cache) as opened:
        # `parse_budget` rejects 0, which is not a size of a cache. For a guarantee, 0 is valid.
        guaranteed_bytes = 0 if guaranteed == "0" else parse_budget(guaranteed, opened.folder)
        maximum_bytes = None if maximum is None else parse_budget(maximum, opened.folder)
        opened.set_quota(tenant, Quota(guaranteed_bytes, maximum_bytes))
    facts = {"tenant": tenant, "guaranteed_bytes": guaranteed_bytes, "maximum_bytes": maximum_bytes}
    line = f"tenant {tenant}: {format_size(guaranteed_bytes)} guaranteed, at most {_maximum_text(maximum_bytes)}"
    print_result(facts, line, as_json=as_json)


def _open_peers(
    context: typer.Context, peers: str | None, token_file: Path | None, ca: Path | None, tls_name: str | None
) -> Peers | None:
    if peers is None:
        reason = "is for the connections to peers, but there is no --peers"
        _refuse_options(context, ("token_file", *_TLS_OPTIONS), reason)
        return None
    from datasvc.node.settings import open_peers

    return open_peers(peers, token_file=token_file, ca_file=ca, tls_name=tls_name)


def open_existing_cache(cache: Path) -> Cache:
    """Return the cache in a folder.

    Raises:
        NotFoundError: the folder is not a cache.
    """
    # Check this first, because `Cache` would create a cache in the folder.
    if not (cache / "catalogue").is_dir():
        raise NotFoundError(
            f"{cache} is not a cache; create one with `datasvc stage REF --cache {cache} --budget SIZE`"
        )
    from datasvc.cache import Cache

    return Cache(cache)


def _open_splits(repo: str, ref: str, split: str | None) -> tuple[str, list[Split]]:
    """Return the version that `ref` resolves to, and a list of one split, or of all if `split` is None."""
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.versions.dataset import choose_split

    dataset = open_dataset(Repository.open(repo), ref)
    return dataset.title, choose_split(dataset, split)


def _stage_files(urls: list[str], opened: Cache, *, as_json: bool) -> None:
    from datasvc.cache.staged_files import stage_files

    with opened, byte_progress(f"staging {count_text(len(urls), 'file')}") as progress:
        files = stage_files(opened, urls, progress)
    if as_json:
        print_json([{**asdict(file), "path": str(file.path)} for file in files])
    else:
        for file in files:
            print_line(str(file.path))


def _print_staged(name: str, report: StageReport, *, as_json: bool, verb: str = "staged") -> None:
    # `asdict` leaves out these two, because they are properties.
    fetched = {"num_fetched": report.num_fetched, "fetched_bytes": report.fetched_bytes}
    from_peers = f", of which {format_size(report.peer_bytes)} from peers" if report.num_from_peers else ""
    line = (
        f"{verb} {name}: {count_text(report.num_fetched, 'shard')} fetched "
        f"({format_size(report.fetched_bytes)}{from_peers}), "
        f"{report.num_hits} already in the cache ({format_size(report.hit_bytes)})"
    )
    print_result({**asdict(report), **fetched}, line, as_json=as_json)


def _maximum_text(maximum_bytes: int | None) -> str:
    return "the whole budget" if maximum_bytes is None else format_size(maximum_bytes)


@app.command()
def placement(
    ref: SamplesArgument,
    repo: RepoOption,
    node: Annotated[
        list[str], typer.Option(metavar="URL", help="All nodes, in the spelling that they have of each other.")
    ],
    failed: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Those of them that do not respond.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which node owns how many shards, and so reads them from the origin for all nodes.

    Example: datasvc cache placement pets@1 --node http://a:8765 --node http://b:8765
    """
    from datasvc.cache.peers.placement import count_shard_owners
    from datasvc.repository import Repository

    found = count_shard_owners(Repository.open(repo), ref, node, failed=failed or ())
    if as_json:
        print_json(found)
        return
    rows = [
        (url, counts["owns"]["shards"], format_size(counts["owns"]["bytes"]), counts["serves"]["shards"],
         format_size(counts["serves"]["bytes"]))
        for url, counts in found["nodes"].items()
    ]  # fmt: skip
    print_table(["node", "owns shards", "bytes", "serves shards", "bytes"], rows)


@app.command()
def where(
    ref: SamplesArgument,
    repo: RepoOption,
    node: Annotated[
        list[str],
        typer.Option(metavar="URL", help="URL of a node, as `datasvc serve` prints it; may be given several times."),
    ],
    token_file: TokenOption = None,
    ca: CaOption = None,
    tls_name: TlsNameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much of a data-set version is already in the cache of each node, most first: where to start a job.

    Example: datasvc cache where pets@1 --node http://a:8765 --node http://b:8765
    """
    from datasvc.node.client import find_resident
    from datasvc.repository import Repository

    found = find_resident(Repository.open(repo), ref, open_nodes(node, token_file, ca, tls_name))
    if as_json:
        print_json(found)
        return
    rows = [
        (each["node"], each.get("error", f"{each['share']:.1%}"), each["shards"], format_size(each["bytes"]))
        for each in found["nodes"]
    ]
    print_table(["node", f"has of {found['dataset']}", "shards", "bytes"], rows)
