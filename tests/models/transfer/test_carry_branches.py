"""Branches in transfers: they arrive with their head, grow there, and never become the main line."""

import json

import pytest

from datasvc.errors import ConflictError, NotFoundError
from datasvc.models import DataUse, save
from datasvc.models.transfer import transfer, transfer_datasets
from datasvc.repository import Repository
from datasvc.repository.branching import create_branch, read_branches, remove_branch
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.versions.delete import delete
from tests.cli.command import run


def texts(keys, text="old"):
    return [{"key": key, "text": text} for key in keys]


def put(repository, line, keys, text):
    ingest(repository, texts(keys, text), line, append=True, on_common="replace")


@pytest.fixture
def pets(repository):
    """pets@1 and pets@3 on the main line, pets@2 and pets@4 on `work`."""
    ingest(repository, texts("abcdef"), "pets")
    create_branch(repository, "pets", "work")
    put(repository, "pets@work", "a", "work")
    put(repository, "pets", "x", "main")
    put(repository, "pets@work", "b", "work")
    return repository


@pytest.fixture
def target(tmp_path):
    return Repository.create(str(tmp_path / "target"))


def heads(repository, name="pets"):
    branches = {branch: state.head.version for branch, state in read_branches(repository, name).items()}
    newest = repository.newest("datasets", name)
    return (newest and newest.version), branches


def content(repository, ref):
    return {sample["key"]: sample["text"] for sample in open_dataset(repository, ref)["train"]}


def test_a_branch_arrives_with_its_head_and_leaves_the_main_line_alone(pets, target):
    transfer_datasets(pets, target, ["pets@3"])
    report = transfer_datasets(pets, target, ["pets@work"])
    assert report.branches == ("pets@work",)
    assert heads(target) == (1, {"work": 2})
    assert content(target, "pets@work") == content(pets, "pets@work")
    assert content(target, "pets") == content(pets, "pets")
    again = transfer_datasets(pets, target, ["pets@work"])
    assert (again.num_objects, again.branches, heads(target)) == (0, ("pets@work",), (1, {"work": 2}))


def test_a_branch_grows_at_the_target_and_can_be_merged_there(pets, target):
    transfer_datasets(pets, target, ["pets", "pets@work"], with_parents=True)
    assert heads(target) == (3, {"work": 4})
    put(pets, "pets@work", "c", "work")
    delete(pets, "pets@work", keys=["d"])
    report = transfer_datasets(pets, target, ["pets@work"], with_parents=True)
    assert [each.is_new for each in report.versions] == [False, False, False, True, True]
    assert heads(target) == (3, {"work": 6})
    assert target.versions("datasets", "pets").read(6).content["parent"] == "pets@5"
    merged = merge_branch(target, "pets@work", "pets")
    assert [str(base) for base in merged.bases] == ["pets@1"]
    assert content(target, "pets")["x"] == "main"
    back = transfer_datasets(target, pets, ["pets"], with_parents=True)
    assert [str(each.target) for each in back.versions if each.is_new] == ["pets@7"]
    assert pets.versions("datasets", "pets").read(7).content["merged"] == ["pets@6"]
    assert pets.versions("datasets", "pets").read(7).content["change"]["bases"] == ["pets@1"]
    assert heads(pets) == (7, {"work": 6})


def test_all_branches_are_carried_on_request_under_another_name(pets, target):
    create_branch(pets, "pets@2", "idle")
    report = transfer_datasets(pets, target, ["pets"], name="copy", with_branches=True)
    assert report.branches == ("copy@idle", "copy@work")
    assert heads(target, "copy") == (2, {"idle": 1, "work": 3})


def test_a_version_of_a_branch_alone_is_on_no_line_of_the_target(pets, target):
    transfer_datasets(pets, target, ["pets@2"])
    assert heads(target) == (None, {})
    assert content(target, "pets@1") == content(pets, "pets@2")
    with pytest.raises(NotFoundError, match="pets has no version on its main line; it has 1, and the branches: none"):
        target.resolve("datasets", "pets")
    transfer_datasets(pets, target, ["pets"])
    assert heads(target) == (2, {})
    transfer_datasets(pets, target, ["pets@work"])
    assert heads(target) == (2, {"work": 3})


