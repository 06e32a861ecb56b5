"""Opens the model, optimizer and loaders of a run for profiling, without checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import datasvc
import datasvc.trainer as hvd
from datasvc.loaders.core.loader import Loader
from datasvc.trainer.recipes.ema import WeightAverage
from datasvc.trainer.recipes.make_optimizer import build_distributed_optimizer
from datasvc.trainer.recipes.optimizers.precision import make_loss_scale
from datasvc.trainer.recipes.profiling.measure.loaders_in_turn import LoadersInTurn
from datasvc.trainer.recipes.settings.batch_plan import BatchPlan, plan_batches
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.start import choose_place, choose_task, compile_model, open_cache
from datasvc.trainer.recipes.tasks.task import Task
from datasvc.trainer.recipes.update import Mark, update


@dataclass
class ProfiledRun:
    """The profiled run of one rank; a `Learner`.

    Attributes:
        config: effective settings.
        task: classification or language modelling.
        batches: batch sizes of a step.
        loaders: of the training split: one that prefetches as the run does, and one without prefetching.
        model: on its device.
        optimizer: distributed, with a learning rate of 0, so that steps do not change the model.
        loss_scale: for fp16; a no-op otherwise.
        average: of the weights; None unless configured.
        device: of the model.
        num_threads: decoding threads beside the training thread.
    """

    config: TrainConfig
    task: Task
    batches: BatchPlan
    loaders: LoadersInTurn
    model: nn.Module
    optimizer: Any
    loss_scale: torch.amp.GradScaler
    average: WeightAverage | None
    device: torch.device
    num_threads: int

    def sends_beside(self, *, beside: bool) -> None:
        """Choose whether gradients are all-reduced during the backward pass, or after it.

        An optimizer that expects one more pass than there is sends nothing before `synchronize`.
        """
        self.optimizer.set_backward_passes_per_step(self.batches.num_passes + (not beside))

    def step(self, batch: Any, mark: Mark = lambda _: None) -> torch.Tensor:
        """Take one training step, see `update`."""
        return update(self, batch, mark)

    def compile(self) -> None:
        """Compile the model if the run does; layers must be measured before."""
        if self.config.compile is not None:
            compile_model(self.model, self.config.compile)


@contextlib.contextmanager
def open_profiled_run(config: TrainConfig) -> Iterator[ProfiledRun]:
    """Open the run of this rank as a context. Every rank calls this.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
    """
    repo = datasvc.open(config.repo)
    data = hvd.broadcast_object(str(repo.dataset(config.data).resolved) if hvd.rank() == 0 else None, name="profile")
    split = repo.dataset(data)["train"]
    task = choose_task(config, split)
    config = dataclasses.replace(config, model=config.model or task.default_model)
    batches, place = plan_batches(config, hvd.size()), choose_place(config)
    with contextlib.ExitStack() as stack:
        cache, nodes = open_cache(config)
        if nodes is not None:
            stack.callback(nodes.close)

        def open_loader(prefetch: int) -> Loader[Any]:
            task_of_loader = choose_task(dataclasses.replace(config, prefetch=prefetch), split)
            return task_of_loader.open_loader(
                split, training=True, batch_size=batches.batch_size, cache=cache, place=place
            )

        loaders = LoadersInTurn(open_loader(0), open_loader(max(1, config.prefetch)))
        stack.callback(loaders.close)
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
        assert config.model is not None
        model = task.build_model(config.model, config.parse_model_options()).to(place.device).train()
        yield ProfiledRun(
            config=config,
            task=task,
            batches=batches,
            loaders=loaders,
            model=model,
            optimizer=_build_optimizer(config, model, batches),
            loss_scale=make_loss_scale(config.precision, place.device),
            average=None if config.ema_decay is None else WeightAverage(model, config.ema_decay),
            device=place.device,
            num_threads=place.num_threads,
        )
        loaders.close()
        if nodes is not None:
            hvd.barrier()  # a node must not stop serving while another still fetches from it


def _build_optimizer(config: TrainConfig, model: nn.Module, batches: BatchPlan) -> Any:
    optimizer = build_distributed_optimizer(config, model, num_passes=batches.num_passes)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer
