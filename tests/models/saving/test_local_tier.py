"""Versions on the disk of a node: where saves go, what a run finds after a kill, and what the repository says."""

import itertools
import logging
import multiprocessing
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader

import datasvc
from datasvc.errors import BusyError, ConfigError, DatasvcError, UnavailableError
from datasvc.loaders.torch import Dataset, OrderBatchSampler
from datasvc.models import LocalSaves, LocalVersion, SaveTo, read_lineage, restore
from datasvc.models.local.local_folder import LocalFolder
from datasvc.models.saving import shared_store
from datasvc.models.saving.nodes import local_tier
from datasvc.models.saving.preemption import Preemption
from datasvc.models.saving.staging_buffer import HostBuffer
from datasvc.testing import small_dataset
from tests.support.gate import Gate


@pytest.fixture
def repo(repository):
    return datasvc.open(repository.url)


@pytest.fixture
def node(tmp_path):
    return tmp_path / "node"


def state(step):
    return {"weights": torch.arange(100.0) + step, "step": step}


def save(manager, *steps):
    """Save after each step as a training loop does; return the results."""
    return [
        str(manager.save(state(step), step=step, to=to).result())
        for step in steps
        if (to := manager.should_save(step))
    ]


def leave(manager):
    """End the use of a manager as an error in the training does."""
    manager.__exit__(None, RuntimeError("the training failed"), None)


def steps_on(node):
    return [version.step for version in LocalFolder(node, "m").versions()]


def on_nodes(step):
    return f"m, step {step}, on the nodes"


def steps_in(repository):
    return [entry.content["step"] for entry in repository.versions("models", "m").entries()]


def test_saves_between_those_of_the_repository_stay_on_the_node_and_the_newest_is_restored(repo, node):
    manager = repo.models.manager("m", every=4, local=node, every_local=2)
    assert manager.restore(default=None) is None
    assert save(manager, *range(1, 8)) == [on_nodes(2), "m@1", on_nodes(6)]
    leave(manager)
    assert steps_on(node) == [4, 6]
    manager = repo.models.manager("m", local=node)
    checkpoint = manager.restore()
    assert isinstance(checkpoint.version, LocalVersion)
    assert checkpoint.version.step == checkpoint.entry["step"] == checkpoint.state["step"] == 6
    assert checkpoint.report.lost_steps == 0
    assert torch.equal(checkpoint.state["weights"], state(6)["weights"])
    assert str(manager.version) == checkpoint.entry["parent"] == "m@1"
    assert str(manager.restore("m@1").version) == "m@1"
    leave(manager)


def test_should_save_says_where_and_a_save_without_it_goes_to_the_repository(repo, node):
    with repo.models.manager("m", every=4, local=node, every_local=2) as manager:
        found = [manager.should_save(step) for step in range(1, 5)]
        assert found == [SaveTo.NOWHERE, SaveTo.NODES, SaveTo.NOWHERE, SaveTo.REPOSITORY]
        assert [bool(to) for to in found] == [False, True, False, True]
        assert manager.should_save(6) is SaveTo.NODES
        # A last save of the step for which a save to the nodes was due.
        assert str(manager.save(state(6), step=6).result()) == "m@1"
    assert steps_in(repo.repository) == [6]


@pytest.mark.parametrize("codec", ["none", "planes", "delta"])
def test_the_newest_version_of_a_run_that_ends_is_committed_to_the_repository(repo, node, codec):
    with repo.models.manager("m", every=4, local=node, every_local=2, codec=codec) as manager:
        assert save(manager, 4, 6) == ["m@1", on_nodes(6)]
    assert str(manager.version) == "m@2"
    found = repo.models.restore("m")
    assert torch.equal(found.state["weights"], state(6)["weights"])
    assert (found.entry["step"], found.entry["parent"], found.state["step"]) == (6, "m@1", 6)
    assert "nodes" not in found.entry
    assert repo.models.verify("m").problems == ()


