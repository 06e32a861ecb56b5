"""Saves the complete state of a run as checkpoints, and restores it; used by the training loop.

A checkpoint holds weights, their average, optimizer, loss scale, loader position, step, the state of early stopping,
and of every rank the random states, the batch statistics, and what it has not sent of its gradients. With `--sync`,
the weights are means over the ranks, or those of the best one, and each rank also saves its own. A run that was
killed and resumed at the same world size therefore ends with the bits of an uninterrupted run, wherever checkpoints
were made. With bucket size "auto", measured leases, or parameter servers (server 0 saves alone), bits can differ.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

import datasvc.trainer as hvd
from datasvc.api import DataRepository
from datasvc.cache import Cache
from datasvc.errors import BusyError, ConfigError, StateMismatchError
from datasvc.loaders import ImageLoader
from datasvc.loaders.core.mixture import splits_of
from datasvc.models import Checkpoint, CheckpointManager, LocalVersion, SaveTo
from datasvc.models.restoring.fit import TensorSpec, plan_load
from datasvc.models.restoring.restore import IntoState, StoredVersion
from datasvc.models.versions.entry_fields import TRACKERS, config_of_run, runs_in_config
from datasvc.planning.layout import AXES
from datasvc.progress import NO_PROGRESS, byte_progress
from datasvc.repository import Resolved
from datasvc.trainer.optim.sync_policy import parse_sync
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.layouts.execution import describe_execution
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.mean_weights import compute_mean_weights, own_weights
from datasvc.trainer.recipes.model_check import MODEL_SIZES, check_sizes, describe_misfit, describe_whole_model
from datasvc.trainer.recipes.optimizers.leased_rounds import LeasedRounds
from datasvc.trainer.recipes.optimizers.precision import load_loss_scale
from datasvc.trainer.recipes.reporting.recorder import RUN_LOG
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.batch_statistics import batch_statistics, compute_average_statistics

# Parts of a checkpoint without parts of the model; each rank restores them whole. "random": of earlier releases.
_RESTORED_WHOLE: Final = (
    "step", "model_name", "optimizer_name", "loss_scale", "early_stop", "loader", "log_ids", "leases",
    "rank_state", "random")  # fmt: skip

_OTHER_RUN: Final = "use another --name, or --resume never"

_LOG = logging.getLogger(__name__)


def open_checkpoints(repo: DataRepository, config: TrainConfig, cache: Cache | None) -> CheckpointManager:
    """Return the manager of the run's checkpoints. It restores through `cache`. Every rank must call this."""
    # The grace period needs signal handlers, which only the main thread can set. A program that trains in another
    # thread ends the run itself.
    is_main = threading.current_thread() is threading.main_thread()
    return repo.models.manager(
        config.name,
        cache=cache,
        codec=config.codec,
        every=config.checkpoint_every,
        max_stall=config.max_stall,
        overlap=config.checkpoint_overlap,
        # A failed save does not end the run: the next save stores a newer state. Only the last one must succeed.
        failures="log",
        grace=config.grace if is_main else None,
        local=config.local_checkpoints,
        every_local=config.every_local,
    )


def commit(run: Run, *, due: bool = False, to: SaveTo = SaveTo.REPOSITORY) -> None:
    """Save the run and its metrics in the background. Every rank must call this.

    Args:
        run: run of this rank.
        due: whether this save is periodic. With `checkpoint_overlap="refuse"`, a periodic save is refused while an
            earlier one is running. Any other save must not be refused, so it waits.
        to: where to save.
    """
    with run.recorder.busy("checkpoint"):
        _submit(run, due=due, to=to)


