"""How often common acts ask the store: a request is what a remote store answers over the network."""

import pytest

from datasvc.models import describe_model, save
from datasvc.repository import Repository, Storage

LISTINGS = ("list", "find")
REQUESTS = (*LISTINGS, "read", "read_range", "size", "create", "put_bytes", "refresh")


class CountingStorage(Storage):
    """Keeps the requests that a repository makes, by name, without those that the storage makes for itself."""

    def __init__(self, url):
        super().__init__(url)
        self.requests, self._is_inside = [], False


def _counted(name):
    def request(self, *arguments, **options):
        if self._is_inside:
            return getattr(Storage, name)(self, *arguments, **options)
        self.requests.append(name)
        self._is_inside = True
        try:
            return getattr(Storage, name)(self, *arguments, **options)
        finally:
            self._is_inside = False

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


def test_a_version_is_described_without_a_listing_for_each_log(repository):
    asked = requests_of(repository, lambda: describe_model(repository, "m@2"))
    assert sum(name in LISTINGS for name in asked) <= 3
