"""The state of an elastic run (`--elastic`): a copy of it in host memory, from which the ranks continue.

A *round* of the job is the time between two changes of its ranks. At the start of each, every rank builds a new run
and loads the copy into it. The hooks, connections and prefetched batches of the round before are discarded. A round
*of averaged weights* (`--sync`) is another one: the steps between two averages. `in_round`, `IN_ROUND` and
`round_part` are of such rounds; all other names here are of rounds of the job.

When a rank is lost, the others copy the end of their last whole step, so that no step is repeated; replicas that
average weights every few steps are at different steps then, and end their round together, see `catch_up`. The copies
that they make at regular steps are for runs and moments in which there is no such end, see `step_end`.

If a layout divides the model, a rank copies its part of it, and a rank that has another part in the next round gets
that from a rank that has a copy of it; see `places`.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.errors import DatasvcError
from datasvc.ledger.broken_rounds import RoundPart
from datasvc.loaders.core.mixture import splits_of
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.trainer.elastic.state import State
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from datasvc.trainer.optim.broadcast_state import allgather_object, broadcast_object
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.checkpoints import committed_versions, load_optimizer, report_commits
from datasvc.trainer.recipes.choose_layout import read_layout
from datasvc.trainer.recipes.layouts.places import (
    AFTER_EPOCH,
    AT_STEP,
    IN_ROUND,
    Commit,
    Place,
    StateCopy,
    TransferPlan,
    find_places,
    plan_transfers,
)
from datasvc.trainer.recipes.layouts.shard import from_local, to_local
from datasvc.trainer.recipes.layouts.step_end import StepEnd, keeps_step_ends
from datasvc.trainer.recipes.optimizers.catch_up import RoundCopy, find_round
from datasvc.trainer.recipes.optimizers.leased_rounds import LeasedRounds
from datasvc.trainer.recipes.optimizers.precision import load_loss_scale
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt
from datasvc.trainer.rendezvous.rendezvous import current_rendezvous

_LOG = logging.getLogger(__name__)

# Attributes of a snapshot that differ between the ranks; the others are sent from one rank to all.
_OF_PLACE = ("place", "model", "average_statistics", "optimizer", "average", "round_part")


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state of a run, the same on all ranks but for parts of the model and of `optimizer`.

    Tensors are those that the rank stores: its parts of a divided model.

    Attributes:
        commit: round of the ranks in which it was made or last sent, step, and whether the epoch or the run ends
            with that step, and its evaluation is done; see `StateCopy`.
        place: place of the rank in the layout.
        data_versions: version of each data set, such as "digits@1".
        parent: version that the next checkpoint continues; None: none.
        step: optimizer steps so far.
        metrics: metrics of the newest evaluation; empty if training has continued since.
        model: weights and buffers; the statistics of batch normalisation are those of this rank.
        average_statistics: statistics of batch normalisation of the averaged weights; see `Run`.
        optimizer: moments and counters, of this rank with `--sync`, and what its compression or codec has not sent
            (residuals).
        loss_scale: state of the loss scaler.
        average: average of the weights; None without one.
        early_stop: best metric, and evaluations since.
        loader: position of the job, from which the learning rate's schedule follows too.
        reading: samples consumed so far; see `ConsumptionTracker`.
        log_ids: ids of the run log and of the trackers' runs, see `Run`.
        leases: shares of the rounds that follow, see `LeasedRounds`; {} without leases.
        round_part: what the replica has applied since the step, in a round of averaged weights that is to be ended:
            model and optimizer have learned from it, and all else is of the start of the round. None: nothing.
    """

    commit: Commit
    place: Place
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
    leases: Mapping[str, Any] = field(default_factory=dict)
    round_part: RoundPart | None = None

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch or the run ends with the step, and its evaluation is done."""
        return self.commit[2] == AFTER_EPOCH

    @property
    def as_copy(self) -> StateCopy:
        """What other ranks need to know of it."""
        return StateCopy(self.commit, self.place, 0 if self.round_part is None else len(self.round_part.applied))


class ElasticMemory(State):
    """State of an elastic run for `hvd.elastic.run`.

    Attributes:
        snapshot: newest copy of the run's state; None before the first one.
        lost_parts: parts of a divided model of which all copies were lost before this round, so that it has no
            snapshot.
        has_saved: whether the job has saved a version, from which it continues without a snapshot.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.snapshot: Snapshot | None = None
        self.lost_parts: tuple[int, ...] = ()
        self.has_saved = False
        self._config = config
        # The copies before the newest one, while it is not known that all ranks have a newest one.
        self._older: list[Snapshot] = []
        self._run: Run | None = None
        self._first_parent: str | None = None  # at the start of this round
        self._step_end: StepEnd | None = None
        self._is_due = self._ends_epoch = False

    @property
    def config(self) -> TrainConfig:
        """Settings of the round: without a snapshot, the job continues the newest version that it has saved."""
        continues = self.snapshot is None and self.has_saved
        return dataclasses.replace(self._config, resume="auto") if continues else self._config

    @contextmanager
    def holding(self, run: Run) -> Iterator[None]:
        """Copy the state of `run` at each commit inside the context (one round), and the last step before an error.

        The run is closed after an error.
        """
        self._run, self._is_due = run, False
        self._step_end = StepEnd(run) if keeps_step_ends(run) else None
        # All ranks have what `sync` has sent. A later loss can leave no whole replica in the rest of a round: then
        # all go back to the copy before the round.
        is_in_round = self.snapshot is not None and self.snapshot.commit[2] == IN_ROUND
        self._older = [copy for copy in self._older if is_in_round and copy.commit[2] != IN_ROUND]
        first_version, self._first_parent = run.checkpoints.version, parent_of(run)
        try:
            yield
        except HostsUpdatedInterrupt as error:
            # A commit has raised it. Closing waits for the saves before the commit, so the newest one is the parent.
            run.close(error)
            report_commits(run)
            assert self.snapshot is not None
            self.snapshot, self._older = dataclasses.replace(self.snapshot, parent=parent_of(run)), []
            error.skip_sync = False  # without a new rank too, ranks get other numbers, and with these other parts
            raise
        except BaseException as error:
            try:
                if _may_be_of_lost_rank(error, run):
                    self._keep_step_end(run)
            except Exception:  # noqa: BLE001 - whatever it is, the copies before it are left
                _LOG.exception("rank %d could not copy its state after step %d", hvd.rank(), run.step)
            finally:
                run.close(error)
            raise
        finally:
            self._run = self._step_end = None
            self.has_saved |= run.checkpoints.version != first_version

    def end_step(self) -> None:
        """Note that a step, which the run counts already, is complete."""
        if self._step_end is not None:
            self._step_end.note()

    def _keep_step_end(self, run: Run) -> None:
        """Copy the state after the last step, unless the newest copy is of that step."""
        if self._step_end is None or not self._step_end.go_back():
            return
        newest, in_round = self.snapshot, find_round(run) if run.config.averages_weights else None
        if newest is not None and newest.commit[:2] == (_round_number(), run.step) and not run.is_updating:
            # A save that was on the way has committed since.
            self.snapshot = dataclasses.replace(newest, parent=parent_of(run))
            return
        if run.config.averages_weights and in_round is None and (run.is_updating or not run.optimizer.is_averaged):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the gradients of the lost step are no loss
            snapshot = take_snapshot(run, in_round=in_round)
        if in_round is not None:
            # A version of a later step has learned from what the lost rank had, and is no part of the history.
            before = [version for step, version in committed_versions(run) if step <= in_round.step]
            snapshot = dataclasses.replace(snapshot, parent=before[-1] if before else self._first_parent)
        self._older = self._older if newest is None else [newest, *self._older]
        self.snapshot = snapshot
        self.num_commits += 1  # this round has made progress

    def commit_when_due(self, *, is_due: bool, ends_epoch: bool = False) -> None:
        """Commit if it is due; with `--sync`, after the next round of all ranks. Every rank calls this in each step.

        What a rank has learned since a round is lost with it, so its samples must not count as consumed.
        `ends_epoch`: the epoch or the run ends with the step, and its evaluation is done.

        Raises:
            HostsUpdatedInterrupt: see `commit`.
            HorovodInternalError: a rank is lost.
        """
        assert self._run is not None, "a commit is made in a round only"
        self._is_due |= is_due
        if self._run.config.averages_weights:
            runtime.current_job().engine.check()  # between rounds, no operation fails for a lost rank
        if self._is_due and (not self._run.config.averages_weights or self._run.optimizer.is_averaged):
            self._is_due, self._ends_epoch = False, ends_epoch
            self.commit()
            self._older = []  # the check for changes of hosts at its end waits for all ranks

    def save(self) -> None:
        """Copy the state of the run to host memory."""
        assert self._run is not None, "a commit is made in a round only"
        self._older = [] if self.snapshot is None else [self.snapshot, *self._older]
        self.snapshot = take_snapshot(self._run, ends_epoch=self._ends_epoch)

    def restore(self) -> None:
        """Do nothing: the next round loads the snapshot."""

    def sync(self) -> None:
        """Take the newest snapshot of which a copy of each part is left, or none. Every rank calls this.

        A rank that has a copy of its part keeps it, with what is its own: the residuals of a compression, and with
        `--sync` the moments and the residuals of a codec. Other ranks get a copy of a rank that has one.
        """
        layout = read_layout(self._config, hvd.size())
        places = find_places(layout, has_own_steps=self._config.averages_weights)
        own = [*([] if self.snapshot is None else [self.snapshot]), *self._older]
        of_ranks = allgather_object(([copy.as_copy for copy in own], self.has_saved), name="elastic.copies")
        self.has_saved = any(has_saved for _, has_saved in of_ranks)
        plan = plan_transfers([copies for copies, _ in of_ranks], places)
        self.lost_parts = plan.missing
        if plan.commit is None:
            self.snapshot, self._older = None, []
            return
        copy = next((copy for copy in own if plan.takes(hvd.rank(), copy.as_copy)), None)
        # A rank can be lost before all have their parts. Therefore the own copies stay, and the new one, whose place
        # has a number of this round, is another commit. Copies that spare ranks keep are older than it.
        snapshot = _exchange(copy, plan)
        commit = (_round_number(), snapshot.step, snapshot.commit[2])
        self.snapshot = dataclasses.replace(snapshot, commit=commit, place=places[hvd.rank()])
        self._older = [copy for copy in own if plan.commit[2] == IN_ROUND or copy.commit >= plan.commit]


