"""`datasvc plan`: what a training run would read, need and take, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.runs import PARSED_BY_PROGRAM
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, SamplesArgument, print_facts, print_json, print_table
from datasvc.printable import count_text
from datasvc.sizes import format_size, parse_size

if TYPE_CHECKING:
    from datasvc.planning.cache import EpochForecast
    from datasvc.planning.cost import CostForecast
    from datasvc.planning.run_plan import RunPlan
    from datasvc.planning.staging import StagingForecast, StagingOptions

app = typer.Typer(no_args_is_help=True, help="What a training run would need, before it starts.")


@app.command()
@options_from(
    "planning.run_plan.PlanOptions",
    in_order="ref repo budget nodes split shuffle lanes block sticky seed batch_size ranks_per_node prefetch peers "
    "images_per_second origin_rate peer_rate prices epochs as_json",
    budget_bytes=None,
)
def cache(
    ref: SamplesArgument,
    repo: RepoOption,
    budget: Annotated[
        str, typer.Option(help="Size of each node's cache, such as 50GB, or 10% of the size of this machine's disk.")
    ],
    split: Annotated[str, typer.Option(help="Split to train on.")] = "train",
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
    **options: Any,
) -> None:
    """Forecast the cache contents, the bandwidth needed from origin and peers, and whether training would starve.

    Example: datasvc plan cache pets@1 --budget 50GB --nodes 4 --shuffle windowed --lanes 4 --block 8192

    The exit status is 1 if the order's window exceeds the budget; the message states the bytes needed.
    """
    from datasvc.cache import parse_budget
    from datasvc.errors import ConfigError
    from datasvc.planning.cache import Rates
    from datasvc.planning.cost import Prices
    from datasvc.planning.run_plan import PlanOptions, plan_run
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset

    if epochs is not None and prices is None:
        raise ConfigError("--epochs is for the cost of a run, and --prices is not given; add --prices FILE.toml")
    table = open_dataset(Repository.open(repo), ref)[split].table
    rates = (None if rate is None else float(parse_size(rate)) for rate in (origin_rate, peer_rate))
    planned = PlanOptions(
        # A percentage refers to the disk of a folder. No cache exists yet, so this is the disk of the current folder.
        budget_bytes=parse_budget(budget, Path.cwd()),
        rates=Rates(images_per_second, *rates),
        prices=None if prices is None else Prices.read(prices),
        epochs=epochs,
        **options,
    )
    result = plan_run(table.positions_per_shard, table.bytes_per_shard, planned)
    if as_json:
        print_json(result.to_dict())
    else:
        _print_forecast(result, images_per_second)
        if result.cost is not None:
            print_facts(_cost_facts(result.cost))


@app.command(context_settings=PARSED_BY_PROGRAM)
def layouts(context: typer.Context) -> None:
    """Estimate memory and step time of every layout of a cluster, and rank them; `--help` lists the options.

    Example: datasvc plan layouts --model gpt2 --vocabulary 50257 --nodes 2 --gpus 8 --flops 300TFLOP/s
    """
    from datasvc.trainer.recipes.planning.command import main

    main(context.args)


@app.command()
@options_from(
    "planning.staging.StagingOptions",
    in_order="nodes size object_size origin_bandwidth request_bandwidth origin_latency bandwidth latency "
    "disk_bandwidth object_time share data_sets lose add slow hot budget one_owner seed as_json",
    size_bytes=None,
    object_bytes=None,
    object_s=None,
    budget_bytes=None,
)
def staging(
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Size of the data, such as 150GB or 10TB.")],
    nodes: Annotated[list[int], typer.Option(help="Number of nodes; repeat the option for several.", min=1)],
    origin_bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth of the origin to all nodes together: 20GB/s, 200Gbit/s.")
    ],
    object_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of each object.")] = "64MiB",
    bandwidth: Annotated[
        str,
        typer.Option(metavar="RATE", help="Bandwidth of the link of each node, in each direction: 10GbE, 25GB/s."),
    ] = "10GbE",
    request_bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bandwidth of one request to the origin.")
    ] = None,
    disk_bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bandwidth with which each node writes.")
    ] = None,
    origin_latency: Annotated[
        str, typer.Option(metavar="TIME", help="Time from a request to the origin until its first byte.")
    ] = "20ms",
    latency: Annotated[str, typer.Option(metavar="TIME", help="Latency of a message between nodes.")] = "50us",
    object_time: Annotated[
        str, typer.Option(metavar="TIME", help="Time of each object in which no bytes flow: hash, publication.")
    ] = "10ms",
    lose: Annotated[
        str, typer.Option(metavar="COUNT@PERCENT", help="Lose nodes when this part of the bytes has arrived: 1@50%.")
    ] = "0@50%",
    add: Annotated[
        str, typer.Option(metavar="COUNT@PERCENT", help="Add nodes when this part of the bytes has arrived.")
    ] = "0@50%",
    slow: Annotated[
        str, typer.Option(metavar="COUNT:FACTOR", help="Nodes whose link is slower by a factor: 1:4.")
    ] = "0:1",
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget of each node's cache; default: the data fits.")
    ] = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Forecast the time in which all nodes stage the same data, beside the bounds of origin, network and disks.

    Example: datasvc plan staging --bytes 150GB --nodes 8 --nodes 64 --origin-bandwidth 20GB/s --bandwidth 100GbE
    """
    from datasvc.planning.cluster import parse_bandwidth, parse_duration
    from datasvc.planning.staging import StagingOptions, parse_nodes, plan_staging

    planned = StagingOptions(
        size_bytes=parse_size(size),
        object_bytes=parse_size(object_size),
        origin_bytes_s=parse_bandwidth(origin_bandwidth),
        request_bytes_s=None if request_bandwidth is None else parse_bandwidth(request_bandwidth),
        origin_latency_s=parse_duration(origin_latency),
        node_bytes_s=parse_bandwidth(bandwidth),
        latency_s=parse_duration(latency),
        disk_bytes_s=None if disk_bandwidth is None else parse_bandwidth(disk_bandwidth),
        object_s=parse_duration(object_time),
        lose=parse_nodes(lose, "@", "%"),
        add=parse_nodes(add, "@", "%"),
        slow=parse_nodes(slow, ":"),
        budget_bytes=None if budget is None else parse_size(budget),
        **options,
    )
    forecasts = [plan_staging(number, planned) for number in nodes]
    if as_json:
        print_json([each.to_dict() for each in forecasts])
        return
    print_table(
        ["nodes", "staged", "bound", "ratio", "origin", "network", "disks", "origin reads", "from origin",
         "from peers", "busiest / mean"],
        [
            (each.num_nodes, f"{each.staged_s:.1f} s", f"{each.bound_s:.1f} s", f"{each.ratio:.2f}",
             f"{each.origin_s:.1f} s", f"{each.network_s:.1f} s", f"{each.disk_s:.1f} s", f"{each.origin_reads:.2f}",
             format_size(each.origin_bytes), format_size(each.peer_bytes), f"{each.busiest:.2f}")
            for each in forecasts
        ],
    )  # fmt: skip
    for each in forecasts:
        print_facts(_staging_facts(each, planned))


