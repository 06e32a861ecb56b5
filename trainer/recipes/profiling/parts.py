"""What is profiled: a run's model, optimizer and loaders, without its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import datasvc
import trainer as hvd
from datasvc.node.ranks import RankNodes
from loaders.loader import Loader
from trainer.recipes.batch_plan import BatchPlan, plan_batches
from trainer.recipes.config import TrainConfig
from trainer.recipes.optimizers import build_optimizer
from trainer.recipes.precision import autocast
from trainer.recipes.start import choose_place, choose_task, compile_model, open_cache
from trainer.recipes.task import Task

Mark = Callable[[str], None]


@dataclass
class Parts:
    """One rank's.

    Attributes:
        config: effective settings.
        task: what is learned.
        batches: sizes of a step.
        ahead: loader that prefetches as the run does.
        at_call: loader that prefetches nothing.
        model: on its device.
        optimizer: distributed, with a rate of 0: steps cost what they cost, and change nothing.
        device: of the model.
        num_threads: that decode, beside the training thread.
        nodes: servers that this rank started for its node.
    """

    config: TrainConfig
    task: Task
    batches: BatchPlan
    ahead: Loader[Any]
    at_call: Loader[Any]
    model: nn.Module
    optimizer: Any
    device: torch.device
    num_threads: int
    nodes: RankNodes | None

    def sends_beside(self, *, beside: bool) -> None:
        """Choose whether gradients are all-reduced beside the backward pass, or after it.

        An optimizer that waits for one more pass than there will be sends nothing until it is synchronized.
        """
        self.optimizer.set_backward_passes_per_step(self.batches.num_passes + (not beside))

    def step(self, batch: Any, mark: Mark = lambda _: None) -> None:
        """Train on a batch; `mark` is called after each part with its name. Every rank calls this."""
        examples = self.task.unpack(batch, self.device)
        num_targets = max(1, self.task.count_targets(examples)) * hvd.size()
        mark("transfer")
        for part in examples.split(self.batches.micro_batch):
            with autocast(self.config.precision, self.device):
                loss = self.task.sum_loss(self.model, part) / num_targets
            mark("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            mark("backward")
        self.optimizer.synchronize()
        mark("all-reduce")
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad()
        mark("update")

    def compile(self) -> None:
        """Compile the model where the run does; what is measured layer by layer comes before."""
        if self.config.compile is not None:
            compile_model(self.model, self.config.compile)

    def close(self) -> None:
        """Let go of everything."""
        self.ahead.close()
        self.at_call.close()
        if self.nodes is not None:
            hvd.barrier()  # nobody's peer goes before everybody has what it needs
            self.nodes.close()


def open_parts(config: TrainConfig) -> Parts:
    """Set up a rank. Every rank calls this.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
    """
    repo = datasvc.open(config.repo)
    data = hvd.broadcast_object(str(repo.dataset(config.data).resolved) if hvd.rank() == 0 else None, name="profile")
    split = repo.dataset(data)["train"]
    task = choose_task(config, split)
    config = dataclasses.replace(config, model=config.model or task.default_model)
    batches, place = plan_batches(config, hvd.size()), choose_place(config)
    cache, nodes = open_cache(config)

    def open_loader(prefetch: int) -> Loader[Any]:
        there = choose_task(dataclasses.replace(config, prefetch=prefetch), split)
        return there.open_loader(split, training=True, batch_size=batches.batch_size, cache=cache, place=place)

    ahead, at_call = open_loader(max(1, config.prefetch)), open_loader(0)
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    assert config.model is not None
    model = task.build_model(config.model, config.parse_model_options()).to(place.device).train()
    plain = build_optimizer(config, model)
    for group in plain.param_groups:
        group["lr"] = 0.0
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=batches.num_passes,
        op=hvd.Sum,
    )
    return Parts(config, task, batches, ahead, at_call, model, optimizer, place.device, place.num_threads, nodes)


def for_ever(loader: Loader[Any]) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader
