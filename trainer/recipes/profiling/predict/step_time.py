"""How long a step takes, from what its parts cost, for three ways to arrange them.

After Shi, Wang and Chu 2018 (arXiv:1711.05979). For one rank of synchronous data-parallel training:

serial: one thing after the other,

    T = t_io + t_h2d + t_n + t_f + t_b + t_l + t_c + t_w + t_u

where t_n, adding up the targets of all ranks where they differ, t_l, launching all-reduces, and t_w, waiting for the
slowest rank, are ours.

prefetched: the loader works ahead. In the long run neither side can be faster than the other, so

    T = max(t_a, t_i + t_h2d + t_n + t_f + t_b + t_l + t_c + t_w + t_u + t_k),  t_k = k w_io

with t_a seconds per batch of the loader by itself, and t_i what of the loader's work stays in the training thread.
The paper writes max(t_io + t_h2d, t_f + t_b + t_c): there the thread that reads copies to the device too, and does
all of its work beside the training. Our training thread copies the batch itself, so t_h2d is on the other side. Both
need room for at least one batch between the two sides.

overlapped: all-reduces run beside the backward pass as well ("wait-free back-propagation"). Messages n = 1 ... N in
the order in which their gradients are complete, at r_n seconds from the beginning of the forward pass; one channel:

    s_n = max(r_n, e_(n-1)),  e_n = s_n + t_c^(n),  e_0 = 0
    t_c^no = max(0, e_N - t_f - t_b)
    T = max(t_a, t_i + t_h2d + t_n + t_f + t_b + t_l + t_c^no + t_w + t_u + t_k)
    t_k = k (w_io + w_c (t_c - t_c^no) / t_c)

With one message per layer, l = L ... 1, and r of layer l being t_f + t_b^(L) + ... + t_b^(l), this is the paper's
recurrence.

The terms with k are ours too, for machines on which "beside" is not free: w_io and w_c are the processor time of
other threads for a batch and for all messages, and k what the training thread loses for each second of it. With
processors to spare k is 0, and overlapped <= prefetched <= serial; with one processor for all threads of a rank it is
1, and what is gained is only the time in which that processor would have waited.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from datasvc.trainer.recipes.profiling.predict.costs import Message, StepCosts


class StepMode(StrEnum):
    """How the parts of a step are arranged."""

    SERIAL = "serial"
    PREFETCHED = "prefetched"
    OVERLAPPED = "overlapped"


def step_time(costs: StepCosts, mode: StepMode) -> float:
    """Return the seconds of a step in the long run; see the module for the equations."""
    if mode is StepMode.SERIAL:
        return costs.io_s + _passes_s(costs) + costs.reduce_s
    return max(costs.ahead_s, training_side_s(costs, mode))


def training_side_s(costs: StepCosts, mode: StepMode) -> float:
    """Return what a step takes where batches are always ready: the right side of the maximum, not of serial steps."""
    assert mode is not StepMode.SERIAL
    reduce_s = costs.reduce_s if mode is StepMode.PREFETCHED else exposed_reduce_s(costs)
    return costs.caller_s + _passes_s(costs) + reduce_s + contention_s(costs, mode)


def contention_s(costs: StepCosts, mode: StepMode) -> float:
    """Return what the training thread loses in a step to work beside it."""
    match mode:
        case StepMode.SERIAL:
            beside_s = 0.0
        case StepMode.PREFETCHED:
            beside_s = costs.io_beside_s
        case StepMode.OVERLAPPED:
            reduce_s = costs.reduce_s
            hidden = 1 - exposed_reduce_s(costs) / reduce_s if reduce_s else 0.0
            beside_s = costs.io_beside_s + costs.reduce_beside_s * hidden
    return costs.contention * beside_s


def exposed_reduce_s(costs: StepCosts) -> float:
    """Return t_c^no: how much of the all-reduces the backward pass does not hide."""
    # The messages added up in another order may seem a little longer than they are.
    return min(costs.reduce_s, max(0.0, last_reduced_s(costs.messages) - costs.compute_s))


def last_reduced_s(messages: Iterable[Message]) -> float:
    """Return e_N: from the beginning of the forward pass to the end of the last all-reduce."""
    end_s = 0.0
    for message in sorted(messages, key=lambda each: each.ready_s):
        end_s = max(message.ready_s, end_s) + message.reduce_s
    return end_s


def _passes_s(costs: StepCosts) -> float:
    """Return what every arrangement takes in the training thread: t_h2d + t_n + t_f + t_b + t_l + t_w + t_u."""
    passes_s = costs.transfer_s + costs.targets_s + costs.compute_s
    return passes_s + costs.launch_s + costs.skew_s + costs.update_s
