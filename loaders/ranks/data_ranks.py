"""Data-parallel ranks of loaders: each rank gets a part of every global batch.

Tensor- and pipeline-parallel peers have the same data rank, so they get the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataRanks:
    """Data-parallel rank of a process, and the number of ranks.

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


def choose_data_ranks(ranks: DataRanks | DeviceMesh | None) -> DataRanks:
    """Return the data rank of this process.

    Args:
        ranks: the data rank, or a device mesh of torch with one axis, such as `mesh["data"]`; None: rank 0 of 1.

    Raises:
        ConfigError: the mesh has several axes, or `ranks` is neither a `DataRanks` nor a mesh.
    """
    if ranks is None or isinstance(ranks, DataRanks):
        return ranks or DataRanks()
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
