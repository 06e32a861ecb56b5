"""Parts of steps in any order: the batches of the ranks that they are of, and a proven ledger after a loss."""

import random

import pytest

from datasvc.ledger.audit import audit
from datasvc.ledger.file import read_ledger
from datasvc.loaders.core.parts import end_epochs_before, take_part
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.loaders.echo import EchoLoader, write_numbers

SIZES = [5, 1, 9, 3, 12, 2, 8]
WORLD, BATCH = 3, 2  # steps of 6 samples: 6 in an epoch of 40


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("parts") / "repo"))
    write_numbers(repository, SIZES)
    return open_dataset(repository, "numbers")["train"]


def worker(split, rank=0, **options):
    return EchoLoader(split, batch_size=BATCH, rank=rank, world_size=WORLD, prefetch=0, **options)


@pytest.mark.parametrize("order", [OrderConfig(1), OrderConfig(1, "windowed", 3, 6)], ids=["global", "windowed"])
def test_parts_in_any_order_are_those_of_the_ranks(numbers, order):
    ranks = [EchoLoader(numbers, batch_size=BATCH, rank=rank, world_size=WORLD, order=order) for rank in range(WORLD)]
    loader, chosen = worker(numbers, order=order), random.Random(0)
    for epoch in range(2):
        expected = {}
        for rank, other in enumerate(ranks):
            expected |= {(batch.step.start, rank): (batch.positions, batch.shards, batch.rows) for batch in other}
        parts = [*expected, *expected]
        chosen.shuffle(parts)
        for position, rank in parts:
            batch = take_part(loader, epoch, position, rank)
            found = (batch.positions, batch.shards, batch.rows)
            assert all((a == b).all() for a, b in zip(found, expected[position, rank], strict=True))
    assert loader.progress > 1


def parts_of_epoch():
    return [(position, part) for position in range(0, 36, 6) for part in range(WORLD)]


def serve_with_losses(numbers, folder, *, returns=True):
    """Two workers serve two epochs; a third is lost with a part of the first one, and its heir, too."""
    loaders = [worker(numbers, rank, ledger=folder) for rank in range(WORLD)]
    for epoch in range(2):
        for number, (position, part) in enumerate(parts_of_epoch()):
            lost = ()
            if (epoch, number) == (0, 4):
                take_part(loaders[2], 0, position, part)  # and is lost
                lost = (2,)
            if (epoch, number) == (0, 7):
                lost = (2,)  # it was granted to the lost one, which had not read it
            take_part(loaders[number % 5 == 0], epoch, position, part, lost_ranks=lost if returns else ())
    for loader in loaders[:2]:
        end_epochs_before(loader, 2)
        loader.close()
    return audit([list(read_ledger(folder))])


def test_a_part_of_a_lost_worker_counts_once(numbers, tmp_path):
    found = serve_with_losses(numbers, tmp_path)
    assert found.is_proven
    assert [(epoch.served, epoch.dropped, epoch.returned, epoch.again) for epoch in found.epochs] == [
        (36, 4, 2, 0),
        (36, 4, 0, 0),
    ]


def test_without_the_record_of_its_return_it_counts_twice(numbers, tmp_path):
    first, _ = serve_with_losses(numbers, tmp_path, returns=False).epochs
    assert first.repeated.count == BATCH
    assert not first.is_proven


def test_a_part_that_was_returned_and_not_served_again_is_missing(numbers, tmp_path):
    loaders = [worker(numbers, rank, ledger=tmp_path) for rank in range(2)]
    for position, part in parts_of_epoch():
        take_part(loaders[0], 0, position, part)
    batch = loaders[1]._batches.read_part(loaders[1]._cursor, 0)
    loaders[1]._open_ledger()
    loaders[1]._ledger.write_returned(batch, 0)
    end_epochs_before(loaders[0], 1)
    (epoch,) = audit([list(read_ledger(tmp_path))]).epochs
    assert epoch.never.count == BATCH
