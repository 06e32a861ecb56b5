"""Views travel with what uses them: named ones with their data set, unnamed ones with the models trained on them."""

import json

import pytest

import datasvc
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models import find_consumers
from datasvc.models.transfer import copying, transfer, transfer_datasets
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.views.named import read_views, remove_view, save_view
from tests.cli.command import run
from tests.loaders.numbered import sample_of
from tests.shards.views.test_kept_views import sweep, train
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


@pytest.fixture
def pets(repository):
    shards = [[sample_of(number, LABELLED_SCHEMA) for number in range(first, first + 6)] for first in (0, 6, 12)]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA)
    return repository


@pytest.fixture
def other(tmp_path):
    return Repository.create(str(tmp_path / "other"))


def labels_of(repository, ref):
    return [each["label"] for each in datasvc.open(repository.url).dataset(ref)["train"]]


def test_named_views_go_with_the_versions_that_they_are_made_of(pets, other):
    split = open_dataset(pets, "pets")["train"]
    high = save_view(pets, "high", split.where("label > 14").weighted("label"), message="large ones")
    delete(pets, "pets", keys=["3"])
    save_view(pets, "low", open_dataset(pets, "pets@2")["train"].where("label < 5"))
    planned = transfer_datasets(pets, other, ["pets@2"], name="animals", dry_run=True)
    report = transfer_datasets(pets, other, ["pets@2"], name="animals")
    assert planned.views == report.views == ("animals[low]",)
    assert (planned.num_objects, planned.bytes) == (report.num_objects, report.bytes)
    assert labels_of(other, "animals[low]") == [0, 1, 2, 4]
    assert transfer_datasets(pets, other, ["pets@1"], name="animals").views == ("animals[high]",)
    assert str(datasvc.open(other.url).dataset("animals[high]").resolved) == "animals@2"
    assert labels_of(other, "animals[high]") == [15, 16, 17]
    copied = read_views(other, "animals")["high"]
    assert (copied.dataset, copied.table, copied.message) == ("animals@2", high.table, "large ones")
    assert open_dataset(other, "animals[high]")["train"].weights.of(0).tolist() == [15, 16, 17]
    assert sweep(other).objects == ()
    assert transfer_datasets(pets, other, ["pets@1", "pets@2"], name="animals").views == ()


def test_a_name_that_was_moved_at_the_source_is_moved_at_the_target_and_no_other_view_is_replaced(pets, other):
    split = open_dataset(pets, "pets")["train"]
    save_view(pets, "high", split.where("label > 14"))
    transfer_datasets(pets, other, ["pets"])
    save_view(pets, "high", split.where("label > 15"))
    assert transfer_datasets(pets, other, ["pets"]).views == ("pets[high]",)
    assert labels_of(other, "pets[high]") == [16, 17]
    save_view(other, "high", open_dataset(other, "pets")["train"].where("label > 16"))
    with pytest.raises(ConflictError, match=r"another view pets\[high\], of 1 sample; remove its name there"):
        transfer_datasets(pets, other, ["pets"])
    assert labels_of(other, "pets[high]") == [17]
    remove_view(other, "pets", "high")
    assert transfer_datasets(pets, other, ["pets"]).views == ("pets[high]",)
    assert labels_of(other, "pets[high]") == [16, 17]


def test_an_unnamed_view_goes_with_the_model_that_was_trained_on_it(pets, other):
    keys = train(pets, open_dataset(pets, "pets")["train"].where("label % 4 <> 1").weighted("label"), 5)
    transfer(pets, other, ["cnn"], with_data=True)
    everything = [str(number) for number in range(18)]
    found = find_consumers(other, ["cnn"], keys=everything)
    assert {each.key for each in found.all_uses()} == set(keys)
    assert found.gaps == {}
    sweep(other)
    assert {each.key for each in find_consumers(other, ["cnn"], keys=everything).all_uses()} == set(keys)


def test_a_model_whose_view_is_lost_can_be_copied_and_says_what_is_missing(pets, other):
    view = open_dataset(pets, "pets")["train"].where("label % 4 <> 1")
    train(pets, view, 3)
    pets.objects.local_path(view.digest).unlink()
    assert [each.is_new for each in transfer(pets, other, ["cnn"], with_data=True).versions] == [True, True]
    found = find_consumers(other, ["cnn"], keys=["3"])
    assert "not in this repository" in str(found.gaps)


def test_of_a_model_that_was_trained_on_whole_splits_no_table_is_read(pets, other, monkeypatch):
    split, read = open_dataset(pets, "pets")["train"], []
    view = split.where("label % 4 <> 1")
    real = copying.objects_of_view
    monkeypatch.setattr(
        copying, "objects_of_view", lambda objects, digest: read.append(digest) or real(objects, digest)
    )
    train(pets, split, 3)
    transfer(pets, other, ["cnn"])
    assert read == []
    train(pets, view, 3)
    transfer(pets, other, ["cnn"])
    assert read == [view.digest]


@pytest.mark.parametrize("error", [ConfigError, CorruptDataError])
def test_a_model_whose_view_cannot_be_read_is_not_copied_without_it(pets, other, monkeypatch, error):
    train(pets, open_dataset(pets, "pets")["train"].where("label % 4 <> 1"), 3)

    def read(_objects, digest):
        raise error(f"{digest} has a later format, or is corrupt")

    monkeypatch.setattr(copying, "objects_of_view", read)
    with pytest.raises(error, match="later format"):
        transfer(pets, other, ["cnn"])
    assert other.names("models") == []


def test_a_view_that_lacks_an_object_is_not_copied_and_neither_is_its_version(pets, other):
    view = open_dataset(pets, "pets")["train"].where("label % 4 <> 1")
    save_view(pets, "some", view)
    pets.objects.local_path(view.table.deletions).unlink()
    with pytest.raises(NotFoundError, match=str(view.table.deletions)):
        transfer_datasets(pets, other, ["pets"])
    assert other.names("datasets") == []


def test_the_command_says_which_views_it_copies(pets, other):
    save_view(pets, "high", open_dataset(pets, "pets")["train"].where("label > 14"))
    words = ("pets", "--to", other.url, "--repo", pets.url)
    assert "would copy the view pets[high]" in run("push", *words, "--dry-run").stdout
    assert json.loads(run("push", *words, "--json").stdout)["views"] == ["pets[high]"]
    assert "view" not in run("push", *words).stdout
