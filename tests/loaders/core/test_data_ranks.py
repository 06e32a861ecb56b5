"""Which part of a batch is whose."""

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders.core.data_ranks import DataRanks, choose_data_ranks


class Mesh:
    """What of a device mesh is asked for: `sizes` and this process's place by axis."""

    def __init__(self, names, sizes, place):
        self.mesh_dim_names, self._sizes, self._place = names, sizes, place
        self.ndim = len(sizes)

    def get_local_rank(self, axis):
        return self._place[axis]

    def size(self, axis):
        return self._sizes[axis]


def test_ranks_are_numbers_or_an_axis_of_a_mesh_or_one_alone():
    assert choose_data_ranks(None, None, None, None) == DataRanks(0, 1)
    assert choose_data_ranks(2, 3, None, None) == DataRanks(2, 3)
    mesh = Mesh(("data", "tensor"), (2, 4), (1, 3))
    assert choose_data_ranks(None, None, mesh, "data") == DataRanks(1, 2)
    assert choose_data_ranks(None, None, mesh, "tensor") == DataRanks(3, 4)
    assert choose_data_ranks(None, None, Mesh(None, (5,), (4,)), None) == DataRanks(4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 3, None, None), r"expected 0 <= data_rank < data_world_size = 3"),
        ((-1, 3, None, None), r"data_rank is -1"),
        ((0, 0, None, None), r"data_world_size = 0"),
        ((1, None, None, None), "give both or neither"),
        ((None, 2, None, None), "give both or neither"),
        ((None, None, None, "data"), "there is no mesh"),
        ((0, 1, Mesh(("a",), (1,), (0,)), None), "together with mesh, which has both"),
        ((None, None, Mesh(("a", "b"), (1, 1), (0, 0)), None), "give the name of the data-parallel one as mesh_axis"),
        ((None, None, Mesh(("a", "b"), (1, 1), (0, 0)), "c"), r"no axis 'c'; give one of \['a', 'b'\] as mesh_axis"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        choose_data_ranks(*arguments)
