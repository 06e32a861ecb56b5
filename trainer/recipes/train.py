"""The training loop, from top to bottom. Every rank runs it; rank 0 commits checkpoints and reports.

A checkpoint holds everything that the rest of the run depends on: weights, optimizer, loader position, step and every
rank's random states. So a run that was killed and resumed at the same world size ends with the same bits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn

import datasvc
import trainer as hvd
from datasvc.api import DataRepository
from datasvc.cache import Cache
from datasvc.errors import ConfigError, NotFoundError
from datasvc.models import Checkpoint, DataUse
from datasvc.shards import Dataset
from loaders import ImageLoader
from loaders.augment import AugmentConfig
from trainer.recipes import random_state
from trainer.recipes.config import TrainConfig
from trainer.recipes.evaluate import evaluate
from trainer.recipes.models import build_model
from trainer.recipes.schedules import warmup_cosine


def train(config: TrainConfig) -> str:
    """Run a training to its end; returns the last committed version, "digits-cnn@9".

    Reports events on standard output, a JSON object a line: `start` of every rank, then from rank 0 `step`,
    `checkpoint` and `end`.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        HorovodInternalError: a rank died or fell out of step.
    """
    hvd.init()
    report("start", rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
    random_state.seed_all(config.seed)
    repo = datasvc.open(config.repo)
    newest = hvd.broadcast_object(resolve_start(repo, config) if hvd.rank() == 0 else None, name="start")
    dataset = repo.dataset(newest["data"])
    loader = make_loader(config, dataset, training=True)
    val_loader = make_loader(config, dataset, training=False)

    model = build_model(config.model, len(dataset["train"].classes)).to(config.device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(
            model.parameters(),
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        ),
        named_parameters=model.named_parameters(),
    )
    step = 0
    if newest["checkpoint"] is not None:
        checkpoint = repo.restore(newest["checkpoint"])
        step = resume(checkpoint, config, model, optimizer, loader)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    total_steps = config.epochs * len(loader)
    parent: str | None = newest["checkpoint"]
    while loader.epoch < config.epochs:
        for images, labels in loader:
            started = time.perf_counter()
            rate = warmup_cosine(
                step, total_steps=total_steps, warmup_steps=config.warmup_steps, peak=config.learning_rate
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(config.device)), labels.to(config.device))
            loss.backward()
            optimizer.step()
            step += 1
            if hvd.rank() == 0:
                report(
                    "step", step=step, of=total_steps, epoch=loader.epoch, loss=loss.item(), rate=rate,
                    seconds=time.perf_counter() - started,
                )  # fmt: skip
            if step % config.checkpoint_every == 0 and step < total_steps:
                parent = commit(repo, config, dataset, model, optimizer, loader, step, parent, {})
    metrics = evaluate(model, val_loader, config.device)
    parent = commit(repo, config, dataset, model, optimizer, loader, step, parent, metrics)
    if hvd.rank() == 0:
        report("end", version=parent, step=step, **metrics)
    loader.close()
    val_loader.close()
    hvd.shutdown()
    return parent


def resolve_start(repo: DataRepository, config: TrainConfig) -> dict[str, Any]:
    """Decide, on one rank for all, which immutable versions this run reads: data and, to continue, checkpoint."""
    data = str(repo.dataset(config.data).resolved)
    checkpoint = None
    if config.resume == "auto":
        try:
            checkpoint = str(repo.repository.resolve("models", config.name))
        except NotFoundError:
            checkpoint = None
    return {"data": data, "checkpoint": checkpoint}


def make_loader(config: TrainConfig, dataset: Dataset, *, training: bool) -> ImageLoader:
    """Return this rank's loader of the training or validation split."""
    split = dataset["train" if training else "val"]
    if not split.classes:
        raise ConfigError(f"{split!r} has no labels to train on")
    cache = Cache(config.cache, budget=config.cache_budget) if config.cache else None
    on_gpu = config.device.startswith("cuda")
    return ImageLoader(
        split,
        batch_size=config.batch_size,
        training=training,
        cache=cache,
        size=config.size,
        resize=config.resize,
        augment=AugmentConfig(scale=config.scale, ratio=config.ratio, flip=config.flip),
        seed=config.seed,
        rank=hvd.rank(),
        world_size=hvd.size(),
        device=f"cuda:{hvd.local_rank()}" if on_gpu else "cpu",
        num_threads=max(1, len(os.sched_getaffinity(0)) // hvd.local_size()),
    )


def resume(
    checkpoint: Checkpoint,
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ImageLoader,
) -> int:
    """Put every part of the run where the checkpoint left it; returns its step."""
    state = checkpoint.state
    if state["model_name"] != config.model:
        raise ConfigError(
            f"{checkpoint.version} is a {state['model_name']!r}, this run trains a {config.model!r}; "
            "use another --name, or --resume never"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    if len(state["random"]) == hvd.size():
        random_state.reinstate(state["random"][hvd.rank()])
    return int(state["step"])


def commit(
    repo: DataRepository,
    config: TrainConfig,
    dataset: Dataset,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ImageLoader,
    step: int,
    parent: str | None,
    metrics: dict[str, float],
) -> str:
    """Commit a checkpoint from rank 0; every rank calls this and gets the version."""
    random = hvd.allgather_object(random_state.capture(), name="commit.random")
    version = None
    if hvd.rank() == 0:
        state = {
            "step": step,
            "model_name": config.model,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "random": random,
        }
        use = DataUse(str(dataset.resolved), "train", loader.state_dict())
        version = str(
            repo.save(
                config.name,
                state,
                step=step,
                data=[use],
                config=config.to_dict(),
                metrics=metrics,
                parent=parent,
            )
        )
        report("checkpoint", version=version, step=step, epoch=loader.epoch)
    return str(hvd.broadcast_object(version, name="commit.version"))


def report(event: str, **facts: Any) -> None:
    """Print one event; whole lines, so that ranks sharing a terminal do not mix theirs."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
