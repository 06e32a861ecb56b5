"""Versions of a data set share shards, which are stored once."""

from datasvc.shards import open_dataset
from datasvc.shards.query.shared_bytes import shared_bytes
from datasvc.shards.versions.delete import delete
from tests.shards.written_versions import write_version


def texts(keys):
    return [{"key": key, "text": f"text of {key}"} for key in keys]


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
