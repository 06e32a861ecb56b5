"""One optimizer step with the batches of all ranks, and the moving average of the weights that it updates.

The training loop runs the step, and the profiler measures it. A run saves and evaluates both weights and average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.models import Architecture
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes.layouts.divided_model import DividedModel
from datasvc.trainer.recipes.layouts.shard import to_local
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
        architecture: modules and operators of the whole model; None: not counted.
        shares_loss: whether `update` returns the loss of all ranks, equal on all of them; the same on all ranks.
        is_updating: whether the weights may be of no whole step: `update` sets it before it changes them, and the
            training loop clears it when all that belongs to the step is done.
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
    architecture: Architecture | None = field(default=None, kw_only=True)
    shares_loss: bool = field(default=False, kw_only=True)
    is_updating: bool = field(default=False, kw_only=True)

    @property
    def steps_alone(self) -> bool:
        """Whether each rank makes steps with its own gradients alone, as a replica of several ranks does not."""
        return self.config.makes_own_steps and self.divided is None


def update(run: Learner, batch: Any, mark: Mark = mark_nothing) -> torch.Tensor:
    """Take one optimizer step with the batches of all ranks; return the mean loss, detached.

    Every rank must call this, with a batch of its loader. `mark` is called at the end of each part: "transfer",
    "targets", "forward", "backward", "all-reduce", "update". The loss is the mean over the targets of all ranks if
    `run.shares_loss`, else that of this rank's batch. If the run masks all samples of all ranks, the step changes
    nothing, and the loss is 0. If replicas average weights, one without targets makes no step of its own.

    Raises:
        HorovodInternalError: a rank is lost. With a divided model, it may be another error of a connection, see
            `explaining_lost_ranks`.
    """
    run.optimizer.zero_grad()
    mark("update")
    examples = run.task.unpack(batch, run.device)
    num_targets = run.task.count_targets(examples)
    mark("transfer")
    num_of_all = _count_all_targets(run, num_targets, mark)
    if num_of_all == 0 and run.task.masks_samples and not run.config.averages_weights:
        # Not even with a gradient of 0: momentum and weight decay would move the weights all the same.
        return torch.zeros((), device=run.device)
    # A rank with steps of its own follows the mean over its own targets.
    num_of_step = num_targets if run.steps_alone else num_of_all
    num_divided_by = max(num_of_step, 1)  # 0 if all are padding
    if run.divided is None:
        total = accumulate(run, examples, num_divided_by, mark)
    else:
        total = _accumulate_divided(run, run.divided, examples, num_divided_by, mark)
    if run.config.averages_weights and num_of_step == 0:
        # Without gradients, the optimizer changes no weight, but takes part in the round that may be due.
        run.optimizer.zero_grad()
    shared_loss = None
    if run.shares_loss and hvd.size() > 1:
        # Sent beside the gradients. Ranks that have the same batch count it equally often.
        sums = torch.stack((total.double(), torch.full_like(total, num_targets, dtype=torch.float64)))
        shared_loss = hvd.allreduce_async(sums, name="update.loss", op=hvd.Sum)
    if not run.config.makes_own_steps:
        run.optimizer.synchronize()
    loss = total / max(num_targets, 1)
    if shared_loss is not None:
        # Before the weights change: a rank that is lost after that takes no loss away, and the others keep the step.
        sums = cast("torch.Tensor", hvd.synchronize(shared_loss))
        loss = (sums[0] / sums[1].clamp(min=1)).float()
    mark("all-reduce")
    run.loss_scale.unscale_(run.optimizer)  # after the all-reduce, so that all ranks see the same infinities
    if run.config.combines_steps:
        _share_overflow(run.loss_scale, run.optimizer)
    if run.config.clip_norm is not None:
        if run.divided is None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.config.clip_norm)
        else:
            run.divided.clip_gradients(run.config.clip_norm)
    # Gradients that are combined already must not be summed once more. With steps of their own, the ranks combine
    # these or average their weights in here, after each rank has clipped its own gradient.
    run.is_updating = True
    with contextlib.nullcontext() if run.config.makes_own_steps else run.optimizer.skip_synchronize():
        run.loss_scale.step(run.optimizer)
    scale = run.loss_scale.get_scale()
    run.loss_scale.update()
    # The scale falls after a gradient overflow, for which the step was skipped. The weights are unchanged then, so do
    # not add them to the average again.
    if run.average is not None and run.loss_scale.get_scale() >= scale:
        run.average.update()
    mark("update")
    return loss


def _count_all_targets(run: Learner, num_targets: int, mark: Mark) -> int:
    """Return the number of targets of a step over all ranks that make it, by which each divides its loss."""
    # Divide by the number of targets of all ranks and passes, not of this pass (Goyal et al. 2017, remark 3).
    # Ranks that have the same batch count its targets once. Adasum needs the sum only to find a step without targets.
    # Replicas that average weights never wait here: each makes a step, or none, by its own number.
    is_own = run.steps_alone and (run.config.averages_weights or not run.task.masks_samples)
    if not run.task.targets_vary or is_own:
        return num_targets * run.layout.replica_data_ranks
    count = torch.tensor(num_targets, dtype=torch.int64, device="cpu")
    process_set = hvd.global_process_set if run.divided is None else run.divided.replica_set
    total = int(hvd.allreduce(count, name="update.targets", op=hvd.Sum, process_set=process_set))
    mark("targets")
    return total // run.layout.num_copies


def _share_overflow(scale: torch.amp.GradScaler, optimizer: Any) -> None:
    """Make all ranks skip the step if the gradients of one have overflowed. Every rank must call this.

    Only for gradients that are not combined: a rank that skipped its step alone would let the others wait for it.
    """
    if scale.is_enabled():
        for found in scale._found_inf_per_device(optimizer).values():  # noqa: SLF001 - torch's sharded scale does so
            hvd.allreduce_(found, name="update.overflow", op=hvd.Max)


def accumulate(run: Learner, examples: Examples, num_divided_by: int, mark: Mark) -> torch.Tensor:
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
    """As `accumulate`, for a model that is divided over ranks; the sum is that of all ranks with the same batch."""
    if divided.split is not None:
        examples = examples.narrow_tokens(divided.split.narrow)
    if divided.pipeline is None:
        total = accumulate(run, examples, num_divided_by, mark)
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


class WeightAverage:
    """Averages a model's weights: `average = decay * average + (1 - decay) * weights` after each step.

    After n updates the decay is `min(decay, (1 + n) / (10 + n))`. Buffers, such as the statistics of batch
    normalisation, are not averaged.

    Args:
        model: its parameters are averaged; the average starts as a copy of them.
        decay: weight of the previous average, 0 <= decay < 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._num_updates = 0
        self._weights = dict(model.named_parameters())
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights and the number of updates to 0."""
        self._num_updates = 0
        for name, weight in self._weights.items():
            self._averages[name].copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average; call this after each step."""
        self._num_updates += 1
        # The decay is smaller at first. Otherwise the initial weights would dominate the average of a short run.
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        averages, weights = (list(map(to_local, tensors.values())) for tensors in (self._averages, self._weights))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights for their average inside the context; do not train inside it."""
        # Exchange the values in place, because the optimizer and a compiled model hold references to the tensors.
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            trained = weight.detach().clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(trained)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages (not copied) and the number of updates as a state tree, a nested dict."""
        return {"num_updates": self._num_updates, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ConfigError: the state has other names or shapes than this model.
        """
        saved_shapes = {name: tuple(average.shape) for name, average in state["averages"].items()}
        if saved_shapes != {name: tuple(average.shape) for name, average in self._averages.items()}:
            raise ConfigError(
                "the averaged weights of the checkpoint have other names or shapes than the model; use another --name"
            )
        for name, average in self._averages.items():
            average.copy_(state["averages"][name])
        self._num_updates = int(state["num_updates"])
