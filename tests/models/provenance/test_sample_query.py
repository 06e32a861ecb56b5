"""Where deleted samples count: told by shards and shard tables, whatever versions are called."""

import pytest

from datasvc.loaders.core.mixture import Mixture
from datasvc.models import CodeRevision, ConsumptionTracker, find_consumers, save
from datasvc.models.transfer import transfer
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.history.rename import rename
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from tests.loaders.numbered import Numbers, sample_of
from tests.models.trainings import commit
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

UNKNOWN = CodeRevision(None, dirty=False)


def write(repository, name, numbers):
    samples = [sample_of(number, LABELLED_SCHEMA) for number in numbers]
    write_version(repository, name, {"train": [samples]}, LABELLED_SCHEMA)


def train(repository, model, samples, *, parent=None, step=1):
    """Save a version whose run read one epoch."""
    loader = Numbers(samples, 1, tail="pad", prefetch=0)
    reading = ConsumptionTracker(loader)
    for _ in loader:
        pass
    return str(save(repository, model, {}, step=step, data=[reading.use()], parent=parent, code=UNKNOWN))


def split(repository, version):
    return open_dataset(repository, version)["train"]


def saw_all(found):
    return [(each.name, each.num_samples, each.is_complete) for each in found.versions]


@pytest.fixture
def pets(repository):
    write(repository, "pets", range(6))
    delete(repository, "pets@1", keys=["3", "4"])
    return repository


def test_deleted_samples_count_in_merged_sets_that_share_their_shards_and_in_no_namesake(pets):
    write(pets, "birds", range(10, 13))
    write(pets, "fish", [3])  # another sample of the same key
    merge(pets, ["pets@1", "birds@1"], "zoo")
    merge(pets, ["pets@2", "fish@1"], "aquarium")
    for model, version in (("zoo", "zoo@1"), ("aquarium", "aquarium@1"), ("after", "pets@2")):
        train(pets, model, split(pets, version))
    found = find_consumers(pets, deleted_in="pets@2")
    assert saw_all(found) == [("after@1", 0, True), ("aquarium@1", 0, True), ("zoo@1", 2, True)]
    # Asked for, keys count where nothing is shared, too.
    assert saw_all(find_consumers(pets, deleted_in="pets@2", data="aquarium")) == [
        ("after@1", 0, True),
        ("aquarium@1", 1, True),
        ("zoo@1", 2, True),
    ]


def test_versions_that_have_other_numbers_elsewhere_are_told_by_their_shard_tables(pets, tmp_path):
    other = Repository.create(str(tmp_path / "other"))
    for first in (50, 60, 70):
        write(other, "pets", range(first, first + 3))
    mixture = Mixture([(split(pets, "pets@1"), 1)], block=2)
    base = train(pets, "cnn", mixture)
    train(pets, "cnn", split(pets, "pets@2"), parent=base, step=2)
    transfer(
        pets, other, ["cnn@2"], with_data=True, data_names={"pets": "theirs"}
    )  # its parent is left, so the history tells of it
    assert [number for number, _ in enumerate(other.entries("datasets", "theirs"), 1)] == [1]
    transfer(pets, other, ["cnn@1"], with_data=True, data_names={"pets": "theirs"})
    deleted = next(
        f"theirs@{each.number}"
        for each in other.entries("datasets", "theirs")
        if each.content["splits"]["train"]["table"] == split(pets, "pets@2").digest
    )
    delete(other, "theirs@2", keys=["3", "4"])
    assert deleted == "theirs@1"
    # At home pets@1 is before the deletion; there it came last.
    assert saw_all(find_consumers(other, deleted_in="theirs@3")) == [("cnn@1", 2, True), ("cnn@2", 2, True)]
    assert {each.data for each in find_consumers(other, keys=["3"]).all_uses()} == {
        "pets@1/train",
        "theirs@2/train",
    }
    assert saw_all(find_consumers(other, keys=["3"], data="pets@1")) == [("cnn@1", 0, True), ("cnn@2", 0, True)]
    assert saw_all(find_consumers(other, ["cnn@1"], keys=["3"], data="theirs@2")) == [("cnn@1", 1, True)]


def test_a_table_of_that_name_that_nobody_knows_is_no_answer(pets, tmp_path):
    other = Repository.create(str(tmp_path / "other"))
    write(other, "pets", range(4, 9))
    use = {"dataset": "pets@7", "split": "train", "state": {}}
    for model, there in (("strange", True), ("lost", False)):
        train(other, model, split(other, "pets@1"))
        use = dict(other.versions("models", model).read(1).content["data"][0])
        if there:
            pets.objects.put(other.objects.read(split(other, "pets@1").digest))
        else:
            use["state"] = {**use["state"], "version": "ab" * 32}
        commit(pets, model, 1, [{**use, "dataset": "pets@7"}])
    found = find_consumers(pets, deleted_in="pets@2")
    assert saw_all(found) == [("lost@1", 0, False), ("strange@1", 0, False)]
    assert "whether it contains the samples that pets@2 deleted is unknown" in found.gaps["strange@1"][0]
    assert "which is not in this repository" in found.gaps["lost@1"][0]


def test_a_shard_that_two_searches_miss_is_counted_once(repository):
    shard = [sample_of(number, LABELLED_SCHEMA) for number in (11, 12, 13)]
    other = [
        sample_of(number, LABELLED_SCHEMA) for number in (10, 11)
    ]  # the key is in both splits, so it is searched for twice
    write_version(repository, "pets", {"train": [other], "val": [shard]}, LABELLED_SCHEMA)
    delete(repository, "pets@1", keys=["11"])
    write_version(repository, "copies", {"train": [shard]}, LABELLED_SCHEMA)
    delete(repository, "copies@1", keys=["12"])
    train(repository, "cnn", split(repository, "copies@2"))
    repository.objects.local_path(split(repository, "copies@2").table.deletions).unlink()
    found = find_consumers(repository, deleted_in="pets@2", data="copies")
    assert found.gaps == {"cnn@1": ("it read copies@2/train, of which 1 shard is not in this repository",)}


def test_data_that_were_left_behind_are_a_gap_and_no_failure(pets, tmp_path):
    train(pets, "cnn", split(pets, "pets@2"))
    other = Repository.create(str(tmp_path / "other"))
    transfer(pets, other, ["cnn"])
    write(other, "birds", range(3, 5))
    train(other, "bird", split(other, "birds@1"))
    found = find_consumers(other, keys=["3"])
    assert saw_all(found) == [("bird@1", 1, True), ("cnn@1", 0, False)]
    assert found.gaps["cnn@1"] == ("it read pets@2/train, of which 1 shard is not in this repository",)


def test_a_model_that_was_trained_before_a_rename_is_found_by_both_names(pets):
    train(pets, "dnn", split(pets, "pets@1"))
    before = saw_all(find_consumers(pets, keys=["3"], data="pets"))
    assert before == [("dnn@1", 1, True)]
    rename(pets, "pets", "animals")
    assert saw_all(find_consumers(pets, keys=["3"], data="animals")) == before
    assert saw_all(find_consumers(pets, keys=["3"], data="pets")) == before
    assert saw_all(find_consumers(pets, keys=["3"], data="animals@1")) == before
    assert saw_all(find_consumers(pets, keys=["3"], data="animals", split="val")) == [("dnn@1", 0, True)]