def test_a_version_that_a_run_restores_and_does_not_continue_is_committed_once(repo, node):
    manager = repo.models.manager("m", local=node, every_local=1, every=100)
    save(manager, 3)
    leave(manager)
    for _ in range(2):  # as a run whose last step was saved before it was killed
        with repo.models.manager("m", local=node, every_local=1, every=100) as manager:
            assert str(manager.restore().version) == on_nodes(3)
        assert steps_in(repo.repository) == [3]


def test_a_version_that_cannot_be_committed_at_the_end_raises_and_stays(repo, node, monkeypatch):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 3)
    with monkeypatch.context() as patched:
        patched.setattr(repo.repository.objects, "put", _fail)
        with pytest.raises(UnavailableError, match=r"step 3, on the nodes, is not in the repository: no answer"):
            manager.close()
    assert steps_in(repo.repository) == []
    with repo.models.manager("m", local=node) as manager:
        assert manager.restore().state["step"] == 3
    assert steps_in(repo.repository) == [3]


def test_an_error_of_the_training_leaves_the_newest_version_on_the_node_and_says_so(repo, node, caplog):
    with pytest.raises(ZeroDivisionError), repo.models.manager("m", every=9, local=node, every_local=1) as manager:
        save(manager, 3)
        raise ZeroDivisionError
    assert f"{on_nodes(3)}, is not in the repository" in caplog.text
    assert steps_in(repo.repository) == []


def test_a_stop_signal_makes_the_next_save_one_to_the_repository(repo, node):
    with repo.models.manager("m", every=100, local=node, every_local=2, grace="30s") as manager:
        assert save(manager, 2) == [on_nodes(2)]
        signal.raise_signal(signal.SIGTERM)
        assert manager.should_save(3) is SaveTo.REPOSITORY
        assert manager.stop_signal == signal.SIGTERM
        manager.save(state(3), step=3)
    assert steps_in(repo.repository) == [3]


@pytest.fixture
def stopped(repo, node, monkeypatch):
    """A manager with version 2 on the node, after a signal whose grace period has ended."""
    manager = repo.models.manager("m", every=100, local=node, every_local=2, grace="30s")
    assert save(manager, 2) == [on_nodes(2)]
    signal.raise_signal(signal.SIGTERM)
    manager.should_save(3)
    monkeypatch.setattr(Preemption, "remaining_s", 0.0)
    return manager


def test_nothing_is_committed_when_the_grace_period_has_ended(repo, node, stopped, caplog):
    stopped.close()
    assert steps_in(repo.repository) == []
    assert f"{on_nodes(2)}, is not in the repository: the next run restores it" in caplog.text


def test_the_wait_for_a_save_to_the_node_ends_with_the_grace_period(repo, node, stopped):
    queue, gate = stopped._local._queue, Gate()
    queue._write = gate.before(queue._write)
    stopped.save(state(3), step=3, to="nodes")
    try:
        with pytest.raises(UnavailableError, match="to the nodes has not ended within the grace period, and conti"):
            stopped.close()
        with pytest.raises(BusyError):
            repo.models.manager("m", local=node)
    finally:
        gate.open()
    stopped.wait()
    stopped.close()
    assert steps_on(node) == [2, 3]
    repo.models.manager("m", local=node).close()


def test_without_every_a_save_is_written_to_the_repository_whenever_none_is_being_written_there(repo, node):
    manager = repo.models.manager("m", local=node, every_local=2)
    manager.restore(default=None)
    gate = Gate()
    manager._queue._write = gate.before(manager._writer.write)
    assert manager.should_save(2) is SaveTo.REPOSITORY
    manager.save(state(2), step=2, to="repository")
    assert manager.should_save(4) is SaveTo.NODES
    gate.open()
    manager.wait()
    assert manager.should_save(6) is SaveTo.REPOSITORY
    manager.close()


