"""Loaders on data that was purged: the purged samples are masked, nothing is decoded, all others are as before."""

import numpy as np
import pyarrow as pa
import pytest

import datasvc
from datasvc.api.purge import purge
from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader, Mixture, TokenFormat, TokenLoader
from datasvc.loaders.torch import Dataset, OrderBatchSampler, ResumableDataLoader
from datasvc.models.versions.data_use import DataUse, ReadSpan
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.testing import small_dataset
from tests.shards.written_versions import write_version

OPTIONS = {"batch_size": 4, "size": 16, "seed": 3, "training": True, "decode": DecodeConfig("cpu", num_threads=1)}


@pytest.fixture
def pets(tmp_path):
    return small_dataset(str(tmp_path / "repo"), "pets", samples=24, splits=None, shard_bytes=4 << 10)


def reopened(dataset):
    return open_dataset(Repository.open(dataset.repository.url), str(dataset.resolved))


def same_but_for(before, after, is_purged):
    """Compare batches; return how many samples were masked. `is_purged` tells it from the place in the epoch."""
    num_masked = 0
    for old, new in zip(before, after, strict=True):
        purged = np.array([is_purged(position) for position in old.positions.tolist()])
        assert (new.positions == old.positions).all()
        assert (np.asarray(new.mask) == np.asarray(old.mask) & ~purged).all()
        assert not new.bad
        assert np.array_equal(new.images[~purged], old.images[~purged])
        assert not new.images[purged].any()
        num_masked += int((np.asarray(old.mask) & purged).sum())
    return num_masked


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resumed_run_has_the_same_batches_but_for_the_masked_samples(pets, world_size):
    def batches(split, state=None):
        found = []
        for rank in range(world_size):
            loader = ImageLoader(
                split, ranks=DataRanks(rank, world_size), tail="pad", **{**OPTIONS, "columns": ["key"]}
            )
            if state is not None:
                loader.load_state_dict(state)
            found.append(loader)
        return found

    split = pets["train"]
    loaders = batches(split)
    full = [list(loader.numpy()) for loader in loaders]
    keys = {split[number]["key"] for number in (5, 11, 20)}
    purged_positions = {
        position
        for parts in full
        for batch in parts
        for position, key in zip(batch.positions.tolist(), batch.columns["key"], strict=True)
        if key in keys
    }
    first = batches(split)
    for loader in first:
        next(loader.numpy())
    state = first[0].state_dict()
    purge(pets.repository, "pets", keys=keys, dry_run=False)
    resumed = batches(reopened(pets)["train"], state)
    masked = sum(
        same_but_for(before[1:], list(loader.numpy()), purged_positions.__contains__)
        for before, loader in zip(full, resumed, strict=True)
    )
    again = batches(reopened(pets)["train"])
    total = sum(
        same_but_for(before, list(loader.numpy()), purged_positions.__contains__)
        for before, loader in zip(full, again, strict=True)
    )
    assert 0 < masked <= total == 3


@pytest.mark.parametrize("kind", ["loader", "torch"])
def test_trained_on_counts_a_purged_sample_only_where_it_was_served_before_the_purge(pets, kind):
    repo = datasvc.open(pets.repository.url)

    def opened():
        split = reopened(pets)["train"]
        if kind == "torch":
            data = Dataset(split, decode=None, columns=["key"])
            return ResumableDataLoader(data, OrderBatchSampler(data, batch_size=4, tail="pad", seed=3))
        return ImageLoader(split, tail="pad", columns=["key"], **OPTIONS)

    def keys_of(batch):
        return list(batch["key"] if kind == "torch" else batch.columns["key"])

    def count(version):
        return [uses.num_samples for uses in repo.models.trained_on([str(version)], keys=keys).versions]

    def use(loader, start, step):
        state = loader.state_dict()
        span = ReadSpan(start, (state["epoch"], state["position"]), step, 4, "pad")
        return DataUse("pets@1", "train", state, spans=[span])

    loader = opened()
    steps = iter(loader)
    before = keys_of(next(steps))
    state = loader.state_dict()
    first = repo.models.save("m", {"w": 1}, step=1, data=[use(loader, (0, 0), 0)])
    after = [key for batch in steps for key in keys_of(batch)]
    keys = [before[0], after[5], after[11]]
    purge(pets.repository, "pets", keys=keys, dry_run=False)
    resumed = opened()
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 5
    second = repo.models.save("m", {"w": 2}, step=6, parent=str(first), data=[use(resumed, (0, 4), 1)])
    loader = opened()
    assert len(list(loader)) == 6
    fresh = repo.models.save("fresh", {"w": 3}, step=6, data=[use(loader, (0, 0), 0)])
    assert (count(first), count(second), count(fresh)) == ([1], [1], [0])


