import pytest

from datasvc.cache import Cache
from datasvc.repository import Repository

BLOCK = 4096


@pytest.fixture
def origin(tmp_path):
    """A repository with ten objects of 4,096 bytes, a block of the disk; returns it and their names and sizes."""
    repository = Repository.create(str(tmp_path / "origin"))
    infos = [repository.objects.put(bytes([number]) * BLOCK) for number in range(10)]
    return repository, infos


@pytest.fixture
def cache(tmp_path):
    """A cache with room for five of them."""
    with Cache(tmp_path / "cache", budget=5 * BLOCK) as opened:
        yield opened
