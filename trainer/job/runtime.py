"""The job of this process: `init` joins it, `shutdown` leaves it. Between the two, the process has one engine.

`init` and `shutdown` import `process_sets` inside their bodies, because `process_sets` imports this module.
"""

from __future__ import annotations

import atexit
import datetime as dt
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from datasvc.trainer.engine.engine import Engine
from datasvc.trainer.engine.execution.timeline import Timeline, TraceFile
from datasvc.trainer.engine.execution.transport import GroupTransport, Transport
from datasvc.trainer.engine.negotiation.negotiation import name_ranks
from datasvc.trainer.env.environment import (
    EngineSettings,
    RankPlacement,
    choose_gloo_interface,
    configure_logging,
    find_gpu_uuid,
    placement_variables,
    read_engine_settings,
    read_placement,
)
from datasvc.trainer.env.foreign_launchers import translate
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.messages import arrival_key
from datasvc.trainer.rendezvous.rendezvous import current_rendezvous, open_rendezvous
from datasvc.trainer.rendezvous.round import join_round

if TYPE_CHECKING:
    from datasvc.trainer.job.process_sets import ProcessSet


@dataclass(frozen=True)
class JobContext:
    """The resources that `init` creates and `shutdown` releases.

    Attributes:
        placement: rank and size of this process in the job and on its node.
        engine: engine of this rank.
        owns_default_group: whether `init` created the default process group, so that `shutdown` destroys it.
    """

    placement: RankPlacement
    engine: Engine
    owns_default_group: bool


_lock = threading.Lock()
_job: JobContext | None = None
# The store through which the ranks of a non-elastic job connect. The first `init` opens it, and later ones reuse it.
_store: Store | None = None
# How often this process has joined a job, including a call of `init` in progress.
_num_inits = 0


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    settings: EngineSettings | None = None,
) -> None:
    """Join the job that the environment describes, or a job of one rank if it describes none.

    Every rank calls this function, which returns when all ranks have called it. If torch.distributed has no default
    process group, `init` creates one (gloo, and NCCL where each rank has a GPU). A second call before `shutdown` has
    no effect.

    Args:
        comm: numbers of all ranks of the job, or None. For a subset of the ranks, use a process set.
        process_sets: process sets to add, the same on every rank. "dynamic", which Horovod requires for
            `add_process_set`, has no effect: process sets can always be added.
        settings: settings of the engine, the same on every rank; None reads the HOROVOD_* variables.

    Raises:
        ValueError: the environment is incomplete or contradicts the existing default process group; `comm` does not
            name all ranks; a process set is invalid.
        HorovodInternalError: some ranks did not connect in time; the message has their numbers.
    """
    global _job, _num_inits  # noqa: PLW0603 - a process is in one job
    with _lock:
        if _job is not None:
            return
        settings = settings or read_engine_settings(os.environ)
        configure_logging(os.environ)
        if _num_inits == 0:
            atexit.register(shutdown)
        placement = read_placement(os.environ)
        _check_comm(comm, placement)
        _num_inits += 1
        os.environ.update(choose_gloo_interface(os.environ))
        try:
            elastic_rendezvous = open_rendezvous(os.environ)
            if elastic_rendezvous is None:
                transport, owns_default_group = _connect(placement, settings)
            else:
                placement, transport = join_round(elastic_rendezvous, settings)
                # Programs choose devices, log folders and seeds by these variables. The launcher set them before the
                # ranks were assigned, so they may differ from the actual placement.
                os.environ.update(placement_variables(placement))
                owns_default_group = True
        except BaseException:
            # Other ranks may still be in this `init`, so a retry on this rank must use the same keys.
            _num_inits -= 1
            raise
        # With several ranks, the settings of rank 0 apply to all of them.
        if isinstance(transport, GroupTransport):
            settings = transport.settings
        _job = JobContext(placement, Engine(transport, settings), owns_default_group)
    if settings.timeline is not None:
        start_timeline(settings.timeline, mark_cycles=settings.timeline_marks_cycles)
    if process_sets is not None and not isinstance(process_sets, str):
        from datasvc.trainer.job.process_sets import add_process_set

        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the job. Operations in flight fail on this rank, and on ranks that wait for this one.

    Ranks may call this at different times; it does not wait for the other ranks. It also runs at exit.
    """
    from datasvc.trainer.job.process_sets import clear_numbers

    global _job  # noqa: PLW0603 - see init
    with _lock:
        if _job is None:
            return
        # The threads of the engine use process groups, so they must end before the default group is destroyed.
        _job.engine.close()
        clear_numbers()
        if _job.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        _job = None


def current_job() -> JobContext:
    """Return the job of this process.

    Raises:
        ValueError: the trainer is not initialized.
    """
    if _job is None:
        raise ValueError("the trainer is not initialized: call hvd.init() first")
    return _job


def is_elastic() -> bool:
    """Return whether this process is in an elastic job: a job in which ranks may join and leave."""
    return current_rendezvous() is not None


def num_inits() -> int:
    """Return how often this process has joined a job. Each time, the numbering of unnamed operations restarts."""
    return _num_inits


def is_initialized() -> bool:
    """Return whether this process is between `init` and `shutdown`."""
    return _job is not None


def size() -> int:
    """Return the number of ranks of the job."""
    return current_job().placement.size


def rank() -> int:
    """Return the rank of this process, from 0."""
    return current_job().placement.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current_job().placement.local_size


def local_rank() -> int:
    """Return the rank of this process among those of its node, from 0."""
    return current_job().placement.local_rank


def cross_size() -> int:
    """Return the number of nodes; with `datasvc-run`, only of those that have a rank with this local rank."""
    return current_job().placement.cross_size


def cross_rank() -> int:
    """Return the number of this node among the nodes that `cross_size` counts, from 0."""
    return current_job().placement.cross_rank


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return current_job().engine.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start a Chrome trace of all operations. Rank 0 writes it; on other ranks the call has no effect.

    Args:
        file_path: path of the JSON file, which is overwritten; it can be read while the job runs, and after a crash.
        mark_cycles: whether the trace contains the cycles of the engine.

    Raises:
        ValueError: the trainer is not initialized, or the file cannot be written.
    """
    job = current_job()
    if job.placement.rank == 0:
        # Complete the previous trace first, because it may be the same file. `Timeline` records nothing.
        job.engine.write_timeline(Timeline())
        try:
            job.engine.write_timeline(TraceFile(Path(file_path), marks_cycles=mark_cycles))
        except OSError as error:
            raise ValueError(f"the timeline cannot be written: {error}") from error


