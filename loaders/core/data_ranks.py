"""Data-parallel ranks: each gets a part of every global batch. Tensor- and pipeline-parallel peers have one rank."""

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
            raise ConfigError(
                f"data_rank is {self.rank}; expected 0 <= data_rank < data_world_size = {self.world_size}"
            )


def choose_data_ranks(
    data_rank: int | None, data_world_size: int | None, mesh: DeviceMesh | None, mesh_axis: str | None
) -> DataRanks:
    """Return the data rank from numbers or from the data axis of a mesh; without both, rank 0 of 1.

    Args:
        data_rank: rank of this process, given together with `data_world_size`.
        data_world_size: number of data ranks.
        mesh: `torch.distributed` device mesh, as an alternative to the numbers.
        mesh_axis: name of the mesh's data-parallel axis; needed if the mesh has several axes.

    Raises:
        ConfigError: numbers and a mesh are both given; one of the two numbers is missing; a number is out of range;
            the mesh has no such axis, or several axes and `mesh_axis` is missing.
    """
    if mesh is None:
        if mesh_axis is not None:
            raise ConfigError(f"mesh_axis is {mesh_axis!r}, but there is no mesh; give mesh too")
        if (data_rank is None) != (data_world_size is None):
            raise ConfigError(
                f"data_rank is {data_rank} and data_world_size is {data_world_size}; give both or neither"
            )
        return DataRanks(data_rank or 0, 1 if data_world_size is None else data_world_size)
    if data_rank is not None or data_world_size is not None:
        raise ConfigError(
            "data_rank and data_world_size are given together with mesh, which has both; give mesh only"
        )
    names = mesh.mesh_dim_names or ()
    if mesh_axis is None and mesh.ndim > 1:
        raise ConfigError(
            f"the mesh has {mesh.ndim} axes, {list(names)}; give the name of the data-parallel one as mesh_axis"
        )
    if mesh_axis is not None and mesh_axis not in names:
        raise ConfigError(f"the mesh has no axis {mesh_axis!r}; give one of {list(names)} as mesh_axis")
    axis = 0 if mesh_axis is None else names.index(mesh_axis)
    return DataRanks(mesh.get_local_rank(axis), mesh.size(axis))
