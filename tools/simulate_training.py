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
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError, DatasvcError
from datasvc.planning.cluster import Cluster, add_cluster_options, parse_bandwidth, parse_clusters
from datasvc.planning.prediction import costs_on
from datasvc.planning.step import StepCosts, StepMode, contention_s
from datasvc.sizes import parse_size

NODES = [2**power for power in range(13)]
OF_ORIGIN = ("data_size", "sample_size", "cache_size", "peers", "first_epoch")
Times = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class InputSystem:
    """The caches of the nodes, and the origin of the samples. All nodes together read each sample once in an epoch.

    Attributes:
        batch_bytes: size of one rank's batch, as it is stored in the shards.
        data_bytes: size of the whole split.
        cache_bytes: size of one node's cache; it holds the part of the data that fits.
        origin_bytes_per_s: bandwidth of the origin, for all nodes together.
        shares_caches: whether nodes read from each other before they read from the origin. Contention with
            all-reduces on the network is not modelled.
        is_first_epoch: whether the caches are still empty.
    """

    batch_bytes: int
    data_bytes: int
    cache_bytes: int
    origin_bytes_per_s: float
    shares_caches: bool = False
    is_first_epoch: bool = False

    def __post_init__(self) -> None:
        if self.batch_bytes < 0 or self.data_bytes < 1 or self.cache_bytes < 0 or not self.origin_bytes_per_s > 0:
            raise ConfigError(
                f"{self}: expected data and a bandwidth above 0, and a batch and a cache that are not below 0"
            )

    def fetch_s(self, cluster: Cluster) -> float:
        """Return the mean seconds in which a rank's batch is fetched, while all other ranks fetch theirs."""
        cache_bytes = 0 if self.is_first_epoch else self.cache_bytes
        # An epoch reads each sample once, so the hit rate of a cache is the share of the data that it holds.
        missed_here = 1.0 - min(1.0, cache_bytes / self.data_bytes)
        # Nodes that share their caches are assumed to keep different parts of the data.
        missed_everywhere = 1.0 - min(1.0, cluster.num_nodes * cache_bytes / self.data_bytes)
        from_origin = missed_everywhere if self.shares_caches else missed_here
        node_bytes = self.batch_bytes * cluster.ranks_per_node
        from_origin_s = node_bytes * cluster.num_nodes * from_origin / self.origin_bytes_per_s
        into_node_s = node_bytes * missed_here / cluster.network.bytes_per_s
        return max(from_origin_s, into_node_s)


UNLIMITED = InputSystem(batch_bytes=0, data_bytes=1, cache_bytes=1, origin_bytes_per_s=math.inf)
"""An input system that never delays a batch: everything is in the node's cache."""


@dataclass(frozen=True)
class Training:
    """Parameters of a simulation.

    Attributes:
        costs: costs of a step of one rank.
        cluster: cluster to simulate.
        mode: arrangement of the parts of a step; the module `step_time` describes the modes.
        jitter: standard deviation of the logarithm of a rank's compute time in a step; the mean does not change.
        prefetch: number of batches that a loader prefetches.
        samples_from: caches and stores that the loaders read from.

    Raises:
        ConfigError: `jitter` or `prefetch` is out of range.
    """

    costs: StepCosts
    cluster: Cluster
    mode: StepMode = StepMode.OVERLAPPED
    jitter: float = 0.0
    prefetch: int = 2
    samples_from: InputSystem = UNLIMITED

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 10:
            raise ConfigError(
                f"jitter is {self.jitter}; expected a number in [0, 10), for example 0.1 for ten percent"
            )
        if self.prefetch < 1:
            raise ConfigError(f"prefetch is {self.prefetch}; expected at least 1")


