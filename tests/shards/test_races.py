"""Deletes, appends and merges at once, by real processes: all land, nothing is lost."""

import multiprocessing

import pytest

from datasvc.repository import Repository, Resolved
from datasvc.shards import open_dataset
from datasvc.shards.versions.combine import append_splits
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.version_entry import describe_tables, read_tables
from tests.shards.written_versions import TEXT_SCHEMA, write_table, write_version

spawning = multiprocessing.get_context("spawn")


def texts(*keys):
    return [{"key": key, "text": f"text of {key}"} for key in keys]


def append(repository, keys):
    """Append as an ingest does: a build callback that combines with whatever is the newest."""
    new = {"train": write_table(repository.objects, [texts(*keys)], TEXT_SCHEMA)}

    def build(head):
        tables = read_tables(repository, Resolved("datasets", "pets", head))
        splits = describe_tables(repository.objects, append_splits(repository.objects, tables, new))
        return {"message": "", "splits": splits, "source": {"kind": "test", "url": "", "options": {}}, "skipped": 0}

    repository.versions("datasets", "pets").append(build)


def run(url, barrier, action, argument):
    repository = Repository.open(url)
    barrier.wait(timeout=60)
    if action == "delete":
        delete(repository, "pets", keys=argument)
    elif action == "merge":
        merge(repository, ["pets", argument], "pets")
    else:
        append(repository, argument)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", [0, 1])
def test_deletes_appends_and_merges_at_once_all_land(repository, attempt):
    write_version(repository, "pets", {"train": [texts(*"abcdefgh"), texts(*"ijkl")]})
    write_version(repository, "more", {"train": [texts("m1", "m2")]})
    actions = [
        ("delete", ["a", "b"]),
        ("delete", ["c", "i"]),
        ("append", ["x1", "x2"]),
        ("append", ["y1"]),
        ("merge", "more"),
    ]
    barrier = spawning.Barrier(len(actions))
    processes = [
        spawning.Process(target=run, args=(repository.url, barrier, *action), daemon=True) for action in actions
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * len(actions)
    assert repository.versions("datasets", "pets").numbers() == [1, 2, 3, 4, 5, 6]
    assert sorted(sample["key"] for sample in open_dataset(repository, "pets")["train"]) == sorted(
        [*"defghjkl", "x1", "x2", "y1", "m1", "m2"]
    )
    assert [sample["key"] for sample in open_dataset(repository, "pets@1")["train"]] == list("abcdefghijkl")
