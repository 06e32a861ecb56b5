"""A view lives as long as a model version that read it, and is found by the version that it is a view of."""

import os
import time
from pathlib import Path

import pytest
import torch

from datasvc.api.gc import GRACE_S, gc
from datasvc.errors import StateMismatchError
from datasvc.ledger.audit import audit_folders
from datasvc.ledger.audit_text import SampleNames
from datasvc.models import ConsumptionTracker, find_consumers, save
from datasvc.repository.removal import remove_versions
from datasvc.shards import open_dataset
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.delete import delete
from tests.loaders.numbered import Numbers, sample_of
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


@pytest.fixture
def pets(repository):
    shards = [[sample_of(number, LABELLED_SCHEMA) for number in range(first, first + 6)] for first in (0, 6, 12)]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA)
    return repository


def train(repository, samples, num_batches):
    """Commit a version that consumed some batches of a split; return its keys."""
    loader = Numbers(samples, 2, prefetch=0)
    tracker = ConsumptionTracker(loader)
    batches = iter(loader)
    keys = [str(number) for _ in range(num_batches) for number in next(batches)[1]]
    save(repository, "cnn", {"weights": torch.zeros(3)}, step=num_batches, data=[tracker.use()])
    return keys


def age(repository):
    """Make every file as old as the grace period of gc."""
    for path in Path(repository.url).rglob("*"):
        os.utime(path, (time.time() - GRACE_S - 60,) * 2)


def sweep(repository):
    """Run gc as if everything were old."""
    age(repository)
    return gc(repository, dry_run=False)


def test_gc_keeps_the_view_of_a_model_version_and_sweeps_the_others(pets):
    split = open_dataset(pets, "pets")["train"]
    used, unused = split.where("label % 4 <> 1"), split.where("label % 4 <> 2")
    expected = {unused.digest, unused.table.deletions}
    keys = train(pets, used, 3)
    assert {info.digest for info in sweep(pets).objects} == expected
    found = find_consumers(pets, ["cnn"], keys=[str(number) for number in range(18)], data="pets@1")
    assert {each.key for each in found.all_uses()} == set(keys)
    reopened = Split("train", "pets@1", pets, used.digest)
    assert [each["label"] for each in reopened] == [number for number in range(18) if number % 4 != 1]


def test_gc_keeps_what_says_on_which_samples_of_a_view_a_removed_version_was_trained(pets):
    keys = train(pets, open_dataset(pets, "pets")["train"].where("label % 4 <> 1"), 3)
    delete(pets, "pets", keys=["3"])
    remove_versions(pets, "datasets", ["pets@1"])
    sweep(pets)
    sweep(pets)
    found = find_consumers(pets, ["cnn"], keys=[str(number) for number in range(18)])
    assert {each.key for each in found.all_uses()} == set(keys)
    assert found.gaps == {}


def test_trained_on_finds_views_of_a_version_and_of_a_deletion_and_of_no_other_version(pets):
    split = open_dataset(pets, "pets")["train"]
    keys = train(pets, split.where("label < 9"), 4)
    delete(pets, "pets", keys=["3", "12"])
    everything = [str(number) for number in range(18)]
    assert {each.key for each in find_consumers(pets, keys=everything, data="pets@1").all_uses()} == set(keys)
    assert list(find_consumers(pets, keys=everything, data="pets@2").all_uses()) == []
    deleted = find_consumers(pets, deleted_in="pets@2")
    assert {each.key for each in deleted.all_uses()} == {"3"} & set(keys)
    assert deleted.gaps == {}


def test_a_state_of_another_view_is_refused_with_the_names_of_both(pets):
    split = open_dataset(pets, "pets")["train"]
    state = Numbers(split.where("label < 9"), 2).state_dict()
    with pytest.raises(StateMismatchError, match=r'pets@1/train\[\("label" < 9\)\].*\[\("label" < 8\)\]'):
        Numbers(split.where("label < 8"), 2).load_state_dict(state)


def test_an_audit_names_the_samples_of_a_view(pets, tmp_path):
    view = open_dataset(pets, "pets")["train"].where("label % 4 <> 1")
    loader = Numbers(view, 2, ledger=tmp_path / "ledger", prefetch=0)
    served = [number for _, numbers in loader for number in numbers]
    loader.close()
    audit = audit_folders([tmp_path / "ledger"])
    assert audit.header.source == "pets@1/train"
    assert SampleNames(pets, audit.header).keys(0, range(len(view))) == [str(number) for number in served]


def test_gc_keeps_a_view_that_was_made_before_it_and_no_version_names_yet(pets):
    view = open_dataset(pets, "pets")["train"].where("label % 4 <> 1")
    assert gc(pets, dry_run=False).objects == ()
    train(pets, view, 3)
    assert [each["label"] for each in view] == [number for number in range(18) if number % 4 != 1]


def test_a_view_that_is_made_again_after_the_grace_period_is_young_again(pets):
    split = open_dataset(pets, "pets")["train"]
    view = split.where("label % 4 <> 1").weighted("label")
    age(pets)
    listed = {info.digest for info in gc(pets).objects}
    assert {view.digest, view.table.deletions, view.table.weights[0].digest} <= listed
    assert split.where("label % 4 <> 1").weighted("label").digest == view.digest
    assert gc(pets, dry_run=False).objects == ()