def _submit(run: Run, *, due: bool, to: SaveTo) -> None:
    """Copy the state of the run, and queue its write; see `commit`."""
    if not due and run.config.checkpoint_overlap == "refuse":
        for handle, _ in run.saves:
            handle.wait()
    # In `weights`, the averages over all ranks replace the batch statistics of this rank.
    means = compute_mean_weights(run)
    weights = run.model.state_dict() | compute_average_statistics(run.model) | means
    average = None
    if run.average is not None:
        average = {**run.average.state_dict(), "batch_statistics": run.average_statistics}
    optimizer = run.optimizer.state_dict()
    rank_state = _take_rank_state(run, optimizer, keeps_weights=bool(means))
    state = {
        "step": run.step,
        "model_name": run.config.model,
        "model": weights,
        "optimizer_name": run.config.optimizer,
        "optimizer": optimizer,
        "loss_scale": run.loss_scale.state_dict(),
        "ema": average,
        "early_stop": run.stop.state_dict(),
        "loader": run.loader.state_dict(),
        "leases": run.rounds.state_dict() if isinstance(run.rounds, LeasedRounds) else None,
        "log_ids": {RUN_LOG: run.log_ids[RUN_LOG]} if RUN_LOG in run.log_ids else {},  # that of rank 0 is stored
    }
    tournament = getattr(run.optimizer, "tournament", None)
    config = run.config.to_dict() | ({MODEL_SIZES: dict(run.model_sizes)} if run.model_sizes else {})
    for tracker in TRACKERS:
        if tracker in run.log_ids:
            config |= config_of_run(tracker, run.log_ids[tracker])
    try:
        handle = run.checkpoints.save(
            state,
            rank_state=rank_state,
            step=run.step,
            data=[run.reading.use()],
            config=config,
            metrics=run.metrics,
            execution=run.execution
            or describe_execution(
                run.layout,
                zero=run.config.zero,
                exchanges_heads=run.divided is not None and run.divided.exchanges_heads,
                sync=run.config.sync,
                tournament=None if tournament is None else tournament.describe(),
            ),
            parent=None if run.has_saved else run.parent,
            run=run.ref,
            architecture=run.architecture,
            to=to,
        )
    except BusyError:
        # Only a periodic save is refused. Nothing is lost: the next save has a newer state.
        if hvd.rank() == 0:
            run.events.report("refused", step=run.step, epoch=run.loader.epoch)
    else:
        # What is on the nodes only is no parent of a version in the repository.
        run.has_saved |= to is SaveTo.REPOSITORY
        run.saves.append((handle, run.loader.epoch))


def _take_rank_state(run: Run, optimizer: dict[str, Any], *, keeps_weights: bool) -> dict[str, Any]:
    """Return the state of this rank alone; parts that are its own are taken out of `optimizer`, its state."""
    rank_state = {"random": random_state.capture()}
    if hvd.size() > 1:
        # The averages in `weights` would change the training of a resumed run, so each rank saves its own values too.
        rank_state["batch_statistics"] = batch_statistics(run.model)
    if run.config.makes_own_steps and hvd.size() > 1:
        # Each rank makes its steps with its own gradients, so its moments are its own too.
        rank_state["optimizer"] = tree_map_only(torch.Tensor, to_local, optimizer["state"])
    if keeps_weights:
        rank_state["weights"] = {name: to_local(weight) for name, weight in own_weights(run).items()}
    if run.config.averages_weights:
        # Outer weights are equal on all ranks, and stored once; what a rank has sent of a round is its own.
        rank_state["averaging"] = optimizer.pop("averaging")
    if "compression" in optimizer:
        # What a rank has not sent of its gradients is its own.
        rank_state["compression"] = optimizer.pop("compression")["memory"]
    return rank_state


def report_commits(run: Run) -> None:
    """Record the saves that have completed or failed since the last call, and report them from rank 0."""
    while run.saves and run.saves[0][0].done():
        handle, epoch = run.saves.popleft()
        facts = {"step": handle.step, "epoch": epoch}
        if handle.version is None:
            event, details = "failed", {**facts, "error": str(handle.error)}
        elif isinstance(handle.version, LocalVersion):
            event, details = "local_checkpoint", {**facts, "stall_s": handle.stall_s}
        else:
            run.version = str(handle.version)
            run.committed.append((handle.step, run.version))
            event, details = "checkpoint", {"version": run.version, **facts, "stall_s": handle.stall_s}
        if hvd.rank() == 0:
            run.events.report(event, **details)


def committed_versions(run: Run) -> list[tuple[int, str]]:
    """Return step and name of each version that this process has committed to the repository, in order."""
    ended = [(handle.step, handle.version) for handle, _ in run.saves]
    unreported = [(step, str(version)) for step, version in ended if type(version) is Resolved]
    return [*run.committed, *unreported]


