"""One optimizer step with the batches of all ranks. The training loop runs it, and the profiler measures it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.ema import WeightAverage
from datasvc.trainer.recipes.layouts.divided_model import DividedModel
from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.reporting.recorder import Mark, mark_nothing
from datasvc.trainer.recipes.settings.config import BatchPlan, TrainConfig
from datasvc.trainer.recipes.tasks.task import Examples, Task, take_outputs


@dataclass
class Learner:
    """The part of a run that an optimizer step reads and changes, on one rank.

    Attributes:
        config: effective settings.
        task: classification or language modelling.
        batches: batch sizes of a step.
        layout: layout of all ranks.
        model: model, on `device`.
        optimizer: distributed optimizer.
        loss_scale: loss scaler for fp16; has no effect otherwise.
        average: average of the weights; None unless configured.
        device: device of the model.
        divided: this rank's part of the model; None: each rank has the whole model.
        num_parameters: parameters of the whole model; 0: not counted.
        model_sizes: sizes of the whole model by name, from its method `sizes`; empty without one.
        shares_loss: whether `update` returns the loss of all ranks, equal on all of them; the same on all ranks.
    """

    config: TrainConfig
    task: Task
    batches: BatchPlan
    layout: Layout
    model: nn.Module
    optimizer: Any
    loss_scale: torch.amp.GradScaler
    average: WeightAverage | None
    device: torch.device
    divided: DividedModel | None = field(default=None, kw_only=True)
    num_parameters: int = field(default=0, kw_only=True)
    model_sizes: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    shares_loss: bool = field(default=False, kw_only=True)


def update(run: Learner, batch: Any, mark: Mark = mark_nothing) -> torch.Tensor:
    """Take one optimizer step with the batches of all ranks; return the mean loss, detached.

    Every rank must call this, with a batch of its loader. `mark` is called at the end of each part: "transfer",
    "targets", "forward", "backward", "all-reduce", "update". The loss is the mean over the targets of all ranks if
    `run.shares_loss`, else that of this rank's batch.

    Raises:
        HorovodInternalError: a rank is lost. With a divided model, it may be another error of a connection, see
            `explaining_lost_ranks`.
    """
    run.optimizer.zero_grad()
    mark("update")
    examples = run.task.unpack(batch, run.device)
    num_targets = run.task.count_targets(examples)
    mark("transfer")
    # Divide by the number of targets of all ranks and passes, not of this pass (Goyal et al. 2017, remark 3).
    # Ranks that have the same batch count its targets once.
    num_divided_by = num_targets * run.layout.num_data_ranks
    if run.config.combines_steps:
        # Adasum combines steps of ranks that each follow the mean over their own targets.
        num_divided_by = num_targets
    elif run.task.targets_vary:
        num_divided_by = int(
            hvd.allreduce(
                torch.tensor(num_targets, dtype=torch.int64, device="cpu"), name="update.targets", op=hvd.Sum
            )
        )
        num_divided_by //= run.layout.num_copies
        mark("targets")
    num_divided_by = max(num_divided_by, 1)  # 0 if all blocks are padding; their gradient is 0 too
    if run.divided is None:
        total = _accumulate(run, examples, num_divided_by, mark)
    else:
        total = _accumulate_divided(run, run.divided, examples, num_divided_by, mark)
    shared_loss = None
    if run.shares_loss and hvd.size() > 1:
        # Sent beside the gradients, and read after the step. Ranks that have the same batch count it equally often.
        sums = torch.stack((total.double(), torch.full_like(total, num_targets, dtype=torch.float64)))
        shared_loss = hvd.allreduce_async(sums, name="update.loss", op=hvd.Sum)
    if not run.config.combines_steps:
        run.optimizer.synchronize()
    mark("all-reduce")
    run.loss_scale.unscale_(run.optimizer)  # after the all-reduce, so that all ranks see the same infinities
    if run.config.combines_steps:
        _share_overflow(run.loss_scale, run.optimizer)
    if run.config.clip_norm is not None:
        if run.divided is None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.config.clip_norm)
        else:
            run.divided.clip_gradients(run.config.clip_norm)
    # Gradients that are combined already must not be summed once more. With Adasum, the ranks combine their steps in
    # here, after each rank has clipped its own gradient.
    with contextlib.nullcontext() if run.config.combines_steps else run.optimizer.skip_synchronize():
        run.loss_scale.step(run.optimizer)
    scale = run.loss_scale.get_scale()
    run.loss_scale.update()
    # The scale falls after a gradient overflow, for which the step was skipped. The weights are unchanged then, so do
    # not add them to the average again.
    if run.average is not None and run.loss_scale.get_scale() >= scale:
        run.average.update()
    mark("update")
    if shared_loss is None:
        return total / max(num_targets, 1)
    sums = cast("torch.Tensor", hvd.synchronize(shared_loss))
    return (sums[0] / sums[1].clamp(min=1)).float()


def _share_overflow(scale: torch.amp.GradScaler, optimizer: Any) -> None:
    """Make all ranks skip the step if the gradients of one have overflowed. Every rank must call this.

    Only for gradients that are not combined: a rank that skipped its step alone would let the others wait for it.
    """
    if scale.is_enabled():
        for found in scale._found_inf_per_device(optimizer).values():  # noqa: SLF001 - torch's sharded scale does so
            hvd.allreduce_(found, name="update.overflow", op=hvd.Max)


def _accumulate(run: Learner, examples: Examples, num_divided_by: int, mark: Mark) -> torch.Tensor:
    """Add the gradients of a batch, in passes of `micro_batch` samples; return the sum of the losses, detached."""
    total = torch.zeros((), device=run.device)
    for part in examples.split(run.batches.micro_batch):
        with autocast(run.config.precision, run.device):
            loss = run.task.sum_loss(run.model, part)
        mark("forward")
        run.loss_scale.scale(loss / num_divided_by).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        mark("backward")
    return total


def _accumulate_divided(
    run: Learner, divided: DividedModel, examples: Examples, num_divided_by: int, mark: Mark
) -> torch.Tensor:
    """As `_accumulate`, for a model that is divided over ranks; the sum is that of all ranks with the same batch."""
    if divided.split is not None:
        examples = examples.narrow_tokens(divided.split.narrow)
    if divided.pipeline is None:
        total = _accumulate(run, examples, num_divided_by, mark)
    else:

        def compute_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return run.task.sum_loss(take_outputs, replace(examples, inputs=outputs, targets=targets, extra={})) / (
                num_divided_by
            )

        with autocast(run.config.precision, run.device):
            total = divided.pipeline.step(examples.inputs, examples.targets, examples.extra, compute_loss)
        total = total * num_divided_by
        mark("backward")
        divided.sum_gradients()
    return divided.sum_over_copies(total)
