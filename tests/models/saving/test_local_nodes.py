"""Versions on the disks of three nodes, with two ranks on the last: what is left without one or two of the nodes."""

import errno
import json
import os
import re
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.errors import BusyError, ConfigError, UnavailableError
from datasvc.models import LocalSaves
from datasvc.models.local import local_folder
from datasvc.models.local.local_folder import LocalFolder
from datasvc.models.saving.nodes.local_restore import LocalRestore
from datasvc.models.saving.preemption import Preemption
from datasvc.models.saving.rank_channel import LostRankError
from tests.models.saving.thread_ranks import ChannelOfThread, ThreadRanks

RANKS, NODES = 4, 3


@pytest.fixture
def ranks(monkeypatch):
    return ThreadRanks(monkeypatch)


@pytest.fixture
def repo(repository):
    return datasvc.open(repository.url)


def node_of(rank):
    return min(rank, NODES - 1)


def state(step):
    # Tensors that are equal on all ranks, of which each rank stores some.
    return {"shared": {str(n): torch.arange(20_000.0) + 100 * n + step for n in range(8)}, "step": step}


def own_state(rank, step):
    return {"own": torch.full((2_000,), 10.0 * step + rank), "rank": rank}


def open_manager(repo, tmp_path, rank, **options):
    folder = tmp_path / f"node{node_of(rank)}"
    local = LocalSaves(folder, **options)
    return repo.models.manager("m", every=3, local=local, every_local=1)


def leave(manager):
    manager.__exit__(None, RuntimeError("the training failed"), None)


def train(ranks, repo, tmp_path, steps, size=RANKS, **options):
    """Save after each step on all ranks, and end without a commit of the newest; return the results by rank."""

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank, **options)
        found = []
        try:
            for step in steps:
                to = manager.should_save(step)
                handle = manager.save(state(step), rank_state=own_state(rank, step), step=step, to=to)
                found.append(str(handle.result()))
        finally:
            leave(manager)
        return found

    return ranks.run(size, on_rank)


def restore(ranks, repo, tmp_path, size=RANKS, ref=None, **options):
    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        try:
            found = manager.restore(ref, **options)
        except BaseException:
            leave(manager)
            raise
        leave(manager)
        return found

    return ranks.run(size, on_rank)


def check(found, step, num_states=RANKS):
    assert found.state["step"] == step
    for name, tensor in state(step)["shared"].items():
        assert torch.equal(found.state["shared"][name], tensor)
    assert len(found.state["rank_state"]) == num_states
    for rank, own in enumerate(found.state["rank_state"]):
        assert torch.equal(own["own"], own_state(rank, step)["own"])


def objects_of(node, step):
    """Return the files of the objects of a version on a node, by digest."""
    return {path.name: path for path in Path(node).glob(f"m/*-{step:010d}-*/objects/*/*")}


def on_nodes(step):
    return f"m, step {step}, on the nodes"


def test_a_node_that_is_lost_is_restored_from_the_others_without_the_repository(ranks, repo, tmp_path):
    assert (
        train(ranks, repo, tmp_path, [1, 2, 3, 4, 5])
        == [[on_nodes(1), on_nodes(2), "m@1", on_nodes(4), on_nodes(5)]] * RANKS
    )
    shutil.rmtree(tmp_path / "node1")
    os.rename(Path(repo.repository.url) / "objects", tmp_path / "away")
    found = restore(ranks, repo, tmp_path)
    for rank, checkpoint in enumerate(found):
        check(checkpoint, 5)
        assert (str(checkpoint.version), checkpoint.entry["parent"]) == (on_nodes(5), "m@1")
        came = checkpoint.report.came_bytes
        assert (came["resident"] == 0) == (node_of(rank) == 1)
        assert came["peer"] > 0
    # The new node has what it fetched.
    assert [version.step for version in LocalFolder(tmp_path / "node1", "m").versions()] == [5]


def test_a_save_whenever_none_is_being_written_is_due_when_all_ranks_have_ended_theirs(ranks, repo, tmp_path):
    def on_rank(rank):
        manager = repo.models.manager("m", local=tmp_path / f"node{node_of(rank)}", every_local=2)
        found = [
            manager._due.decide(step, is_saving=rank == busy, if_idle=True)
            for step, busy in [(2, 3), (4, 0), (6, None)]
        ]
        leave(manager)
        return found

    assert ranks.run(RANKS, on_rank) == [[False, False, True]] * RANKS


def test_each_object_is_on_two_nodes(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1])
    on_nodes = [objects_of(tmp_path / f"node{node}", 1) for node in range(NODES)]
    copies = [sum(digest in found for found in on_nodes) for digest in set().union(*on_nodes)]
    assert sorted(set(copies)) == [2, 3]
    assert copies.count(3) in (2, 3), "the table, the state, and uncommitted changes of the code are on all"


