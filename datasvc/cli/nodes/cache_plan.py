"""`datasvc cache plan | placement`: forecast of a training run's traffic, and the owners of shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from datasvc.cli.terminal.output import JsonOption, RefArgument, RepoOption, print_facts, print_json, print_table
from datasvc.printable import count_text
from datasvc.sizes import format_size, parse_size

if TYPE_CHECKING:
    from datasvc.cache.forecast.cost import CostForecast
    from datasvc.cache.forecast.forecast import EpochForecast, Forecast
    from datasvc.cache.forecast.workload import Workload
    from datasvc.order import OrderConfig


def plan(
    ref: RefArgument,
    repo: RepoOption,
    budget: Annotated[
        str, typer.Option(help="Size of each node's cache, such as 50GB, or 10% of the size of this machine's disk.")
    ],
    nodes: Annotated[int, typer.Option(help="Number of training nodes, each with its own cache.")] = 1,
    split: Annotated[str, typer.Option(help="Split to train on.")] = "train",
    shuffle: Annotated[Literal["global", "windowed", "none"], typer.Option(help="Shuffle of the loader.")] = "global",
    lanes: Annotated[int, typer.Option(help="With windowed: parts of the data set that are read in parallel.")] = 1,
    block: Annotated[
        int | None,
        typer.Option(
            help="With windowed: samples permuted together within a lane. Without lanes and block: those that a "
            "loader derives."
        ),
    ] = None,
    sticky: Annotated[
        bool, typer.Option("--sticky", help="With windowed: each lane reads the same samples in every epoch.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the access order.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 256,
    ranks_per_node: Annotated[int, typer.Option(help="Training processes per node.")] = 1,
    prefetch: Annotated[int, typer.Option(help="Batches that each rank loads ahead.")] = 2,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether nodes fetch from each other.")] = True,
    images_per_second: Annotated[
        float | None, typer.Option(metavar="R", help="Images that one node trains per second.")
    ] = None,
    origin_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second from the origin to all nodes together, such as 2GB."),
    ] = None,
    peer_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes per second that each node receives from other nodes.")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Prices of requests and of bytes, in a TOML file: also forecast what the traffic costs.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="With --prices: epochs of the run, for the cost of all of them.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast the cache contents, the bandwidth needed from origin and peers, and whether training would starve.

    Example: datasvc cache plan pets@1 --budget 50GB --nodes 4 --shuffle windowed --lanes 4 --block 8192

    The exit status is 1 if the order's window exceeds the budget; the message states the bytes needed.
    """
    from datasvc.cache import parse_budget
    from datasvc.cache.forecast.cost import Prices
    from datasvc.cache.forecast.plan_options import PlanOptions, plan_run
    from datasvc.cache.forecast.workload import Rates
    from datasvc.errors import ConfigError
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset

    if epochs is not None and prices is None:
        raise ConfigError("--epochs is for the cost of a run, and --prices is not given; add --prices FILE.toml")
    table = open_dataset(Repository.open(repo), ref)[split].table
    origin_bytes_s, peer_bytes_s = (
        None if rate is None else float(parse_size(rate)) for rate in (origin_rate, peer_rate)
    )
    options = PlanOptions(
        # A percentage refers to the disk of a folder. No cache exists yet, so this is the disk of the current folder.
        budget_bytes=parse_budget(budget, Path.cwd()),
        nodes=nodes,
        shuffle=shuffle,
        lanes=lanes,
        block=block,
        sticky=sticky,
        seed=seed,
        batch_size=batch_size,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
        peers=peers,
        rates=Rates(images_per_second, origin_bytes_s, peer_bytes_s),
        prices=None if prices is None else Prices.read(prices),
        epochs=epochs,
    )
    result = plan_run(table.samples_per_shard, table.bytes_per_shard, options)
    if as_json:
        print_json(result.to_dict())
    else:
        _print_forecast(result.forecast, result.workload, images_per_second)
        if result.cost is not None:
            print_facts(_cost_facts(result.cost))


def placement(
    ref: RefArgument,
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
    from datasvc.cache.peers.shard_owners import count_shard_owners
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


def _print_forecast(result: Forecast, workload: Workload, images_per_second: float | None) -> None:
    print_facts(
        {
            "data": f"{count_text(result.num_samples, 'sample')} in {count_text(result.num_shards, 'shard')}, "
            f"{format_size(result.data_bytes)}",
            "nodes": f"{workload.nodes}, each reads {'its own lanes' if workload.splits_lanes else 'all shards'}",
            "order": _order_text(workload.order),
            "budget": f"{format_size(result.budget_bytes)} per node",
            "minimum": f"{format_size(result.window_bytes)} per node, the window of the access order",
            "resident": f"{format_size(result.resident_bytes)} per node after several epochs, "
            f"{result.resident_bytes / result.data_bytes:.0%} of the data",
            "first epoch": _epoch_facts(result.first_epoch, result.data_bytes, images_per_second),
            "each later epoch": _epoch_facts(result.later_epochs, result.data_bytes, images_per_second),
        }
    )


def _order_text(order: OrderConfig) -> str:
    if order.shuffle != "windowed":
        return order.shuffle or "that of the shard table"
    assert order.block is not None  # `plan` has chosen it
    return f"windowed, {count_text(order.lanes, 'lane')}, blocks of {count_text(order.block, 'sample')}"


def _epoch_facts(epoch: EpochForecast, data_bytes: int, images_per_second: float | None) -> dict[str, str]:
    facts = {
        "from the caches": f"{format_size(epoch.hit_bytes)} of {format_size(epoch.used_bytes)} that the nodes read",
        "from the origin": f"{format_size(epoch.origin_bytes)}, {epoch.origin_bytes / data_bytes:.2f} x the data",
        "from peers": format_size(epoch.peer_bytes),
    }
    if epoch.origin_rate is not None and epoch.peer_rate is not None:
        facts["bandwidth needed"] = (
            f"{format_size(epoch.origin_rate)}/s from the origin in total, {format_size(epoch.peer_rate)}/s from "
            "peers to each node"
        )
    if epoch.starves:
        facts["starves"] = (
            f"yes: the bandwidth suffices for {epoch.fed_samples_per_second:.0f} of {images_per_second:.0f} images/s "
            "per node"
        )
    elif epoch.starves is not None:
        facts["starves"] = "no"
    elif epoch.fed_samples_per_second is not None:  # a bandwidth is given, but not --images-per-second
        facts["trains at most"] = f"{epoch.fed_samples_per_second:.0f} images/s per node"
    return facts


def _cost_facts(cost: CostForecast) -> dict[str, str]:
    from datasvc.cache.forecast.cost import format_money

    epochs = {"cost of the first epoch": cost.first_epoch, "cost of each later epoch": cost.later_epochs}
    if cost.epochs is not None and cost.run is not None:
        epochs[f"cost of {count_text(cost.epochs, 'epoch')}"] = cost.run
    return {
        name: f"{format_money(epoch.total)} {cost.currency}: at most {count_text(epoch.num_requests, 'request')} "
        f"{format_money(epoch.requests)}, bytes from the origin {format_money(epoch.egress)}, "
        f"between nodes {format_money(epoch.peers)}"
        for name, epoch in epochs.items()
    }
