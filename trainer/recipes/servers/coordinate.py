"""Rank 0 of a job with parameter servers: the run, and the first server.

The run is that of one rank with the global batch of all workers: its loader has the position of the run and reads
nothing, its weights and optimizer get those of the servers when the gate is closed. Invariant: what is evaluated and
saved is the state after all parts of a whole number of steps, and of nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from datasvc.cache.peers.placement import rank_nodes
from datasvc.errors import ConfigError
from datasvc.models import Execution, SaveTo
from datasvc.models.versions.data_use import cursor_of
from datasvc.repository import Digest
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.build import set_rate
from datasvc.trainer.recipes.checkpoints import commit, report_commits
from datasvc.trainer.recipes.reporting.recorder import LoggedEvents
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.recipes.servers.server_job import ServerJob, make_server_optimizer
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.start import start
from datasvc.trainer.recipes.tasks.batch_statistics import batch_norms
from datasvc.trainer.recipes.train import end, end_epoch, leave, report_not_finite, report_step
from datasvc.trainer.servers.coordinator import Coordinator, Gate
from datasvc.trainer.servers.leases import parse_staleness
from datasvc.trainer.servers.parameter_shard import put_back, take_shard


def coordinate(config: TrainConfig, job: ServerJob, events: LoggedEvents) -> str:
    """Train until the run is complete or stopped; return the last committed version. See `train` for events.

    It reports also `lost`: a worker is lost.

    Raises:
        SystemExit, ConfigError, NotFoundError, CacheFullError, NotFiniteError: see `train`.
        HorovodInternalError: another server is lost, or all workers are.
    """
    random_state.seed_all(config.seed)
    run = start(_settings_of_run(config, job.num_workers), events)
    try:
        with run.checkpoints:
            _train(run, config, job)
        end(run)
    except BaseException as error:
        run.recorder.close(error)
        raise
    return leave(run)


def _settings_of_run(config: TrainConfig, num_workers: int) -> TrainConfig:
    """Return the settings of one rank whose batches are those of all workers. Workers write the ledger."""
    batches = plan_batches(config, num_workers)
    return dataclasses.replace(
        config.without_records(), global_batch=batches.global_batch, micro_batch=batches.micro_batch
    )


def _train(run: Run, config: TrainConfig, job: ServerJob) -> None:
    if batch_norms(run.model) and not config.recomputes_statistics:
        raise ConfigError(
            f"the model {run.config.model} has batch normalisation, whose statistics are those of no worker; give "
            "--statistics recompute"
        )
    parts = _place(run.model, job.num_servers)
    staleness = config.parse_staleness()
    run.execution = describe_server_execution(config.sync, job.num_workers, job.num_servers)
    with Coordinator(
        job.store,
        [take_shard(part, run.optimizer) for part in parts],
        make_server_optimizer(config),
        num_workers=job.num_workers,
        staleness=staleness,
        welcome={
            "config": config.to_dict(),
            "model": {name: value.cpu() for name, value in run.model.state_dict().items()},
            "names": [list(part) for part in parts],
            "loader": run.loader.state_dict(),
        },
        on_lost=lambda worker: run.events.report("lost", rank=job.num_servers + worker, worker=worker, step=run.step),
        timeout_s=job.timeout_s,
        lost_after_s=config.lost_after,
    ) as coordinator:
        _go_through_epochs(run, coordinator, parts)
        epoch, _ = cursor_of(run.loader.state_dict())
        coordinator.end(epoch=epoch)


def _place(model: nn.Module, num_servers: int) -> list[dict[str, nn.Parameter]]:
    """Return the trainable weights of each server by name. Raises ConfigError: float32 cannot hold one."""
    servers = [str(server) for server in range(num_servers)]
    parts: list[dict[str, nn.Parameter]] = [{} for _ in servers]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if torch.promote_types(parameter.dtype, torch.float32) is not torch.float32:
                raise ConfigError(
                    f"the weight {name} is {parameter.dtype}, and parameter servers hold and send float32; make the "
                    "model in float32, or give --sync bsp"
                )
            parts[int(rank_nodes(Digest(name), servers)[0])][name] = parameter
    return parts


def describe_server_execution(sync: str, num_workers: int, num_servers: int) -> Execution:
    """Return what the entry of a version says about a job with parameter servers."""
    consistency = {"ssp:0": "synchronous", "async": "asynchronous"}.get(sync, "bounded")
    return Execution(
        layout={"data": num_workers, "server": num_servers},
        parallelism="data" if num_workers > 1 else "none",
        consistency=consistency,  # type: ignore[arg-type]  # one of its literals
        topology="centralised",
        communication="point-to-point",
        sync=sync,
        sync_steps=1,
        staleness=parse_staleness(sync).bound,
    )


def _go_through_epochs(run: Run, coordinator: Coordinator, parts: Sequence[dict[str, nn.Parameter]]) -> None:
    """Train until the run is complete or a stop signal arrives, as `train.go_through_epochs` does."""
    if run.loader.state_dict()["epoch"] < run.loader.epoch and not run.is_over:
        end_epoch(run)
    timer = run.recorder.timer
    while not run.is_over:
        to = _serve_gate(run, coordinator)
        _take_weights(run, coordinator, parts)
        if to and not run.is_over:
            run.metrics, run.average_statistics = {}, {}
            report_not_finite(run)
            commit(run, due=run.checkpoints.stop_signal is None, to=to)
            if run.checkpoints.stop_signal is not None:
                return
        epoch, _ = cursor_of(run.loader.state_dict())
        if epoch < run.loader.epoch:
            _move(run, epoch + 1, 0)
            end_epoch(run)
        elif run.is_cut_short:
            end_epoch(run)
        timer.restart()


def _serve_gate(run: Run, coordinator: Coordinator) -> SaveTo:
    """Train to the end of the epoch, the last step of the run, or a save that may be due; return where to save."""
    epoch, begin = cursor_of(run.loader.state_dict())
    if epoch < run.loader.epoch:
        epoch, begin = epoch + 1, 0
    samples, num_samples = run.batches.global_batch, run.loader.split.num_positions
    num_steps = (num_samples - begin) // samples
    # Stop before steps after which a save may be due, so that it has no parts of later steps.
    num_steps = min(num_steps, run.config.checkpoint_every - run.step % run.config.checkpoint_every)
    if run.config.max_steps is not None:
        num_steps = min(num_steps, run.config.max_steps - run.step)

    def rate_at(position: int) -> float:
        before, after = (epoch + (position + passed) / num_samples for passed in (0, samples))
        return run.schedule.rate_at(before, after=after)

    to, timer, position = SaveTo.NOWHERE, run.recorder.timer, begin
    for loss in coordinator.run_steps(Gate(epoch, begin, num_steps, samples, rate_at)):
        timer.got_batch()
        rate = rate_at(position)
        set_rate(run.optimizer, rate, epoch + position / num_samples)
        position += samples
        _move(run, epoch, position)
        run.step += 1
        timer.end_step()
        if run.step % run.config.report_every == 0:
            report_step(run, epoch=epoch, loss=loss, rate=rate)
            if not math.isfinite(loss):
                report_not_finite(run, loss)
        report_commits(run)
        if not to and (to := run.checkpoints.should_save(run.step)):
            coordinator.close_gate()
    return to


def _move(run: Run, epoch: int, position: int) -> None:
    run.loader.load_state_dict({**run.loader.state_dict(), "epoch": epoch, "position": position})


@torch.no_grad()
def _take_weights(run: Run, coordinator: Coordinator, parts: Sequence[dict[str, nn.Parameter]]) -> None:
    """Write the weights and moments of all servers into the run."""
    for state, part in zip(coordinator.state(), parts, strict=True):
        put_back(state, part, run.optimizer)
