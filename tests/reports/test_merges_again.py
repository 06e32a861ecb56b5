"""Merges of a branch that was merged before, reverted, or whose samples both sides deleted."""

import pytest

from datasvc.repository.branching import create_branch
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.history.revert import revert
from datasvc.shards.versions.delete import delete


def put(repository, line, keys):
    ingest(repository, [{"key": key, "text": f"text of {key}"} for key in keys], line, append=True)


def keys_of(repository, ref):
    return "".join(sorted(sample["key"] for sample in open_dataset(repository, ref)["train"]))


@pytest.fixture
def pets(repository):
    ingest(repository, [{"key": key, "text": f"text of {key}"} for key in "ab"], "pets")
    create_branch(repository, "pets", "work")
    return repository


def test_a_merge_that_was_reverted_is_made_again_from_the_version_before_it(pets):
    """FESOM/fesom2#215, NCAR/DART#63: after a revert, a merge brings only what is newer, without a way back."""
    put(pets, "pets@work", "x")
    merge_branch(pets, "pets@work", "pets")
    revert(pets, "pets@1")
    put(pets, "pets@work", "y")
    merge_branch(pets, "pets@work", "pets")
    assert keys_of(pets, "pets") == "aby"
    preview = merge_branch(pets, "pets@work", "pets", base="pets@1", dry_run=True)
    assert (preview.added, keys_of(pets, "pets")) == ({"train": 1}, "aby")
    merge_branch(pets, "pets@work", "pets", base="pets@1")
    assert keys_of(pets, "pets") == "abxy"


def test_a_merge_from_a_given_version_commits_nothing_if_the_line_has_all_of_it(pets):
    """The neighbour of the fault above: the same command again."""
    put(pets, "pets@work", "x")
    first = merge_branch(pets, "pets@work", "pets", base="pets@1")
    again = merge_branch(pets, "pets@work", "pets", base="pets@1")
    assert (first.is_new, again.is_new, again.version, again.bases) == (True, False, first.version, (first.theirs,))


def test_what_one_side_added_and_deleted_again_is_nobodys_change(pets):
    """treeverse/dvc#5151, second situation: a merge driver that knows additions only."""
    put(pets, "pets", "c")
    put(pets, "pets@work", "d")
    delete(pets, "pets@work", keys=["d"])
    delete(pets, "pets@work", keys=["b"])
    report = merge_branch(pets, "pets@work", "pets")
    assert (keys_of(pets, "pets"), report.conflicts) == ("ac", [])


def test_a_sample_that_both_sides_deleted_is_no_conflict(pets):
    """treeverse/dvc#8360, opsmill/infrahub#1257: both branches deleted the same file."""
    put(pets, "pets", "c")
    delete(pets, "pets", keys=["b"])
    delete(pets, "pets@work", keys=["b"])
    assert merge_branch(pets, "pets@work", "pets").conflicts == []
    assert keys_of(pets, "pets") == "ac"
