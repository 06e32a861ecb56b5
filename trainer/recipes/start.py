"""Builds a run from its settings: new, with the weights of another version, or restored from a checkpoint.

Each rank reads its part of a divided model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.api import DataRepository
from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders import Loader, serve_loader_metrics
from datasvc.loaders.core.batch import check_gpu
from datasvc.models import Checkpoint, ConsumptionTracker, LocalVersion
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.models.restoring.fit import LoadReport, TensorSpec, plan_load
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.restoring.restore import read_version
from datasvc.models.tensors.dtypes import cast
from datasvc.models.tensors.name_filter import select_names
from datasvc.models.versions.code_revision import capture_code, describe_environment
from datasvc.node.ranks import RankNodes
from datasvc.node.settings import open_peers
from datasvc.planning.layout import AXES, Layout, plan_layout
from datasvc.runs import RunLog
from datasvc.threads import count_processors
from datasvc.trainer.recipes.build import build_learner, build_rounds, compile_model
from datasvc.trainer.recipes.checkpoints import open_checkpoints, plan_restore, restore, resume
from datasvc.trainer.recipes.choose_layout import read_layout
from datasvc.trainer.recipes.elastic_memory import Snapshot, load_snapshot
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.masking import mask_forgotten, mask_skipped_steps
from datasvc.trainer.recipes.model_check import check_sizes, describe_misfit, describe_whole_model, has_finite_state
from datasvc.trainer.recipes.optimizers.schedules import RateSchedule, scale_rate
from datasvc.trainer.recipes.rank_check import check_data
from datasvc.trainer.recipes.rejoin import call_on_first_rank
from datasvc.trainer.recipes.reporting.metric_logs import open_logs
from datasvc.trainer.recipes.reporting.recorder import RUN_LOG, LoggedEvents, Recorder
from datasvc.trainer.recipes.run import EarlyStop, Run
from datasvc.trainer.recipes.settings.config import BatchPlan, TrainConfig, plan_batches
from datasvc.trainer.recipes.tasks.held_out import read_held_out
from datasvc.trainer.recipes.tasks.task import DataPlacement, Task
from datasvc.trainer.recipes.training_data import TrainingData, choose_task, open_data, resolve_data


def start(
    config: TrainConfig,
    events: LoggedEvents,
    snapshot: Snapshot | None = None,
    forget: ForgetPlan | None = None,
) -> Run:
    """Build this rank's run, new or restored from the checkpoint that it continues. Every rank must call this.

    Args:
        config: settings of the run.
        events: sink of this rank's events.
        snapshot: state of an elastic run to continue, the same on all ranks, instead of a checkpoint.
        forget: samples to mask, from the version that `config` continues on; the same on all ranks.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data or the checkpoint.
    """
    repo = datasvc.open(config.repo)
    if snapshot is None:
        versions, version, init_version = call_on_first_rank(lambda: resolve_start(repo, config), name="start")
    else:
        versions, version, init_version = snapshot.data_versions, snapshot.parent, None
    data = open_data(repo, config, versions)
    check_data(data, versions)
    task = choose_task(config, data.train)
    # Replace None by the default model of the task, because the checkpoints store the name of the model.
    config = dataclasses.replace(config, model=config.model or task.default_model)
    layout = read_layout(config, hvd.size())
    batches = plan_batches(config, layout.num_data_ranks)
    schedule = build_schedule(config, batches.global_batch)
    place = choose_place(config, layout)
    _check_patience(config, data, versions)
    # If a step below fails, the stack closes what the steps before it have opened.
    with contextlib.ExitStack() as stack:
        cache, nodes = open_cache(config)
        if nodes is not None:
            stack.callback(nodes.close)
        if cache is not None:
            stack.enter_context(cache)
        loaders = _open_loaders(stack, config, task, data, layout, batches, cache=cache, place=place)
        loader = loaders["loader"]
        stop_metrics = serve_metrics(config, {"train": loader, "val": loaders["val_loader"]})
        stack.callback(stop_metrics)
        held_out = read_held_out(
            config, task, data.val, batch_size=batches.micro_batch, versions=versions, cache=cache, place=place
        )
        block = getattr(loader, "block_tokens", None)
        run = Run(
            **vars(build_learner(config, task, batches, place, layout, block=block, held_out=held_out)),
            **loaders,
            schedule=schedule,
            stop=EarlyStop(config.stop_metric, config.patience, config.stop_mode),
            events=events,
            recorder=Recorder(place.device, is_on=config.run_log, has_own_times=has_own_times(config, layout)),
            cache=cache,
            nodes=nodes,
            stop_metrics=stop_metrics,
            version=version,
        )
        # The manager installs signal handlers; closing it restores the old ones.
        run.checkpoints = stack.enter_context(open_checkpoints(repo, config, cache))
        _load_state(run, repo, snapshot, init_version, forget)
        compile_model(run.model, config.compile)
        _open_reports(stack, run, repo, events, versions, init_version)
        stack.pop_all()
    return run


def _open_reports(
    stack: contextlib.ExitStack,
    run: Run,
    repo: DataRepository,
    events: LoggedEvents,
    versions: Sequence[str],
    init_version: str | None,
) -> None:
    """Open the log of the run, its signal and its trackers, as the settings ask for; `stack` closes the log."""
    # Every rank keeps the ids, because any rank of an elastic run may become rank 0 and continue these runs.
    if run.config.run_log:
        parent = run.version or init_version
        run.log_ids |= call_on_first_rank(lambda: open_run_log(run, repo, events, versions, parent), name="run_log")
        # Returns None, so the error goes on.
        stack.push(lambda _type, error, _traceback: run.recorder.close(error))
    if run.config.signals is not None:
        _record_signals(run, repo)
    if run.config.log_to:
        run.log_ids |= call_on_first_rank(lambda: open_run_logs(run), name="logs")


def _check_patience(config: TrainConfig, data: TrainingData, versions: Sequence[str]) -> None:
    if config.patience is not None and data.val is None:
        raise ConfigError(
            f"patience compares {config.stop_metric!r} of evaluations, and {' + '.join(versions)} has no split 'val' "
            "to evaluate; ingest the data with one (--val-fraction), or leave out --patience"
        )


def _open_loaders(
    stack: contextlib.ExitStack,
    config: TrainConfig,
    task: Task,
    data: TrainingData,
    layout: Layout,
    batches: BatchPlan,
    **options: Any,
) -> dict[str, Any]:
    """Open the loaders of a run, by the attributes of `Run`; `stack` closes them. `options` are of all of them."""

    def open_one(task: Task, split: Any, *, training: bool, batch_size: int) -> Loader[Any]:
        loader = task.open_loader(split, training=training, batch_size=batch_size, **options)
        stack.callback(loader.close)
        return loader

    loader = open_one(task, data.train, training=True, batch_size=batches.batch_size)
    # The validation loader is opened before training, so that its errors appear at the start. A training step may
    # divide its batch into several passes. An evaluation runs one pass per batch, so its batches have the size of
    # such a pass. A pipeline divides every batch.
    batch_size = batches.batch_size if layout.pipeline > 1 else batches.micro_batch
    val_loader = None if data.val is None else open_one(task, data.val, training=False, batch_size=batch_size)
    statistics_loader = None
    if config.recomputes_statistics:
        # The samples of this loader are not trained on: they belong in no ledger, and in no group's batches.
        unrecorded = choose_task(config.without_records(), data.train)
        statistics_loader = open_one(unrecorded, data.train, training=True, batch_size=batches.batch_size)
    return {"loader": loader, "val_loader": val_loader, "statistics_loader": statistics_loader}


def _load_state(
    run: Run,
    repo: DataRepository,
    snapshot: Snapshot | None,
    init_version: str | None,
    forget: ForgetPlan | None,
) -> None:
    """Load the snapshot, the checkpoint that the run continues, or initial weights; begin to record what is read."""
    checkpoint = None
    if snapshot is not None:
        load_snapshot(run, snapshot)
    else:
        checkpoint = restore_start(run, repo)
        if checkpoint is None and init_version is not None:
            initialise(run, repo, init_version)
        if forget is not None:
            mask_forgotten(run, forget)
    if snapshot is None:
        mask_skipped_steps(run, repo, checkpoint)
    # A purge may have come between the ranks that open the data: all must count targets together.
    run.task.masks_samples = call_on_first_rank(lambda: bool(run.loader.masked), name="masks_samples")
    run.reading = ConsumptionTracker(run.loader, step=run.step)
    if checkpoint is not None and isinstance(checkpoint.version, LocalVersion):
        # The next version of the repository has consumed what this version has, since the one that it continues.
        run.reading.load_state_dict(checkpoint.entry["data"][0])
    if snapshot is not None:
        run.reading.load_state_dict(snapshot.reading)
    part = None if snapshot is None else snapshot.round_part
    run.rounds = build_rounds(run, () if forget is None else forget.repeated, part)


def serve_metrics(config: TrainConfig, loaders: Mapping[str, Loader[Any] | None]) -> Callable[[], None]:
    """Serve the metrics of this rank's loaders if the settings name a port; return the function that ends this."""
    if config.metrics_port is None:
        return lambda: None
    opened = {name: loader for name, loader in loaders.items() if loader is not None}
    return serve_loader_metrics(config.metrics_port + hvd.local_rank(), opened)


