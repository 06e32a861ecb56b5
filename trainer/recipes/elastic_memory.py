"""The state of an elastic run (`--elastic`): a copy of it in host memory, from which the ranks continue.

A *round* is the time between two changes of the ranks of a job. At the start of each round, every rank builds a new
run and loads the copy into it. The hooks, connections and prefetched batches of the round before are discarded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.errors import DatasvcError
from datasvc.loaders.core.mixture import splits_of
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.trainer.elastic.state import State
from datasvc.trainer.job import runtime
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.checkpoints import load_optimizer, report_commits
from datasvc.trainer.recipes.optimizers.precision import load_loss_scale
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state of a run, the same on all ranks but for parts of `optimizer`.

    Attributes:
        data_versions: version of each data set, such as "digits@1".
        parent: version that the next checkpoint continues; None: none.
        step: optimizer steps so far.
        metrics: metrics of the newest evaluation; empty if training has continued since.
        model: weights and buffers; the statistics of batch normalisation are those of rank 0.
        average_statistics: statistics of batch normalisation of the averaged weights; see `Run`.
        optimizer: moments and counters, of this rank with `--sync`, and what its compression or codec has not sent
            (residuals).
        loss_scale: state of the loss scaler.
        average: average of the weights; None without one.
        early_stop: best metric, and evaluations since.
        loader: position of the job, from which the learning rate's schedule follows too.
        reading: samples consumed so far; see `ConsumptionTracker`.
        log_ids: ids of the run log and of the trackers' runs, see `Run`.
    """

    data_versions: list[str]
    parent: str | None
    step: int
    metrics: dict[str, float]
    model: Mapping[str, Any]
    average_statistics: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    loss_scale: Mapping[str, Any]
    average: Mapping[str, Any] | None
    early_stop: Mapping[str, Any]
    loader: Mapping[str, Any]
    reading: Mapping[str, Any]
    log_ids: dict[str, str]


