"""The process's membership in a job: at most one engine, between ``init`` and ``shutdown``."""

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
from datasvc.trainer.engine.execution.transport import GroupTransport, LoopbackTransport, Transport
from datasvc.trainer.engine.negotiation.agreement import name_ranks
from datasvc.trainer.env.engine_settings import EngineSettings
from datasvc.trainer.env.environment import (
    RankPlacement,
    choose_gloo_interface,
    configure_logging,
    place_variables,
    read_engine_settings,
    read_place,
)
from datasvc.trainer.env.foreign_launchers import translate
from datasvc.trainer.env.gpus import name_own_gpu
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.arrivals import arrival_key
from datasvc.trainer.rendezvous.rendezvous import current_rendezvous, open_rendezvous
from datasvc.trainer.rendezvous.round import join_round

if TYPE_CHECKING:
    from datasvc.trainer.job.process_sets import ProcessSet


@dataclass(frozen=True)
class JobContext:
    """What ``init`` sets up and ``shutdown`` takes down."""

    place: RankPlacement
    engine: Engine
    owns_default_group: bool


_lock = threading.Lock()
_job: JobContext | None = None
_store: Store | None = None
_num_inits = 0


def init(
    comm: Sequence[int] | None = None,
    process_sets: "Sequence[ProcessSet] | str | None" = None,
    *,
    settings: EngineSettings | None = None,
) -> None:
    """Joins the job that the launcher describes in the environment, or a world of one if there is none.

    Every rank calls this; it returns when all have. If there is no default process group of
    torch.distributed, it creates one (gloo, and NCCL where each rank has a GPU). Calling it again before
    ``shutdown`` does nothing.

    Args:
        comm: all ranks of the job, or None. Fewer are a process set.
        process_sets: to add at once, the same on every rank. "dynamic", which Horovod wants before
            ``add_process_set``, means nothing here: it can always be called.
        settings: of the engine, the same on every rank; from the HOROVOD_* variables if not given.

    Raises:
        ValueError: the environment is incomplete, or contradicts the existing default process group; ``comm`` is not
            all ranks; a process set is impossible.
        HorovodInternalError: some ranks did not come in time: their numbers are in the message.
    """
    global _job, _num_inits  # noqa: PLW0603 - a process is in one job
    with _lock:
        if _job is not None:
            return
        settings = settings or read_engine_settings(os.environ)
        configure_logging(os.environ)
        if _num_inits == 0:
            atexit.register(shutdown)
        place = read_place(os.environ)
        _check_comm(comm, place)
        _num_inits += 1
        os.environ.update(choose_gloo_interface(os.environ))
        try:
            elastic = open_rendezvous(os.environ)
            if elastic is None:
                transport, owns_default_group = _connect(place, settings)
            else:
                place, transport = join_round(elastic, settings)
                # Devices, folders for logs and seeds are often chosen by these; the launcher could only predict them.
                os.environ.update(place_variables(place))
                owns_default_group = True
        except BaseException:
            _num_inits -= 1  # it can be tried again, with others that may be at this round still
            raise
        if isinstance(transport, GroupTransport):
            settings = transport.settings
        _job = JobContext(place, Engine(transport, settings), owns_default_group)
    if settings.timeline is not None:
        start_timeline(settings.timeline, mark_cycles=settings.timeline_marks_cycles)
    if process_sets is not None and not isinstance(process_sets, str):
        from datasvc.trainer.job.process_sets import add_process_set

        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job. Operations in flight fail, here and on the ranks that still wait for this one.

    Ranks may call this at different moments; it does not wait for them to call it. Runs by itself at exit.
    """
    from datasvc.trainer.job.process_sets import forget_all

    global _job  # noqa: PLW0603 - see init
    with _lock:
        if _job is None:
            return
        _job.engine.close()
        forget_all()
        if _job.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        _job = None


def current_job() -> JobContext:
    """The job that this process is in.

    Raises:
        ValueError: it is in none.
    """
    if _job is None:
        raise ValueError("the trainer is not initialized: call hvd.init() first")
    return _job


def is_elastic() -> bool:
    """Whether this process is in a job whose ranks may come and go."""
    return current_rendezvous() is not None


def num_inits() -> int:
    """How often this process has joined a job; names made by counting start anew each time."""
    return _num_inits


def is_initialized() -> bool:
    """Whether this process is between ``init`` and ``shutdown``."""
    return _job is not None


def size() -> int:
    """Number of ranks."""
    return current_job().place.size


def rank() -> int:
    """This process among all, from 0."""
    return current_job().place.rank


def local_size() -> int:
    """Number of ranks on this node."""
    return current_job().place.local_size


def local_rank() -> int:
    """This process among those of its node, from 0."""
    return current_job().place.local_rank


def cross_size() -> int:
    """Number of nodes."""
    return current_job().place.cross_size


def cross_rank() -> int:
    """This node among all, from 0."""
    return current_job().place.cross_rank


def is_homogeneous() -> bool:
    """Whether all nodes have equally many ranks."""
    return current_job().engine.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes a chrome trace of all operations from now on; rank 0 does, on the others nothing happens.

    Args:
        file_path: JSON, made anew; it can be read while the job runs, and after a crash.
        mark_cycles: whether cycles of the engine are marked.

    Raises:
        ValueError: not initialized, or the file cannot be written.
    """
    job = current_job()
    if job.place.rank == 0:
        job.engine.write_timeline(Timeline())  # it may be the same file
        try:
            job.engine.write_timeline(TraceFile(Path(file_path), marks_cycles=mark_cycles))
        except OSError as error:
            raise ValueError(f"the timeline cannot be written: {error}") from error