@pytest.mark.parametrize("has_version", [False, True])
def test_two_lost_nodes_are_named_or_the_repository_has_an_older_version(ranks, repo, tmp_path, has_version, caplog):
    train(ranks, repo, tmp_path, [1, 2, 3, 4] if has_version else [1, 2])
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node{node}")
    if has_version:
        for checkpoint in restore(ranks, repo, tmp_path):
            check(checkpoint, 3)
            assert (str(checkpoint.version), checkpoint.report.lost_steps) == ("m@1", 1)
        assert "m@1, step 3, is restored instead: 1 step lost" in caplog.text
        return
    for error in restore(ranks, repo, tmp_path, default=None):
        assert isinstance(error, UnavailableError)
        assert "objects of" in str(error)
        assert f"nodes that are missing: {os.uname().nodename} (" in str(error)
    assert [version.step for version in LocalFolder(tmp_path / "node2", "m").versions()] == [1, 2], (
        "nothing is removed"
    )


def test_a_node_that_comes_back_makes_the_version_complete_again(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1, 2])
    for node in (0, 1):
        os.rename(tmp_path / f"node{node}", tmp_path / f"away{node}")
    assert all(isinstance(error, UnavailableError) for error in restore(ranks, repo, tmp_path, default=None))
    shutil.rmtree(tmp_path / "node0")
    os.rename(tmp_path / "away0", tmp_path / "node0")
    for checkpoint in restore(ranks, repo, tmp_path, default=None):
        check(checkpoint, 2)


def test_a_damaged_object_is_read_from_the_node_that_has_its_copy(ranks, repo, tmp_path, caplog):
    train(ranks, repo, tmp_path, [1])
    first, others = objects_of(tmp_path / "node0", 1), objects_of(tmp_path / "node1", 1)
    damaged = [path for digest, path in sorted(first.items()) if digest in others]
    for path in damaged:  # the table and the state too
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for checkpoint in restore(ranks, repo, tmp_path):
        check(checkpoint, 1)
    for path in damaged:
        assert path.read_bytes() == others[path.name].read_bytes(), "mended"


@pytest.mark.parametrize("is_restored_before", [False, True])
def test_what_a_disk_cannot_read_comes_from_another_node(ranks, repo, tmp_path, monkeypatch, is_restored_before):
    train(ranks, repo, tmp_path, [1])
    first, others = objects_of(tmp_path / "node0", 1), objects_of(tmp_path / "node1", 1)
    (entry,) = (tmp_path / "node0/m").glob("*-0000000001-*/models/m/versions/00000001.json")
    unreadable = [path for digest, path in sorted(first.items()) if digest in others] + [entry]
    for number, path in enumerate(unreadable):
        os.link(path, tmp_path / f"kept{number}")  # no new file gets its number
    files = set()

    def open_file(path, *arguments, real=open, **options):
        if not isinstance(path, int) and os.path.exists(path) and os.stat(path).st_ino in files:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **options)

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        if is_restored_before:
            manager.restore()
        if rank == 0:
            files.update(path.stat().st_ino for path in unreadable)
        if not is_restored_before:
            check(manager.restore(), 1)
        manager.close()

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", open_file)
        patched.setattr("io.open", open_file)
        assert ranks.run(RANKS, on_rank) == [None] * RANKS
    check(repo.models.restore("m"), 1)
    for path in unreadable:
        assert not path.exists() or path.stat().st_ino not in files, "removed"
    if not is_restored_before:  # a commit needs no copy of what another node has
        assert all(path.exists() for path in unreadable)


def test_a_new_node_whose_disk_is_full_fails_the_restore_on_all_ranks_at_once(ranks, repo, tmp_path, monkeypatch):
    train(ranks, repo, tmp_path, [1])
    shutil.rmtree(tmp_path / "node1")

    def open_version(folder, version):
        if folder._root.name == "node1":
            raise UnavailableError("cannot write: no space left on device")
        return repository(folder, version)

    repository = LocalFolder.repository
    monkeypatch.setattr(LocalFolder, "repository", open_version)
    for error in restore(ranks, repo, tmp_path):
        assert isinstance(error, UnavailableError)
        assert "rank 1: cannot write: no space left on device" in str(error)


def test_a_damaged_entry_on_one_node_does_not_matter(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1])
    (path,) = (tmp_path / "node0/m").glob("*-0000000001-*/models/m/versions/00000001.json")
    path.write_bytes(b"{}")
    for checkpoint in restore(ranks, repo, tmp_path):
        check(checkpoint, 1)


