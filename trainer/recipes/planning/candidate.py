"""A candidate: a layout, and the settings that decide its memory and time beside the layout."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.trainer.recipes.layouts.layout import Layout


@dataclass(frozen=True)
class Candidate:
    """A way to run the training.

    Attributes:
        layout: number of ranks of each axis.
        micro_batch: samples of one forward and backward pass of a data rank.
        num_micro_batches: passes of a step.
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

        The ranks of a context group have parts of the same gradient, as those of a shard group have.
        """
        return self.layout.shard * self.layout.context
