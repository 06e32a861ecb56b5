import json

import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Repository, Storage, parse_reference
from datasvc.repository.logs.references import check_name
from datasvc.testing import FaultyStore


@pytest.fixture
def repository(url):
    return Repository.create(url)


def commit(repository, name, kind="datasets"):
    return repository.versions(kind, name).append(lambda _head: {}).number


def test_a_repository_is_made_once_and_opened_again(url):
    first = Repository.create(url)
    info = first.objects.put(b"x")
    assert Repository.create(url).objects.read(info.digest) == b"x"
    assert Repository.open(url).objects.read(info.digest) == b"x"


def test_the_error_of_a_missing_repository_has_the_command_that_creates_one(url):
    with pytest.raises(NotFoundError, match="datasvc ingest"):
        Repository.open(url)


@pytest.mark.parametrize(
    ("marker", "error", "message"),
    [
        ({"format": 2}, ConfigError, "format 2; this datasvc reads up to 1: upgrade"),
        ({}, CorruptDataError, "is corrupt"),
        ([], CorruptDataError, "is corrupt"),
    ],
)
def test_a_repository_of_a_later_or_no_format_is_refused(tmp_path, marker, error, message):
    (tmp_path / "datasvc.json").write_text(json.dumps(marker))
    for way in (Repository.open, Repository.create):
        with pytest.raises(error, match=message):
            way(str(tmp_path))


def test_a_store_that_ignores_create_only_writes_is_refused_and_its_marker_is_left_as_it_was():
    with FaultyStore(creates_exclusively=False) as store:
        with pytest.raises(ConfigError, match="ignores create-only writes"):
            Repository.create(store.url)
        assert json.loads(Storage(store.url).read("datasvc.json")) == {"format": 1}


def test_references_resolve_to_the_newest_a_number_or_a_tag(repository):
    assert [commit(repository, "digits") for _ in range(3)] == [1, 2, 3]
    repository.tag("datasets", "digits@2", "stable")
    assert str(repository.resolve("datasets", "digits")) == "digits@3"
    assert str(repository.resolve("datasets", "digits@1")) == "digits@1"
    assert str(repository.resolve("datasets", "digits@stable")) == "digits@2"


def test_moving_a_tag_keeps_its_history(repository):
    commit(repository, "digits"), commit(repository, "digits")
    repository.tag("datasets", "digits@1", "prod")
    repository.tag("datasets", "digits@2", "prod")
    assert repository.tags("datasets", "digits") == {"prod": 2}
    assert [entry.content["version"] for entry in repository.tag_history("datasets", "digits", "prod")] == [1, 2]


def test_the_error_of_a_reference_that_does_not_resolve_lists_what_exists(repository):
    commit(repository, "digits")
    repository.tag("datasets", "digits", "stable")
    for ref, message in (
        ("letters", "no data set 'letters' .* it has: digits"),
        ("digits@9", "has no version 9; it has 1"),
        ("digits@beta", "has no tag 'beta'; it has: stable"),
    ):
        with pytest.raises(NotFoundError, match=message):
            repository.resolve("datasets", ref)
    with pytest.raises(NotFoundError, match=r"no model 'digits' .* it has: none yet"):
        repository.resolve("models", "digits")


@pytest.mark.parametrize("name", ["", "Digits", "-digits", "di gits", "di/gits", "..", "digits\n", "ü", "a" * 129])
def test_names_outside_the_pattern_are_refused(name, repository):
    with pytest.raises(ConfigError, match="is not a valid name of a data set"):
        check_name(name, "data set")
    with pytest.raises(ConfigError):
        repository.versions("datasets", name)


@pytest.mark.parametrize("name", ["digits", "0", "a.b-c_d", "a" * 128])
def test_names_inside_the_pattern_are_accepted(name):
    assert check_name(name, "data set") == name


@pytest.mark.parametrize("ref", ["a@", "a@b@c", "a@0", "a@-1", "@1", "a@B"])
def test_what_is_no_reference_is_refused(ref):
    with pytest.raises(ConfigError):
        parse_reference(ref)


def test_a_number_cannot_be_a_tag(repository):
    commit(repository, "digits")
    with pytest.raises(ConfigError, match="NAME@NUMBER is a version"):
        repository.tag("datasets", "digits", "7")


def test_stray_files_beside_the_names_have_no_effect(tmp_path):
    repository = Repository.create(str(tmp_path))
    commit(repository, "digits")
    repository.tag("datasets", "digits", "stable")
    for folder in ("datasets", "datasets/digits/tags"):
        (tmp_path / folder / ".DS_Store").write_text("x")
        (tmp_path / folder / "Not A Name").write_text("x")
    assert repository.names("datasets") == ["digits"]
    assert repository.tags("datasets", "digits") == {"stable": 1}


def test_a_name_without_a_version_is_not_listed(tmp_path):
    repository = Repository.create(str(tmp_path))
    commit(repository, "digits")
    (tmp_path / "datasets" / "begun" / "versions").mkdir(parents=True)
    assert repository.names("datasets") == ["digits"]
