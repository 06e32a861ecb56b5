"""Candidates: every layout of a number of ranks, with the settings on which its memory and time depend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.planning.layout import PIPELINE_SCHEDULES, Layout, ModelSizes, check_layout, divisors


@dataclass(frozen=True)
class Candidate:
    """A layout, and settings with which to run it.

    Attributes:
        layout: number of ranks of each axis.
        micro_batch: samples of one forward and backward pass of a data rank.
        num_micro_batches: forward and backward passes of a step.
        recompute: whether blocks are computed again in the backward pass, so that only their inputs are kept.
        schedule: schedule of the pipeline; without effect for one stage.
        zero: stage of ZeRO; 0 for layouts that run without FSDP.
    """

    layout: Layout
    micro_batch: int = 1
    num_micro_batches: int = 1
    recompute: bool = False
    schedule: str = "1f1b"
    zero: int = 0

    @property
    def num_shards(self) -> int:
        """Number of ranks that store one copy of the parameters together.

        A context group counts too, because its ranks divide parameters and gradients like those of a shard group.
        """
        return self.layout.shard * self.layout.context


@dataclass(frozen=True)
class ExecutionTraits:
    """How ranks compute and communicate. The default is that of GPUs with NCCL.

    Attributes:
        overlap: share of the computation during which collectives of gradients and parameters make progress; 0 if the
            two compete for the same processors.
        processors_per_rank: processors that a rank has, at most 1: 0.5 if two ranks share one. Compute times must
            then be those of ranks that all compute at the same time. While a rank waits, others use its processors.
        scatters_by_all_reduce: whether a reduce-scatter is an all-reduce, of which each rank keeps its part, as in
            torch's gloo.

    Raises:
        ConfigError: a value is out of range.
    """

    overlap: float = 1.0
    processors_per_rank: float = 1.0
    scatters_by_all_reduce: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap}; expected a number from 0, nothing, to 1, all")
        if not 0 < self.processors_per_rank <= 1:
            raise ConfigError(
                f"processors_per_rank is {self.processors_per_rank}; expected more than 0, and at most 1"
            )


GPUS = ExecutionTraits()
GLOO = ExecutionTraits(overlap=0.0, scatters_by_all_reduce=True)


ZERO_STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Choices:
    """Settings to try with each layout.

    Attributes:
        micro_batches: samples of a pass of a data rank; empty: every power of two that divides its batch.
        recompute: whether to compute blocks again in the backward pass.
        schedules: schedules of pipelines.
        zero_stages: ZeRO stages of the axis `shard`; stage 1 is tried with `data` and `shard` only.
    """

    micro_batches: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = (False, True)
    schedules: tuple[str, ...] = PIPELINE_SCHEDULES
    zero_stages: tuple[int, ...] = ZERO_STAGES

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.micro_batches):
            raise ConfigError(f"micro_batch is {min(self.micro_batches)}; expected at least 1")


def enumerate_layouts(world_size: int) -> Iterator[Layout]:
    """Yield every layout of `world_size` ranks once; those that divide the model least come first.

    Raises:
        ConfigError: `world_size` is below 1.
    """
    if world_size < 1:
        raise ConfigError(f"there are {world_size} ranks; expected at least 1")
    for context in divisors(world_size):
        for pipeline in divisors(world_size // context):
            for tensor in divisors(world_size // context // pipeline):
                num_data_ranks = world_size // context // pipeline // tensor
                for shard in divisors(num_data_ranks):
                    yield Layout(num_data_ranks // shard, shard, tensor, pipeline, context)


def enumerate_candidates(
    layout: Layout, *, global_batch: int, sizes: ModelSizes, choices: Choices
) -> tuple[list[Candidate], str]:
    """Return the candidates of a layout, and the reason if there are none, else "".

    Args:
        layout: layout to run.
        global_batch: samples of all ranks per step.
        sizes: sizes of the model, which the layout must divide evenly.
        choices: settings to try.
    """
    batch = global_batch // layout.num_data_ranks
    micro_batches = (
        choices.micro_batches or tuple(size for size in _powers_of_two(batch) if batch % size == 0) or (1,)
    )
    candidates, reason = [], ""
    # Settings without effect on a layout have one value.
    for schedule, zero, recompute, size in itertools.product(
        choices.schedules if layout.pipeline > 1 else ("1f1b",),
        _zero_stages(layout, choices),
        choices.recompute if sizes.layers is not None else (False,),
        micro_batches,
    ):
        try:
            check_layout(
                layout,
                world_size=layout.size,
                global_batch=global_batch,
                micro_batch=size,
                sizes=sizes,
                pipeline_schedule=schedule,
            )
        except ConfigError as error:
            reason = reason or str(error)
            continue
        micro_batch = min(size, batch)
        # Rounded up, because the last pass takes the remaining samples.
        candidates.append(Candidate(layout, micro_batch, -(-batch // micro_batch), recompute, schedule, zero))
    if not candidates and not reason:
        reason = f"zero 1 is for the axes data and shard only; allow --zero 2 or 3 for layout {layout}"
    return candidates, "" if candidates else reason


def _zero_stages(layout: Layout, choices: Choices) -> tuple[int, ...]:
    has_whole_model = layout.size == layout.num_data_ranks  # each data rank has the whole model
    if layout.shard > 1:
        return tuple(stage for stage in choices.zero_stages if has_whole_model or stage > 1)
    # FSDP with its default stage also runs for `context`, and for `data` with `tensor`.
    is_without = has_whole_model or (layout.context == 1 and (layout.data == 1 or layout.pipeline > 1))
    return (0,) if is_without else (3,)


def _powers_of_two(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2
