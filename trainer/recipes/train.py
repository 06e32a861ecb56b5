"""The training loop, from top to bottom. Every rank runs it; rank 0 commits checkpoints and reports.

A checkpoint holds everything that the rest of the run depends on: weights, optimizer, loader position, step and every
rank's random states. So a run that was killed and resumed at the same world size ends with the same bits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import datasvc
import trainer as hvd
from datasvc.api import DataRepository
from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.models import Checkpoint, DataUse
from datasvc.node.peers import open_peers
from datasvc.node.ranks import RankNodes
from datasvc.processors import count_processors
from datasvc.shards import Dataset, Split
from loaders import ImageLoader
from loaders.augment import AugmentConfig
from trainer.recipes import random_state
from trainer.recipes.config import TrainConfig
from trainer.recipes.evaluate import evaluate
from trainer.recipes.models import build_model
from trainer.recipes.profile import profile_epoch
from trainer.recipes.schedules import warmup_cosine


@dataclass
class Run:
    """One rank's run: what a checkpoint binds."""

    config: TrainConfig
    repo: DataRepository
    dataset: Dataset
    loader: ImageLoader
    val_loader: ImageLoader | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    step: int = 0
    begun_at: int = -1
    version: str | None = None
    nodes: RankNodes | None = None


def train(config: TrainConfig) -> str:
    """Run a training to its end; returns the last committed version, "digits-cnn@9".

    Reports events on standard output, a JSON object a line: `start` of every rank, then from rank 0 `step`,
    `checkpoint`, `profile` and `end`.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        HorovodInternalError: a rank died or fell out of step.
    """
    hvd.init()
    report("start", rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
    random_state.seed_all(config.seed)
    run = start(config)
    ended = time.perf_counter()
    while run.loader.epoch < config.epochs:
        for batch in run.loader:
            wait_s = time.perf_counter() - ended
            rate = warmup_cosine(
                run.loader.progress,
                epochs=config.epochs,
                warmup_epochs=config.warmup_epochs,
                peak=config.learning_rate,
            )
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            run.optimizer.zero_grad()
            assert batch.labels is not None
            logits = run.model(batch.images.to(run.device))
            loss = nn.functional.cross_entropy(logits, batch.labels.to(run.device))
            loss.backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()
            run.step += 1
            step_s = time.perf_counter() - ended
            if hvd.rank() == 0:
                timed = {"rate": rate, "step_s": step_s, "wait_s": wait_s}
                share = run.loader.progress / config.epochs
                report("step", step=run.step, epoch=batch.epoch, progress=share, loss=loss.item(), **timed)
            is_last = run.loader.epoch == config.epochs - 1 and not run.loader.steps_left
            if run.step % config.checkpoint_every == 0 and not is_last:
                commit(run, {})
            ended = time.perf_counter()
        if config.profile is not None:
            profile(run, config.profile)
    # Released before the evaluation: both loaders' shards need not fit the cache together.
    run.loader.close()
    metrics = {} if run.val_loader is None else evaluate(run.model, run.val_loader, run.device)
    version = run.version if run.step == run.begun_at else commit(run, metrics)
    assert version is not None
    if run.val_loader is not None:
        run.val_loader.close()
    if run.nodes is not None:
        hvd.barrier()  # nobody's peer goes before everybody has what it needs
        run.nodes.close()
    if hvd.rank() == 0:
        report("end", version=version, step=run.step, **metrics)
    hvd.shutdown()
    return version


def start(config: TrainConfig) -> Run:
    """Set up this rank's run: anew, or where the newest checkpoint left it."""
    repo = datasvc.open(config.repo)
    begin = hvd.broadcast_object(resolve_start(repo, config) if hvd.rank() == 0 else None, name="start")
    dataset = repo.dataset(begin["data"])
    cache, nodes = open_cache(config)
    loader = make_loader(config, cache, dataset["train"], training=True)
    # Made before the first step, so that what is wrong with it is said now; without `val` nothing is evaluated.
    val_loader = make_loader(config, cache, dataset["val"], training=False) if "val" in dataset else None
    device = torch.device(rank_device(config))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = build_model(config.model, len(dataset["train"].classes)).to(device)
    sgd = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    run = Run(
        config, repo, dataset, loader, val_loader, model, optimizer, device, version=begin["checkpoint"], nodes=nodes
    )
    if run.version is not None:
        resume(run, repo.restore(run.version))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return run


def resolve_start(repo: DataRepository, config: TrainConfig) -> dict[str, str | None]:
    """Decide, on one rank for all, which immutable versions this run reads: data and, to continue, checkpoint."""
    data = str(repo.dataset(config.data).resolved)
    checkpoint = None
    if config.resume == "auto" and repo.repository.versions("models", config.name).head():
        checkpoint = str(repo.repository.resolve("models", config.name))
    return {"data": data, "checkpoint": checkpoint}


def rank_device(config: TrainConfig) -> str:
    """Return the device of this rank: each has a GPU of its own on its node."""
    return f"cuda:{hvd.local_rank()}" if config.device == "cuda" else "cpu"


def open_cache(config: TrainConfig) -> tuple[Cache | None, RankNodes | None]:
    """Return this node's cache, with the peers that the run wants, and the servers that were started for it."""
    if config.cache is None:
        return None, None
    if config.peers == "ranks":
        nodes = RankNodes(config.cache, (config.repo,), budget=config.cache_budget)
        return Cache(config.cache, budget=config.cache_budget, peers=nodes.peers), nodes
    peers = None if config.peers is None else open_peers(config.peers)
    return Cache(config.cache, budget=config.cache_budget, peers=peers), None


def make_loader(config: TrainConfig, cache: Cache | None, split: Split, *, training: bool) -> ImageLoader:
    """Return this rank's loader of a split."""
    if not split.classes:
        raise ConfigError(f"{split!r} has no labels to train on")
    return ImageLoader(
        split,
        batch_size=config.batch_size,
        training=training,
        cache=cache,
        size=config.size,
        resize=config.resize,
        augment=AugmentConfig(scale=config.scale, ratio=config.ratio, flip=config.flip),
        seed=config.seed,
        **(_order(config) if training else {}),
        data_rank=hvd.rank(),
        data_world_size=hvd.size(),
        device=rank_device(config),
        num_threads=max(1, count_processors() // hvd.local_size()),
    )


def _order(config: TrainConfig) -> dict[str, Any]:
    if config.shuffle == "global":
        return {"shuffle": "global"}
    return {"shuffle": config.shuffle, "lanes": config.lanes, "block": config.block}


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Put every part of the run where the checkpoint left it.

    Raises:
        ConfigError: the checkpoint is of another model.
        StateMismatchError: it was trained on other data, or in another order.
    """
    state = checkpoint.state
    if state["model_name"] != run.config.model:
        raise ConfigError(
            f"{checkpoint.version} is a {state['model_name']!r}, this run trains a {run.config.model!r}; "
            "use another --name, or --resume never"
        )
    run.loader.load_state_dict(state["loader"])
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ConfigError(f"{checkpoint.version} does not fit this run's model: {error}") from error
    run.optimizer.load_state_dict(state["optimizer"])
    run.step = run.begun_at = int(state["step"])
    if len(state["random"]) == hvd.size():
        random_state.reinstate(state["random"][hvd.rank()])


def profile(run: Run, path: str) -> None:
    """Say where the time of the epoch that just ended went."""
    times = profile_epoch(run.loader, path, rank=hvd.rank(), num_ranks=hvd.size())
    if hvd.rank() == 0:
        report("profile", epoch=run.loader.epoch - 1, **times)


def commit(run: Run, metrics: dict[str, float]) -> str:
    """Commit a checkpoint from rank 0; every rank calls this and gets the version."""
    random = hvd.allgather_object(random_state.capture(), name="commit.random")
    version = None
    if hvd.rank() == 0:
        state = {
            "step": run.step,
            "model_name": run.config.model,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "loader": run.loader.state_dict(),
            "random": random,
        }
        committed = run.repo.save(
            run.config.name,
            state,
            step=run.step,
            data=[DataUse(str(run.dataset.resolved), "train", run.loader.state_dict())],
            config=run.config.to_dict(),
            metrics=metrics,
            parent=run.version,
        )
        version = str(committed)
        report("checkpoint", version=version, step=run.step, epoch=run.loader.epoch)
    run.version = str(hvd.broadcast_object(version, name="commit.version"))
    return run.version


def report(event: str, **facts: Any) -> None:
    """Print one event; whole lines, so that ranks sharing a terminal do not mix theirs."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
