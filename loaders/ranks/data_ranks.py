"""Data-parallel ranks of loaders: each rank gets a part of every global batch.

Tensor- and pipeline-parallel peers have the same data rank, so they get the same batches. Without `ranks=`, a loader
takes the rank of this process in the group that the program has initialised. No process of many is alone by default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from datasvc.errors import ConfigError
from datasvc.threads import count_launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Modules that form groups of processes, and their functions: is a group initialised, the rank, the number of ranks.
# `datasvc.trainer` initialises that of torch.distributed.
_GROUPS: Final = (
    ("torch.distributed", "is_initialized", "get_rank", "get_world_size"),
    ("horovod.torch", "is_initialized", "rank", "size"),
    ("horovod.tensorflow", "is_initialized", "rank", "size"),
    ("jax", "distributed.is_initialized", "process_index", "process_count"),
)


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
