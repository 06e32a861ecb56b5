"""Data-parallel ranks of loaders: each rank gets a part of every global batch.

Tensor- and pipeline-parallel peers have the same data rank, so they get the same batches. Without `ranks=`, a loader
takes the rank of this process in the group that the program has initialised. No process of many is alone by default.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError, UnavailableError
from datasvc.threads import count_launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store


# Modules that form groups of processes, and their functions: is a group initialised, the rank, the number of ranks.
# `datasvc.trainer` initialises that of torch.distributed.
_GROUPS: Final = (
    ("torch.distributed", "is_initialized", "get_rank", "get_world_size"),
    ("horovod.torch", "is_initialized", "rank", "size"),
    ("horovod.tensorflow", "is_initialized", "rank", "size"),
    ("jax", "distributed.is_initialized", "process_index", "process_count"),
)


_TIMEOUT: Final = timedelta(minutes=20)  # longer than data rank 0 takes to try all decoding backends


@dataclass(frozen=True)
class DataRanks:
    """Data-parallel rank of a process, and the number of ranks. `DataRanks()` reads all samples in this process.

    Attributes:
        rank: rank of this process; processes with the same rank get the same batches.
        world_size: number of distinct ranks.

    Raises:
        ConfigError: `rank` is not in range(world_size).
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"the data rank is {self.rank}; expected 0 <= rank < world_size = {self.world_size}")


def choose_data_ranks(ranks: DataRanks | DeviceMesh | None, environ: Mapping[str, str] = os.environ) -> DataRanks:
    """Return the data rank of this process.

    Args:
        ranks: the data rank, or a device mesh of torch with one axis, such as `mesh["data"]`; None: the rank in the
            group that the program has initialised, or rank 0 of 1 in a process that no launcher started.
        environ: environment of this process.

    Raises:
        ConfigError: the mesh has several axes; `ranks` is neither a `DataRanks` nor a mesh; or it is None, a launcher
            has started several processes, and none of the groups is initialised.
    """
    if ranks is None:
        return find_group() or _alone(environ)
    if isinstance(ranks, DataRanks):
        return ranks
    if not hasattr(ranks, "get_local_rank"):
        raise ConfigError(f"ranks is {ranks!r}; expected DataRanks(rank, world_size) or a device mesh of one axis")
    if ranks.ndim > 1:
        names = list(ranks.mesh_dim_names or ())
        raise ConfigError(
            f"the mesh has {ranks.ndim} axes, {names}; give the data-parallel one alone, such as "
            f"ranks=mesh[{names[0] if names else 'NAME'!r}]"
            + ("" if names else ", of a mesh that is created with mesh_dim_names")
        )
    return DataRanks(ranks.get_local_rank(), ranks.size())


def find_group() -> DataRanks | None:
    """Return the rank of this process in the largest group that the program has initialised; None: there is none."""
    return max(_groups(), key=lambda ranks: ranks.world_size, default=None)


def check_group(ranks: DataRanks) -> None:
    """Raise ConfigError if ranks that were chosen by default are no longer those of the group.

    Programs create loaders before the group, and elastic jobs replace the group: then the ranks would share samples.
    """
    group = find_group()
    if group not in {None, ranks}:
        raise ConfigError(
            f"the loader was created as data rank {ranks.rank} of {ranks.world_size}, without ranks=, and now the "
            f"process group has this process as rank {group.rank} of {group.world_size}; create the loader after the "
            "group, or give ranks=DataRanks(rank, world_size)"
        )


def _groups() -> Iterator[DataRanks]:
    # Only modules that are imported already: a group cannot be initialised in another one.
    for name, is_initialized, rank, world_size in _GROUPS:
        module = sys.modules.get(name)
        with suppress(AttributeError):  # a torch without its distributed package, or a module that is being imported
            if module is not None and attrgetter(is_initialized)(module)():
                yield DataRanks(attrgetter(rank)(module)(), attrgetter(world_size)(module)())
    train = sys.modules.get("ray.train")
    with suppress(AttributeError, RuntimeError):  # Ray Train's error outside of a training function
        if train is not None:
            context = train.get_context()
            yield DataRanks(context.get_world_rank(), context.get_world_size())


def _alone(environ: Mapping[str, str]) -> DataRanks:
    """Return rank 0 of 1. Raises ConfigError: a launcher has started several processes."""
    name, size = count_launched(environ)
    if size > 1:
        raise ConfigError(
            f"the environment has {name}={size}, so this is one of {size} processes, but no process group is "
            "initialised, and each process would read all samples: call datasvc.trainer.init() or "
            "torch.distributed.init_process_group() before the loader is created; or give "
            "ranks=DataRanks(rank, world_size), and ranks=DataRanks() if this process reads all samples"
        )
    return DataRanks()


# A store is used instead of a collective, for two reasons: ranks may use it from any thread, in parallel with other
# communication; and a rank that never uses it does not block the collectives of the others.


def default_store() -> Store | None:
    """Return a separate connection to the store of torch.distributed; None if there is no process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public function
    # A thread that waits locks the connection for other threads, so use a clone, which has its own connection. Stores
    # written in Python, such as those of elastic jobs, have no such lock and cannot be cloned.
    with suppress(RuntimeError):
        store = store.clone()
    default: Store = store
    return default


def agree(
    question: str, choose: Callable[[], str], *, is_first: bool, store: Store, timeout: timedelta = _TIMEOUT
) -> str:
    """Return, on every rank, the result of `choose` on data rank 0.

    Args:
        question: text that identifies the decision, equal on all ranks. The same text later has the same answer.
        choose: function that decides. It is called once, in one process of data rank 0.
        is_first: whether this is a process of data rank 0; with tensor or pipeline parallelism there are several.
        store: store of the process group.
        timeout: longest time that other processes wait for the answer.

    Raises:
        ConfigError: `choose` failed on data rank 0.
        UnavailableError: data rank 0 gave no answer in time, or the process of the store has exited.
        RuntimeError: another error of the store. In an elastic job, HorovodInternalError: a rank is lost.
    """
    from torch.distributed import DistNetworkError, DistStoreError  # needs torch, which the loaders do not need

    key = f"datasvc/decode/{question}"
    # Several processes may have data rank 0. The first one that increments the counter decides; the others wait.
    if is_first and store.add(f"{key}/asked", 1) == 1:
        try:
            answer = {"chosen": choose()}
        except Exception as error:  # report it to the other ranks too: otherwise they would wait until the timeout
            store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        store.set(key, json.dumps(answer))
        return answer["chosen"]
    try:
        store.wait([key], timeout)
        reply = json.loads(store.get(key))
    except DistNetworkError as error:
        raise UnavailableError(
            f"the store of the process group cannot be reached, so the choice of data rank 0 is unknown: {error}; "
            "its process has probably exited: read the output of the launcher and of the other ranks"
        ) from error
    except DistStoreError as error:  # the time limit
        raise UnavailableError(
            f"data rank 0 did not report within {timeout} what it has chosen; create and iterate the same loaders on "
            "every rank of a job, or choose for all ranks: decode='cpu' or another backend, and the order as "
            "order=OrderConfig(...)"
        ) from error
    if "error" in reply:
        raise ConfigError(f"data rank 0 could not choose: {reply['error']}")
    return str(reply["chosen"])