@pytest.mark.parametrize("backend", ["cpu", "pillow"])
def test_no_backend_decodes_a_purged_sample(pets, backend):
    purge(pets.repository, "pets", keys=[pets["train"][3]["key"]], dry_run=False)
    options = OPTIONS | {"decode": DecodeConfig(backend, num_threads=1)}
    loader = ImageLoader(reopened(pets)["train"], tail="pad", **options)
    assert sum(int((~batch.mask).sum()) for batch in loader) == 1
    assert loader.num_bad == 0


def test_mixtures_mask_the_purged_samples_of_each_split(tmp_path):
    pets = small_dataset(str(tmp_path / "repo"), "pets", splits={"train": 12, "val": 8}, shard_bytes=2 << 10)
    purge(pets.repository, "pets", keys=[pets["train"][0]["key"]], split="train", dry_run=False)
    opened = reopened(pets)
    loader = ImageLoader(Mixture({opened["train"]: 1, opened["val"]: 1}, epoch_samples=24), tail="pad", **OPTIONS)
    masked = [
        int(source) for batch in loader for source, kept in zip(batch.sources, batch.mask, strict=True) if not kept
    ]
    assert masked == [0]


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16(), 2), pa.list_(pa.uint16()), pa.large_binary()])
def test_token_blocks_that_were_purged_are_masked(tmp_path, kind):
    repository = Repository.create(str(tmp_path / "repo"))
    schema = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("tokens", kind)])

    def tokens(n):
        return (
            np.array([10 * n + 1, 10 * n + 2], "<u2").tobytes()
            if kind == pa.large_binary()
            else [10 * n + 1, 10 * n + 2]
        )

    write_version(
        repository,
        "text",
        {"train": [[{"key": str(n), "tokens": tokens(n)} for n in part] for part in (range(4), range(4, 8))]},
        schema=schema,
    )
    stored = TokenFormat(block_tokens=2, dtype="uint16" if kind == pa.large_binary() else None)

    def blocks():
        split = open_dataset(Repository.open(repository.url), "text")["train"]
        loader = TokenLoader(split, batch_size=4, tokens=stored, training=True, seed=1)
        return [
            (block.tolist(), bool(kept))
            for batch in loader.numpy()
            for block, kept in zip(batch.tokens, batch.mask, strict=True)
        ]

    before = blocks()
    purge(repository, "text", keys=["2"], dry_run=False)
    assert blocks() == [([0, 0], False) if block == [21, 22] else (block, kept) for block, kept in before]


def test_torchs_own_data_set_serves_a_black_pixel_and_a_mask(pets):
    split = pets["train"]
    purge(pets.repository, "pets", keys=[split[2]["key"]], dry_run=False)
    data = Dataset(reopened(pets)["train"], decode="numpy")
    found = [data[number] for number in range(len(data))]
    assert [number for number, row in enumerate(found) if not row["mask"]] == [2]
    assert found[2]["image"].shape == (1, 1, 3)
    sampler = OrderBatchSampler(data, batch_size=5, tail="pad", seed=0)
    batches = [data[index] for batch in sampler for index in batch]
    assert sum(not row["mask"] for row in batches) == 1 + 1  # and one of padding
