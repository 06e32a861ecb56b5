"""The training loop, from top to bottom. Every rank runs it; rank 0 commits checkpoints and reports."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import trainer as hvd
from trainer.recipes import random_state
from trainer.recipes.batch_statistics import average_batch_statistics
from trainer.recipes.checkpoints import commit
from trainer.recipes.config import TrainConfig
from trainer.recipes.evaluate import evaluate
from trainer.recipes.events import choose_events
from trainer.recipes.optimizers import set_rate
from trainer.recipes.precision import autocast
from trainer.recipes.profiling.epoch_trace import profile_epoch
from trainer.recipes.run import Run
from trainer.recipes.start import start
from trainer.recipes.step_clock import StepClock


def train(config: TrainConfig) -> str:
    """Run a training to its end; returns the last committed version, "digits-cnn@9".

    Reports events, see `events`: `start` of every rank, then from rank 0 `step`, `evaluation`, `checkpoint`,
    `profile` and `end`.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        HorovodInternalError: a rank died or fell out of step.
    """
    hvd.init()
    events = choose_events(sys.stdout)
    events.report("start", rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
    random_state.seed_all(config.seed)
    run = start(config, events)
    clock = StepClock()
    while not run.is_over:
        progress = run.loader.progress  # before the batch: the loader's has it as soon as it is handed over
        for batch in run.loader:
            clock.got_batch()
            rate = run.schedule.rate_at(progress, after=run.loader.progress)
            set_rate(run.optimizer, rate, progress)
            progress = run.loader.progress
            loss = update(run, batch)
            run.step += 1
            # Reading the loss waits for the device: on all ranks, so that none runs ahead of what is measured.
            seen_loss = float(loss) if run.step % run.config.report_every == 0 else None
            clock.ended_step()
            if seen_loss is not None:
                report_step(run, clock, epoch=batch.epoch, loss=seen_loss, rate=rate)
            if run.step % run.config.checkpoint_every == 0 and not run.is_over:
                run.metrics = {}
                commit(run)
            clock.restart()
            if run.is_cut_short:
                break
        if run.config.profile is not None:
            profile(run, run.config.profile)
        if run.is_over or is_due(run.loader.epoch, run.config.evaluate_every):
            run.metrics = evaluate_run(run)
            run.stop.update(run.metrics)
            commit(run)
        clock.restart()
    return end(run)


def update(run: Run, batch: Any) -> torch.Tensor:
    """Take one optimizer step with the batches of all ranks; returns the mean loss of this rank's part, detached."""
    run.optimizer.zero_grad()
    examples = run.task.unpack(batch, run.device)
    num_targets = run.task.count_targets(examples)
    num_in_all = num_targets * hvd.size()
    if run.task.targets_vary:
        num_in_all = int(hvd.allreduce(torch.tensor(num_targets), name="update.targets", op=hvd.Sum))
        num_in_all = max(num_in_all, 1)  # blocks of padding alone have no target, and no gradient
    total = torch.zeros((), device=run.device)
    for part in examples.split(run.batches.micro_batch):
        with autocast(run.config.precision, run.device):
            loss = run.task.sum_loss(run.model, part)
        # Divided by the whole batch, not by this rank's or this pass's part of it (Goyal et al. 2017, remark 3).
        run.loss_scale.scale(loss / num_in_all).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    run.optimizer.synchronize()
    run.loss_scale.unscale_(run.optimizer)  # after the sum over the ranks: all see the same infinities
    if run.config.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.config.clip_norm)
    with run.optimizer.skip_synchronize():
        run.loss_scale.step(run.optimizer)
    scale = run.loss_scale.get_scale()
    run.loss_scale.update()
    # It falls where a gradient overflowed and the step was skipped: then there are no new weights to take in.
    if run.average is not None and run.loss_scale.get_scale() >= scale:
        run.average.update()
    return total / max(num_targets, 1)


def is_due(epoch: int, every: int | None) -> bool:
    """Return whether something that is done every so many epochs is to be done after `epoch` of them."""
    return every is not None and epoch > 0 and epoch % every == 0


def evaluate_run(run: Run) -> dict[str, float]:
    """Return the metrics of the weights and, under `ema_`, of their average; none without a validation split."""
    if run.val_loader is None:
        return {}
    # Released before the evaluation: both loaders' shards need not fit the cache together.
    run.loader.close()
    average_batch_statistics(run.model)
    metrics = evaluate(run.task, run.model, run.val_loader, run.device, run.config.precision)
    if run.average is not None:
        with run.average.applied():
            averaged = evaluate(run.task, run.model, run.val_loader, run.device, run.config.precision)
        metrics |= {f"ema_{name}": value for name, value in averaged.items()}
    run.val_loader.close()
    if hvd.rank() == 0:
        run.events.report("evaluation", step=run.step, epoch=run.loader.epoch, **metrics)
        for log in run.logs:
            log.log(run.step, metrics)
    return metrics


def report_step(run: Run, clock: StepClock, *, epoch: int, loss: float, rate: float) -> None:
    """Say how it goes, from rank 0: loss of its part, rate, and the mean times of the steps since the last report."""
    step_s, wait_s = clock.take()
    if hvd.rank() != 0:
        return
    samples = run.batches.global_batch
    run.events.report(
        "step",
        step=run.step,
        epoch=epoch,
        progress=run.loader.progress / run.config.epochs,
        loss=loss,
        rate=rate,
        step_s=step_s,
        wait_s=wait_s,
        samples=samples,
        unit=run.task.unit,
    )
    values = {"loss": loss, "rate": rate, f"{run.task.unit}_per_s": samples / step_s, "data_stall": wait_s / step_s}
    for log in run.logs:
        log.log(run.step, values)


def profile(run: Run, path: str) -> None:
    """Say where the time of the epoch that just ended went."""
    times = profile_epoch(run.loader, path, rank=hvd.rank(), num_ranks=hvd.size())
    if hvd.rank() == 0:
        run.events.report("profile", epoch=run.loader.epoch - 1, **times)


def end(run: Run) -> str:
    """Let go of everything; returns the last version."""
    run.loader.close()
    if run.val_loader is not None:
        run.val_loader.close()
    if run.nodes is not None:
        hvd.barrier()  # nobody's peer goes before everybody has what it needs
        run.nodes.close()
    assert run.version is not None
    if hvd.rank() == 0:
        for log in run.logs:
            log.close()
        run.events.report("end", version=run.version, step=run.step, **run.metrics)
    hvd.shutdown()
    return run.version
