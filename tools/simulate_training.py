r"""Simulate training on up to thousands of ranks, from the profile of a step.

Stragglers (lognormal compute times), the buckets' all-reduces (rings, or hierarchical with `--inside-bandwidth`),
and loaders behind caches and an origin that all nodes share. Prints how long steps take and how well it scales:
efficiency is the step on one rank by the step there.

    python -m datasvc.trainer.launch -np 2 --no-prefix python -m datasvc.trainer profile \
        --data DATA --repo REPO --model resnet50 --json > profile.json
    python tools/simulate_training.py profile.json --ranks-per-node 8 --bandwidth 100Gbit/s --inside-bandwidth 200GB/s

What it does not know: how the network between nodes is shared with others, how fetching slows all-reduces down, and
ranks that are slow for longer than a step. A profile of one rank knows neither what a message costs nor how long
ranks wait for each other: `--jitter` says the latter, and the former is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasvc.errors import ConfigError, DatasvcError
from datasvc.sizes import parse_size
from datasvc.trainer.recipes.profiling.predict.cluster import (
    Cluster,
    add_cluster_options,
    parse_bandwidth,
    parse_clusters,
)
from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.profiling.predict.simulate import UNLIMITED, InputSystem, Training, jitter_of, simulate
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode

NODES = [2**power for power in range(13)]
OF_ORIGIN = ("data_size", "sample_size", "cache_size", "peers", "first_epoch")


def main() -> None:
    """Parse the command line, simulate, and print."""
    arguments = make_parser().parse_args()
    try:
        rows = run(arguments)
    except DatasvcError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(rows) if arguments.json else describe(rows))


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each number of nodes; see `describe`."""
    profile = read_profile(arguments.profile)
    costs = StepCosts.from_dict(profile["costs"])
    jitter = choose_jitter(arguments.jitter, costs, profile["world_size"])
    samples_from = choose_input(arguments, costs.samples)
    clusters = parse_clusters(arguments)
    training = Training(
        costs,
        Cluster(1, clusters[0].network),
        mode=StepMode(arguments.mode),
        jitter=jitter,
        prefetch=profile["prefetch"],
        samples_from=samples_from,
    )
    alone_s = float(np.mean(simulate(training, steps=arguments.steps, seed=arguments.seed)))
    rows = []
    for cluster in clusters:
        there = dataclasses.replace(training, cluster=dataclasses.replace(cluster, message_s=profile["message_s"]))
        steps_s = simulate(there, steps=arguments.steps, seed=arguments.seed)
        mean_s = float(steps_s.mean())
        p50_s, p95_s, p99_s = np.quantile(steps_s, (0.5, 0.95, 0.99)).tolist()
        rows.append(
            {
                "num_nodes": cluster.num_nodes,
                "world_size": cluster.world_size,
                "mean_s": mean_s,
                "p50_s": p50_s,
                "p95_s": p95_s,
                "p99_s": p99_s,
                "samples_per_s": costs.samples * cluster.world_size / mean_s,
                "efficiency": alone_s / mean_s,
                "jitter": jitter,
            }
        )
    return rows


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table."""
    lines = [f"jitter {rows[0]['jitter']:.3f}", f"{'nodes':>6}{'ranks':>7}"]
    lines[-1] += "".join(f"{name:>10}" for name in ("mean ms", "p50 ms", "p95 ms", "p99 ms")) + f"{'samples/s':>14}"
    lines[-1] += f"{'efficiency':>12}"
    for row in rows:
        times = "".join(f"{row[name] * 1e3:>10.2f}" for name in ("mean_s", "p50_s", "p95_s", "p99_s"))
        lines.append(
            f"{row['num_nodes']:>6}{row['world_size']:>7}{times}{row['samples_per_s']:>14,.0f}{row['efficiency']:>12.1%}"
        )
    return "\n".join(lines)


def choose_jitter(given: float | None, costs: StepCosts, world_size: int) -> float:
    """Return the jitter of compute times: as given, or else as it explains a profile's wait for the slowest rank."""
    if given is not None:
        return given
    if world_size == 1:
        raise ConfigError(
            "this profile is of one rank, which waits for nobody: profile two or more, or say --jitter, 0 for none; "
            "without, all ranks would be equally fast, and scale better than any do"
        )
    return jitter_of(costs, world_size)


def choose_input(arguments: argparse.Namespace, samples: int) -> InputSystem:
    """Return what feeds the loaders: the nodes' caches alone, unless there is an origin."""
    if arguments.origin is None:
        given = [name for name in OF_ORIGIN if getattr(arguments, name) not in (None, False)]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"without --origin all data are taken to be cached, and {options} would do nothing")
        return UNLIMITED
    if arguments.data_size is None or arguments.sample_size is None:
        raise ConfigError("--origin needs --data-size and --sample-size: how much is to come through it")
    return InputSystem(
        batch_bytes=samples * parse_size(arguments.sample_size),
        data_bytes=parse_size(arguments.data_size),
        cache_bytes=parse_size(arguments.cache_size or "0"),
        origin_bytes_per_s=parse_bandwidth(arguments.origin),
        shares_caches=arguments.peers,
        is_first_epoch=arguments.first_epoch,
    )


def read_profile(path: str) -> dict[str, Any]:
    """Return what `python -m datasvc.trainer profile --json` printed. Raises ConfigError: it is something else."""
    try:
        profile = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no profile: {error}") from error
    if not isinstance(profile, dict) or not {"costs", "world_size", "message_s", "prefetch"} <= profile.keys():
        raise ConfigError(f"{path} is no profile; write one with python -m datasvc.trainer profile --json")
    return profile


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="what python -m datasvc.trainer profile --json printed; -: standard input")
    add_cluster_options(parser, num_nodes=NODES, default_help="1 2 4 ... 4096")
    parser.add_argument("--mode", choices=list(StepMode), default=StepMode.OVERLAPPED, help="default: %(default)s")
    parser.add_argument("--jitter", type=float, help="of compute times, 0.1 for 10 %%; default: as in the profile")
    parser.add_argument("--origin", help="bandwidth of the repository, shared by all nodes; default: all is cached")
    parser.add_argument("--data-size", help="of the split: 150GB")
    parser.add_argument("--sample-size", help="of a stored sample: 110kB")
    parser.add_argument("--cache-size", help="of each node; default: none")
    parser.add_argument("--peers", action="store_true", help="nodes take from each other's caches")
    parser.add_argument("--first-epoch", action="store_true", help="caches are empty")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    return parser


if __name__ == "__main__":
    main()
