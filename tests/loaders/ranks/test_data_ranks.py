"""Which part of a batch is whose."""

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders.ranks.data_ranks import DataRanks, choose_data_ranks


class Mesh:
    """What of a device mesh is asked for: `sizes` and this process's place by axis."""

    def __init__(self, names, sizes, place):
        self.mesh_dim_names, self._sizes, self._place = names, sizes, place
        self.ndim = len(sizes)

    def get_local_rank(self):
        (place,) = self._place
        return place

    def size(self):
        (size,) = self._sizes
        return size


def test_ranks_are_a_value_or_a_mesh_of_one_axis_or_one_alone():
    assert choose_data_ranks(None) == DataRanks(0, 1)
    assert choose_data_ranks(DataRanks(2, 3)) == DataRanks(2, 3)
    assert choose_data_ranks(Mesh(None, (5,), (4,))) == DataRanks(4, 5)
    assert choose_data_ranks(Mesh(("data",), (2,), (1,))) == DataRanks(1, 2)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, r"ranks is 3; expected DataRanks\(rank, world_size\) or a device mesh of one axis"),
        ((1, 2), r"ranks is \(1, 2\); expected DataRanks"),
        (Mesh(("a", "b"), (1, 1), (0, 0)), r"2 axes, \['a', 'b'\]; give .* alone, such as ranks=mesh\['a'\]$"),
        (Mesh(None, (1, 1), (0, 0)), r"such as ranks=mesh\['NAME'\], of a mesh that is created with mesh_dim_names"),
    ],
)
def test_what_is_no_data_rank_is_refused(ranks, message):
    with pytest.raises(ConfigError, match=message):
        choose_data_ranks(ranks)


@pytest.mark.parametrize(("rank", "world_size"), [(3, 3), (-1, 3), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match=f"the data rank is {rank}; expected 0 <= rank < world_size = {world_size}"):
        DataRanks(rank, world_size)