class ElasticMemory(State):
    """State of an elastic run for `hvd.elastic.run`.

    Attributes:
        snapshot: newest copy of the run's state; None before the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.snapshot: Snapshot | None = None
        self._run: Run | None = None
        self._is_due = False

    @contextmanager
    def holding(self, run: Run) -> Iterator[None]:
        """Copy the state of `run` at each commit inside the context (one round); close the run after an error."""
        self._run, self._is_due = run, False
        try:
            yield
        except HostsUpdatedInterrupt as error:
            # A commit has raised it. Closing waits for the saves before the commit, so the newest one is the parent.
            run.close(error)
            report_commits(run)
            assert self.snapshot is not None
            self.snapshot = dataclasses.replace(self.snapshot, parent=parent_of(run))
            raise
        except BaseException as error:
            run.close(error)
            raise
        finally:
            self._run = None

    def commit_when_due(self, *, is_due: bool) -> None:
        """Commit if it is due; with `--sync`, after the next round of all ranks. Every rank calls this in each step.

        What a rank has learned since a round is lost with it, so its samples must not count as consumed.

        Raises:
            HostsUpdatedInterrupt: see `commit`.
            HorovodInternalError: a rank is lost.
        """
        assert self._run is not None, "a commit is made in a round only"
        self._is_due |= is_due
        if self._run.config.averages_weights:
            runtime.current_job().engine.check()  # between rounds, no operation fails for a lost rank
        if self._is_due and (not self._run.config.averages_weights or self._run.optimizer.is_averaged):
            self._is_due = False
            self.commit()

    def save(self) -> None:
        """Copy the state of the run to host memory."""
        assert self._run is not None, "a commit is made in a round only"
        self.snapshot = take_snapshot(self._run)

    def restore(self) -> None:
        """Do nothing: the next round loads the snapshot."""

    def sync(self) -> None:
        """Take the snapshot of rank 0, but keep what is this rank's own. Every rank calls this.

        These are the residuals of a compression, and with `--sync` the moments and the residuals of a codec.
        """
        own = self.snapshot
        snapshot: Snapshot | None = self._bcast_object(own)
        # A rank that was lost in a commit may leave this rank with an older snapshot, which is outdated.
        if snapshot is not None and own is not None and own.step == snapshot.step:
            parts = {"compression"} | ({"averaging", "state"} if "averaging" in own.optimizer else set())
            kept = {part: own.optimizer[part] for part in parts & own.optimizer.keys()}
            snapshot = dataclasses.replace(snapshot, optimizer={**snapshot.optimizer, **kept})
        elif snapshot is not None and (outer := _outer_state(snapshot.optimizer)):
            outer["rank"] = None  # nobody's here: the residuals of rank 0 must not count twice
        self.snapshot = snapshot


def parent_of(run: Run) -> str | None:
    """Return the version that the next checkpoint of a run continues; None: none."""
    newest = run.checkpoints.version
    return run.parent if newest is None else str(newest)


def take_snapshot(run: Run) -> Snapshot:
    """Return a copy of the state of a run, in host memory."""
    optimizer = copy_to_host(run.optimizer.state_dict())
    if "compression" in optimizer:
        # Ranks change between rounds, so only the process may identify whose residuals these are. If the number of
        # the rank did too, one residual could be applied on two ranks.
        optimizer["compression"]["rank"] = None
    return Snapshot(
        data_versions=[split.dataset for split in splits_of(run.loader.split)],
        parent=parent_of(run),
        step=run.step,
        metrics=dict(run.metrics),
        model=copy_to_host(run.model.state_dict()),
        average_statistics=copy_to_host(run.average_statistics),
        optimizer=optimizer,
        loss_scale=run.loss_scale.state_dict(),
        average=None if run.average is None else copy_to_host(run.average.state_dict()),
        early_stop=run.stop.state_dict(),
        loader=run.loader.state_dict(),
        reading=run.reading.state_dict(),
        log_ids=dict(run.log_ids),
    )


def load_snapshot(run: Run, snapshot: Snapshot) -> None:
    """Load a snapshot into a run that was just built, and seed the rank's generators for the steps after it."""
    run.loader.load_state_dict(copy.deepcopy(dict(snapshot.loader)))
    run.model.load_state_dict(snapshot.model)
    # Copied, because the optimizer keeps the tensors that it loads, and a later round may load the snapshot again.
    optimizer = copy_to_host(snapshot.optimizer)
    if (outer := _outer_state(optimizer)) and outer["rank"] is not None:
        outer["rank"] = hvd.rank()  # this rank has another number in each round
    load_optimizer(run.optimizer, optimizer)
    load_loss_scale(run.loss_scale, snapshot.loss_scale)
    if run.average is not None and snapshot.average is not None:
        run.average.load_state_dict(snapshot.average)
    run.average_statistics = copy_to_host(snapshot.average_statistics)
    run.stop.load_state_dict(snapshot.early_stop)
    run.step, run.metrics, run.log_ids = snapshot.step, dict(snapshot.metrics), dict(snapshot.log_ids)
    run.parent = snapshot.parent
    # The random states of lost ranks are lost too. The step is part of the seed: no random numbers are repeated.
    random_state.seed_all(random_state.seed_of_rank(run.config.seed, hvd.rank(), step=run.step))


def _outer_state(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer's state that `--sync diloco` adds; {} if there is none."""
    return optimizer.get("averaging", {}).get("outer") or {}


def copy_to_host(tree: Any) -> Any:
    """Return a copy of a state tree whose tensors are on the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: copy_to_host(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(copy_to_host, tree))
    return copy.deepcopy(tree)


@contextmanager
def reporting_lost_ranks() -> Iterator[None]:
    """Raise `HorovodInternalError`, which starts a new round, for errors of checkpoints that a lost rank caused."""
    try:
        yield
    except DatasvcError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LostRankError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise hvd.HorovodInternalError(str(error)) from error
