"""Versions name the data that torch's own DataLoader handed over, without a word of the training program about it."""

import itertools
import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler, ResumableDataLoader
from datasvc.testing import small_dataset

# See test_torch_order.py: a worker that is left in the middle of an epoch may abort while it ends.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BATCH, SAMPLES = 8, 60  # seven batches in an epoch, four samples are dropped
WEIGHTS = {"weights": torch.zeros(4)}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "repo"
    small_dataset(str(folder), "pets", samples=SAMPLES)
    return str(folder)


@pytest.fixture
def repo(url):
    return datasvc.open(url)


@pytest.fixture
def dataset(repo):
    return Dataset(repo.dataset("pets@1")["train"], columns=("key",))


def make_loader(dataset, num_workers=0, kind="map", epoch=0, **order):
    batches = OrderBatchSampler(dataset, **{"batch_size": BATCH, "seed": 3, **order})
    batches.set_epoch(epoch)
    if kind == "resumable":
        return batches, ResumableDataLoader(dataset, batches, num_workers=num_workers)
    if kind == "map":
        return batches, DataLoader(dataset, batch_sampler=batches, num_workers=num_workers)
    samples = IterableDataset(dataset, batches)
    return samples, DataLoader(samples, batch_size=BATCH, num_workers=num_workers)


def read(loader, count):
    return [batch["key"] for batch in itertools.islice(loader, count)]


def uses_of(repo, version):
    """Return how often a version consumed each key, and at which steps."""
    keys = [sample["key"] for sample in repo.dataset("pets@1")["train"]]
    found = repo.models.trained_on([str(version)], keys=keys)
    assert found.gaps == {}
    return sorted((use.key, use.step) for use in found.all_uses())


def expected_uses(batches):
    return sorted((key, step) for step, keys in enumerate(batches, 1) for key in keys)


def train_until_killed(url, name):
    repo = datasvc.open(url)
    _, loader = make_loader(Dataset(repo.dataset("pets@1")["train"], columns=("key",)), 2)
    with repo.models.manager(name) as manager:
        for step, _ in enumerate(loader, 1):
            if step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.save(WEIGHTS, step=step, wait=True)


@pytest.mark.slow
def test_a_job_that_was_killed_continues_from_the_data_of_its_version_and_every_use_is_known(url, repo, dataset):
    job = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(url, "killed"))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    expected = [batch["key"] for batch in make_loader(dataset)[1]]

    batches, loader = make_loader(dataset, 2)
    with repo.models.manager("killed") as manager:
        checkpoint = manager.restore()
        assert uses_of(repo, checkpoint.version) == expected_uses(expected[:3])
        batches.load_state_dict(checkpoint.entry["data"][0]["state"])
        for step, batch in enumerate(loader, 4):
            assert batch["key"] == expected[step - 1]
            last = manager.save(WEIGHTS, step=step)
        last = last.result()
    assert uses_of(repo, last) == expected_uses(expected)


@pytest.mark.parametrize(("kind", "num_workers"), [("map", 0), ("iterable", 2), ("resumable", 0)])
def test_epochs_of_any_loader_are_one_span_of_what_was_handed_over(repo, dataset, kind, num_workers):
    handed = []
    with repo.models.manager(f"{kind}-epochs") as manager:
        for epoch in range(2):
            _, loader = make_loader(dataset, num_workers, kind, epoch)  # a new loader in each epoch
            for batch in loader:
                handed.append(batch["key"])
                if len(handed) == 9:  # workers have read further
                    break
        version = manager.save(WEIGHTS, step=9).result()
    (use,) = repo.models.restore(str(version)).entry["data"]
    assert [(span["start"], span["stop"]) for span in use["spans"]] == [([0, 0], [1, 2 * BATCH])]
    assert (use["state"]["epoch"], use["state"]["position"]) == (1, 2 * BATCH)
    replayed = [repo.models.batch_at(str(version), step) for step in range(1, 10)]
    assert [batch.keys for batch in replayed] == handed
    with pytest.raises(ConfigError, match="only the keys of the batch are known"):
        _ = replayed[0].batch
    assert uses_of(repo, version) == expected_uses(handed)


def test_each_manager_counts_from_its_own_beginning_and_a_restore_begins_anew(repo, dataset):
    loader = make_loader(dataset)[1]
    read(loader, 2)  # of an earlier run in this process
    with repo.models.manager("first") as first:
        handed = read(loader, 3)
        with repo.models.manager("second") as second:
            version = first.save(WEIGHTS, step=3).result()
            assert repo.models.restore(str(second.save(WEIGHTS, step=3).result())).entry["data"] == []
        read(loader, 4)  # is lost with the weights
        first.restore(str(version))
        handed += read(loader, 2)
        final = first.save(WEIGHTS, step=5).result()
    assert uses_of(repo, final) == expected_uses(handed)


def test_a_batch_that_was_only_looked_at_counts_but_steps_are_unknown_then(repo, dataset):
    loader = make_loader(dataset)[1]
    with repo.models.manager("peek") as manager:
        handed = [*read(loader, 1), *read(loader, 2)]
        version = manager.save(WEIGHTS, step=2).result()
    assert uses_of(repo, version) == sorted((key, None) for keys in handed for key in keys)


@pytest.mark.parametrize("order", [{"shuffle": None}, {"training": False}])
def test_data_of_an_evaluation_and_other_loaders_are_not_recorded(repo, dataset, order):
    with repo.models.manager("evaluated") as manager:
        read(make_loader(dataset, **order)[1], 2)
        read(DataLoader(dataset, batch_size=4), 2)
        read(DataLoader(IterableDataset(dataset, OrderBatchSampler(dataset, batch_size=BATCH)), batch_size=4), 2)
        version = manager.save(WEIGHTS, step=1).result()
        assert repo.models.restore(str(version)).entry["data"] == []


def test_data_that_a_save_is_given_replaces_what_was_recorded(repo, dataset):
    with repo.models.manager("given") as manager:
        read(make_loader(dataset, training=True, shuffle=None)[1], 1)
        recorded, given = (manager.save(WEIGHTS, step=1, **data).result() for data in ({}, {"data": ()}))
    assert [len(repo.models.restore(str(version)).entry["data"]) for version in (recorded, given)] == [1, 0]