def stop_timeline() -> None:
    """Completes the chrome trace. Raises ValueError: not initialized."""
    current_job().engine.write_timeline(Timeline())


def _check_comm(comm: Sequence[int] | None, place: RankPlacement) -> None:
    if comm is None:
        return
    if not isinstance(comm, Sequence) or sorted(comm) != list(range(place.size)):
        raise ValueError(
            f"comm must be all {place.size} ranks, or None, not {comm!r}: for some of them use "
            "hvd.add_process_set(ranks); MPI communicators are not known here"
        )


def _connect(place: RankPlacement, settings: EngineSettings) -> tuple[Transport, bool]:
    if place.size == 1:
        return LoopbackTransport(), False
    gpu = name_own_gpu(place)
    owns_default_group = not dist.is_initialized()
    if not owns_default_group and (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise ValueError(
            f"the default process group says rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the environment rank {place.rank} of {place.size}; set RANK and WORLD_SIZE to match"
        )
    try:
        if owns_default_group:
            _create_default_group(place, settings, has_gpu=bool(gpu))
        transport = GroupTransport(settings, gpu=gpu, local_size=place.local_size)
    except RuntimeError as error:
        # Otherwise the next attempt would take it for the user's own.
        if owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        if isinstance(error, HorovodInternalError):
            raise
        raise HorovodInternalError(f"rank {place.rank} could not connect to the other ranks: {error}") from error
    return transport, owns_default_group


def _create_default_group(place: RankPlacement, settings: EngineSettings, *, has_gpu: bool) -> None:
    global _store
    timeout = dt.timedelta(seconds=settings.timeout_s)
    # One store per process, and fresh keys per round: a second server, or keys that an earlier round has left
    # behind, would hang the ranks.
    if _store is None:
        os.environ.update(translate(os.environ))
        _store, _, _ = next(rendezvous("env://"))
    # By this the launcher can name a rank that does not come.
    _store.set(arrival_key(place.rank), "")
    store = PrefixStore(f"trainer/{_num_inits}", _store)
    _await_ranks(store, place, settings.start_timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
    )


def _await_ranks(store: Store, place: RankPlacement, timeout_s: float) -> None:
    """Waits until every rank has come. Raises HorovodInternalError, naming those that have not."""
    store.set(f"here/{place.rank}", "")
    keys = [f"here/{rank}" for rank in range(place.size)]
    try:
        store.wait(keys, dt.timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise HorovodInternalError(
            f"{name_ranks(missing)} of {place.size} did not come within {timeout_s:g} s; look at their "
            "output, or give them longer with HOROVOD_START_TIMEOUT"
        ) from error
