"""Masked samples in all loaders: False in the mask, nothing of them in the inputs, all others as they were."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from datasvc.errors import ConfigError
from datasvc.ledger.audit import audit_folders
from datasvc.ledger.handed_over import handed_over_since, mark
from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader, Masked, OrderConfig, TokenLoader
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler, ResumableDataLoader, order_state
from datasvc.repository import Repository
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import delete_samples
from tests.loaders.numbered import Numbers, make_splits, mix
from tests.shards.written_versions import write_table

FAST = {"size": 32, "training": True, "seed": 4, "decode": DecodeConfig(num_threads=1)}


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return make_splits(tmp_path_factory.mktemp("masks"))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A split of twelve token blocks in two shards; block n has the tokens 10 n + 1 and 10 n + 2."""
    repository = Repository.create(str(tmp_path_factory.mktemp("blocks") / "repo"))
    fields = [pa.field("key", pa.string(), nullable=False), pa.field("tokens", pa.list_(pa.uint16(), 2))]
    shards = [
        [{"key": str(n), "tokens": [10 * n + 1, 10 * n + 2]} for n in numbers] for numbers in (range(7), range(7, 12))
    ]
    table = write_table(repository.objects, shards, shard_schema(fields))
    return Split("train", "tokens@1", repository, repository.objects.put(table.encode()).digest)


def served(loader, epochs=1):
    """Return (epoch, position, number, whether it counts) of every sample."""
    found = []
    for _ in range(epochs):
        for batch, numbers in loader:
            rows = zip(batch.positions.tolist(), numbers, batch.mask.tolist(), strict=True)
            found += [(batch.epoch, *row) for row in rows]
    return found


def test_positions_and_samples_are_masked_and_the_order_stays(splits):
    split = splits["big"]
    plain = served(Numbers(split, 6), 2)
    masked = Masked(((1, 3, 8),)) | Masked.rows(split.digest, {0: [2], 4: [13]})
    found = served(Numbers(split, 6, masked=masked), 2)
    numbers = {102, 100 + 26 + 13}
    assert found == [(e, p, n, not (n in numbers or (e == 1 and 3 <= p < 8))) for e, p, n, _ in plain]
    assert sum(not counts for *_, counts in found) >= 4 + 5 - 2


def test_rows_are_those_of_the_file_also_where_samples_were_deleted(splits):
    big = splits["big"]
    objects = big.repository.objects
    table = delete_samples(objects, big.table, {0: np.array([0, 1, 5])})
    cut = Split("train", "big@2", big.repository, objects.put(table.encode()).digest)
    found = served(Numbers(cut, 6, masked=Masked.rows(cut.digest, {0: [2, 8]})))
    assert {number for *_, number, counts in found if not counts} == {102, 108}


