"""How often common acts ask the store: a request is what a remote store answers over the network."""

import threading
from collections import Counter

import pytest

from datasvc.models import describe_model, list_models, save
from datasvc.repository import Repository, Storage
from datasvc.shards import open_dataset
from datasvc.shards.versions.describe import describe_dataset
from datasvc.testing import FaultyStore
from tests.shards.written_versions import write_version

LISTINGS = ("list", "find")
REQUESTS = (*LISTINGS, "read", "read_range", "size", "create", "put_bytes", "refresh")


class CountingStorage(Storage):
    """Keeps the requests that a repository makes, by name, without those that the storage makes for itself."""

    def __init__(self, url):
        super().__init__(url)
        self.requests, self._thread = [], threading.local()


def _counted(name):
    def request(self, *arguments, **options):
        if getattr(self._thread, "is_inside", False):
            return getattr(Storage, name)(self, *arguments, **options)
        self.requests.append(name)
        self._thread.is_inside = True
        try:
            return getattr(Storage, name)(self, *arguments, **options)
        finally:
            self._thread.is_inside = False

    return request


for _name in REQUESTS:
    setattr(CountingStorage, _name, _counted(_name))


@pytest.fixture(params=["local", "memory"])
def repository(request, url, tmp_path):
    place = str(tmp_path / "counted") if request.param == "local" else url
    made = Repository.create(place)
    for number in (1, 2, 3):
        save(made, "m", {}, step=number)
    made.tag("models", "m@1", "prod")
    made.tag("models", "m@2", "best")
    return Repository(CountingStorage(place))


def requests_of(repository, act):
    repository.storage.requests.clear()
    act()
    return list(repository.storage.requests)


def test_a_tag_is_moved_by_four_requests(repository):
    asked = requests_of(repository, lambda: repository.tag("models", "m@3", "prod"))
    assert asked == ["find", "read", "create", "list"]
    assert [move.content["version"] for move in repository.tag_history("models", "m", "prod")] == [1, 3]


def test_a_tag_that_stands_there_already_is_not_moved_by_two_requests(repository):
    assert requests_of(repository, lambda: repository.tag("models", "m@1", "prod")) == ["find", "read"]


@pytest.mark.parametrize(("ref", "expected"), [("m", ["find"]), ("m@2", ["find"]), ("m@prod", ["find", "read"])])
def test_a_reference_is_resolved_by_one_listing(repository, ref, expected):
    assert requests_of(repository, lambda: repository.resolve("models", ref)) == expected


def test_a_log_is_extended_by_one_listing_and_one_write(repository):
    log = repository.versions("models", "m")
    assert requests_of(repository, lambda: log.append(lambda _head: {})) == ["list", "create"]


def test_the_tags_of_a_model_are_read_after_one_listing(repository):
    assert requests_of(repository, lambda: repository.tags("models", "m")) == ["find", "read", "read"]


def test_a_first_save_lists_no_other_model(repository):
    for number in range(3):
        save(repository, f"other{number}", {}, step=1)
    asked = requests_of(repository, lambda: save(repository, "new", {}, step=1))
    assert [name for name in asked if name in LISTINGS] == ["find", "list"]


@pytest.mark.parametrize("ref", ["m", "m@2", "m@prod"])
def test_a_version_is_described_by_one_listing_its_entry_and_the_tags(repository, ref):
    assert sorted(requests_of(repository, lambda: describe_model(repository, ref))) == ["find", *["read"] * 3]


def test_models_are_listed_by_one_listing_each_and_one_of_the_names(repository):
    for name in ("n", "o"):
        save(repository, name, {}, step=1)
    asked = requests_of(repository, lambda: list_models(repository))
    assert sorted(asked) == [*["find"] * 3, "list", *["read"] * 5]


def test_a_data_set_is_described_by_one_listing_its_entry_and_a_table_per_split():
    with FaultyStore() as store:
        samples = [[{"key": "a", "text": "b"}]]
        write_version(Repository.create(store.url), "pets", {"train": samples, "val": samples})
        before = len(store.requests)
        describe_dataset(open_dataset(Repository.open(store.url), "pets"))
        # The marker, the entry and both tables are read; of each table, whether a purge has changed its shards.
        assert Counter(operation for operation, _ in store.requests[before:]) == {"read": 4, "list": 1, "info": 2}


def test_the_stores_own_requests_of_describing_a_version_are_as_few():
    with FaultyStore() as store:
        made = Repository.create(store.url)
        for number in (1, 2, 3):
            save(made, "m", {}, step=number)
        made.tag("models", "m@2", "best")
        before = len(store.requests)
        describe_model(Repository.open(store.url), "m@best")
        # The marker, the tag and the entry are read; all logs of the model are listed once.
        assert Counter(operation for operation, _ in store.requests[before:]) == {"read": 3, "list": 1}