def stop_timeline() -> None:
    """Complete the Chrome trace.

    Raises:
        ValueError: the trainer is not initialized.
    """
    current_job().engine.write_timeline(Timeline())


def _check_comm(comm: Sequence[int] | None, placement: RankPlacement) -> None:
    """Check the argument of `init`: it is None, or has all ranks in any order."""
    if comm is None:
        return
    if not isinstance(comm, Sequence) or sorted(comm) != list(range(placement.size)):
        raise ValueError(
            f"comm must be the ranks 0 to {placement.size - 1}, or None, not {comm!r}: for some of the ranks use "
            "hvd.add_process_set(ranks); MPI communicators are not supported"
        )


def _connect(placement: RankPlacement, settings: EngineSettings) -> tuple[Transport, bool]:
    """Connect this rank of a non-elastic job. Return its transport, and whether the default group was created here.

    Raises:
        ValueError: the existing default process group has another rank or size than the environment.
        HorovodInternalError: this rank could not connect to the others.
    """
    if placement.size == 1:
        return Transport(), False
    gpu = find_gpu_uuid(placement)
    owns_default_group = not dist.is_initialized()
    if not owns_default_group and (dist.get_rank(), dist.get_world_size()) != (placement.rank, placement.size):
        raise ValueError(
            f"the default process group has rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"the environment has rank {placement.rank} of {placement.size}; set RANK and WORLD_SIZE to match"
        )
    try:
        if owns_default_group:
            _create_default_group(placement, settings, has_gpu=bool(gpu))
        transport = GroupTransport(settings, gpu=gpu, local_size=placement.local_size, node=placement.cross_rank)
    except RuntimeError as error:
        # Destroy the new group: a retry would treat it as one that the user created.
        if owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        # This subclass of RuntimeError already names the ranks that are missing.
        if isinstance(error, HorovodInternalError):
            raise
        raise HorovodInternalError(f"rank {placement.rank} could not connect to the other ranks: {error}") from error
    return transport, owns_default_group


def _create_default_group(placement: RankPlacement, settings: EngineSettings, *, has_gpu: bool) -> None:
    """Create the default process group of torch, after all ranks have connected to the store."""
    global _store
    timeout = dt.timedelta(seconds=settings.timeout_s)
    # Each process opens the store only once, but uses new keys in each `init`: the ranks would hang with a second
    # store server, or with the keys of an earlier `init`.
    if _store is None:
        # torch reads the variables of torchrun, so set them from those of mpirun or Slurm.
        os.environ.update(translate(os.environ))
        _store, _, _ = next(rendezvous("env://"))
    # The launcher reads this key to name ranks that do not connect.
    _store.set(arrival_key(placement.rank), "")
    store = PrefixStore(f"trainer/{_num_inits}", _store)
    # Wait here first, because the error of `init_process_group` would not name the ranks that are missing.
    _await_ranks(store, placement, settings.start_timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=store,
        rank=placement.rank,
        world_size=placement.size,
        timeout=timeout,
    )


def _await_ranks(store: Store, placement: RankPlacement, timeout_s: float) -> None:
    """Wait until every rank has connected.

    Raises:
        HorovodInternalError: some ranks did not connect within `timeout_s`; the message has their numbers.
    """
    store.set(f"here/{placement.rank}", "")
    keys = [f"here/{rank}" for rank in range(placement.size)]
    try:
        store.wait(keys, dt.timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise HorovodInternalError(
            f"{name_ranks(missing)} of {placement.size} did not connect within {timeout_s:g} s; read their "
            "output, or set a longer HOROVOD_START_TIMEOUT"
        ) from error