def restore_start(run: Run, repo: DataRepository) -> Checkpoint | None:
    """Restore the checkpoint that a run continues, and return it; None: there is none.

    With `--local-checkpoints` and `--resume auto`, it is the newest on the disks of the nodes or in the repository.
    """
    is_newest = run.config.local_checkpoints is not None and run.config.resume == "auto"
    if is_newest:
        checkpoint = restore(run, None, into=partial(plan_restore, run))
    elif run.version is None:
        return None
    else:
        checkpoint = _restore_version(run, repo, run.version)
    if checkpoint is not None:
        resume(run, checkpoint)
        if not has_finite_state(run):
            checkpoint = _restore_finite(run, repo, checkpoint)
        newest = run.checkpoints.version
        run.version = None if newest is None else str(newest)
    return checkpoint


def _restore_version(run: Run, repo: DataRepository, ref: str) -> Checkpoint:
    into = None
    if isinstance(run.optimizer, LayoutOptimizer):
        # Planned here and not during the restore, which would raise the error of rank 0 on all ranks.
        into = plan_restore(run, read_version(repo.repository, ref))
    checkpoint = restore(run, ref, into=into)
    assert checkpoint is not None  # a reference is restored or raises
    return checkpoint


def _restore_finite(run: Run, repo: DataRepository, diverged: Checkpoint) -> Checkpoint:
    """Return the checkpoint to continue, loaded, in place of a restored one whose weights are not finite.

    A version that the settings name is continued all the same, with a warning.

    Raises:
        ConfigError: no version has finite weights.
    """
    chosen, name = diverged, run.config.name
    if run.config.resume == "auto":
        older = call_on_first_rank(lambda: [str(version) for version in repo.models.versions(name)], name="finite")
        for ref in reversed(older):
            if ref == str(diverged.version):
                continue
            chosen = _restore_version(run, repo, ref)
            resume(run, chosen)
            if has_finite_state(run):
                break
        else:
            raise ConfigError(
                f"{diverged.version} has weights that are NaN or infinite, and no other version of {name} has finite "
                "ones; give --resume never to begin again, or "
                f"--resume {diverged.version} to continue it all the same"
            )
    if hvd.rank() == 0:
        way = "" if chosen is diverged else f"; give --resume {diverged.version} to continue it all the same"
        sys.stderr.write(
            f"{diverged.version} has weights that are NaN or infinite; the run continues {chosen.version}, of step "
            f"{run.step}{way}\n"
        )
    return chosen