def test_the_copy_of_a_state_is_not_overwritten_before_the_node_has_it(repo, node, monkeypatch):
    manager = repo.models.manager("m", every=100, local=LocalSaves(node, keep=9), every_local=1)
    gate, has_come = Gate(), threading.Event()
    queue, copy = manager._local._queue, HostBuffer.copy

    def wait_for_slot(real=queue.wait_for_slot):
        has_come.set()
        real()

    def copy_and_tell(*arguments):
        copies = copy(*arguments)
        has_come.set()
        return copies

    queue._write = gate.before(queue._write)
    manager.save(state(1), step=1, to="nodes")
    has_come.clear()
    monkeypatch.setattr(queue, "wait_for_slot", wait_for_slot)
    monkeypatch.setattr(HostBuffer, "copy", copy_and_tell)
    second = threading.Thread(target=manager.save, args=(state(2),), kwargs={"step": 2, "to": "nodes"})
    second.start()
    has_come.wait()
    gate.open()
    second.join()
    manager.wait()
    leave(manager)
    for version in LocalFolder(node, "m").versions():
        found = restore(LocalFolder(node, "m").repository(version), "m@1")
        assert torch.equal(found.state["weights"], state(version.step)["weights"])
    assert steps_on(node) == [1, 2]


def test_a_failed_last_save_to_the_node_raises_at_the_end(repo, node, monkeypatch, caplog):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 1)
    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "publish", _fail)
        manager.save(state(2), step=2, to="nodes")
        manager.wait()
    assert "the save of step 2 to the nodes failed: no answer" in caplog.text
    assert steps_on(node) == [1]
    with pytest.raises(DatasvcError, match="step 2, has failed, and the repository has step 1 at most"):
        manager.close()
    assert steps_in(repo.repository) == [1]


