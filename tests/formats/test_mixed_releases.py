"""The page upgrading.md on an old release that meets a newer format: it refuses one version, not the others."""

import json

import pytest

from datasvc.repository import Repository
from datasvc.repository.branching import create_branch
from datasvc.repository.logs.heads import Heads
from datasvc.repository.logs.log import BRANCH_FORMAT, decode_entry, encode_entry
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.delete import delete
from tests.cli.command import run
from tests.samples import write_folder
from tests.shards.written_versions import write_version


@pytest.fixture
def pets(tmp_path):
    """A repository whose newest version of `pets` is of a later release; it has two, and a tag at the first."""
    repository = Repository.create(str(tmp_path / "repo"))
    folder = write_folder(tmp_path / "images", {"train": {"cat": 3}})
    for _ in range(2):
        ingest(repository, str(folder), "pets")
    assert run("tag", "pets@1", "stable", DATASVC_REPO=repository.url).returncode == 0
    newest = tmp_path / "repo/datasets/pets/versions/00000002.json"
    content = json.loads(newest.read_bytes())
    del content["checksum"]
    newest.chmod(0o644)
    newest.write_bytes(encode_entry({**content, "format": BRANCH_FORMAT + 1}))
    return repository, folder


@pytest.mark.parametrize(
    "words", [["show", "pets@1"], ["show", "pets@stable"], ["tag", "pets@1", "good"], ["head", "pets@1"]]
)
def test_an_old_release_uses_the_versions_that_it_can_read(pets, words):
    done = run(*words, DATASVC_REPO=pets[0].url)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["show", "pets"], ["show", "pets@2"], ["gc", "--yes"]])
def test_an_old_release_refuses_what_needs_the_newest_version(pets, words):
    refused = run(*words, DATASVC_REPO=pets[0].url)
    assert (refused.returncode, "upgrade datasvc" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize("words", [["ls"], ["log", "pets"]])
def test_an_old_release_lists_the_other_versions_and_names_the_one_that_it_cannot_read(pets, words):
    write_version(pets[0], "tales", {"train": [[{"key": "a", "text": "a"}]]})
    listed = run(*words, DATASVC_REPO=pets[0].url)
    assert (listed.returncode, "pets@1" in listed.stdout or "tales" in listed.stdout) == (3, True)
    assert "pets@2 is left out" in listed.stderr
    assert "upgrade datasvc" in listed.stderr


def test_an_old_release_appends_nothing_to_a_newer_version(pets, tmp_path):
    repository, folder = pets
    refused = run("ingest", folder, "pets", DATASVC_REPO=repository.url)
    assert (refused.returncode, "upgrade datasvc" in refused.stderr) == (2, True)
    assert not (tmp_path / "repo/datasets/pets/versions/00000003.json").exists()


@pytest.fixture
def branched(tmp_path, monkeypatch):
    """A repository whose newest version of `pets`, pets@2, is on a branch, as a release without branches reads it."""
    repository = Repository.create(str(tmp_path / "repo"))
    folder = write_folder(tmp_path / "images", {"train": {"cat": 3}})
    ingest(repository, str(folder), "pets")
    create_branch(repository, "pets", "work")
    delete(repository, "pets@work", keys=[open_dataset(repository, "pets")["train"][0]["key"]])
    monkeypatch.setattr("datasvc.repository.logs.log.decode_log_entry", decode_entry)
    monkeypatch.setattr(Heads, "main", property(lambda self: self.numbers[-1]))
    return repository, folder


@pytest.mark.parametrize("words", [["show", "pets"], ["delete", "pets", "--where", "label = 0"], ["gc"]])
def test_a_release_without_branches_refuses_the_version_of_a_branch_instead_of_taking_it_for_the_newest(
    branched, words
):
    refused = run(*words, DATASVC_REPO=branched[0].url)
    assert (refused.returncode, "upgrade datasvc" in refused.stderr) == (2, True), refused.stderr
    assert run("show", "pets@1", DATASVC_REPO=branched[0].url).returncode == 0
