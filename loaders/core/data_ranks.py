"""Which part of each global batch a process gets. Tensor- and pipeline-parallel peers have the same data rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataRanks:
    """A place among those that share global batches.

    Attributes:
        rank: of this process; peers with the same rank get the same batches.
        world_size: number of different ranks.

    Raises:
        ConfigError: not 0 <= rank < world_size.
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
    """Return the ranks that are given: as numbers, or as the data axis of a mesh. Without any, the only rank of one.

    Args:
        data_rank: of this process, with `data_world_size`.
        data_world_size: number of data ranks.
        mesh: a `torch.distributed` device mesh, instead of the numbers.
        mesh_axis: name of its data axis; not needed where the mesh has one axis only.

    Raises:
        ConfigError: both, half of either, out of range, or no such axis.
    """
    if mesh is None:
        if mesh_axis is not None:
            raise ConfigError(f"mesh_axis is {mesh_axis!r}, without a mesh")
        if (data_rank is None) != (data_world_size is None):
            raise ConfigError("data_rank and data_world_size go together; give both or none")
        return DataRanks(data_rank or 0, 1 if data_world_size is None else data_world_size)
    if data_rank is not None or data_world_size is not None:
        raise ConfigError("data_rank and data_world_size come from the mesh; give the mesh alone")
    names = mesh.mesh_dim_names or ()
    if mesh_axis is None and mesh.ndim > 1:
        raise ConfigError(f"the mesh has {mesh.ndim} axes, {list(names)}; say which is data-parallel with mesh_axis")
    if mesh_axis is not None and mesh_axis not in names:
        raise ConfigError(f"the mesh has no axis {mesh_axis!r}; its axes are {list(names)}")
    axis = 0 if mesh_axis is None else names.index(mesh_axis)
    return DataRanks(mesh.get_local_rank(axis), mesh.size(axis))