def restore(
    run: Run, ref: str | None, *, only: Collection[str] = (), into: IntoState | None = None
) -> Checkpoint | None:
    """Read a checkpoint, and report the time and bytes that this rank needed for it. Every rank must call this.

    On a terminal, rank 0 shows a progress bar. For `only`, `into` and errors, see `CheckpointManager.restore`.

    Args:
        run: run of this rank.
        ref: version to restore; None: the newest, on the disks of the nodes or in the repository.
        only: tensors to restore.
        into: state to fill.

    Returns:
        The checkpoint; None only without `ref`: there is none.
    """
    bar = (
        byte_progress(f"restoring {ref or run.config.name}")
        if hvd.rank() == 0
        else contextlib.nullcontext(NO_PROGRESS)
    )
    with bar as progress:
        if ref is None:
            newest: Checkpoint | None = run.checkpoints.restore(default=None, into=into, progress=progress)
            if newest is None:
                return None
            checkpoint = newest
        else:
            checkpoint = run.checkpoints.restore(ref, only=only, into=into, progress=progress)
    report = checkpoint.report
    run.events.report(
        "restored",
        rank=hvd.rank(),
        version=str(checkpoint.version),
        seconds=report.seconds,
        size_bytes=report.size_bytes,
        lost_steps=report.lost_steps,
        **{f"{source}_bytes": num_bytes for source, num_bytes in report.came_bytes.items()},
    )
    return checkpoint


def plan_restore(run: Run, stored: StoredVersion) -> dict[str, Any] | None:
    """Return the state that a restore fills on this rank: its part of the model, and the state of its parameters.

    Returns None if every rank has the whole model and optimizer, and therefore restores all of the checkpoint. The
    checkpoint `stored` may be from a run with another layout. Every rank must call this.

    Raises:
        ConfigError: the checkpoint belongs to another model, or its tensors are not those of the model.
    """
    if not isinstance(run.optimizer, LayoutOptimizer):
        return None
    records = stored.records
    # Check it here: a restore into the tensors of another model would fail first, on each rank with its own tensors.
    saved = (stored.entry.get("config") or {}).get("model") or run.config.model
    _check_same(stored.version, "model", saved, run.config.model)
    check_sizes(run, str(stored.version), stored.entry, remedy=_OTHER_RUN)
    _check_weights(run, stored)
    prefix = "optimizer.state."
    moments = {
        record.name.removeprefix(prefix): (getattr(torch, record.dtype), record.shape)
        for record in records
        if record.name.startswith(prefix)
    }
    into: dict[str, Any] = dict.fromkeys(_RESTORED_WHOLE)
    if any(record.name.startswith("rank_state.") for record in records):
        # Those of all ranks have the weights and moments of all replicas.
        into["rank_state"] = {hvd.rank() if _has_same_ranks(run, stored.entry) else 0: None}
    into["model"] = dict(run.model.state_dict())
    into["optimizer"] = {"state": run.optimizer.make_state(moments), "param_groups": None}
    if run.average is not None and any(record.name.startswith("ema.averages.") for record in records):
        into["ema"] = run.average.state_dict()
    return into


