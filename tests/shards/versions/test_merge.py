"""Data sets put together into one."""

import pytest

from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.shards import open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import LABELLED_SCHEMA, keys_of, labelled, texts, write_version


@pytest.fixture
def zoo(repository):
    write_version(repository, "pets", {"train": [texts("ab")], "val": [texts("v")]})
    write_version(repository, "wild", {"train": [texts("xy"), texts("z")], "test": [texts("t")]})
    return repository


def test_a_merge_has_the_samples_of_all_split_by_split_and_copies_nothing(zoo):
    before = {path.name for path in zoo.objects.local_path("0" * 64).parents[1].rglob("*") if path.is_file()}
    report = merge(zoo, ["pets", "wild"], "animals", message="all")
    assert str(report.version) == "animals@1"
    assert [str(version) for version in report.merged] == ["pets@1", "wild@1"]
    assert report.num_samples == {"train": 5, "val": 1, "test": 1}
    assert report.num_shards == {"train": 3, "val": 1, "test": 1}
    assert keys_of(zoo, "animals") == {"train": list("abxyz"), "val": ["v"], "test": ["t"]}
    after = {path.name for path in zoo.objects.local_path("0" * 64).parents[1].rglob("*") if path.is_file()}
    assert after - before == {open_dataset(zoo, "animals")["train"].digest}
    found = open_dataset(zoo, "animals")
    assert found["val"].digest == open_dataset(zoo, "pets")["val"].digest
    assert report.size_bytes == sum(split.table.size_bytes for split in found.values())


def test_the_entry_lists_the_merged_versions(zoo):
    merge(zoo, ["pets", "wild@1"], "animals", message="all")
    entry = zoo.versions("datasets", "animals").read(1).content
    assert entry["change"] == {"kind": "merge", "versions": ["pets@1", "wild@1"]}
    assert (entry["parent"], entry["message"], entry["source"]["url"]) == (None, "all", "pets@1, wild@1")
    merge(zoo, ["animals", "pets@1"], "animals", on_common="drop")
    assert zoo.versions("datasets", "animals").read(2).content["parent"] == "animals@1"


def test_classes_of_all_are_numbered_together(repository):
    write_version(repository, "one", {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA, ["dog", "cat"])
    write_version(repository, "two", {"train": [labelled(c=0, d=1)]}, LABELLED_SCHEMA, ["ant", "cat"])
    write_version(repository, "three", {"train": [labelled(e=0)]}, LABELLED_SCHEMA, ["bee"])
    merge(repository, ["one", "two", "three"], "all")
    split = open_dataset(repository, "all")["train"]
    assert split.classes == ("dog", "cat", "ant", "bee")
    assert [split.classes[sample["label"]] for sample in split] == ["dog", "cat", "ant", "cat", "bee"]


@pytest.mark.parametrize(
    ("on_common", "text"), [("first", ["text of a", "text of b"]), ("last", ["text of a", "new b"])]
)
def test_of_a_common_key_the_first_or_the_last_sample_is_taken(zoo, on_common, text):
    write_version(zoo, "newer", {"train": [[*texts("a"), *texts("b", "new {}")]]})
    merge(zoo, ["pets", "newer"], "all", on_common=on_common)
    assert sorted(sample["text"] for sample in open_dataset(zoo, "all")["train"]) == sorted(text)


def test_equal_samples_may_be_taken_once_and_unequal_ones_are_a_conflict(zoo):
    write_version(zoo, "newer", {"train": [texts("bc")]})
    with pytest.raises(ConflictError, match="1 key is on both sides: 'b'"):
        merge(zoo, ["pets", "newer"], "all")
    merge(zoo, ["pets", "newer", "pets"], "all", on_common="drop")
    assert keys_of(zoo, "all") == {"train": list("abc"), "val": ["v"]}
    write_version(zoo, "newer", {"train": [texts("b", "new {}")]})
    with pytest.raises(ConflictError, match="1 key is on both sides with different samples: 'b'"):
        merge(zoo, ["pets", "newer"], "all", on_common="drop")
    assert zoo.versions("datasets", "all").head() == 1


def test_versions_with_equal_keys_fit_by_a_prefix_of_the_keys_of_one_of_them(zoo):
    write_version(zoo, "newer", {"train": [texts("ab", "new {}"), texts("c")]})
    delete(zoo, "newer", keys=["c"])
    report = merge(zoo, ["pets", "newer"], "all", key_prefixes={"newer": "new/"})
    assert report.num_samples["train"] == 4
    split = open_dataset(zoo, "all")["train"]
    assert {sample["key"]: sample["text"] for sample in split} == {
        "a": "text of a", "b": "text of b", "new/a": "new a", "new/b": "new b",
    }  # fmt: skip
    assert verify(zoo, "all", deep=True).problems == ()
    change = zoo.versions("datasets", "all").read(1).content["change"]
    assert change == {"kind": "merge", "versions": ["pets@1", "newer@2"], "key_prefixes": ["", "new/"]}
    shards = {shard.digest for shard in open_dataset(zoo, "pets")["train"].table.shards()}
    assert shards < {shard.digest for shard in split.table.shards()}  # only the prefixed ones are copied
    with pytest.raises(
        ConfigError, match="a key prefix for 'other', which is not merged; expected one of pets, newer"
    ):
        merge(zoo, ["pets", "newer"], "all", key_prefixes={"other": "x"})


def test_deleted_samples_stay_deleted_and_do_not_count_as_common(zoo):
    write_version(zoo, "newer", {"train": [texts("b", "new {}")]})
    delete(zoo, "pets", keys=["b"])
    merge(zoo, ["pets", "newer"], "all")
    assert [sample["text"] for sample in open_dataset(zoo, "all")["train"]] == ["text of a", "new b"]


def test_a_merge_into_itself_continues_whatever_is_the_newest(zoo):
    class Slow:
        """A repository where somebody deletes a sample after the references were resolved."""

        def __getattr__(self, name):
            return getattr(zoo, name)

        def versions(self, kind, name):
            if zoo.versions("datasets", "pets").head() == 1:
                delete(zoo, "pets", keys=["a"])
            return zoo.versions(kind, name)

    report = merge(Slow(), ["pets", "wild"], "pets")
    assert [str(version) for version in report.merged] == ["pets@2", "wild@1"]
    assert keys_of(zoo, "pets@3")["train"] == list("bxyz")


def test_a_version_that_is_named_is_taken_even_if_it_is_not_the_newest(zoo):
    delete(zoo, "pets", keys=["a"])
    merge(zoo, ["pets@1", "wild"], "pets")
    assert keys_of(zoo, "pets")["train"] == list("abxyz")
    assert zoo.versions("datasets", "pets").read(3).content["parent"] is None


@pytest.mark.parametrize(
    ("refs", "options", "error", "message"),
    [
        (["pets", "wild"], {"name": "All Animals"}, ConfigError, "is not a valid name of a data set"),
        (["pets"], {}, ConfigError, "at least two versions to combine; got 1"),
        (["pets", "wild"], {"on_common": "any"}, ConfigError, "expected one of fail, drop, first, last"),
        (["pets", "cats"], {}, NotFoundError, "no data set 'cats'"),
        (["pets", "wild@9"], {}, NotFoundError, "wild has no version 9"),
    ],
)
def test_a_merge_that_cannot_be_is_refused(zoo, refs, options, error, message):
    with pytest.raises(error, match=message):
        merge(zoo, refs, **{"name": "all", **options})
    assert zoo.names("datasets") == ["pets", "wild"]
