"""Checkpoints of a run: they hold everything that the rest of it depends on.

Weights, their average, optimizer, loss scale, loader position, step, the count of the early stop, and every rank's
random states. So a run that was killed and resumed at the same world size ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import trainer as hvd
from datasvc.errors import ConfigError
from datasvc.models import Checkpoint, DataUse
from trainer.recipes import random_state
from trainer.recipes.batch_statistics import average_batch_statistics
from trainer.recipes.precision import load_loss_scale
from trainer.recipes.run import Run


def commit(run: Run) -> str:
    """Commit a checkpoint from rank 0, with the metrics of `run`; every rank calls this and gets the version."""
    average_batch_statistics(run.model)
    random = hvd.allgather_object(random_state.capture(), name="commit.random")
    version = None
    if hvd.rank() == 0:
        state = {
            "step": run.step,
            "model_name": run.config.model,
            "model": run.model.state_dict(),
            "optimizer_name": run.config.optimizer,
            "optimizer": run.optimizer.state_dict(),
            "loss_scale": run.loss_scale.state_dict(),
            "ema": None if run.average is None else run.average.state_dict(),
            "early_stop": run.stop.state_dict(),
            "loader": run.loader.state_dict(),
            "random": random,
        }
        committed = run.repo.save(
            run.config.name,
            state,
            step=run.step,
            data=[DataUse(str(run.dataset.resolved), "train", run.loader.state_dict())],
            config=run.config.to_dict(),
            metrics=run.metrics,
            parent=run.version,
        )
        version = str(committed)
        run.events.report("checkpoint", version=version, step=run.step, epoch=run.loader.epoch)
    run.version = str(hvd.broadcast_object(version, name="commit.version"))
    return run.version


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Put every part of the run where the checkpoint left it.

    Raises:
        ConfigError: the checkpoint is of another model or optimizer.
        StateMismatchError: it was trained on other data, or in another order.
    """
    state = checkpoint.state
    for name, wanted in (("model", run.config.model), ("optimizer", run.config.optimizer)):
        found = state.get(f"{name}_name", wanted)
        if found != wanted:
            raise ConfigError(
                f"{checkpoint.version} has the {name} {found!r}, this run {wanted!r}; "
                "use another --name, or --resume never"
            )
    run.loader.load_state_dict(state["loader"])
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ConfigError(f"{checkpoint.version} does not fit this run's model: {error}") from error
    try:
        load_optimizer(run.optimizer, state["optimizer"])
    except ValueError as error:
        raise ConfigError(f"{checkpoint.version} does not fit this run's optimizer: {error}") from error
    load_loss_scale(run.loss_scale, state.get("loss_scale") or {})
    if run.average is not None:
        if state.get("ema"):
            run.average.load_state_dict(state["ema"])
        else:
            run.average.restart()
    if state.get("early_stop"):
        run.stop.load_state_dict(state["early_stop"])
    run.step = int(state["step"])
    run.metrics = {name: float(value) for name, value in checkpoint.entry["metrics"].items()}
    if len(state["random"]) == hvd.size():
        random_state.reinstate(state["random"][hvd.rank()])
    else:
        # With the step: the draws since the beginning are not to come once more.
        random_state.seed_all(random_state.seed_of_rank(run.config.seed, hvd.rank(), step=run.step))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's averages and counts; its settings, such as the weight decay, stay those of this run.

    Raises ValueError: the state is of other parameters, or groups of them.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
