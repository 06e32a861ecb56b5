"""Named views: a name keeps a view from gc, follows its data set, and opens as `pets[NAME]`."""

import gc
import json
import weakref

import pytest

import datasvc
from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.history.rename import rename
from datasvc.shards.versions.delete import delete
from datasvc.shards.views.named import read_views, remove_view, save_view
from tests.cli.command import run
from tests.loaders.numbered import sample_of
from tests.shards.views.test_kept_views import sweep
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


@pytest.fixture
def pets(repository):
    shards = [[sample_of(number, LABELLED_SCHEMA) for number in range(first, first + 6)] for first in (0, 6, 12)]
    write_version(repository, "pets", {"train": shards, "val": [shards[0]]}, LABELLED_SCHEMA)
    return repository


def labels_of(split):
    return [each["label"] for each in split]


def test_a_named_view_survives_gc_until_its_name_is_removed(pets):
    view = open_dataset(pets, "pets")["train"].weighted("label")
    stored = save_view(pets, "high", view, message="no small ones")
    assert (stored.dataset, stored.samples, stored.message) == ("pets@1", 17, "no small ones")
    assert sweep(pets).objects == ()
    assert read_views(pets, "pets") == {"high": stored}
    remove_view(pets, "pets", "high")
    assert read_views(pets, "pets") == {}
    swept = {info.digest for info in sweep(pets).objects}
    assert {view.digest} | {pack.digest for pack in view.table.weights} <= swept


def test_a_closed_repository_is_not_kept_in_memory_by_its_views(pets):
    opened = Repository.open(pets.url)
    save_view(opened, "high", open_dataset(opened, "pets")["train"].where("label > 3"))
    objects = weakref.ref(opened.objects)
    del opened
    gc.collect()
    assert objects() is None


def test_a_replaced_view_is_kept_for_the_runs_that_read_it(pets):
    split = open_dataset(pets, "pets")["train"]
    old, new = split.where("label > 3"), split.where("label > 4")
    save_view(pets, "high", old)
    save_view(pets, "high", new)
    assert sweep(pets).objects == ()
    assert datasvc.open(pets.url).dataset("pets[high]")["train"].digest == new.digest


def test_a_name_opens_the_version_that_the_view_was_made_of_and_leaves_other_splits_whole(pets):
    save_view(pets, "high", open_dataset(pets, "pets")["train"].where("label > 14"))
    delete(pets, "pets", where="label = 16", split="train")
    repo = datasvc.open(pets.url)
    opened = repo.dataset("pets[high]")
    assert str(opened.resolved) == "pets@1"
    assert labels_of(opened["train"]) == [15, 16, 17]
    assert labels_of(opened["val"]) == list(range(6))
    with pytest.raises(ConfigError, match=r"pets@2\[high\] is a view of pets@1"):
        repo.dataset("pets@2[high]")
    with pytest.raises(NotFoundError, match="pets has no view 'low'; it has: high"):
        repo.dataset("pets[low]")


def test_views_go_along_when_their_data_set_is_renamed(pets):
    save_view(pets, "high", open_dataset(pets, "pets")["train"].where("label > 14"))
    rename(pets, "pets", "animals")
    assert labels_of(datasvc.open(pets.url).dataset("animals[high]")["train"]) == [15, 16, 17]
    assert sweep(pets).objects == ()


def test_what_is_no_view_and_what_has_no_valid_name_is_refused(pets):
    split = open_dataset(pets, "pets")["train"]
    with pytest.raises(ConfigError, match="is no view of this repository"):
        save_view(pets, "all", split)
    for name in ("3", "Großes"):
        with pytest.raises(ConfigError, match="valid"):
            save_view(pets, name, split.where("label > 3"))
    with pytest.raises(NotFoundError, match="it has: none yet"):
        remove_view(pets, "pets", "high")


def test_the_command_makes_lists_shows_and_removes_views(pets):
    def command(*words, status=0):
        done = run("view", *words, DATASVC_REPO=pets.url)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    made = json.loads(command("pets", "high", "--where", "label > 3", "--weights", "label", "--json"))
    assert (made["samples"], made["steps"]) == (14, ['("label" > 3)', "weighted(label)"])
    assert "pets[high] has 14 samples of pets@1/train" in command("pets", "high")
    assert list(json.loads(command("pets", "--json"))) == ["high"]
    assert "high" in command("pets")
    assert "exclude each other" in command("pets", "high", "--remove", "--take", "0.5", status=2)
    assert "removed the view pets[high]" in command("pets", "high", "--remove")
    assert json.loads(command("pets", "--json")) == {}