def simulate(training: Training, *, steps: int, seed: int = 0) -> Times:
    """Return the durations of `steps` steps, after some warm-up steps.

    A step starts when the last rank has ended the step before, and ends when the last rank has ended it.

    The symbols t_..., r_n and e_n are those of `datasvc.planning.step`. For rank i in step s, x(i, s) is the compute
    time of the rank in this step divided by its mean; it has a lognormal distribution. t_g is the time of the loader
    for a batch: t_a, or the time to fetch it if that is longer. D, B, F, E, s_n and e_n are points in time:

        D(i, s) = max(D(i, s-1), B(i, s-p)) + t_g                  the batch is ready; the loader prefetches p batches
        B(i, s) = max(E(i, s-1), D(i, s))                          the training thread takes the batch
        F(i, s) = B(i, s) + t_i + t_h2d + t_l + t_k                the forward pass starts if t_n = 0
        F(i, s) = max over j of B(j, s) + t_i + t_h2d + t_l + t_k + t_n      the same if the targets are summed before
        s_n = max(max over i of (F(i, s) + r_n x(i, s)), e_(n-1))  all-reduce n starts when it is ready on every rank
        e_n = s_n + t_c^(n)                                        all-reduce n ends
        E(i, s) = max(F(i, s) + (t_f + t_b) x(i, s), e_N) + t_u    the step ends

    These equations are for the mode "overlapped". In the modes "prefetched" and "serial", r_n is t_f + t_b for all n.
    In the mode "serial", t_g is 0, and t_io, or the time to fetch the batch if that is longer, replaces t_i.

    Ranks wait for each other only in all-reduces, so the simulation only evaluates these equations, step by step.
    Without jitter, the mean duration of a step is that of `step_time` there with t_w = 0. With jitter, t_w, the wait
    for the slowest rank, results from the simulation.

    Args:
        training: parameters of the simulation.
        steps: number of steps, at least 1.
        seed: seed of the jitter; equal seeds give equal durations.

    Returns:
        `float64[steps]`, seconds.

    Raises:
        ConfigError: `steps` is below 1.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; expected at least 1")
    costs, num_ranks = costs_on(training.costs, training.cluster), training.cluster.world_size
    fetch_s = training.samples_from.fetch_s(training.cluster)
    is_serial = training.mode is StepMode.SERIAL
    before_s = costs.transfer_s + costs.launch_s + contention_s(costs, training.mode)
    before_s += max(costs.io_s, fetch_s) if is_serial else costs.caller_s
    ahead_s = 0.0 if is_serial else max(costs.ahead_s, fetch_s)
    messages = sorted(costs.messages, key=lambda message: message.ready_s)

    generator = np.random.default_rng(seed)
    # The first steps are left out, because the buffers of the loaders are empty when the simulation starts.
    warm_up = training.prefetch + 2
    # The symbols of the equations: `ahead_s` is t_g, `slowness` is x, `batch_ready` is D, `begun` is B, `forward` is
    # F, `ready_s` is r_n, `reduced_s` is e_n and `ended` is E. `before_s` is F - B if t_n is 0. `taken` has the last
    # p values of B.
    batch_ready, ended = np.zeros(num_ranks), np.zeros(num_ranks)
    taken = [np.zeros(num_ranks)] * training.prefetch
    ends = []
    for _ in range(warm_up + steps):
        # The exponential of a normal number with mean -j^2 / 2 and deviation j has the mean 1 for every jitter j.
        slowness = np.exp(generator.normal(-(training.jitter**2) / 2, training.jitter, num_ranks))
        batch_ready = np.maximum(batch_ready, taken.pop(0)) + ahead_s
        begun = np.maximum(ended, batch_ready)
        taken.append(begun)
        forward = begun + before_s
        if costs.targets_s:
            forward = np.full(num_ranks, forward.max() + costs.targets_s)
        reduced_s = -math.inf
        for message in messages:
            ready_s = message.ready_s if training.mode is StepMode.OVERLAPPED else costs.compute_s
            reduced_s = max(float((forward + ready_s * slowness).max()), reduced_s) + message.reduce_s
        ended = np.maximum(forward + costs.compute_s * slowness, reduced_s) + costs.update_s
        ends.append(float(ended.max()))
    return np.diff(ends)[warm_up - 1 :]


def jitter_of(costs: StepCosts, world_size: int) -> float:
    """Return the jitter for which the simulated wait for the slowest rank is about the measured wait, `skew_s`.

    For a small jitter, the expected wait is the product of the jitter, the compute time and the expected maximum of N
    standard normal numbers. This maximum is about the quantile at (N - 3/8) / (N + 1/4) (Blom 1958). N is
    `world_size`, the number of ranks that were measured.
    """
    if world_size < 2:
        return 0.0
    expected_maximum = statistics.NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    return costs.skew_s / costs.compute_s / expected_maximum


if __name__ == "__main__":
    main()