def _save_on_a_full_disk(url, node):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    manager = datasvc.open(url).models.manager("m", every=100, local=node, every_local=1)
    save(manager, 1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    with pytest.raises(UnavailableError, match="cannot write"):
        manager.save(state(2), step=2, to="nodes").result()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    save(manager, 3)
    leave(manager)


def test_a_disk_that_is_full_for_a_while_costs_one_version(repo, node):
    child = multiprocessing.get_context("fork").Process(target=_save_on_a_full_disk, args=(repo.repository.url, node))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert steps_on(node) == [1, 3]


def test_the_history_of_a_run_that_continues_from_the_node_is_that_of_one_run(repo, node):
    small_dataset(repo, "pets", samples=60)
    dataset = Dataset(repo.dataset("pets@1")["train"], columns=("key",))
    handed = []

    def train(manager, batches, *steps):
        loader = DataLoader(dataset, batch_sampler=batches)
        for step, batch in zip(steps, itertools.islice(loader, len(steps)), strict=True):
            handed.append(batch["key"])
            if to := manager.should_save(step):
                manager.save(state(step), step=step, to=to, wait=True)

    manager = repo.models.manager("m", every=2, local=node, every_local=1)
    train(manager, OrderBatchSampler(dataset, batch_size=8, seed=3), 1, 2, 3)
    leave(manager)
    with repo.models.manager("m", every=2, local=node, every_local=1) as manager:
        batches = OrderBatchSampler(dataset, batch_size=8, seed=3)
        batches.load_state_dict(manager.restore().entry["data"][0]["state"])
        train(manager, batches, 4, 5, 6)
    keys = [sample["key"] for sample in repo.dataset("pets@1")["train"]]
    found = repo.models.trained_on(["m@3"], keys=keys)
    assert found.gaps == {}
    expected = sorted((key, step) for step, batch in enumerate(handed, 1) for key in batch)
    assert sorted((use.key, use.step) for use in found.all_uses()) == expected
    assert list(read_lineage(repo.repository, "m@3").models) == ["m@3", "m@2", "m@1"]


def test_a_version_of_another_run_in_the_repository_ends_those_on_the_node(repo, node, caplog):
    with repo.models.manager("m", local=node) as manager:
        manager.save(state(3), step=3, wait=True)
    repo.models.save("m", state(2), step=2)
    with repo.models.manager("m", local=node, every_local=1, every=100) as manager:
        assert str(manager.restore().version) == "m@2"
        assert f"{on_nodes(3)} is not used: m@2 is in the repository, and is of another run" in caplog.text
        assert steps_on(node) == [3]
        save(manager, 10)
    assert steps_on(node) == [10]


@pytest.mark.parametrize("is_new", [False, True])
def test_what_a_run_has_left_does_not_come_back_before_the_next_save(repo, node, is_new):
    manager = repo.models.manager("m", every=2, local=node, every_local=1)
    save(manager, 2, 4, 5)
    leave(manager)
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    if is_new:
        save(manager, 1)  # as a run that begins anew
    else:
        assert str(manager.restore("m@1").version) == "m@1"
    leave(manager)
    with repo.models.manager("m", local=node) as manager:
        found = manager.restore()
        # Without a save since, the newest version of the repository, as without a node.
        assert str(found.version) == (on_nodes(1) if is_new else "m@2")


def test_a_node_that_comes_back_with_more_steps_does_not_bring_back_what_the_job_has_left(repo, node, tmp_path):
    manager = repo.models.manager("m", every=2, local=node, every_local=1)
    save(manager, 2, 3, 4, 5)
    leave(manager)
    away = tmp_path / "away"
    os.rename(node / "m", away)
    (node / "m").mkdir()
    os.rename(away / ".branch.json", node / "m/.branch.json")
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    assert str(manager.restore("m@1").version) == "m@1"
    save(manager, 3)
    leave(manager)
    for version in away.glob("*-*"):
        os.rename(version, node / "m" / version.name)
    assert steps_on(node) == [4, 5, 3]
    with repo.models.manager("m", local=node) as manager:
        found = manager.restore()
    assert (str(found.version), found.entry["parent"]) == (on_nodes(3), "m@1")


def test_a_second_job_is_refused_and_changes_nothing(repo, node):
    with repo.models.manager("m", every=100, local=node, every_local=1) as manager:
        save(manager, 1)
        before = sorted(str(path) for path in node.rglob("*"))
        with pytest.raises(BusyError, match=rf"is in use by process {os.getpid()} on .*; nothing was changed"):
            repo.models.manager("m", local=node)
        assert sorted(str(path) for path in node.rglob("*")) == before
        with repo.models.manager("other", local=node) as other:  # another model of the same node
            other.save(state(1), step=1)
        save(manager, 2)


def test_a_manager_that_cannot_be_made_holds_no_lock(repo, node):
    with ThreadPoolExecutor() as pool:
        made = pool.submit(repo.models.manager, "m", local=node, grace="30s")
        assert isinstance(made.exception(), ConfigError)
    repo.models.manager("m", local=node, grace="30s").close()


def _hold(url, node, told, ended):
    manager = datasvc.open(url).models.manager("m", local=node)
    if not os.fork():  # as a worker of a loader, which may live longer
        os.read(ended, 1)
        os._exit(0)
    os.write(told, b"1")
    os.read(ended, 1)
    assert manager


def test_a_killed_job_holds_no_lock_even_if_a_worker_of_it_lives_on(repo, node):
    is_open, told = os.pipe()
    ended, end = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=_hold, args=(repo.repository.url, node, told, ended))
    child.start()
    try:
        os.read(is_open, 1)
        with pytest.raises(BusyError, match=f"process {child.pid} on"):
            repo.models.manager("m", local=node)
        child.kill()
        child.join()
        repo.models.manager("m", local=node).close()
    finally:
        os.write(end, b"1")
        for descriptor in (is_open, told, ended, end):
            os.close(descriptor)


