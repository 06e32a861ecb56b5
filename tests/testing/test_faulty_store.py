"""A faulty store is a store until it is told to fail; then it fails as told, and no more."""

import fsspec
import pytest

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, UnavailableError
from datasvc.repository import Repository, Storage
from datasvc.testing import FaultyStore


@pytest.fixture
def store():
    with FaultyStore() as store:
        yield store


@pytest.fixture
def storage(store):
    return Storage(store.url)


OPERATIONS = {
    "read": lambda storage: storage.read("a/1"),
    "write": lambda storage: storage.put_bytes("a/2", b"x"),
    "list": lambda storage: storage.list("a"),
    "info": lambda storage: storage.size("a/1"),
    "delete": lambda storage: storage.delete_if_older("a/1", 1e12),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_fails_as_often_as_it_was_told_and_only_there(store, storage, operation):
    storage.put_bytes("a/1", b"x")
    store.fail(operation, "b/*")
    store.fail(operation, "a*", times=2, error=OSError("503 Slow Down"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="503 Slow Down"):
            OPERATIONS[operation](storage)
    OPERATIONS[operation](storage)
    assert [each for each, _ in store.requests].count(operation) >= 3


def test_a_healed_store_answers(store, storage):
    storage.put_bytes("a/1", b"x")
    store.fail("read")
    with pytest.raises(UnavailableError, match="injected fault: read"):
        storage.read("a/1")
    store.heal()
    assert storage.read("a/1") == b"x"


def test_a_write_without_an_answer_is_done_and_a_silent_one_is_not(store, storage):
    store.fail("write", "*/1", effect="unanswered")
    store.fail("write", "*/2", effect="silent")
    storage.create("a/1", b"x")
    with pytest.raises(UnavailableError, match="it does not exist after the write"):
        storage.create("a/2", b"x")
    assert storage.list("a") == ["1"]


def test_a_silent_read_gives_half_of_the_bytes(store, storage):
    storage.put_bytes("a", b"0123")
    store.fail("read", effect="silent")
    assert storage.read("a") == b"01"
    with fsspec.open(f"{store.url}/a") as file:
        assert file.read() == b"01"


def test_bytes_can_be_damaged(store):
    repository = Repository.create(store.url)
    info = repository.objects.put(b"whole")
    store.damage(repository.objects.path(info.digest), 2)
    with pytest.raises(CorruptDataError):
        repository.objects.read(info.digest)


def test_requests_are_recorded_in_their_order(store, storage):
    storage.put_bytes("a/1", b"x")
    storage.read("a/1")
    assert store.requests == [("write", "a/1"), ("read", "a/1")]


def test_a_store_that_overwrites_is_refused_as_a_repository():
    with FaultyStore(creates_exclusively=False) as store, pytest.raises(ConfigError, match="ignores create-only"):
        Repository.create(store.url)


def test_two_stores_share_nothing_and_a_closed_one_is_empty(store, storage):
    with FaultyStore() as other:
        Storage(other.url).create("a", b"theirs")
        storage.create("a", b"mine")
        with pytest.raises(ConflictError):
            storage.create("a", b"again")
        store.fail("read")
        assert Storage(other.url).read("a") == b"theirs"
    assert Storage(other.url).size("a") is None
    assert storage.size("a") == 4