def resolve_start(repo: DataRepository, config: TrainConfig) -> tuple[list[str], str | None, str | None]:
    """Resolve the names of versions that a run starts from.

    Call this on one rank only: the ranks may resolve a name such as `digits@latest` to different versions.

    Returns:
        The version of each data set; the checkpoint to continue, None for a new run; and the version whose weights a
        new run starts with, None for random weights.
    """
    data_versions = resolve_data(repo, config)
    checkpoint = None
    if config.resume not in ("auto", "never"):
        checkpoint = str(repo.models.resolve(config.resume))
    elif config.resume == "auto" and (versions := repo.models.versions(config.name)):
        checkpoint = str(versions[-1])
    init_version = None
    if config.init_from is not None and checkpoint is None:
        init_version = str(repo.models.resolve(config.init_from))
    return data_versions, checkpoint, init_version


def build_schedule(config: TrainConfig, global_batch: int) -> RateSchedule:
    """Return the learning-rate schedule. Its peak depends on the global batch, see `scale_rate`."""
    return RateSchedule(
        peak=scale_rate(
            config.learning_rate,
            rule=config.rate_scaling,
            global_batch=global_batch,
            reference_batch=config.reference_batch,
        ),
        epochs=config.epochs,
        shape=config.schedule,
        warmup_epochs=config.warmup_epochs,
        warmup_start=config.warmup_start,
        milestones=config.parse_milestones(),
        power=config.power,
    )


