"""Data sets that travel between repositories on their own: `repo.datasets.push`, `datasvc push` and `pull`."""

import json
import os
import secrets
import signal
import subprocess

import pytest

import datasvc
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models import DataUse, save
from datasvc.models.transfer import transfer, transfer_datasets
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from tests.cli.command import run
from tests.models.stored import flip_last_byte
from tests.progress import RecordedProgress
from tests.samples import write_folder
from tests.support import warm_python


@pytest.fixture
def pets(repository, tmp_path):
    """Three versions, the newest a deletion: pets@1, pets@2 and pets@3, of which pets@2 is stable."""
    ingest(
        repository,
        str(write_folder(tmp_path / "a", {"train": {"cat": 9, "dog": 7}, "val": {"cat": 3}})),
        "pets",
        shard_bytes=3000,
    )
    ingest(repository, str(write_folder(tmp_path / "b", {"train": {"emu": 5}}, start=50)), "pets", append=True)
    delete(repository, "pets", where="label = 1")
    repository.tag("datasets", "pets@2", "stable")
    return repository


@pytest.fixture(params=["local", "s3"])
def target(request, tmp_path):
    if request.param == "local":
        return Repository.create(str(tmp_path / "target"))
    return Repository.create(f"{request.getfixturevalue('s3_bucket')}/{secrets.token_hex(8)}")


@pytest.fixture
def other(tmp_path):
    return Repository.create(str(tmp_path / "other"))


def told(report):
    return [(str(each.source), str(each.target), each.is_new) for each in report.versions]


def test_a_version_arrives_whole_once_and_goes_back_as_itself(pets, target):
    report = transfer_datasets(pets, target, ["pets"])
    assert told(report) == [("pets@3", "pets@1", True)]
    ours, theirs = open_dataset(pets, "pets@3"), open_dataset(target, "pets@1")
    assert {name: split.digest for name, split in theirs.items()} == {
        name: split.digest for name, split in ours.items()
    }
    assert [[sample["key"] for sample in split] for split in theirs.values()] == [
        [sample["key"] for sample in split] for split in ours.values()
    ]
    assert not verify(target, "pets@1", deep=True).problems
    entry = target.entry(target.resolve("datasets", "pets@1")).content
    assert (entry["parent"], entry["origin"]["version"], entry["origin"]["parents"]) == (None, "pets@3", ["pets@2"])
    assert told(transfer_datasets(pets, target, ["pets@3"])) == [("pets@3", "pets@1", False)]
    assert told(transfer_datasets(target, pets, ["pets"])) == [("pets@1", "pets@3", False)]


def test_the_history_comes_along_if_it_is_asked_for_in_its_order(pets, other):
    report = transfer_datasets(pets, other, ["pets"], with_parents=True)
    assert told(report) == [("pets@1", "pets@1", True), ("pets@2", "pets@2", True), ("pets@3", "pets@3", True)]
    assert diff(other, "pets@1", "pets@3").splits.keys() == diff(pets, "pets@1", "pets@3").splits.keys()
    assert other.entry(other.resolve("datasets", "pets@3")).content["parent"] == "pets@2"


def test_only_missing_objects_move_and_progress_counts_all(pets, other):
    first = transfer_datasets(pets, other, ["pets@1"])
    progress = RecordedProgress()
    second = transfer_datasets(pets, other, ["pets@2"], progress=progress)
    assert 0 < second.bytes < progress.total
    assert 0 < second.num_objects < first.num_objects + second.num_objects
    assert transfer_datasets(pets, other, ["pets@1", "pets@2"]).num_objects == 0


def test_a_dry_run_says_what_moves_and_writes_nothing(pets, other):
    transfer_datasets(pets, other, ["pets@1"])
    before = sorted(other.storage.find(""))
    planned = transfer_datasets(pets, other, ["pets"], with_parents=True, with_tags=True, dry_run=True)
    assert sorted(other.storage.find("")) == before
    done = transfer_datasets(pets, other, ["pets"], with_parents=True, with_tags=True)
    assert (planned.is_dry_run, done.is_dry_run) == (True, False)
    assert planned.versions == done.versions
    assert (planned.num_objects, planned.bytes, planned.tags) == (done.num_objects, done.bytes, ("pets@stable",))


def test_tags_come_along_if_they_are_asked_for_and_none_is_moved(pets, other):
    assert transfer_datasets(pets, other, ["pets@2"]).tags == ()
    assert other.tags("datasets", "pets") == {}
    # Of a version that is there already, too.
    assert transfer_datasets(pets, other, ["pets@2", "pets@3"], with_tags=True).tags == ("pets@stable",)
    assert other.tags("datasets", "pets") == {"stable": 1}
    assert transfer_datasets(pets, other, ["pets@2"], with_tags=True).tags == ("pets@stable",)
    pets.tag("datasets", "pets@3", "stable")
    transfer_datasets(pets, other, ["pets@3"])
    before = sorted(other.storage.find(""))
    for refs in (["pets@3"], ["pets@1", "pets@3"]):
        with pytest.raises(ConflictError, match=r"'stable'.*points at pets@1; move or remove it there"):
            transfer_datasets(pets, other, refs, with_tags=True)
    assert sorted(other.storage.find("")) == before


