"""A repository, copies in turn, and the node's cache are sources of chunks alike."""

from contextlib import closing

import pytest

from datasvc.cache import Cache
from datasvc.errors import UnavailableError
from datasvc.models.restoring.cached_source import CachedSource
from datasvc.models.restoring.failover_source import FailoverSource
from datasvc.repository import Repository
from datasvc.testing import FaultyStore
from tests.models.restoring.chunk_source_laws import CONTENT, INFO, MISSING, ChunkSourceLaws, record_of


@pytest.fixture
def objects(repository):
    repository.objects.put(CONTENT)
    return repository.objects


@pytest.fixture
def copy(tmp_path):
    """A second repository with the object."""
    repository = Repository.create(str(tmp_path / "copy"))
    repository.objects.put(CONTENT)
    return repository


class TestLocalObjects(ChunkSourceLaws):
    @pytest.fixture
    def source(self, objects):
        return objects


class TestRemoteObjects(ChunkSourceLaws):
    @pytest.fixture
    def store(self):
        with FaultyStore() as store:
            yield store

    @pytest.fixture
    def objects(self, store):
        objects = Repository.create(store.url).objects
        objects.put(CONTENT)
        self.damage = lambda objects: store.damage(objects.path(INFO.digest), 2000)
        return objects

    @pytest.fixture
    def source(self, objects):
        return objects

    def test_a_store_that_fails_is_unavailable_and_an_answer_cut_short_is_no_damage(self, store, source):
        store.fail("read", "objects/*", times=1)
        store.fail("read", "objects/*", times=1, effect="silent")
        for message in ("injected fault", "received 50 of 100 bytes"):
            with pytest.raises(UnavailableError, match=message):
                source.read_range(INFO.digest, 0, 100)
        assert source.read_range(INFO.digest, 0, 100) == CONTENT[:100]


class TestFailoverSource(ChunkSourceLaws):
    """The first place lacks the object, the second has it."""

    @pytest.fixture
    def source(self, tmp_path, objects, copy):
        empty = Repository.create(str(tmp_path / "empty"))
        return FailoverSource([empty.objects, objects, copy.objects])


class TestCachedSource(ChunkSourceLaws):
    @pytest.fixture
    def source(self, tmp_path, repository, objects, copy):
        direct = FailoverSource([objects, copy.objects])
        # Twice: a law may read more than a restore would.
        records = [record_of(INFO), record_of(INFO), record_of(MISSING)]
        with (
            Cache(tmp_path / "cache", budget="1MB") as cache,
            closing(CachedSource(cache, [repository, copy], direct, records)) as source,
        ):
            yield source


class TestCachedSourceOfAFullCache(ChunkSourceLaws):
    @pytest.fixture
    def source(self, tmp_path, repository, objects):
        with (
            Cache(tmp_path / "cache", budget=4096) as cache,
            closing(
                CachedSource(cache, [repository], FailoverSource([objects]), [record_of(INFO), record_of(MISSING)])
            ) as source,
        ):
            yield source
