"""`datasvc cache plan`: what a training run will ask of caches, peers and origin."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json

if TYPE_CHECKING:
    from datasvc.cache.forecast.forecast import EpochForecast, Forecast
    from datasvc.cache.forecast.workload import Workload


class ShuffleName(StrEnum):
    """Shuffles by their names on the command line."""

    GLOBAL = "global"
    WINDOWED = "windowed"
    NONE = "none"


_SHUFFLES: Final[dict[ShuffleName, Literal["global", "windowed"] | None]] = {
    ShuffleName.GLOBAL: "global",
    ShuffleName.WINDOWED: "windowed",
    ShuffleName.NONE: None,
}


def plan(
    ref: Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")],
    repo: RepoOption,
    budget: Annotated[str, typer.Option(help="Of each node's cache, such as 50GB; 10% is of this machine's disk.")],
    nodes: Annotated[int, typer.Option(help="Nodes that train, each with a cache.")] = 1,
    split: Annotated[str, typer.Option(help="The split that is trained on.")] = "train",
    shuffle: Annotated[ShuffleName, typer.Option(help="As the loader's.")] = ShuffleName.GLOBAL,
    lanes: Annotated[int, typer.Option(help="windowed: places of the data set read side by side.")] = 1,
    block: Annotated[int | None, typer.Option(help="windowed: samples permuted together within a lane.")] = None,
    sticky: Annotated[bool, typer.Option("--sticky", help="windowed: lanes keep their shards.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Samples of a rank per step.")] = 256,
    ranks_per_node: Annotated[int, typer.Option(help="Processes that train on a node.")] = 1,
    prefetch: Annotated[int, typer.Option(help="Batches under way while a rank trains.")] = 2,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether nodes serve each other.")] = True,
    images_per_second: Annotated[float | None, typer.Option(metavar="R", help="That one node trains.")] = None,
    origin_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the origin gives all nodes in a second, such as 2GB.")
    ] = None,
    peer_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a node gets from the others in a second.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say before a run what its caches will hold, what origin and peers must give, and whether it will starve.

    Example: datasvc cache plan pets@1 --budget 50GB --nodes 4 --shuffle windowed --lanes 4 --block 8192

    Ends with status 1 and the number needed where the order's window does not fit into the budget.
    """
    from datasvc.cache import parse_budget
    from datasvc.cache.forecast.forecast import forecast
    from datasvc.cache.forecast.workload import Rates, Workload
    from datasvc.order import OrderConfig
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.sizes import parse_size

    order = OrderConfig(seed=seed, shuffle=_SHUFFLES[shuffle], lanes=lanes, block=block, sticky=sticky)
    shape = Workload(
        order,
        batch_size,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
        has_peers=peers and nodes > 1,
    )
    origin, between = (None if rate is None else float(parse_size(rate)) for rate in (origin_rate, peer_rate))
    rates = Rates(images_per_second, origin, between)
    table = open_dataset(Repository.open(repo), ref)[split].table
    budget_bytes = parse_budget(budget, Path.cwd())
    found = forecast(table.samples_per_shard, table.bytes_per_shard, budget_bytes, shape, rates)
    if as_json:
        print_json(asdict(found))
    else:
        _print_forecast(found, shape, rates.samples_per_second)


def _print_forecast(found: Forecast, shape: Workload, wanted: float | None) -> None:
    from datasvc.sizes import format_size

    print_facts(
        {
            "data": f"{found.num_samples} samples in {found.num_shards} shards, {format_size(found.data_bytes)}",
            "nodes": f"{shape.nodes}, each reads {'lanes of its own' if shape.splits_lanes else 'all shards'}",
            "budget": f"{format_size(found.budget_bytes)} on each node",
            "needed at once": f"{format_size(found.window_bytes)} on each node",
            "resident": f"{format_size(found.resident_bytes)} on each node after some epochs, "
            f"{found.resident_bytes / found.data_bytes:.0%} of the data",
            "first epoch": _epoch_facts(found.first_epoch, found.data_bytes, wanted),
            "each later epoch": _epoch_facts(found.later_epochs, found.data_bytes, wanted),
        }
    )


def _epoch_facts(epoch: EpochForecast, data_bytes: int, wanted: float | None) -> dict[str, str]:
    from datasvc.sizes import format_size

    facts = {
        "from the caches": f"{format_size(epoch.hit_bytes)} of {format_size(epoch.used_bytes)} that the nodes use",
        "from the origin": f"{format_size(epoch.origin_bytes)}, {epoch.origin_bytes / data_bytes:.2f} x the data",
        "from peers": format_size(epoch.peer_bytes),
    }
    if epoch.origin_rate is not None and epoch.peer_rate is not None:
        facts["bandwidth needed"] = (
            f"{format_size(epoch.origin_rate)}/s from the origin in all, {format_size(epoch.peer_rate)}/s from peers "
            "to each node"
        )
    if epoch.starves is not None:
        facts["starves"] = (
            f"yes: the bandwidth given feeds {epoch.fed_samples_per_second:.0f} of {wanted:.0f} images/s on each node"
            if epoch.starves
            else "no"
        )
    elif epoch.fed_samples_per_second is not None:
        facts["trains at most"] = f"{epoch.fed_samples_per_second:.0f} images/s on each node"
    return facts
