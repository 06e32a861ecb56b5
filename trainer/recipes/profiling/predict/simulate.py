"""Simulates training on many ranks step by step: stragglers, messages, loaders that work ahead. Pure and seeded.

For rank i in step s, with x its compute time in that step by the mean one, lognormal:

    D(i, s) = max(D(i, s-1), B(i, s-p)) + a              its batch is there; the loader works p batches ahead
    B(i, s) = max(E(i, s-1), D(i, s))                    it takes the batch
    F(i, s) = B(i, s) + t_i + t_h2d + t_l + t_k          its forward pass begins; where targets are added up first:
    F(i, s) = max over j of (B(j, s) + t_i + t_h2d) + t_n + t_l + t_k
    s_n = max(max over i of F(i, s) + r_n x, e_(n-1))    message n goes when the last rank has it
    e_n = s_n + t_c^(n)
    E(i, s) = max(F(i, s) + (t_f + t_b) x, e_N) + t_u    the step ends

Each is one event; as ranks only wait for each other through messages, evaluating the equations step by step is the
whole simulation. Without jitter a step takes in the long run what `step_time` says, but for the wait for the slowest
rank, t_w, which here follows from the jitter.
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
    """What is simulated.

    Attributes:
        costs: of a step of one rank.
        cluster: that runs it; None: the communication is as it was measured, at `world_size`.
        world_size: ranks; only without a cluster.
        mode: how a step is arranged.
        jitter: standard deviation of the logarithm of a rank's compute time in a step; its mean stays.
        prefetch: batches that a loader works ahead.
        samples_from: what feeds the loaders.
        is_first_epoch: caches are empty.
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
            raise ConfigError(f"jitter is {self.jitter}; expected at least 0, and 0.1 for ten percent")
        if self.prefetch < 1 or self.world_size < 1:
            raise ConfigError(f"prefetch is {self.prefetch} and world_size {self.world_size}; expected at least 1")


def simulate(training: Training, *, steps: int, seed: int = 0) -> Times:
    """Return how long each of so many steps takes, after some that warm up; of the slowest rank.

    Args:
        training: what is simulated.
        steps: at least 1.
        seed: equal seeds give equal steps.

    Returns:
        `float64[steps]`, seconds.
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
    batch_there, ended = np.zeros(num_ranks), np.zeros(num_ranks)
    taken = [np.zeros(num_ranks)] * training.prefetch
    ends = []
    for _ in range(warm_up + steps):
        # Mean 1 whatever the jitter: exp(N(-s^2 / 2, s)).
        slowness = np.exp(generator.normal(-(training.jitter**2) / 2, training.jitter, num_ranks))
        batch_there = np.maximum(batch_there, taken.pop(0)) + ahead_s
        begun = np.maximum(ended, batch_there)
        taken.append(begun)
        forward = begun + before_s
        if costs.targets_s:
            forward = np.full(num_ranks, forward.max() + costs.targets_s)
        last_s = _all_reduced(forward, slowness, ready_s, reduce_s)
        ended = np.maximum(forward + costs.compute_s * slowness, last_s) + costs.update_s
        ends.append(float(ended.max()))
    return np.diff(ends)[warm_up - 1 :]


def jitter_of(costs: StepCosts, world_size: int) -> float:
    """Return the jitter that makes ranks wait for the slowest as long as was measured.

    The largest of N normal numbers is expected at the quantile (N - 3/8) / (N + 1/4) (Blom 1958).
    """
    if world_size < 2 or not costs.compute_s:
        return 0.0
    expected = statistics.NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    return costs.skew_s / costs.compute_s / expected


def _fetch_s(training: Training, cluster: Cluster) -> float:
    return training.samples_from.fetch_s(cluster, is_first_epoch=training.is_first_epoch)


def _messages(costs: StepCosts, mode: StepMode) -> tuple[Times, Times]:
    """Return when each message is ready, from the beginning of the forward pass, and how long it takes, in order."""
    messages = sorted(costs.messages, key=lambda message: message.ready_s)
    ready_s = [message.ready_s if mode is StepMode.OVERLAPPED else costs.compute_s for message in messages]
    return np.array(ready_s), np.array([message.reduce_s for message in messages])


def _all_reduced(forward: Times, slowness: Times, ready_s: Times, reduce_s: Times) -> float:
    """Return when the last message is reduced; before everything, where there are none."""
    end_s = -np.inf
    for ready, takes in zip(ready_s, reduce_s, strict=True):
        end_s = max(float((forward + ready * slowness).max()), end_s) + takes
    return end_s
