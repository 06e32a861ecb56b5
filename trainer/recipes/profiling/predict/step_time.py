"""Model of the duration of a step, computed from the costs of its parts, for three arrangements of the parts.

The model follows Shi, Wang and Chu 2018 (arXiv:1711.05979). `StepCosts` defines the symbols of the parts. T is the
duration of a step of one rank of synchronous data-parallel training.

serial: the parts run one after the other.

    T = t_io + t_h2d + t_n + t_f + t_b + t_l + t_c + t_w + t_u

Three terms are not in the paper: t_n, for the sum of the ranks' numbers of targets, if these can differ; t_l, for the
launch of the all-reduces; and t_w, the wait for the slowest rank.

prefetched: the loader prefetches batches. Over many steps the slower of loader and training determines the duration:

    T = max(t_a, t_i + t_h2d + t_n + t_f + t_b + t_l + t_c + t_w + t_u + t_k),  t_k = k w_io

t_a is the time per batch of the loader alone, and t_i the part of its work in the training thread. The last
paragraph explains t_k. The paper has T = max(t_io + t_h2d, t_f + t_b + t_c), because there the loader thread also
copies the batch to the device. Here the training thread copies the batch, so t_h2d is in the second argument. Both
equations assume that at least one batch is prefetched.

overlapped: all-reduces also run during the backward pass ("wait-free back-propagation"). All-reduces n = 1 ... N are
ordered by r_n, the time from the start of the forward pass until their gradients are complete. They run one at a
time:

    s_n = max(r_n, e_(n-1)),  e_n = s_n + t_c^(n),  e_0 = 0
    t_c^no = max(0, e_N - t_f - t_b)
    T = max(t_a, t_i + t_h2d + t_n + t_f + t_b + t_l + t_c^no + t_w + t_u + t_k)
    t_k = k (w_io + w_c (t_c - t_c^no) / t_c)

With one all-reduce per layer, l = L ... 1, and r = t_f + t_b^(L) + ... + t_b^(l) for layer l, this is the recurrence
of the paper.

The terms with k are not in the paper. They model the competition of threads for processors: w_io and w_c are the
processor times of other threads for a batch and for all all-reduces, and k is the time that the training thread loses
per second of these processor times. With free processors k is 0, and overlapped <= prefetched <= serial. With one
processor for all threads of a rank k is 1, and overlap only uses the time in which that processor would be idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from datasvc.trainer.recipes.profiling.predict.costs import Message, StepCosts


class StepMode(StrEnum):
    """Arrangement of the parts of a step."""

    SERIAL = "serial"
    PREFETCHED = "prefetched"
    OVERLAPPED = "overlapped"


def step_time(costs: StepCosts, mode: StepMode) -> float:
    """Return the mean duration of a step in seconds, by the equations of the module."""
    if mode is StepMode.SERIAL:
        # Nothing runs concurrently, so no time is lost to other threads (t_k).
        return costs.io_s + _always_s(costs) + costs.reduce_s
    return max(costs.ahead_s, training_side_s(costs, mode))


def training_side_s(costs: StepCosts, mode: StepMode) -> float:
    """Return the duration of a step in seconds if batches are always ready.

    This is the second argument of the maximum in the equations of the module, so `mode` must not be SERIAL.
    """
    assert mode is not StepMode.SERIAL
    reduce_s = costs.reduce_s if mode is StepMode.PREFETCHED else exposed_reduce_s(costs)
    return costs.caller_s + _always_s(costs) + reduce_s + contention_s(costs, mode)


def contention_s(costs: StepCosts, mode: StepMode) -> float:
    """Return t_k: the seconds per step that the training thread loses to other threads."""
    match mode:
        case StepMode.SERIAL:
            beside_s = 0.0
        case StepMode.PREFETCHED:
            beside_s = costs.io_beside_s
        case StepMode.OVERLAPPED:
            reduce_s = costs.reduce_s
            # The share of the all-reduces that runs during the backward pass. Only this share slows the pass down.
            hidden_share = 1 - exposed_reduce_s(costs) / reduce_s if reduce_s else 0.0
            beside_s = costs.io_beside_s + costs.reduce_beside_s * hidden_share
    return costs.contention * beside_s


def exposed_reduce_s(costs: StepCosts) -> float:
    """Return t_c^no: the seconds of all-reduces after the end of the backward pass."""
    # Limited to reduce_s: the difference can exceed reduce_s by a rounding error, because it adds in another order.
    return min(costs.reduce_s, max(0.0, last_reduced_s(costs.messages) - costs.compute_s))


def last_reduced_s(messages: Iterable[Message]) -> float:
    """Return e_N: the seconds from the start of the forward pass to the end of the last all-reduce; 0 for none."""
    end_s = 0.0
    # One all-reduce runs at a time, in the order in which the gradients become ready.
    for message in sorted(messages, key=lambda message: message.ready_s):
        end_s = max(message.ready_s, end_s) + message.reduce_s
    return end_s


def _always_s(costs: StepCosts) -> float:
    """Return t_h2d + t_n + t_f + t_b + t_l + t_w + t_u, which the training thread needs in every arrangement."""
    until_backward_s = costs.transfer_s + costs.targets_s + costs.compute_s
    return until_backward_s + costs.launch_s + costs.skew_s + costs.update_s