def _round_number() -> int:
    rendezvous = current_rendezvous()
    assignment = None if rendezvous is None else rendezvous.assignment
    return 0 if assignment is None else assignment.round_number


def _exchange(copy: Snapshot | None, plan: TransferPlan) -> Snapshot:
    """Return the snapshot of this rank, from its own copy or that of another rank. Every rank calls this."""
    shared = broadcast_object(None if copy is None else _split(copy)[0], plan.sources[0], "elastic.shared")
    parts = None if copy is None else _split(copy)[1]
    for source in sorted(set(plan.sources)):
        ranks = sorted({source, *(rank for rank, other in enumerate(plan.sources) if other == source)})
        if len(ranks) > 1:
            with _process_set(ranks) as process_set:
                if hvd.rank() in ranks:
                    sent = broadcast_object(
                        None if copy is None else _split(copy)[1], source, "elastic.parts", process_set
                    )
                    if plan.sources[hvd.rank()] == source:
                        parts = sent
    assert parts is not None
    optimizer = parts["optimizer"]
    if plan.sources[hvd.rank()] != hvd.rank() and (outer := _outer_state(optimizer)):
        outer["rank"] = None  # no rank: the residuals of the other one would count twice
    if not plan.keeps_moments:
        optimizer = {**optimizer, "state": {}}
    return Snapshot(**shared, **{**parts, "optimizer": optimizer})