def test_a_version_with_a_lost_object_gives_way_to_the_repository_and_says_what_is_lost(repo, node, caplog):
    manager = repo.models.manager("m", every=2, local=node, every_local=1)
    save(manager, 2, 3)
    for path in (node / "m").glob("*/objects/*/*"):
        path.write_bytes(b"x" * path.stat().st_size)
    leave(manager)
    with repo.models.manager("m", local=node) as manager:
        found = manager.restore()
    assert (str(found.version), found.report.lost_steps) == ("m@1", 1)
    assert "m@1, step 2, is restored instead: 1 step lost" in caplog.text


def test_a_chunk_that_was_damaged_on_the_only_node_gives_way_to_the_version_before(repo, node):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 2, 3)
    leave(manager)
    (path,) = [path for path in (node / "m").glob("*-0000000003-*/objects/*/*") if path.stat().st_size == 400]
    path.write_bytes(b"x" * 400)
    with repo.models.manager("m", local=node) as manager:
        found = manager.restore()
    assert (str(found.version), found.report.lost_steps) == (on_nodes(2), 1)


def test_a_run_does_not_begin_anew_where_the_nodes_have_a_part_of_a_version(repo, node):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 3)
    leave(manager)
    (path,) = [path for path in (node / "m").glob("*/objects/*/*") if path.stat().st_size == 400]
    path.unlink()
    manager = repo.models.manager("m", local=node)
    with pytest.raises(UnavailableError, match=r"1 object of \d+ are on none.*the repository has no version of 'm'"):
        manager.restore(default=None)
    leave(manager)
    assert steps_on(node) == [3], "nothing is removed"


def test_a_restore_that_would_lose_more_steps_than_allowed_is_refused(repo, node):
    manager = repo.models.manager("m", every=2, local=node, every_local=1)
    save(manager, 2, 3)
    leave(manager)
    (path,) = [path for path in (node / "m").glob("*-0000000003-*/objects/*/*") if path.stat().st_size == 400]
    path.unlink()
    manager = repo.models.manager("m", local=LocalSaves(node, max_lost_steps=0))
    with pytest.raises(UnavailableError, match="would lose 1 step, and max_lost_steps is 0"):
        manager.restore()
    leave(manager)
    with repo.models.manager("m", local=LocalSaves(node, max_lost_steps=1)) as manager:
        assert manager.restore().report.lost_steps == 1


def _fail(*_, **__):
    raise UnavailableError("no answer")


def test_a_repository_that_does_not_answer_is_not_needed_for_a_restore_from_the_nodes(
    repo, node, tmp_path, monkeypatch, caplog
):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 1)
    leave(manager)
    with monkeypatch.context() as patched:
        patched.setattr(shared_store, "_check_same_store", _fail)
        patched.setattr(repo.repository, "newest", _fail)
        patched.setattr(repo.repository, "resolve", _fail)
        with pytest.raises(UnavailableError):
            repo.models.manager("m")
        manager = repo.models.manager("m", every=2, local=node, every_local=1)
        found = manager.restore()
        assert str(found.version) == on_nodes(1)
        assert "the repository may have a newer version: the repository cannot be read: no answer" in caplog.text
    checked = []
    monkeypatch.setattr(shared_store, "_check_same_store", lambda *_: checked.append(1))
    assert save(manager, 2, 4) == ["m@1", "m@2"]
    assert checked == [1], "the first save checks the store"
    manager.close()


def test_a_program_opens_a_repository_that_does_not_answer_if_it_says_so(tmp_path, monkeypatch):
    url = f"{tmp_path}/repo"
    datasvc.open(url, create=True)
    with monkeypatch.context() as patched:
        patched.setattr(datasvc.repository.Storage, "read", _fail)
        with pytest.raises(UnavailableError):
            datasvc.open(url)
        repo = datasvc.open(url, unavailable_ok=True)
    assert str(repo.models.save("m", state(1), step=1)) == "m@1"


