"""Repairing a data-set version: bad objects come from another repository, and what cannot be repaired stays named."""

import shutil

import pytest

from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.history.repair import repair_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import texts, write_version


@pytest.fixture
def pets(repository):
    write_version(repository, "pets", {"train": [texts("ab"), texts("c")], "val": [texts("v")]})
    delete(repository, "pets", keys=["a"])
    return repository


@pytest.fixture
def backup(pets, tmp_path):
    """A copy of the repository, made before anything was damaged."""
    shutil.copytree(pets.url, tmp_path / "backup")
    return Repository.open(str(tmp_path / "backup"))


def path_of(repository, digest):
    return repository.objects.local_path(digest)


def test_missing_truncated_and_changed_objects_are_repaired_and_the_bad_bytes_kept(pets, backup):
    split = open_dataset(pets, "pets")["train"]
    table, (first, second) = split.table, split.table.shards()
    before = {digest: path_of(pets, digest).read_bytes() for digest in (first.digest, second.digest, table.index(0))}
    path_of(pets, first.digest).unlink()
    path_of(pets, second.digest).write_bytes(before[second.digest][:-40])
    path_of(pets, table.index(0)).write_bytes(b"x" + before[table.index(0)][1:])
    report = repair_dataset(pets, "pets", [backup.url], deep=True)
    assert len(report.verified.problems) == 3
    assert [repair.failure for repair in report.repairs] == [None] * 3
    assert sum(repair.kept_at is not None for repair in report.repairs) == 2
    assert report.remaining == ()
    assert {digest: path_of(pets, digest).read_bytes() for digest in before} == before
    assert verify(pets, "pets", deep=True).problems == ()


def test_what_a_bad_table_hides_is_repaired_too(pets, backup):
    split = open_dataset(pets, "pets")["train"]
    for digest in (split.digest, split.table.deletions, split.table.shard(0).digest):
        path_of(pets, digest).unlink()
    report = repair_dataset(pets, "pets", [backup])
    assert report.remaining == ()
    assert len(report.repairs) == 3
    assert report.verified.num_shards == 3
    assert verify(pets, "pets", deep=True).problems == ()


def test_what_no_copy_has_remains_and_does_not_stop_the_others(pets, backup):
    first, second = open_dataset(pets, "pets")["train"].table.shards()
    for repository, digest in ((pets, first.digest), (backup, first.digest), (pets, second.digest)):
        path_of(repository, digest).unlink()
    report = repair_dataset(pets, "pets", [backup])
    assert [(problem.digest, problem.kind) for problem in report.remaining] == [(first.digest, "missing")]
    failures = {repair.digest: repair.failure for repair in report.repairs}
    assert failures[second.digest] is None
    assert "missing as well" in failures[first.digest]


def test_without_copies_nothing_is_repaired(pets):
    (first, _) = open_dataset(pets, "pets")["train"].table.shards()
    path_of(pets, first.digest).unlink()
    report = repair_dataset(pets, "pets", [])
    assert (report.repairs, len(report.remaining)) == ((), 1)
