"""Simulation of data-parallel training on many ranks, with stragglers, all-reduces and prefetching loaders.

The simulation is a pure function of its arguments and the seed. For rank i in step s, let x be the compute time of
the rank in this step divided by its mean (lognormal):

    D(i, s) = max(D(i, s-1), B(i, s-p)) + a              the batch is ready; the loader prefetches p batches
    B(i, s) = max(E(i, s-1), D(i, s))                    the training thread takes the batch
    F(i, s) = B(i, s) + t_i + t_h2d + t_l + t_k          the forward pass starts; if the targets are summed first:
    F(i, s) = max over j of (B(j, s) + t_i + t_h2d) + t_n + t_l + t_k
    s_n = max(max over i of F(i, s) + r_n x, e_(n-1))    all-reduce n starts when it is ready on every rank
    e_n = s_n + t_c^(n)                                  all-reduce n ends
    E(i, s) = max(F(i, s) + (t_f + t_b) x, e_N) + t_u    the step ends

Ranks wait for each other only in all-reduces, so evaluating these equations step by step is the complete simulation.
Without jitter, the mean step equals `step_time`, except for t_w, the wait for the slowest rank: here t_w results from
the jitter.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster
from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.profiling.predict.input_system import UNLIMITED, InputSystem
from datasvc.trainer.recipes.profiling.predict.predict import costs_on
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode, contention_s

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Training:
    """Parameters of a simulation.

    Attributes:
        costs: costs of a step of one rank.
        cluster: cluster to simulate; None: use the measured communication costs, at `world_size` ranks.
        world_size: number of ranks; used only without a cluster.
        mode: arrangement of the parts of a step.
        jitter: standard deviation of the logarithm of a rank's compute time in a step; the mean does not change.
        prefetch: number of batches that a loader prefetches.
        samples_from: caches and stores that the loaders read from.
        is_first_epoch: True: the caches are empty.

    Raises:
        ConfigError: `jitter`, `prefetch` or `world_size` is out of range.
    """

    costs: StepCosts
    cluster: Cluster | None
    world_size: int = 1
    mode: StepMode = StepMode.OVERLAPPED
    jitter: float = 0.0
    prefetch: int = 2
    samples_from: InputSystem = UNLIMITED
    is_first_epoch: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 10:
            raise ConfigError(
                f"jitter is {self.jitter}; expected a number in [0, 10), for example 0.1 for ten percent"
            )
        if self.prefetch < 1 or self.world_size < 1:
            raise ConfigError(f"prefetch is {self.prefetch} and world_size {self.world_size}; expected at least 1")


def simulate(training: Training, *, steps: int, seed: int = 0) -> Times:
    """Return the durations of `steps` steps of the slowest rank, after some warm-up steps.

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
    costs = training.costs if training.cluster is None else costs_on(training.costs, training.cluster)
    num_ranks = training.world_size if training.cluster is None else training.cluster.world_size
    fetch_s = 0.0 if training.cluster is None else _fetch_s(training, training.cluster)
    is_serial = training.mode is StepMode.SERIAL
    before_s = costs.transfer_s + costs.launch_s + contention_s(costs, training.mode)
    before_s += max(costs.io_s, fetch_s) if is_serial else costs.caller_s
    ahead_s = 0.0 if is_serial else max(costs.ahead_s, fetch_s)
    ready_s, reduce_s = _messages(costs, training.mode)

    generator = np.random.default_rng(seed)
    warm_up = training.prefetch + 2
    batch_ready, ended = np.zeros(num_ranks), np.zeros(num_ranks)
    taken = [np.zeros(num_ranks)] * training.prefetch
    ends = []
    for _ in range(warm_up + steps):
        # exp(N(-s^2 / 2, s)) has the mean 1 for every jitter s.
        slowness = np.exp(generator.normal(-(training.jitter**2) / 2, training.jitter, num_ranks))
        batch_ready = np.maximum(batch_ready, taken.pop(0)) + ahead_s
        begun = np.maximum(ended, batch_ready)
        taken.append(begun)
        forward = begun + before_s
        if costs.targets_s:
            forward = np.full(num_ranks, forward.max() + costs.targets_s)
        last_s = _all_reduced(forward, slowness, ready_s, reduce_s)
        ended = np.maximum(forward + costs.compute_s * slowness, last_s) + costs.update_s
        ends.append(float(ended.max()))
    return np.diff(ends)[warm_up - 1 :]


def jitter_of(costs: StepCosts, world_size: int) -> float:
    """Return the jitter for which the simulated wait for the slowest rank equals the measured one.

    The expected maximum of N normal numbers is about the quantile (N - 3/8) / (N + 1/4) (Blom 1958).
    """
    if world_size < 2 or not costs.compute_s:
        return 0.0
    expected = statistics.NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    return costs.skew_s / costs.compute_s / expected


def _fetch_s(training: Training, cluster: Cluster) -> float:
    return training.samples_from.fetch_s(cluster, is_first_epoch=training.is_first_epoch)


def _messages(costs: StepCosts, mode: StepMode) -> tuple[Times, Times]:
    """Return when each all-reduce is ready, seconds from the start of the forward pass, and its duration."""
    messages = sorted(costs.messages, key=lambda message: message.ready_s)
    ready_s = [message.ready_s if mode is StepMode.OVERLAPPED else costs.compute_s for message in messages]
    return np.array(ready_s), np.array([message.reduce_s for message in messages])


def _all_reduced(forward: Times, slowness: Times, ready_s: Times, reduce_s: Times) -> float:
    """Return the time at which the last all-reduce ends, or minus infinity if there is none."""
    end_s = -np.inf
    for ready, takes in zip(ready_s, reduce_s, strict=True):
        end_s = max(float((forward + ready * slowness).max()), end_s) + takes
    return end_s
