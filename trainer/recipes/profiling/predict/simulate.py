"""Simulates data-parallel training on many ranks, with stragglers, all-reduces and prefetching loaders.

The simulation is a pure function of its arguments and the seed. `tools/simulate_training.py` is its command line.

The symbols t_..., r_n and e_n are those of the module `step_time`. For rank i in step s, x(i, s) is the compute time
of the rank in this step divided by its mean; it has a lognormal distribution. t_g is the time of the loader for a
batch: t_a, or the time to fetch the batch if that is longer. D, B, F, E, s_n and e_n are points in time:

    D(i, s) = max(D(i, s-1), B(i, s-p)) + t_g                  the batch is ready; the loader prefetches p batches
    B(i, s) = max(E(i, s-1), D(i, s))                          the training thread takes the batch
    F(i, s) = B(i, s) + t_i + t_h2d + t_l + t_k                the forward pass starts if t_n = 0
    F(i, s) = max over j of B(j, s) + t_i + t_h2d + t_l + t_k + t_n      the same if the targets are summed before
    s_n = max(max over i of (F(i, s) + r_n x(i, s)), e_(n-1))  all-reduce n starts when it is ready on every rank
    e_n = s_n + t_c^(n)                                        all-reduce n ends
    E(i, s) = max(F(i, s) + (t_f + t_b) x(i, s), e_N) + t_u    the step ends

These equations are for the mode "overlapped". In the modes "prefetched" and "serial", r_n is t_f + t_b for all n. In
the mode "serial", t_g is 0, and t_io, or the time to fetch the batch if that is longer, replaces t_i.

Ranks wait for each other only in all-reduces, so the simulation only evaluates these equations, step by step. Without
jitter, the mean duration of a step is that of `step_time` with t_w = 0. With jitter, t_w, the wait for the slowest
rank, results from the simulation.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster
from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.profiling.predict.predict import costs_on
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode, contention_s

Times = npt.NDArray[np.float64]


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
