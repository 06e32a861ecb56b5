"""Deletes, appends and merges at once, by real processes: all land, nothing is lost."""

import multiprocessing

import pytest

from datasvc.repository import Repository, Resolved
from datasvc.repository.branching import create_branch
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.combine import append_splits
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.version_entry import describe_tables, read_tables
from tests.shards.written_versions import TEXT_SCHEMA, texts, write_table, write_version

pytestmark = pytest.mark.usefixtures("warm_workers")
spawning = multiprocessing.get_context("spawn")


def append(repository, keys):
    """Append as an ingest does: a build callback that combines with whatever is the newest."""
    new = {"train": write_table(repository.objects, [texts(keys)], TEXT_SCHEMA)}

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
    write_version(repository, "pets", {"train": [texts("abcdefgh"), texts("ijkl")]})
    write_version(repository, "more", {"train": [texts(["m1", "m2"])]})
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


def work_on_a_line(url, barrier, line, name):
    repository = Repository.open(url)
    barrier.wait(timeout=60)
    for number in range(3):
        ingest(repository, texts([f"{name}{number}"]), line, append=True)
    delete(repository, line, keys=[f"{name}0"])


@pytest.mark.slow
def test_writers_on_two_branches_and_on_the_same_one_at_once_all_land_on_their_line(repository):
    write_version(repository, "pets", {"train": [texts("abc")]})
    for branch in ("one", "two"):
        create_branch(repository, "pets", branch)
    writers = [("pets@one", "p"), ("pets@one", "q"), ("pets@two", "r"), ("pets", "s")]
    barrier = spawning.Barrier(len(writers))
    processes = [
        spawning.Process(target=work_on_a_line, args=(repository.url, barrier, *writer), daemon=True)
        for writer in writers
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    assert [process.exitcode for process in processes] == [0] * len(writers)
    assert repository.versions("datasets", "pets").numbers() == list(range(1, 18))
    keys = {
        ref: sorted(sample["key"] for sample in open_dataset(repository, ref)["train"])
        for ref in ("pets@one", "pets@two", "pets")
    }
    assert keys == {
        "pets@one": [*"abc", "p1", "p2", "q1", "q2"],
        "pets@two": [*"abc", "r1", "r2"],
        "pets": [*"abc", "s1", "s2"],
    }
    # Each version continues the one before it on its line, so both writers of one line see each other's samples.
    entries = {number: repository.versions("datasets", "pets").read(number).content for number in range(2, 18)}
    for line in ("one/1", "two/1", None):
        own = [number for number, content in entries.items() if content.get("branch") == line]
        assert [entries[number]["parent"] for number in own] == [f"pets@{before}" for before in [1, *own[:-1]]]
