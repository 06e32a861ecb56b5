"""Versions on the disk of the node: what a run that was killed finds there, and what the repository then says."""

import itertools
import logging
import os

import pytest
import torch
from torch.utils.data import DataLoader

import datasvc
from datasvc.errors import ConfigError, UnavailableError
from datasvc.loaders.torch import Dataset, OrderBatchSampler
from datasvc.models import LocalSaves, LocalVersion, read_lineage
from datasvc.models.local.local_folder import LocalFolder
from datasvc.testing import small_dataset


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
    return [str(manager.save(state(step), step=step).result()) for step in steps if manager.should_save(step)]


def steps_on(node):
    return [version.step for version in LocalFolder(node, "m").versions()]


def on_nodes(step):
    return f"m, step {step}, on the nodes"


def test_saves_between_those_of_the_repository_stay_on_the_node_and_the_newest_is_restored(repo, node):
    with repo.models.manager("m", every=4, local=node, every_local=2) as manager:
        assert manager.restore(default=None) is None
        assert save(manager, *range(1, 8)) == [on_nodes(2), "m@1", on_nodes(6)]
    assert steps_on(node) == [4, 6]
    with repo.models.manager("m", local=node) as manager:
        checkpoint = manager.restore()
        assert isinstance(checkpoint.version, LocalVersion)
        assert checkpoint.version.step == checkpoint.entry["step"] == checkpoint.state["step"] == 6
        assert torch.equal(checkpoint.state["weights"], state(6)["weights"])
        assert str(manager.version) == checkpoint.entry["parent"] == "m@1"
        assert str(manager.restore("m@1").version) == "m@1"


def test_the_history_of_a_run_that_continues_from_the_node_is_that_of_one_run(repo, node):
    small_dataset(repo, "pets", samples=60)
    dataset = Dataset(repo.dataset("pets@1")["train"], columns=("key",))
    handed = []

    def train(manager, batches, *steps):
        loader = DataLoader(dataset, batch_sampler=batches)
        for step, batch in zip(steps, itertools.islice(loader, len(steps)), strict=True):
            handed.append(batch["key"])
            if manager.should_save(step):
                manager.save(state(step), step=step, wait=True)

    with repo.models.manager("m", every=2, local=node, every_local=1) as manager:
        train(manager, OrderBatchSampler(dataset, batch_size=8, seed=3), 1, 2, 3)
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


def test_a_version_of_the_repository_with_more_steps_is_preferred_and_ends_the_older_ones(repo, node):
    with repo.models.manager("m", local=node) as manager:
        manager.save(state(3), step=3, wait=True)
    repo.models.save("m", state(9), step=9)
    with repo.models.manager("m", local=node, every_local=1) as manager:
        assert str(manager.restore().version) == "m@2"
        assert steps_on(node) == [3]
        save(manager, 10)
    assert steps_on(node) == [10]


def test_what_was_not_published_is_not_found_and_is_removed(repo, node, monkeypatch, caplog):
    with repo.models.manager("m", local=node, every_local=1) as manager:
        save(manager, 1)
        with monkeypatch.context() as patched:
            patched.setattr(LocalFolder, "publish", lambda *_: (_ for _ in ()).throw(UnavailableError("disk full")))
            assert manager.should_save(2)
            manager.save(state(2), step=2)
            manager.wait()
        assert "on the nodes: the save of step 2 failed: disk full" in caplog.text
        assert len(os.listdir(node / "m")) == 1
    (node / "m/.incoming-0000000003-0123456789abcdef/objects").mkdir(parents=True)  # left by a kill
    with repo.models.manager("m", local=node) as manager:
        assert str(manager.restore().version) == on_nodes(1)
    assert len(os.listdir(node / "m")) == 1


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_version_with_a_lost_object_gives_way_to_the_repository(repo, node, damage, caplog):
    with repo.models.manager("m", local=node) as manager:
        version = manager.save(state(3), step=3, wait=True).result()
    (path,) = [path for path in (node / "m").glob("*/objects/*/*") if path.stat().st_size == 400]
    path.unlink() if damage == "removed" else path.write_bytes(b"x" * 400)
    with repo.models.manager("m", local=node) as manager, caplog.at_level(logging.WARNING):
        assert manager.restore().version == version
    assert "m, step 3, on the nodes" in caplog.text


def test_a_repository_that_does_not_answer_is_not_needed(repo, node, monkeypatch):
    with repo.models.manager("m", local=node, every_local=1) as manager:
        save(manager, 1)

        def fail(*_, **__):
            raise UnavailableError("no answer")

        monkeypatch.setattr(repo.repository, "newest", fail)
        monkeypatch.setattr(repo.repository, "resolve", fail)
        assert str(manager.restore().version) == on_nodes(1)


def test_the_number_and_the_bytes_of_versions_are_bounded(repo, node, caplog):
    with repo.models.manager("m", local=LocalSaves(node, keep=3), every_local=1) as manager:
        save(manager, *range(1, 7))
    assert steps_on(node) == [4, 5, 6]
    size = sum(path.stat().st_size for path in (node / "m").glob("*6-*/objects/*/*"))
    with repo.models.manager(
        "m", local=LocalSaves(node, keep=9, max_bytes=int(2.5 * size)), every_local=1
    ) as manager:
        manager.restore()
        save(manager, 7, 8, 9)
    assert steps_on(node) == [8, 9]
    with repo.models.manager("m", local=LocalSaves(node, max_bytes=size), every_local=1) as manager:
        manager.restore()
        assert manager.should_save(10)
        manager.save(state(10), step=10)
    assert "max_bytes is" in caplog.text
    assert steps_on(node) == [9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_local": 5}, "give local="),
        ({"every_local": 0, "local": "x"}, "every_local is 0"),
    ],
)
def test_settings_are_checked(repo, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        repo.models.manager("m", **options)
    with pytest.raises(ConfigError, match="keep is 0"):
        LocalSaves("x", keep=0)