def _check_weights(run: Run, stored: StoredVersion) -> None:
    """Check that a checkpoint has the tensors of the whole model. Every rank must call this."""
    own = {name: value for name, value in run.model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    expected, tied = describe_whole_model(own, name="restore.model")
    prefix = "model."
    found = {
        record.name.removeprefix(prefix): TensorSpec(record.dtype, record.shape)
        for record in stored.records
        if record.name.startswith(prefix)
    }
    report = plan_load(expected, found, tied)
    if not report.is_exact:
        raise ConfigError(f"{describe_misfit(run, str(stored.version), report)}\nuse the same model, or {_OTHER_RUN}")


def _check_same(version: Resolved, part: str, saved: str | None, configured: str | None) -> None:
    if saved != configured:
        raise ConfigError(f"{version} has the {part} {saved!r}, this run has {configured!r}; {_OTHER_RUN}")


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into every part of the run.

    Raises:
        ConfigError: the checkpoint belongs to another model or optimizer, or a model of other sizes, or its tensors
            do not fit them.
        StateMismatchError: the checkpoint was trained on other data or in another order.
    """
    state = {name: value for name, value in checkpoint.state.items() if value is not None}
    _check_settings(run, checkpoint, state)
    # Load the loader's state first: the loader refuses a checkpoint of other data before anything else changes.
    _resume_loader(run, checkpoint, state["loader"])
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as error:
        message = describe_misfit(run, str(checkpoint.version), error)
        raise ConfigError(f"{message}\nuse the same model, or {_OTHER_RUN}") from error
    # Checkpoints of earlier releases have no `rank_state`, only the random state of each rank.
    rank_states = state.get("rank_state") or [{"random": random} for random in state["random"]]
    # `plan_restore` leaves out the states of other ranks.
    num_saved = len(rank_states) if isinstance(rank_states, list) else None
    has_same_ranks = _has_same_ranks(run, checkpoint.entry, num_saved)
    rank_state = rank_states[hvd.rank() if has_same_ranks else 0]
    # The weights of the model are those of this rank, if there was a tournament: its moments belong to them.
    winner = (checkpoint.entry.get("tournament") or {}).get("winner")
    if winner is not None and run.layout.is_data_only:
        state["optimizer"] = {**state["optimizer"], "state": rank_states[winner]["optimizer"]}
    continues_rounds = _resume_optimizer(run, checkpoint, state, rank_state, has_same_ranks=has_same_ranks)
    if run.average is not None:
        if state.get("ema"):
            run.average.load_state_dict(state["ema"])
        else:
            # The checkpointed run had no average, so the average begins at the restored weights.
            run.average.restart()
    if state.get("early_stop"):
        run.stop.load_state_dict(state["early_stop"])
    # A run that continues a checkpoint of another name gets new runs in the experiment trackers.
    if checkpoint.version.name == run.config.name:
        # Earlier releases kept the ids of the trackers here too, by targets such as "wandb:PROJECT".
        ids = {target.partition(":")[0]: run_id for target, run_id in (state.get("log_ids") or {}).items()}
        run.log_ids = ids | runs_in_config(checkpoint.entry.get("config"))
    run.step, run.saved_leases = int(state["step"]), state.get("leases") or {}
    run.metrics = {name: float(value) for name, value in checkpoint.entry["metrics"].items()}
    if has_same_ranks:
        random_state.reinstate(rank_state["random"])
        # Not strict: these are the batch statistics only; the other weights were loaded above, with a winner's own.
        own = rank_state.get("batch_statistics", {}) if winner is None or continues_rounds else {}
        run.model.load_state_dict(own, strict=False)
    else:
        # The ranks have changed, so seed again. The step is part of the seed: no random numbers are repeated.
        rank = hvd.rank() // run.layout.tensor
        random_state.seed_all(random_state.seed_of_rank(run.config.seed, rank, step=run.step))


def _has_same_ranks(run: Run, entry: Mapping[str, Any], num_saved: int | None = None) -> bool:
    """Return whether ranks continue with their own states of a version, saved by `num_saved` (None: not counted)."""
    saved = _saved_layout(entry)
    if (math.prod(saved.values()) if num_saved is None else num_saved) != hvd.size():
        return False
    # Ranks of the axis `tensor` must go on to draw equal numbers, so a state of another size of it serves no rank.
    # With replicas, weights and moments in the state are parts of this layout.
    axes = AXES if max(saved.get("replica", 1), run.layout.replica) > 1 else ("tensor",)
    return all(saved.get(axis, 1) == run.layout.size_of(axis) for axis in axes)


def _check_settings(run: Run, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Check that a checkpoint is of the run's model and optimizer; warn if it was evaluated in another way."""
    for part, configured in (("model", run.config.model), ("optimizer", run.config.optimizer)):
        # A checkpoint without this name passes; the loads in `resume` check its tensors.
        _check_same(checkpoint.version, part, state.get(f"{part}_name", configured), configured)
    check_sizes(run, str(checkpoint.version), checkpoint.entry, remedy=_OTHER_RUN)
    if isinstance(run.loader, ImageLoader) and hvd.rank() == 0:
        # Releases without this setting evaluated by "window".
        saved = (checkpoint.entry.get("config") or {}).get("evaluation", "window")
        if saved != run.config.evaluation:
            _LOG.warning(
                "%s was evaluated with --evaluation %s, this run has %s, so accuracies before and after it differ; "
                "give --evaluation %s to compare them",
                checkpoint.version,
                saved,
                run.config.evaluation,
                saved,
            )


def _resume_loader(run: Run, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    try:
        run.loader.load_state_dict(state)
    except StateMismatchError as error:
        current = {split.dataset for split in splits_of(run.loader.split)}
        # The versions of a mixture are separated by commas.
        trained_on = {version for use in checkpoint.entry["data"] for version in use["dataset"].split(", ")}
        if current <= trained_on:
            raise  # the order differs, not the data
        # The loader's message has digests of shard tables, because a state does not name its data set.
        raise StateMismatchError(
            f"{checkpoint.version} was trained on {' and '.join(sorted(trained_on))}, this run reads "
            f"{' and '.join(sorted(current))}; give --data the version that it was trained on, or start a new run "
            f"with its weights: another --name, and --init-from {checkpoint.version}"
        ) from error


def _resume_optimizer(
    run: Run, checkpoint: Checkpoint, state: Mapping[str, Any], rank_state: Mapping[str, Any], *, has_same_ranks: bool
) -> bool:
    """Load the optimizer, this rank's part of it, and the loss scale; return whether rounds of `--sync` continue.

    A run with `--sync` continues the round of a checkpoint, each rank with its own weights and moments. At another
    number of ranks, all ranks have the mean weights and the moments of rank 0, or both of the winner of a tournament;
    with another `--sync`, rounds also begin again. So they do if a replica has several ranks, at any other layout.
    """
    optimizer = {**state["optimizer"]}
    averaging = rank_state.get("averaging", {})
    # Several texts can describe one policy, such as "gossip:ring" and "gossip:ring:1".
    continues_rounds = (
        "sync" in averaging
        and run.config.averages_weights
        and parse_sync(averaging["sync"]) == parse_sync(run.config.sync)
    )
    if continues_rounds and has_same_ranks:
        optimizer["averaging"] = averaging
        # These are the trainable weights, if they differed; `resume` has loaded their means.
        own = rank_state.get("weights", {})
        for name, weight in run.model.named_parameters():
            if name in own:
                to_local(weight.detach()).copy_(own[name])
    elif continues_rounds and run.divided is None and _saved_layout(checkpoint.entry).get("replica", 1) == 1:
        # Without what rank 0 has sent of a round: the other ranks of that round may be gone.
        outer = averaging["outer"]
        optimizer["averaging"] = {**averaging, "outer": outer and {**outer, "changes": {}}}
    if has_same_ranks and (continues_rounds or run.config.combines_steps):
        # A checkpoint of a run without steps of each rank has one state for all ranks.
        optimizer["state"] = rank_state.get("optimizer", optimizer["state"])
    # At another number of ranks, what a rank has not sent of its gradients is lost: without its rank, `optimizer`
    # loads the part that is equal on all ranks.
    owner = hvd.rank() if has_same_ranks else None
    optimizer["compression"] = {"rank": owner, "memory": rank_state.get("compression", {})}
    try:
        load_optimizer(run.optimizer, optimizer)
    except ValueError as error:
        raise ConfigError(f"{checkpoint.version} does not fit this run's optimizer: {error}") from error
    load_loss_scale(run.loss_scale, state.get("loss_scale") or {})
    return continues_rounds


def _saved_layout(entry: Mapping[str, Any]) -> Mapping[str, int]:
    execution = entry.get("execution") or {}
    return {} if execution.get("topology") == "centralised" else execution.get("layout") or {}


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the moments and counters of an optimizer; its settings, such as weight decay, stay those of this run.

    Raises:
        ValueError: the state has other parameters or parameter groups.
    """
    # `load_state_dict` also overwrites the settings of the groups, so restore the settings of this run.
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(group_settings)