def test_padding_is_no_masked_sample(splits):
    loader = Numbers(splits["tiny"], 5, tail="pad", masked=Masked.rows(splits["tiny"].digest, {0: [1]}))
    (batch, numbers) = next(iter(loader))
    assert batch.mask.tolist() == [number == 300 and index < 2 for index, number in enumerate(numbers)]
    assert batch.masked.tolist() == [number == 301 and index < 2 for index, number in enumerate(numbers)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_keeps_the_masks_at_any_size_and_adds_those_of_the_loader(splits, world_size):
    mixture = mix(splits)
    first = Masked(((0, 10, 14), (1, 0, 9))) | Masked.rows(splits["middle"].digest, {1: [0, 5]})
    loader = Numbers(mixture, 6, masked=first)
    expected = served(loader, 2)
    loader = Numbers(mixture, 6, masked=first)
    head = list(itertools.islice(loader, 2))
    state = json.loads(json.dumps(loader.state_dict()))
    added = Masked.rows(splits["big"].digest, {2: [3]})
    ranks = [
        Numbers(mixture, 3, rank=rank, world_size=world_size, masked=added if world_size == 2 else None)
        for rank in range(world_size)
    ]
    found = []
    for each in ranks:
        each.load_state_dict(state)
        found += served(each, 2)
    rest = [row for row in expected if row[:2] >= (0, 12)]
    if world_size == 2:
        rest = [(e, p, n, counts and n != 100 + 13 + 3) for e, p, n, counts in rest]
        assert ranks[0].masked == first | added.since((0, 12))
        assert ranks[0].state_dict()["masked"] == ranks[1].state_dict()["masked"]
    assert sorted(found) == sorted(rest)
    assert [batch.mask.all() for batch, _ in head] == [True, False]


def test_the_ledger_counts_them_apart_and_a_later_mask_is_no_other_order(splits, tmp_path):
    split = splits["big"]
    loader = Numbers(split, 4, ledger=tmp_path, tail="pad")
    next(iter(loader))
    resumed = Numbers(split, 4, ledger=tmp_path, tail="pad", masked=Masked(((0, 0, 7), (0, 39, 40))))
    resumed.load_state_dict(loader.state_dict())
    list(resumed)
    resumed.close()
    (epoch,) = audit_folders([tmp_path]).epochs
    assert (epoch.served, epoch.left_out, epoch.masked, epoch.padded, epoch.is_proven) == (36, 4, 0, 0, True)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_images_of_masked_samples_are_zeros_and_all_others_are_the_same(digits, framework):
    masked = Masked(((0, 2, 5), (0, 8, 16)))
    plain, left_out = (ImageLoader(digits["train"], batch_size=8, masked=m, **FAST) for m in (None, masked))
    for index in range(3):
        first, second = (next(iter(each if framework == "torch" else each.numpy())) for each in (plain, left_out))
        counts = ~masked.at(0, first.positions)
        assert second.mask.tolist() == counts.tolist()
        assert np.array_equal(np.asarray(first.images)[counts], np.asarray(second.images)[counts])
        assert not np.asarray(second.images)[~counts].any()
        assert np.array_equal(first.labels, second.labels)
        assert second.bad == {}
        assert (~counts).sum() == [3, 8, 0][index]


def test_blocks_of_masked_samples_have_no_tokens_and_no_labels(blocks):
    masked = Masked.rows(blocks.digest, {0: [3], 1: [1]})
    order = {"batch_size": 6, "training": True, "order": OrderConfig(shuffle=None), "labels": "across"}
    batches = list(TokenLoader(blocks, masked=masked, **order))
    tokens = torch.cat([batch.tokens for batch in batches])
    plain = torch.cat([batch.tokens for batch in TokenLoader(blocks, **order)])
    counts = torch.cat([batch.mask for batch in batches])
    assert torch.equal(torch.nonzero(~counts).flatten(), torch.tensor([3, 8]))
    assert torch.equal(tokens[counts], plain[counts])
    assert not tokens[~counts].any()
    labels, lengths = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("labels", "length"))
    assert (labels[~counts] == -100).all()
    assert lengths.tolist() == [2 * count for count in counts.tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_the_loaders_of_torch_mask_too_and_their_states_go_into_any_loader(digits, kind, num_workers):
    split = digits["val"]
    dataset = Dataset(split, columns=("label",))
    masked = Masked(((0, 4, 9),)) | Masked.rows(split.digest, {0: [0, 1, 2]})
    batches = OrderBatchSampler(dataset, batch_size=8, seed=5, masked=masked, ranks=DataRanks())
    source = batches if kind == "map" else IterableDataset(dataset, batches)
    made = (dataset, source) if kind == "map" else (source,)
    loader = ResumableDataLoader(*made, num_workers=num_workers)
    counts = torch.cat([batch["mask"] for batch in loader])
    order = {"order": OrderConfig(seed=5), "blob": None, "columns": (), "tail": "drop"}
    expected = Numbers(split, 8, masked=masked, **{**order, "columns": ("label",)})
    assert counts.tolist() == [count for batch, _ in expected for count in batch.mask.tolist()]
    assert (~counts).sum() >= 5
    state = loader.state_dict()
    assert state["masked"] == masked.to_dict()
    without = OrderBatchSampler(dataset, batch_size=8, seed=5, ranks=DataRanks())
    without.load_state_dict(state)
    assert without.order.masked == masked
    if kind == "map":
        stateful = StatefulDataLoader(dataset, batch_sampler=batches, num_workers=num_workers)
        next(iter(stateful))
        assert order_state(stateful.state_dict())["masked"] == masked.to_dict()


def test_workers_that_have_other_masks_than_a_loaded_state_say_so(digits):
    dataset = Dataset(digits["val"], columns=("label",))
    plain = IterableDataset(dataset, OrderBatchSampler(dataset, batch_size=8, seed=5, ranks=DataRanks()))
    loader = ResumableDataLoader(plain, num_workers=1, persistent_workers=True)
    state = loader.state_dict()
    next(iter(loader))
    loader.load_state_dict({**state, "masked": {"positions": [[0, 0, 3]]}})
    with pytest.raises(ConfigError, match="persistent_workers"):
        next(iter(loader))


def test_what_torch_handed_over_names_the_masks(digits):
    before = mark()
    dataset = Dataset(digits["val"], columns=("label",))
    masked = Masked(((0, 0, 3),))
    batches = OrderBatchSampler(dataset, batch_size=8, seed=77, masked=masked, ranks=DataRanks())
    next(iter(torch.utils.data.DataLoader(dataset, batch_sampler=batches)))
    ((order, _),) = handed_over_since(before).items()
    assert order.state_at((0, 8))["masked"] == masked.to_dict()
