"""The group of settings of how the ranks divide the model and the batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.errors import ConfigError
from datasvc.planning.layout import LOST_AFTER_S, PipelineSchedule, parse_sizes
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class LayoutSettings(SettingGroup):
    """How the ranks divide the model and the batches; see docs/explanation/layouts.md.

    Attributes:
        layout: number of ranks along each axis, such as "data=2,shard=2,tensor=2"; the axes are data, shard, tensor,
            pipeline and context. data may be left out: it follows from the number of ranks. None: all ranks along
            data, so that each has the whole model.
        pipeline_schedule: order in which the micro-batches go through the stages of a pipeline: "gpipe", "1f1b",
            "interleaved" or "zbv". The last two give each rank two stages.
        zero: what the axis shard divides: 1: the optimizer state; 2: also gradients; 3: also parameters, which are
            gathered for the forward pass and again for the backward pass. None: 3.
        recompute: whether the activations of each block are freed and computed again in the backward pass.
        offload: whether parameters, gradients and optimizer state are in host memory; needs the axis shard.
        lost_after: seconds without a sign of life of a rank after which the others ask whether it runs, and end the
            run if it does not answer. The connections of a process that has ended tell sooner.
    """

    title: ClassVar[str] = "layout of the ranks"

    layout: Annotated[str | None, Metavar("AXIS=SIZE,...")] = None
    pipeline_schedule: PipelineSchedule = "1f1b"
    zero: Annotated[int | None, Metavar("STAGE"), Range(1, 4)] = None
    recompute: bool = False
    offload: bool = False
    lost_after: Annotated[float, Metavar("SECONDS"), Range(2)] = LOST_AFTER_S

    def check(self) -> None:
        """Check the form of the layout, and that the options of its axes have their axis."""
        sizes = {} if self.layout is None else parse_sizes(self.layout)
        for option, is_set in (("zero", self.zero is not None), ("offload", self.offload)):
            if is_set and sizes.get("shard", 1) == 1:
                raise ConfigError(f"{option} is for the axis shard; give a --layout with it, such as shard=2")
        if self.lost_after != LOST_AFTER_S and not sizes.keys() - {"data"}:
            raise ConfigError(
                f"lost_after is {self.lost_after:g}; it is for layouts of other axes than data: give a --layout, or "
                f"leave it at {LOST_AFTER_S:g}"
            )
        if self.offload and self.zero == 1:
            raise ConfigError(
                "offload keeps parts of parameters in host memory, and with zero 1 they are not divided"
            )
        if self.pipeline_schedule != "1f1b" and sizes.get("pipeline", 1) == 1:
            raise ConfigError(
                f"pipeline_schedule is {self.pipeline_schedule!r}; it is for the axis pipeline: give a --layout with "
                "it, such as pipeline=2"
            )
        others = [axis for axis in ("tensor", "pipeline", "context") if sizes.get(axis, 1) > 1]
        if self.zero == 1 and others:
            raise ConfigError(
                f"zero is 1, which goes with the axes data and shard only, not with {', '.join(others)}"
            )