@contextmanager
def killed_while_it_publishes(ranks, monkeypatch):
    """Have node 1 die before it publishes the version of step 2."""

    def dying(folder, version):
        if folder._root.name == "node1" and version.step == 2:
            for meeting in ranks._meetings:
                meeting.barrier.abort()
            raise LostRankError("killed")
        publish(folder, version)

    publish = LocalFolder.publish
    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "publish", dying)
        yield


def test_a_node_that_dies_while_versions_are_published_loses_nothing(ranks, repo, tmp_path, monkeypatch):
    with killed_while_it_publishes(ranks, monkeypatch):
        assert all(isinstance(error, LostRankError) for error in train(ranks, repo, tmp_path, [1, 2]))
    shutil.rmtree(tmp_path / "node1")
    for checkpoint in restore(ranks, repo, tmp_path):
        check(checkpoint, 2)


def test_a_version_that_one_node_has_not_published_is_whole_with_what_it_has(ranks, repo, tmp_path, monkeypatch):
    with killed_while_it_publishes(ranks, monkeypatch):
        train(ranks, repo, tmp_path, [1, 2], copies=1)
    assert list((tmp_path / "node1/m").glob(".incoming-*-0000000002-*"))
    for checkpoint in restore(ranks, repo, tmp_path):
        check(checkpoint, 2)


def test_old_versions_that_cannot_be_listed_do_not_undo_a_published_one(ranks, repo, tmp_path, monkeypatch, caplog):
    published = set()

    def publish_and_tell(folder, version, real=LocalFolder.publish):
        real(folder, version)
        published.add(folder._root.name)

    def versions_of(folder, real=LocalFolder.versions):
        if folder._root.name == "node1" and "node1" in published:
            raise UnavailableError("cannot read: input/output error")
        return real(folder)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "publish", publish_and_tell)
        patched.setattr(LocalFolder, "versions", versions_of)
        assert train(ranks, repo, tmp_path, [1]) == [[on_nodes(1)]] * RANKS
    assert "node1/m until the next save: cannot read: input/output error" in caplog.text
    for node in range(NODES):
        assert [version.step for version in LocalFolder(tmp_path / f"node{node}", "m").versions()] == [1]


def test_a_save_that_did_not_reach_all_nodes_is_no_loss(ranks, repo, tmp_path, monkeypatch, caplog):
    def dying(folder, version, entry):
        if folder._root.name == "node1" and version.step == 2:
            for meeting in ranks._meetings:
                meeting.barrier.abort()
            raise LostRankError("killed")
        prepare(folder, version, entry)

    prepare = LocalFolder.prepare
    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "prepare", dying)
        train(ranks, repo, tmp_path, [1, 2], copies=1)
    shutil.rmtree(next((tmp_path / "node1/m").glob(".incoming-*")))
    for checkpoint in restore(ranks, repo, tmp_path):
        check(checkpoint, 1)
        assert checkpoint.report.lost_steps == 0
    assert not list(tmp_path.glob("node*/m/.incoming-*"))


def test_a_disk_that_is_full_on_one_node_fails_the_save_on_all_and_not_the_next(ranks, repo, tmp_path, monkeypatch):
    prepare = LocalFolder.prepare

    def full(folder, version, entry):
        if folder._root.name == "node1" and version.step == 2:
            raise UnavailableError("no space left on device")
        prepare(folder, version, entry)

    monkeypatch.setattr(LocalFolder, "prepare", full)

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        for step in (1, 2, 3):
            to = manager.should_save(step)
            handle = manager.save(state(step), rank_state=own_state(rank, step), step=step, to=to)
            handle.wait()
            if step == 2:
                found = str(handle.error)
        manager.close()
        return found

    found = ranks.run(RANKS, on_rank)
    assert {text.removeprefix("rank 1: ") for text in found} == {"no space left on device"}
    for node in range(NODES):
        assert [version.step for version in LocalFolder(tmp_path / f"node{node}", "m").versions()] == [1, 3]


def test_the_newest_version_is_committed_at_the_end_by_all_nodes(ranks, repo, tmp_path):
    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        manager.save(state(1), rank_state=own_state(rank, 1), step=1, to="nodes")
        manager.close()
        return str(manager.version)

    assert ranks.run(RANKS, on_rank) == ["m@1"] * RANKS
    check(repo.models.restore("m"), 1)
    assert repo.models.verify("m").problems == ()


def test_a_rank_without_time_left_keeps_all_ranks_from_a_commit(ranks, repo, tmp_path, monkeypatch):
    class Grace(Preemption):
        def __init__(self, _):
            self.received = signal.SIGTERM

        def close(self):
            pass

        remaining_s = 30.0

    monkeypatch.setattr("datasvc.models.saving.manager.Preemption", Grace)

    def on_rank(rank):
        local = tmp_path / f"node{node_of(rank)}"
        manager = repo.models.manager("m", every=3, local=local, every_local=1, grace="30s")
        manager.should_save(1)
        manager.save(state(1), rank_state=own_state(rank, 1), step=1, to="nodes").result()
        if rank == 1:
            manager._preemption.remaining_s = 0.0
        manager.close()

    assert ranks.run(RANKS, on_rank) == [None] * RANKS
    assert repo.repository.newest("models", "m") is None


