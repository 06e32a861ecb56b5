import os
import time

import pytest

from datasvc.errors import CorruptDataError, NotFoundError, UnreadableVersionWarning
from datasvc.repository import Repository
from datasvc.repository.logs.log import encode_entry


@pytest.fixture
def repository(url):
    made = Repository.create(url)
    for _ in range(6):
        made.versions("models", "cnn").append(lambda _head: {})
    return made


def removals(repository):
    return repository.removals("models", "cnn")


def number(repository, ref, **options):
    return repository.resolve("models", ref, **options).version


def test_removed_versions_do_not_resolve_and_say_when_why_and_what_is_left(repository):
    removals(repository).add([2, 3], "diverged")
    removals(repository).add([6])
    created = removals(repository).find(3).content["created"]
    with pytest.raises(NotFoundError) as caught:
        number(repository, "cnn@3")
    assert str(caught.value) == f"cnn@3 was removed on {created} (diverged); cnn still has 1, 4 to 5"
    with pytest.raises(NotFoundError, match="no version 9; it has 1, 4 to 5"):
        number(repository, "cnn@9")
    assert number(repository, "cnn@3", removed=True) == 3
    assert number(repository, "cnn") == 5
    assert repository.living("models", "cnn") == [1, 4, 5]
    assert [entry.number for entry in repository.entries("models", "cnn")] == [1, 2, 3, 4, 5, 6]


def test_a_number_is_never_used_again_even_with_every_version_removed(repository):
    removals(repository).add(range(1, 7))
    with pytest.raises(NotFoundError, match="cnn@6 was removed"):
        number(repository, "cnn")
    assert repository.versions("models", "cnn").append(lambda _head: {}).number == 7
    assert number(repository, "cnn") == 7


def test_each_removal_is_found_by_the_versions_that_it_took(repository):
    for each in (4, 1, 5):
        removals(repository).add([each], f"took {each}")
    assert [removals(repository).find(each).content["message"] for each in (1, 4, 5)] == [
        "took 1",
        "took 4",
        "took 5",
    ]
    assert removals(repository).find(2) is None
    assert removals(repository).removed() == {1, 4, 5}


def test_a_removal_can_be_taken_back(repository):
    removals(repository).add([2, 3])
    removals(repository).restore([3], "tagged")
    assert removals(repository).removed() == {2}
    assert number(repository, "cnn@3") == 3


def test_recent_removals_are_distinguished_from_old_ones(tmp_path):
    repository = Repository.create(str(tmp_path))
    for _ in range(4):
        repository.versions("models", "cnn").append(lambda _head: {})
    for each in (1, 2, 3):
        removals(repository).add([each])
    for entry, age_s in ((1, 300), (2, 200)):
        os.utime(tmp_path / f"models/cnn/removals/{entry:08d}.json", (time.time() - age_s,) * 2)
    assert removals(repository).removed_before(time.time() - 100) == {1, 2}
    assert removals(repository).removed_before(time.time() - 250) == {1}
    removals(repository).restore([1], "tagged")
    assert removals(repository).removed_before(time.time() - 100) == {2}
    removals(repository).add([1])
    assert removals(repository).removed_before(time.time() - 100) == {2}  # removed anew, a moment ago


def test_a_removal_that_does_not_say_what_it_took_takes_nothing_and_stops_gc(tmp_path):
    repository = Repository.create(str(tmp_path))
    for _ in range(2):
        repository.versions("models", "cnn").append(lambda _head: {})
    removals(repository).add([1])
    removals(repository).add([2])
    path = tmp_path / "models/cnn/removals/00000002.json"
    path.write_bytes(encode_entry({"format": 1}))
    with pytest.warns(UnreadableVersionWarning, match="entry 2, has no field 'removed'"):
        assert number(repository, "cnn") == 2
    with pytest.raises(CorruptDataError, match="entry 2, has no field 'removed'"):
        removals(repository).removed_before(time.time() + 100)
