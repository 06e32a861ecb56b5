"""A candidate: a layout, with the other settings on which its memory and time depend."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.trainer.recipes.layouts.layout import Layout


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