def test_the_number_and_the_bytes_of_versions_are_bounded(repo, node, caplog):
    manager = repo.models.manager("m", every=100, local=LocalSaves(node, keep=3), every_local=1)
    save(manager, *range(1, 7))
    leave(manager)
    assert steps_on(node) == [4, 5, 6]
    size = sum(path.stat().st_size for path in (node / "m").glob("*-0000000006-*/objects/*/*"))
    saves = LocalSaves(node, keep=9, max_bytes=int(2.5 * size))
    manager = repo.models.manager("m", every=100, local=saves, every_local=1)
    manager.restore()
    save(manager, 7, 8, 9)
    leave(manager)
    assert steps_on(node) == [8, 9]
    manager = repo.models.manager("m", every=100, local=LocalSaves(node, max_bytes=size), every_local=1)
    manager.restore()
    with pytest.raises(ConfigError, match="max_bytes is"):
        manager.save(state(10), step=10, to="nodes").result()
    leave(manager)
    assert steps_on(node) == [9]


@pytest.fixture
def fill(node, monkeypatch):
    """Return a function after which the disk of the node has so many bytes for objects."""

    def limit_disk(disk_bytes):
        def store(*arguments, **options):
            part = store_part(*arguments, **options)
            if sum(path.stat().st_size for path in node.glob("m/*/objects/*/*")) > disk_bytes:
                raise UnavailableError("cannot write: no space left on device")
            return part

        store_part = local_tier.store_part
        monkeypatch.setattr(local_tier, "store_part", store)

    return limit_disk


def test_space_is_made_before_a_version_is_written(repo, node, fill):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 1)
    size = LocalFolder(node, "m").size_bytes(*LocalFolder(node, "m").versions())
    leave(manager)
    fill(int(2.5 * size))
    saves = LocalSaves(node, keep=2, max_bytes=int(2.2 * size))
    manager = repo.models.manager("m", every=100, local=saves, every_local=1)
    assert save(manager, *range(1, 5)) == [on_nodes(step) for step in range(1, 5)]
    assert steps_on(node) == [3, 4]
    fill(0)
    for step in (5, 6):
        with pytest.raises(UnavailableError, match="no space left"):
            manager.save(state(step), step=step, to="nodes").result()
        assert steps_on(node) == [4]
    leave(manager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_local": 5}, "give local="),
        ({"every_local": 0, "local": "x"}, "every_local is 0"),
        ({"local": "x", "trusted_keys": ["key"]}, "does not go with trusted keys"),
    ],
)
def test_settings_are_checked(repo, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasvc.models.saving.manager.load_trusted_keys", lambda paths: paths)
    with pytest.raises(ConfigError, match=message):
        repo.models.manager("m", **options)


def test_places_and_numbers_are_checked(repo):
    with repo.models.manager("m") as manager:
        for to, message in [("nodes", "give local="), ("disk", "to is 'disk'"), (SaveTo.NOWHERE, "to is <SaveTo")]:
            with pytest.raises(ConfigError, match=message):
                manager.save(state(1), step=1, to=to)
    with pytest.raises(ConfigError, match="keep is 0"):
        LocalSaves("x", keep=0)
    with pytest.raises(ConfigError, match="max_lost_steps is -1"):
        LocalSaves("x", max_lost_steps=-1)


def test_the_records_of_a_node_are_checked(repo, node, caplog):
    manager = repo.models.manager("m", every=100, local=node, every_local=1)
    save(manager, 1)
    leave(manager)
    path = node / "m/.branch.json"
    path.write_bytes(path.read_bytes().replace(b'"generation": 1', b'"generation": 2'))
    manager = repo.models.manager("m", local=node)
    with caplog.at_level(logging.WARNING), pytest.raises(DatasvcError, match=r"\.branch\.json is corrupt"):
        manager.restore()
    leave(manager)
