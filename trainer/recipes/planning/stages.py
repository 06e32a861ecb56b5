"""Pipelines: which parts of the model each rank has, how many micro-batches it holds, and how long it is idle.

Schedules: GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473), ZB-V (Qi et al. 2023, arXiv:2401.10241). Symbols: p ranks, m micro-batches, v stages of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasvc.trainer.recipes.layouts.layout import stages_per_rank


@dataclass(frozen=True)
class RankParts:
    """The parts of the model that a rank of a pipeline has.

    Attributes:
        blocks: number of blocks.
        has_first: whether it has the part before the blocks.
        has_last: whether it has the part after the blocks, and the loss.
    """

    blocks: int
    has_first: bool
    has_last: bool


def divide_parts(layers: int, pipeline: int, schedule: str) -> list[RankParts]:
    """Return the parts of each rank of a pipeline, in order, with equal numbers of blocks.

    `pipeline` times the stages of a rank must divide `layers`. Under ZB-V the stages go down the ranks and back up,
    so that the first rank has the first and the last part of the model.
    """
    last = 0 if schedule == "zbv" else pipeline - 1
    return [RankParts(layers // pipeline, rank == 0, rank == last) for rank in range(pipeline)]


def held_micro_batches(schedule: str, rank: int, pipeline: int, num_micro_batches: int) -> float:
    """Return the largest number of micro-batches whose activations a rank holds at the same time.

    The activations of one of its v stages count as 1/v. Without a pipeline the number is 1.
    """
    if pipeline == 1:
        return 1
    match schedule:
        case "gpipe":
            return num_micro_batches
        case "interleaved":
            # The warm-up of Narayanan et al.: 2 (p - rank - 1) + (v - 1) p forward passes of stages, and one more.
            num_stages = stages_per_rank(schedule)
            held = 2 * (pipeline - rank - 1) + (num_stages - 1) * pipeline + 1
            return min(held / num_stages, num_micro_batches)
        case "zbv":
            return min(pipeline, num_micro_batches)
    return min(pipeline - rank, num_micro_batches)


def idle_s(schedule: str, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """Return the bubble: the seconds of a step in which the slowest rank has no work.

    Args:
        schedule: one of `PIPELINE_SCHEDULES`.
        forward_s: forward pass of one micro-batch on each rank.
        backward_s: backward pass of one micro-batch on each rank.

    Returns:
        At least 0. With equal ranks: (p - 1) (f + b) for GPipe and 1F1B, 1/v of it for interleaved 1F1B, and
        (p - 1) (f - b / 2) for ZB-V, whose backward pass consists of two equal halves.
    """
    # The first micro-batch passes all ranks; from then on the slowest rank sets the pace.
    totals_s = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    if schedule == "zbv":
        half_s = [forward - backward / 2 for forward, backward in zip(forward_s, backward_s, strict=True)]
        return max(0.0, sum(half_s) - max(half_s))
    return (sum(totals_s) - max(totals_s)) / stages_per_rank(schedule)