def test_an_unrelated_data_set_keeps_its_name_and_the_copy_gets_another(pets, other, tmp_path):
    ingest(other, str(write_folder(tmp_path / "x", {"train": {"x": 2}})), "pets")
    with pytest.raises(ConfigError, match=r"another data set 'pets'.*--name NAME"):
        transfer_datasets(pets, other, ["pets"])
    report = transfer_datasets(pets, other, ["pets@2"], name="theirs", with_tags=True)
    assert (told(report), report.tags) == ([("pets@2", "theirs@1", True)], ("theirs@stable",))
    ingest(pets, str(tmp_path / "x"), "zoo")
    with pytest.raises(ConfigError, match="2 data sets cannot all get the name 'x': pets, zoo"):
        transfer_datasets(pets, other, ["pets", "zoo"], name="x")
    with pytest.raises(ConfigError, match="is both source and target"):
        transfer_datasets(pets, pets.url, ["pets"])
    with pytest.raises(NotFoundError, match="cats"):
        transfer_datasets(pets, other, ["cats"])


def test_a_merged_version_is_whole_without_the_data_sets_that_it_was_made_of(pets, other, tmp_path):
    ingest(pets, str(write_folder(tmp_path / "zoo", {"train": {"ape": 4}}, start=90)), "zoo")
    merge(pets, ["pets@1", "zoo@1"], "all")
    transfer_datasets(pets, other, ["all"], with_parents=True)
    assert other.names("datasets") == ["all"]
    assert not verify(other, "all", deep=True).problems


def test_a_data_set_that_came_with_a_model_and_one_that_came_alone_are_the_same(pets, other):
    table = open_dataset(pets, "pets@2")["train"].digest
    save(pets, "net", {"step": 1}, step=1, data=[DataUse("pets@2", "train", {"version": table, "position": 3})])
    transfer(pets, other, ["net"], with_data=True)
    assert told(transfer_datasets(pets, other, ["pets@2"])) == [("pets@2", "pets@1", False)]


def test_a_damaged_shard_does_not_arrive_and_its_version_does_not_appear(pets, other):
    digest = open_dataset(pets, "pets@1")["train"].table.rows["digest"][0].as_py().hex()
    flip_last_byte(pets.storage.local_path(pets.objects.path(digest)))
    with pytest.raises(CorruptDataError):
        transfer_datasets(pets, other, ["pets@1"])
    assert other.versions("datasets", "pets").head() == 0


INTERRUPTED = """
import os, signal, sys
from datasvc.models.transfer import copying, transfer_datasets
left = int(sys.argv[3])
real = copying._copy_bytes
copying.AT_ONCE = 1
def copy(source, target, info):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    real(source, target, info)
copying._copy_bytes = copy
transfer_datasets(sys.argv[1], sys.argv[2], ["pets"], with_parents=True, with_tags=True)
"""


@pytest.mark.slow
def test_a_killed_push_leaves_no_half_version_and_goes_on_where_it_was(pets, target):
    whole = transfer_datasets(pets, target, ["pets"], with_parents=True, dry_run=True)
    killed = subprocess.run([warm_python.command(), "-c", INTERRUPTED, pets.url, target.url, "4"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert target.names("datasets") == []
    assert target.storage.list("journal") != [], "it keeps what has arrived from gc"
    rest = transfer_datasets(pets, target, ["pets"], with_parents=True, with_tags=True)
    assert rest.num_objects == whole.num_objects - 4
    assert told(rest) == told(whole)
    for number in (1, 2, 3):
        assert not verify(target, f"pets@{number}", deep=True).problems
    assert target.tags("datasets", "pets") == {"stable": 2}
    assert target.storage.list("journal") == []


def test_the_commands_push_pull_and_plan(pets, tmp_path):
    there = str(tmp_path / "there")
    words = ["push", "pets", "--to", there, "--repo", pets.url, "--with-parents"]
    assert "no repository at" in run(*words).stderr
    planned = json.loads(run(*words, "--create", "--dry-run", "--json").stdout)
    assert not os.path.exists(there)
    done = json.loads(run(*words, "--create", "--json").stdout)
    assert done == {**planned, "dry_run": False}
    assert [version["new"] for version in done["versions"]] == [True] * 3
    shown = run(*words, "--dry-run", "--with-tags").stdout
    assert "would tag pets@stable" in shown
    assert "would copy 0 objects, 0 bytes" in shown
    here = datasvc.open(str(tmp_path / "here"), create=True)
    assert "copied" in run("pull", "pets@2", "--from", there, "--repo", here.repository.url, "--name", "mine").stdout
    assert here.datasets.pull(there, ["pets@1"], name="mine").versions[0].target.version == 2
    assert here.datasets.push(pets, ["mine"], name="pets").versions[0].is_new is False