def _staging_facts(forecast: StagingForecast, options: StagingOptions) -> dict[str, str]:
    """Return what the table does not have, for options that need it."""
    facts = {}
    if forecast.num_simulated < forecast.num_objects:
        facts["simulated"] = f"{forecast.num_simulated} larger objects instead of {forecast.num_objects}"
    if options.data_sets > 1:
        facts["data sets staged"] = ", ".join(f"{seconds:.1f} s" for seconds in forecast.data_set_s)
    if forecast.hot_s is not None:
        facts["hot object on all nodes"] = f"{forecast.hot_s:.1f} s"
    return {f"{forecast.num_nodes} nodes, {name}": text for name, text in facts.items()}


def _print_forecast(plan: RunPlan, images_per_second: float | None) -> None:
    result, workload = plan.forecast, plan.workload
    print_facts(
        {
            "data": f"{count_text(result.num_samples, 'sample')} in {count_text(result.num_shards, 'shard')}, "
            f"{format_size(result.data_bytes)}",
            "nodes": f"{workload.nodes}, each reads {'its own lanes' if workload.splits_lanes else 'all shards'}",
            "order": plan.order_text,
            "budget": f"{format_size(result.budget_bytes)} per node",
            "minimum": f"{format_size(result.window_bytes)} per node, the window of the access order",
            "resident": f"{format_size(result.resident_bytes)} per node after several epochs, "
            f"{result.resident_bytes / result.data_bytes:.0%} of the data",
            "first epoch": _epoch_facts(result.first_epoch, result.data_bytes, images_per_second),
            "each later epoch": _epoch_facts(result.later_epochs, result.data_bytes, images_per_second),
        }
    )


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
    from datasvc.planning.cost import format_money

    return {
        f"cost of {name}": f"{format_money(epoch.total)} {cost.currency}: at most "
        f"{count_text(epoch.num_requests, 'request')} {format_money(epoch.requests)}, "
        f"bytes from the origin {format_money(epoch.egress)}, between nodes {format_money(epoch.peers)}"
        for name, epoch in cost.by_period().items()
    }
