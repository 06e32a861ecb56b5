"""The axis `pipeline`: ranks compute successive layers.

Sources: Huang et al. 2019, "GPipe", arXiv:1811.06965, and Narayanan et al. 2019, "PipeDream".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from datasvc.planning.layout import stages_per_rank

_SCHEDULES: Final[Mapping[str, Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


def plan_stages(index: int, size: int, schedule: str) -> list[int]:
    """Return the stages of the rank with this index along the axis, of `size` ranks.

    "interleaved" gives each rank stages that are `size` apart; "zbv" gives it one stage on the way down and one on
    the way back, so that the last stage is on the rank of the first.
    """
    if schedule == "zbv":
        return [index, 2 * size - 1 - index]
    return [index + size * turn for turn in range(stages_per_rank(schedule))]


def join_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Return one module with the children of all stages, which have the names that they have in the whole model."""
    if len(stages) == 1:
        return stages[0]
    joined = nn.Module()
    for stage in stages:
        for name, child in stage.named_children():
            if isinstance(child, nn.ModuleDict) and hasattr(joined, name):
                cast("nn.ModuleDict", getattr(joined, name)).update(dict(child.items()))
            else:
                # A new dict, because the next stage's modules are added to it.
                setattr(
                    joined, name, nn.ModuleDict(dict(child.items())) if isinstance(child, nn.ModuleDict) else child
                )
    return joined


class Pipeline:
    """The stages of this rank, and the schedule by which micro-batches go through them.

    Args:
        stages: modules of the stages of this rank, by `plan_stages`.
        schedule: one of `PIPELINE_SCHEDULES`.
        num_micro_batches: equal parts into which each batch is divided.
        device: device of the stages.
        group: ranks of the pipeline, in order.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        schedule: str,
        num_micro_batches: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        size = dist.get_world_size(group)
        self.numbers = plan_stages(dist.get_rank(group), size, schedule)
        self.num_stages = size * stages_per_rank(schedule)
        self.num_micro_batches = num_micro_batches
        self._stages = list(stages)
        self._name, self._device, self._group = schedule, device, group
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._schedules: dict[tuple[int, ...], Any] = {}

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.numbers

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.num_stages - 1 in self.numbers

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        extra: Mapping[str, torch.Tensor],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Compute the gradients of a batch. Every rank of the pipeline calls this.

        Args:
            inputs: inputs of the whole model.
            targets: expected outputs.
            extra: further arguments of every stage by name; divided into micro-batches as the inputs are.
            loss: function of the outputs and targets of a micro-batch; the losses are summed, not averaged.

        Returns:
            The sum of the losses, detached; 0 on ranks without the last stage.
        """
        self._loss = loss
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.has_first else ()
        self._schedule(inputs).step(*arguments, target=targets, losses=losses, return_outputs=False, **extra)
        if not self.has_last:
            return torch.zeros((), device=self._device)
        return torch.stack([part.detach() for part in losses]).sum()

    def evaluate(self, inputs: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the outputs of the model on the rank of the last stage, else None. Every rank calls this.

        The batch must have as many samples as those of `step`.
        """
        arguments = (inputs,) if self.has_first else ()
        # torch computes a loss here too, and needs targets for it.
        self._loss = lambda outputs, _targets: outputs.sum() * 0
        schedule = self._schedule(inputs)
        if self._name == "zbv":
            # torch 2.13 has no evaluation of schedules in which neighbouring stages are on one rank, so run a step,
            # whose gradients are zeros; the next update clears them.
            with torch.enable_grad():
                outputs = schedule.step(*arguments, target=inputs, **extra)
            return None if outputs is None else cast("torch.Tensor", outputs.detach())
        return cast("torch.Tensor | None", schedule.eval(*arguments, target=inputs, **extra))

    def _schedule(self, inputs: torch.Tensor) -> Any:
        """Return the schedule for batches of this shape. Its receive buffers have the shapes of micro-batches."""
        shape = tuple(inputs.shape)
        if shape not in self._schedules:
            stages = [
                PipelineStage(module, number, self.num_stages, self._device, group=self._group)
                for module, number in zip(self._stages, self.numbers, strict=True)
            ]
            self._schedules[shape] = _SCHEDULES[self._name](
                stages[0] if stages_per_rank(self._name) == 1 else stages,
                self.num_micro_batches,
                loss_fn=self._sum_loss,
                scale_grads=False,  # the loss is a sum already divided by the targets of all ranks
            )
        return self._schedules[shape]

    def _sum_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)