def test_the_data_of_a_model_that_was_trained_on_a_branch_do_not_become_the_main_line(pets, target):
    transfer_datasets(pets, target, ["pets"])
    split = open_dataset(pets, "pets@work")["train"]
    save(pets, "m", {}, step=1, data=[DataUse.of(split)] if hasattr(DataUse, "of") else [])
    transfer(pets, target, ["m"], with_data=True)
    assert heads(target)[0] == 1


def test_a_branch_that_went_on_at_the_target_is_not_set_back(pets, target):
    transfer_datasets(pets, target, ["pets@work"], with_parents=True)
    put(target, "pets@work", "z", "there")
    before = heads(target)
    assert transfer_datasets(pets, target, ["pets@work"]).branches == ("pets@work",)
    assert heads(target) == before  # it has all of the source already
    put(pets, "pets@work", "e", "here")
    for dry_run in (True, False):
        with pytest.raises(
            ConflictError, match=r"has pets@4, which pets@5 does not continue: copy pets@4 by its number"
        ):
            transfer_datasets(pets, target, ["pets@work"], dry_run=dry_run)
    assert heads(target) == before
    # What the message advises.
    transfer_datasets(target, pets, ["pets@4"])
    assert pets.versions("datasets", "pets").read(6).content["branch"] == "work/0"
    merge_branch(pets, "pets@6", "pets@work")
    transfer_datasets(pets, target, ["pets@work"], with_parents=True)
    assert {"z", "e"} <= content(target, "pets@work").keys()


def test_a_tag_of_the_target_with_the_name_of_the_branch_is_a_conflict_before_anything_is_copied(pets, target):
    transfer_datasets(pets, target, ["pets@1"])
    target.tag("datasets", "pets@1", "work")
    with pytest.raises(ConflictError, match="has a tag pets@work"):
        transfer_datasets(pets, target, ["pets@work"])
    assert target.versions("datasets", "pets").numbers() == [1]


def test_a_branch_that_was_begun_anew_replaces_the_one_of_the_target_only_when_that_is_removed(pets, target):
    transfer_datasets(pets, target, ["pets", "pets@work"])
    remove_branch(pets, "pets", "work")
    create_branch(pets, "pets", "work")
    with pytest.raises(ConflictError, match=r"cannot be set to pets@3|does not continue"):
        transfer_datasets(pets, target, ["pets@work"])
    remove_branch(target, "pets", "work")
    transfer_datasets(pets, target, ["pets@work"])
    assert heads(target) == (1, {"work": 1})


def test_a_transfer_that_ended_before_the_branch_is_continued(pets, target, monkeypatch):
    from datasvc.models.transfer import copy_datasets

    def fail(*_arguments):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(copy_datasets, "create_branch", fail)
        with pytest.raises(OSError):  # noqa: PT011 - our own
            transfer_datasets(pets, target, ["pets@work"])
    assert heads(target) == (None, {})
    transfer_datasets(pets, target, ["pets@work"])
    assert heads(target) == (None, {"work": 1})


def test_the_commands_carry_branches_and_say_so(pets, target):
    dry = run("push", "pets", "--to", target.url, "--with-branches", "--dry-run", DATASVC_REPO=pets.url)
    assert (dry.returncode, "would carry the branch pets@work" in dry.stdout) == (0, True), dry.stderr
    done = run("push", "pets", "pets@work", "--to", target.url, "--json", DATASVC_REPO=pets.url)
    assert json.loads(done.stdout)["branches"] == ["pets@work"]
    pulled = run("pull", "pets@work", "--from", target.url, DATASVC_REPO=pets.url)
    assert (pulled.returncode, "carried the branch pets@work" in pulled.stdout) == (0, True), pulled.stderr