def choose_place(config: TrainConfig, layout: Layout) -> DataPlacement:
    """Return this process's data rank and device, and its number of decoding threads.

    By default it gets one thread per processor that it may use, divided by the number of ranks on the node.

    Raises:
        ConfigError: the device is a GPU that torch does not find.
    """
    device = torch.device(f"cuda:{hvd.local_rank()}" if config.device == "cuda" else "cpu")
    check_gpu(device)
    return DataPlacement(
        rank=plan_layout(layout).ranks[hvd.rank()].data_rank,
        world_size=layout.num_data_ranks,
        device=device,
        num_threads=config.decode_threads or max(1, count_processors() // hvd.local_size()),
    )


def has_own_times(config: TrainConfig, layout: Layout) -> bool:
    """Return whether ranks wait for each other only while they sum targets and gradients.

    A divided model and synchronised batch normalisation communicate in the forward and the backward pass too, and
    ranks with steps of their own in the update.
    """
    is_divided = not layout.is_data_only and config.zero != 1
    return not (is_divided or config.sync_batch_norm or config.makes_own_steps)


def open_run_log(
    run: Run, repo: DataRepository, events: LoggedEvents, versions: Sequence[str], parent: str | None
) -> dict[str, str]:
    """Open the log of a run in the repository, for rank 0; return its identifier, which the checkpoints keep."""
    log = RunLog.open(
        repo.repository,
        run.config.name,
        run_id=run.log_ids.get(RUN_LOG),
        config=run.config.to_dict(),
        data=versions,
        parent=parent,
        code=capture_code().to_dict(),
        world_size=hvd.size(),
        layout={axis: run.layout.size_of(axis) for axis in AXES},
        facts={
            "environment": describe_environment(world_size=hvd.size()),
            "num_samples": run.loader.split.num_positions,
            "global_batch": run.batches.global_batch,
            "num_parameters": run.num_parameters,
            "device": str(run.device),
            "step": run.step,
        },
    )
    run.recorder.attach(log)
    events.attach(log)
    return {RUN_LOG: log.id}


def _record_signals(run: Run, repo: DataRepository) -> None:
    """Record the losses of the samples whose outputs this rank has. Raises ConfigError: no rank has whole blocks."""
    if run.divided is not None and run.divided.split is not None:
        raise ConfigError(
            "signals needs the loss of whole blocks, and this layout divides them among ranks; use an axis other "
            "than the one of sequences, or leave out --signals"
        )
    assert run.ref is not None, "ReportSettings.check"
    if run.divided is None or run.divided.reports_outputs:
        repo.runs.record(run.ref, run.loader)
        run.task.losses = []


def open_run_logs(run: Run) -> dict[str, str]:
    """Open the experiment trackers of a run, for rank 0; return the ids of the trackers' runs by kind."""
    config = run.config
    settings = config.to_dict()
    run.logs = open_logs(config.log_to, name=config.name, config=settings, step=run.step, run_ids=run.log_ids)
    return {target.partition(":")[0]: log.run_id for target, log in run.logs.items() if log.run_id is not None}


def open_cache(config: TrainConfig) -> tuple[Cache | None, RankNodes | None]:
    """Return this node's cache with the configured peers, and the servers that let other nodes read from it.

    The cache is None if none is configured. Servers are started only if `config.peers` is "ranks"; otherwise None.
    """
    if not config.cache:
        return None, None
    if config.peers == "ranks":
        nodes = RankNodes(config.cache, (config.repo,), budget=config.cache_budget)
        try:
            return Cache(config.cache, budget=config.cache_budget, tenant=config.tenant, peers=nodes.peers), nodes
        except BaseException:
            nodes.close()
            raise
    peers = None if config.peers is None else open_peers(config.peers)
    return Cache(config.cache, budget=config.cache_budget, tenant=config.tenant, peers=peers), None


def initialise(run: Run, repo: DataRepository, ref: str) -> None:
    """Load the weights of a version into the model of a new run. Every rank must call this.

    The version is a checkpoint of this program, or its tensors have the model's names. It becomes the parent of the
    run's first checkpoint.

    Raises:
        ConfigError: the tensors, without excluded ones, are not those of the model; the message has the differences.
        NotFoundError, CorruptDataError, UnavailableError: see `models.restore`.
    """
    stored, entry = call_on_first_rank(lambda: _read_tensors(repo, ref), name="init_from")
    own = {name: value for name, value in run.model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    expected, tied = describe_whole_model(own, name="init_from.model")
    stored_names = _match_names(stored, expected)
    included = set(select_names([*dict.fromkeys([*expected, *stored_names])], exclude=run.config.init_exclude))
    if not included & stored_names.keys() & expected.keys():
        raise ConfigError(
            f"{ref} has no weights for the model {run.config.model!r}, whose tensors are "
            f"{', '.join(list(expected)[:3])}, ...; give --model the model of that version, or --init-from a version "
            "with these names"
        )
    report = plan_load(
        {name: spec for name, spec in expected.items() if name in included},
        {name: stored[stored_name] for name, stored_name in stored_names.items() if name in included},
        tied,
        cast=True,
    )
    # Without `layers`: tensors tell them apart, and some may be left out.
    check_sizes(run, ref, entry, but=("layers",), remedy="give another --init-from")
    _check_exact(run, report, ref)
    targets = {name: own[name].detach() for name in report.loaded if name in own and name in stored_names}
    parts = {
        # Tensors that are stored with another dtype are read first, and converted then.
        name: target if spec_of(target) == (spec := stored[stored_names[name]]) else _make_like(target, spec)
        for name, target in targets.items()
    }
    # The names are at the root of the tree: a rank that has none of these tensors then reads nothing.
    restore(run, ref, into={stored_names[name]: part for name, part in parts.items()})
    for name, target in targets.items():
        if parts[name] is not target:
            to_local(target).copy_(cast(name, to_local(parts[name]), target.dtype))
    # This changes only modules whose state dict has copies of their tensors.
    run.model.load_state_dict(targets, strict=False)
    if run.average is not None:
        run.average.restart()


def _read_tensors(repo: DataRepository, ref: str) -> tuple[dict[str, TensorSpec], Mapping[str, Any]]:
    """Return dtype and shape of the tensors of a version by name, and its entry."""
    stored = read_version(repo.repository, ref)
    return {record.name: TensorSpec(record.dtype, record.shape) for record in stored.records}, stored.entry


def _match_names(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored name of each tensor of a version by the name that it has in a model."""
    # A checkpoint of this program has the prefix "model." before the names of weights, other versions have none. But
    # a model may itself have a module called "model", so choose the case in which more names fit.
    prefix = "model."
    names = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if len(names.keys() & expected.keys()) < len(stored.keys() & expected.keys()):
        return {name: name for name in stored}
    return names


def _check_exact(run: Run, report: LoadReport, ref: str) -> None:
    if report.is_exact:
        return
    differing = [*(mismatch.name for mismatch in report.mismatched), *report.missing, *report.unexpected]
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in differing))
    raise ConfigError(
        f"{describe_misfit(run, ref, report)}\n"
        "train tensors that differ from random weights, and leave out those that the model lacks, with "
        f"--init-exclude {' '.join([*modules[:3], *(['...'] if len(modules) > 3 else [])])}"
    )


def _make_like(target: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor with another dtype and the placement of `target`."""
    return torch.empty_like(target, dtype=getattr(torch, spec.dtype))
