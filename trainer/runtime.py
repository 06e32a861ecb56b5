"""The process's membership in a job: at most one engine, between ``init`` and ``shutdown``."""

import atexit
import datetime as dt
import os
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainer.engine.engine import Engine
from trainer.engine.settings import EngineSettings
from trainer.engine.transport import GroupTransport, LoopbackTransport, Transport
from trainer.environment import Place, read_engine_settings, read_place


@dataclass(frozen=True)
class Job:
    """What ``init`` sets up and ``shutdown`` takes down."""

    place: Place
    engine: Engine
    owns_default_group: bool


_lock = threading.Lock()
_job: Job | None = None
_store: Store | None = None
_num_inits = 0


def init() -> None:
    """Joins the job that the launcher describes in the environment, or a world of one if there is none.

    Every rank calls this; it returns when all have. If there is no default process group of
    torch.distributed, it creates one (gloo, and NCCL where each rank has a GPU). Calling it again before
    ``shutdown`` does nothing.

    Raises:
        ValueError: the environment is incomplete, or contradicts the existing default process group.
    """
    global _job, _num_inits  # noqa: PLW0603 - a process is in one job
    with _lock:
        if _job is not None:
            return
        place, settings = read_place(os.environ), read_engine_settings(os.environ)
        if _num_inits == 0:
            atexit.register(shutdown)
        _num_inits += 1
        transport, owns_default_group = _connect(place, settings)
        _job = Job(place, Engine(transport, settings), owns_default_group)


def shutdown() -> None:
    """Leaves the job. Operations in flight fail, here and on the ranks that still wait for this one.

    Ranks may call this at different moments; it does not wait for them to call it. Runs by itself at exit.
    """
    global _job  # noqa: PLW0603 - see init
    with _lock:
        if _job is None:
            return
        _job.engine.close()
        if _job.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        _job = None


def current_job() -> Job:
    """The job that this process is in.

    Raises:
        ValueError: it is in none.
    """
    if _job is None:
        raise ValueError("the trainer is not initialized: call hvd.init() first")
    return _job


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


def _connect(place: Place, settings: EngineSettings) -> tuple[Transport, bool]:
    if place.size == 1:
        return LoopbackTransport(), False
    has_own_gpu = dist.is_nccl_available() and torch.cuda.device_count() >= place.local_size
    owns_default_group = not dist.is_initialized()
    if owns_default_group:
        _create_default_group(place, settings, has_own_gpu=has_own_gpu)
    elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise ValueError(
            f"the default process group says rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the environment rank {place.rank} of {place.size}; set RANK and WORLD_SIZE to match"
        )
    return GroupTransport(timeout_s=settings.timeout_s, has_own_gpu=has_own_gpu), owns_default_group


def _create_default_group(place: Place, settings: EngineSettings, *, has_own_gpu: bool) -> None:
    global _store
    timeout = dt.timedelta(seconds=settings.timeout_s)
    # One store per process, and fresh keys per round: a second server, or keys that an earlier round has left
    # behind, would hang the ranks.
    if _store is None:
        _store, _, _ = next(rendezvous("env://"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_own_gpu else "gloo",
        store=PrefixStore(f"trainer/{_num_inits}", _store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
    )
