"""A smoke run of the training program, before `datasvc-run --smoke` starts the job: a few steps that store nothing.

It builds model, optimizer and loaders with the batch of one rank of the whole job, and continues the checkpoint that
the job will continue, so its memory is that of a rank of the job.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.loaders.core.loader import Loader
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.models.saving.shared_store import write_marker
from datasvc.trainer.env.environment import SMOKE_RANKS
from datasvc.trainer.env.foreign_launchers import parse_whole
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.build import set_rate
from datasvc.trainer.recipes.choose_layout import choose_layout, read_block_tokens
from datasvc.trainer.recipes.rejoin import call_on_first_rank
from datasvc.trainer.recipes.reporting.metric_logs import import_trackers
from datasvc.trainer.recipes.reporting.recorder import LoggedEvents, mark_nothing
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.settings.groups.job import RankSettings
from datasvc.trainer.recipes.start import start
from datasvc.trainer.recipes.tasks.task import evaluate
from datasvc.trainer.recipes.update import update

_EVALUATED_BATCHES: Final = 2


@dataclass(frozen=True)
class SmokeRun:
    """What the launcher asks of a smoke run.

    Attributes:
        steps: number of steps.
        job_size: number of ranks of the job that starts after it.
    """

    steps: int
    job_size: int


def read_smoke(environ: Mapping[str, str], size: int) -> SmokeRun | None:
    """Return the smoke run that this process is a rank of; None: it is a rank of a job.

    `size` is the number of ranks, and that of the job too if a launcher of another kind set the steps only.
    """
    steps = hvd.smoke_steps()
    return None if steps is None else SmokeRun(steps, parse_whole(environ.get(SMOKE_RANKS) or str(size), SMOKE_RANKS))


def plan_smoke_config(config: TrainConfig, smoke: SmokeRun, size: int) -> TrainConfig:
    """Return the settings of a smoke run of `size` ranks, and check those of the whole job. Communicates not.

    The batch of a rank, and all axes of the layout but `data`, are those of the job.

    Raises:
        ConfigError: the settings do not go with the number of ranks of the job, or the other axes with `size`; or the
            package of a tracker is missing.
    """
    import_trackers(config.log_to)
    layout = choose_layout(config, smoke.job_size, block=read_block_tokens(config, smoke.job_size))
    others = layout.size // layout.data
    if size % others:
        raise ConfigError(
            f"a smoke run has {size} ranks, and the layout {layout} needs a multiple of {others}, because only its "
            f"axis data can be smaller; give --smoke {others}"
        )
    return replace(
        config.without_records(),
        batch_size=plan_batches(config, layout.num_data_ranks).batch_size,
        global_batch=None,
        layout=None if config.layout is None else str(replace(layout, data=size // others)),
        elastic=False,
        commit_every=RankSettings.commit_every,
        local_checkpoints=None,
        every_local=None,
        run_log=False,
        log_to=(),
        signals=None,
        metrics_port=None,
        profile=None,
    )


def make_smoke_run(config: TrainConfig, smoke: SmokeRun, events: LoggedEvents, forget: ForgetPlan | None) -> None:
    """Make the steps of a smoke run, and evaluate a few batches. Every rank must call this.

    Rank 0 reports an event `smoke`. The repository is as before; only the cache keeps what it fetches, and a view of
    the data set is stored, as by every run.

    Args:
        config: settings of `plan_smoke_config`.
        smoke: the smoke run.
        events: sink of this rank's events.
        forget: see `start`.

    Raises:
        ConfigError: the settings do not fit the data or the checkpoint, or the repository is not writable.
        NotFoundError, CacheFullError, UnavailableError: see `start`.
    """
    random_state.seed_all(config.seed)
    run = start(config, events, forget=forget)
    # Closing the manager raises a signal that has come meanwhile: the launcher then starts no job.
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stack.enter_context(run.checkpoints)
        call_on_first_rank(lambda: _check_writable(config.repo), name="smoke.writable")
        losses = list(_make_steps(run, smoke.steps))
        if run.val_loader is not None:
            run.loader.close()
            batches = itertools.islice(run.val_loader, _EVALUATED_BATCHES)
            evaluate(run.task, run.model, batches, run.device, config.precision, run.divided)
        if hvd.rank() == 0:
            events.report(
                "smoke",
                steps=len(losses),
                batch_size=run.batches.batch_size,
                loss=losses[-1] if losses else None,
                **({"gpu_bytes": torch.cuda.max_memory_allocated(run.device)} if run.device.type == "cuda" else {}),
            )
        hvd.barrier()  # a node must not stop its server while another rank fetches from it


def _make_steps(run: Run, steps: int) -> Iterator[float]:
    """Make up to `steps` optimizer steps, and yield the loss of each, equal on all ranks."""
    run.shares_loss = True
    # A step at the end of an epoch is followed by one of the next epoch. A complete run has none.
    epochs: Iterable[Loader[Any]] = () if run.is_over else itertools.repeat(run.loader)
    progress = run.loader.progress
    for batch in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        set_rate(run.optimizer, run.schedule.rate_at(progress, after=run.loader.progress), progress)
        progress = run.loader.progress
        yield float(update(run, batch, mark_nothing))
        run.step += 1


def _check_writable(url: str) -> None:
    """Write a temporary file into the repository and remove it. Raises ConfigError: the store refuses it."""
    storage = datasvc.open(url).repository.storage
    storage.remove_temporary(write_marker(storage).path)