def _split(copy: Snapshot) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes that are equal on all ranks, and those of a place."""
    values = {each.name: getattr(copy, each.name) for each in dataclasses.fields(copy)}
    parts = {name: values.pop(name) for name in _OF_PLACE}
    return values, parts


@contextmanager
def _process_set(ranks: Sequence[int]) -> Iterator[ProcessSet]:
    """Add a process set for the context. Every rank calls this."""
    if len(ranks) == hvd.size():
        yield global_process_set
        return
    process_set = add_process_set(ranks)
    yield process_set
    remove_process_set(process_set)


def parent_of(run: Run) -> str | None:
    """Return the version that the next checkpoint of a run continues; None: none."""
    newest = run.checkpoints.version
    return run.parent if newest is None else str(newest)


def take_snapshot(run: Run, *, ends_epoch: bool = False, in_round: RoundCopy | None = None) -> Snapshot:
    """Return a copy of the state of a run, in host memory; for `ends_epoch`, see `Snapshot.commit`.

    `in_round`: the round that is to be ended, if replicas average weights and one was lost in it.
    """
    optimizer = copy_to_host(run.optimizer.state_dict())
    if "compression" in optimizer:
        # Ranks change between rounds, so only the process may identify whose residuals these are. If the number of
        # the rank did too, one residual could be applied on two ranks.
        optimizer["compression"]["rank"] = None
    snapshot = Snapshot(
        commit=(_round_number(), run.step, AFTER_EPOCH if ends_epoch else AT_STEP),
        place=find_places(run.layout, has_own_steps=run.config.averages_weights)[hvd.rank()],
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
        leases=run.rounds.state_dict() if isinstance(run.rounds, LeasedRounds) else {},
    )
    if in_round is None:
        return snapshot
    part = in_round.part
    return dataclasses.replace(
        snapshot,
        commit=(_round_number(), in_round.step, IN_ROUND),
        step=in_round.step,
        optimizer=in_round.rewind(snapshot.optimizer),
        loader={**snapshot.loader, "epoch": part.epoch, "position": part.start},
        reading=run.reading.state_dict((part.epoch, part.start)),
        round_part=part,
    )


def load_snapshot(run: Run, snapshot: Snapshot) -> None:
    """Load a snapshot into a run that was just built, and seed the rank's generators for the steps after it."""
    run.loader.load_state_dict(copy.deepcopy(dict(snapshot.loader)))
    own = run.model.state_dict()
    run.model.load_state_dict({name: from_local(value, own[name]) for name, value in snapshot.model.items()})
    # Copied, because the optimizer keeps the tensors that it loads, and a later round may load the snapshot again.
    optimizer = copy_to_host(snapshot.optimizer)
    if (outer := _outer_state(optimizer)) and outer["rank"] is not None:
        outer["rank"] = hvd.rank()  # this rank has another number in each round
    load_optimizer(run.optimizer, optimizer)
    load_loss_scale(run.loss_scale, snapshot.loss_scale)
    if run.average is not None and snapshot.average is not None:
        own = run.average.state_dict()["averages"]
        averages = {name: from_local(value, own[name]) for name, value in snapshot.average["averages"].items()}
        run.average.load_state_dict({**snapshot.average, "averages": averages})
    run.average_statistics = copy_to_host(snapshot.average_statistics)
    run.stop.load_state_dict(snapshot.early_stop)
    run.step, run.metrics, run.log_ids = snapshot.step, dict(snapshot.metrics), dict(snapshot.log_ids)
    run.parent, run.saved_leases = snapshot.parent, dict(snapshot.leases)
    # The random states of lost ranks are lost too. The step is part of the seed, and what was applied since: a rank
    # repeats no random numbers. Ranks of the axis `tensor` must draw equal numbers.
    rank, num_applied = hvd.rank() // run.layout.tensor, snapshot.as_copy.num_applied
    random_state.seed_all(random_state.seed_of_rank(run.config.seed, rank, step=run.step, num_applied=num_applied))


def _outer_state(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer's state that `--sync diloco` adds; {} if there is none."""
    return optimizer.get("averaging", {}).get("outer") or {}


def copy_to_host(tree: Any) -> Any:
    """Return a copy of a state tree on the CPU, with the parts of tensors that this rank stores."""
    if isinstance(tree, torch.Tensor):
        return to_local(tree.detach()).to("cpu", copy=True)
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
        if not _is_of_lost_rank(error):
            raise
        raise hvd.HorovodInternalError(str(error)) from error


def _is_of_lost_rank(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, hvd.HorovodInternalError | LostRankError):
        error = error.__cause__
    return error is not None


def _may_be_of_lost_rank(error: BaseException, run: Run) -> bool:
    # That of a lost connection of a divided model has no class of its own, see `explaining_lost_ranks`.
    return _is_of_lost_rank(error) or (run.divided is not None and isinstance(error, RuntimeError))