def test_a_version_whose_copy_was_damaged_is_committed_from_the_other(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1])
    others = objects_of(tmp_path / "node1", 1)

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        manager.restore()
        if rank == 0:
            for digest, path in objects_of(tmp_path / "node0", 1).items():
                if digest in others and path.stat().st_size > 5_000:
                    path.write_bytes(b"x" * path.stat().st_size)
        manager.close()

    assert ranks.run(RANKS, on_rank) == [None] * RANKS
    check(repo.models.restore("m"), 1)


def test_a_rank_that_cannot_restore_raises_on_all(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1])

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        into = {"shared": {"0": torch.zeros(20_000 if rank != 1 else 7)}}
        try:
            manager.restore(into=into)
        finally:
            leave(manager)

    for error in ranks.run(RANKS, on_rank):
        assert isinstance(error, ConfigError)
        assert "rank 1: m@1 does not fit the state" in str(error)


def test_a_restore_into_a_state_fetches_only_what_it_needs(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1])
    shutil.rmtree(tmp_path / "node1")

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        into = {"shared": {str(rank): torch.zeros(20_000)}}
        # A function that chooses by what is stored.
        found = manager.restore(into=lambda stored: into if stored.records else None)
        leave(manager)
        assert torch.equal(into["shared"][str(rank)], state(1)["shared"][str(rank)])
        return found.report.came_bytes

    came = ranks.run(RANKS, on_rank)
    assert came[1] == {"peer": 80_000, "resident": 0}
    fetched = [path for path in objects_of(tmp_path / "node1", 1).values() if path.stat().st_size == 80_000]
    assert len(fetched) == 1


def test_a_node_sends_the_digests_of_its_own_objects_only(ranks, repo, tmp_path, monkeypatch):
    train(ranks, repo, tmp_path, [1], copies=1)
    most = max(len(objects_of(tmp_path / f"node{node}", 1)) for node in range(NODES))
    counts, exchange = [], ChannelOfThread.exchange

    def count(channel, message):
        counts.append(len(re.findall("[0-9a-f]{64}", json.dumps(message))))
        return exchange(channel, message)

    def on_rank(rank):
        manager = open_manager(repo, tmp_path, rank)
        found = LocalRestore(manager._local).choose(None)
        leave(manager)
        return found.version.step

    monkeypatch.setattr(ChannelOfThread, "exchange", count)
    assert ranks.run(RANKS, on_rank) == [1] * RANKS
    assert max(counts) == most


def test_more_and_fewer_nodes_restore_what_others_have_saved(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1, 2])
    for size in (2, 4, 1):
        for checkpoint in restore(ranks, repo, tmp_path, size=size):
            check(checkpoint, 2)


def test_a_second_job_is_refused_on_all_its_ranks_if_one_of_its_nodes_is_in_use(ranks, repo, tmp_path):
    held = LocalFolder(tmp_path / "node1", "m").lock()
    for error in train(ranks, repo, tmp_path, [1]):
        assert isinstance(error, BusyError)
        assert "is in use by process" in str(error)
    held.close()
    assert train(ranks, repo, tmp_path, [1]) == [[on_nodes(1)]] * RANKS, "the other nodes are not locked any more"


def test_jobs_that_ran_on_different_nodes_are_not_mixed(ranks, repo, tmp_path):
    train(ranks, repo, tmp_path, [1, 2], size=1)
    for node in ("node1", "node2"):
        (tmp_path / node).mkdir()
    os.rename(tmp_path / "node0", tmp_path / "away")
    train(ranks, repo, tmp_path, [1], size=1)
    os.rename(tmp_path / "away", tmp_path / "node1.new")
    shutil.rmtree(tmp_path / "node1")
    os.rename(tmp_path / "node1.new", tmp_path / "node1")
    for error in restore(ranks, repo, tmp_path, size=2):
        assert isinstance(error, ConfigError)
        assert "versions of 'm' of several jobs" in str(error)


def test_a_folder_that_machines_share_is_refused(ranks, repo, tmp_path, monkeypatch):
    boots = iter(["a", "b"])

    class Boot:
        def exists(self):
            return True

        def read_text(self, **_):
            return next(boots)

    monkeypatch.setattr(local_folder, "_MACHINE", Boot())
    for error in ranks.run(2, lambda _: repo.models.manager("m", local=tmp_path / "shared")):
        assert isinstance(error, ConfigError)
        assert "has the same node id on" in str(error)
