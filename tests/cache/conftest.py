import pytest

from datasvc.repository import Repository


@pytest.fixture
def origin(tmp_path):
    """A repository with ten objects of 1,000 bytes; returns it and their names and sizes."""
    repository = Repository.create(str(tmp_path / "origin"))
    infos = [repository.objects.put(bytes([number]) * 1000) for number in range(10)]
    return repository, infos
