"""What `show` says of a version, computed from its tables alone."""

import pytest

from datasvc.shards import open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.describe import count_classes, describe_dataset, shared_bytes
from tests.shards.written_versions import LABELLED_SCHEMA, texts, write_version


def test_an_overview_counts_what_is_live_and_what_is_stored(repository):
    samples = [{"key": f"k{number}", "blob": b"x" * number, "label": number % 3} for number in range(9)]
    write_version(
        repository, "pets", {"train": [samples[:5], samples[5:]]}, LABELLED_SCHEMA, ("cat", "dog", "eel", "fox")
    )
    delete(repository, "pets", keys=["k0", "k1"], message="cleaner")
    dataset = open_dataset(repository, "pets")
    found = describe_dataset(dataset)
    assert (found["version"], found["message"], found["parent"]) == ("pets@2", "cleaner", "pets@1")
    train = found["splits"]["train"]
    size_bytes = dataset["train"].table.size_bytes
    assert (train["samples"], train["deleted"], train["shards"], train["bytes"]) == (7, 2, 2, size_bytes)
    assert (train["bytes_per_sample"], train["max_sample_bytes"]) == (round(size_bytes / 9), 8)
    assert train["classes"] == ["cat", "dog", "eel", "fox"]
    assert train["class_counts"] == {"cat": 2, "dog": 2, "eel": 3, "fox": 0}
    assert train["columns"] == {"key": "string", "blob": "large_binary", "label": "int32"}


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        ({}, ("a", "b"), {}),
        ({0: 3}, ("a", "b"), {"a": 3, "b": 0}),
        ({-1: 2, 0: 3, 7: 1}, ("a",), {"a": 3, "-1": 2, "7": 1}),
        ({0: 3, 7: 1}, ("7",), {"7": 3, "label 7": 1}),
        ({1: 4, 0: 3}, (), {"0": 3, "1": 4}),
    ],
)
def test_every_label_is_counted_under_a_name_of_its_own(labels, classes, expected):
    assert count_classes(labels, classes) == expected
    assert sum(count_classes(labels, classes).values()) == sum(labels.values())


def test_each_version_has_its_total_its_new_and_its_unique_bytes(repository):
    first, second, third = texts("abc"), texts("defgh"), texts("xy")
    write_version(repository, "pets", {"train": [first, second]})
    delete(repository, "pets", keys=["a"])
    write_version(repository, "pets", {"train": [first], "val": [third]})
    sizes = {ref: open_dataset(repository, ref) for ref in ("pets@1", "pets@3")}
    a, b = (shard.size_bytes for shard in sizes["pets@1"]["train"].table.shards())
    (c,) = (shard.size_bytes for shard in sizes["pets@3"]["val"].table.shards())
    found = [
        (each.version, each.total_bytes, each.new_bytes, each.unique_bytes)
        for each in shared_bytes(repository, "pets")
    ]
    assert found == [(1, a + b, a + b, 0), (2, a + b, 0, 0), (3, a + c, c, c)]
    newest = shared_bytes(repository, "pets", last=1)
    assert [each.to_json() for each in newest] == [
        {"version": 3, "total_bytes": a + c, "new_bytes": a + c, "unique_bytes": a + c}
    ]
