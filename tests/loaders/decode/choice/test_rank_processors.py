"""Default threads of a loader in a rank."""

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.decode.choice import choice
from datasvc.loaders.decode.choice.choice import count_rank_processors


@pytest.fixture
def sixteen_processors(monkeypatch):
    monkeypatch.setattr(choice, "count_processors", lambda: 16)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 16),
        ({"LOCAL_WORLD_SIZE": "1"}, 16),
        ({"LOCAL_WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "5"}, 3),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"HOROVOD_LOCAL_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "4"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "HOROVOD_LOCAL_SIZE": "4"}, 4),
    ],
)
@pytest.mark.usefixtures("sixteen_processors")
def test_the_ranks_of_a_node_share_its_processors(environ, expected):
    assert count_rank_processors(environ) == expected


@pytest.mark.parametrize("given", ["0", "-1", "two"])
def test_a_number_of_ranks_that_is_none_is_refused_by_its_name(given):
    with pytest.raises(ConfigError, match=f"HOROVOD_LOCAL_SIZE is '{given}'"):
        count_rank_processors({"HOROVOD_LOCAL_SIZE": given})


@pytest.mark.usefixtures("sixteen_processors")
def test_a_loader_in_a_rank_takes_its_share_unless_threads_are_given(digits, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for options, expected in (({}, 4), ({"decode": DecodeConfig(num_threads=5)}, 5)):
        with ImageLoader(digits["val"], batch_size=8, training=False, **options) as loader:
            assert loader._config.num_threads == expected
