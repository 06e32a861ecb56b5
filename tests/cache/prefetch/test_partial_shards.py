"""Single samples of shards that are not here, read by range and checked, as long as a small allowance lasts."""

from collections import Counter

import numpy as np
import pytest

from datasvc.cache import Cache
from datasvc.cache.prefetch.prefetching_store import PartialShardReader, PrefetchingShardStore
from datasvc.errors import UnavailableError
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import ShardRequest, ingest, open_dataset
from tests.samples import write_folder


class Counting:
    """Objects of a repository that count what is read by range, and may fail or flip a byte."""

    def __init__(self, objects):
        self._objects = objects
        self.num_bytes = 0
        self.fails = self.flips = False

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def read_range(self, digest, offset, length):
        if self.fails:
            raise UnavailableError("gone")
        self.num_bytes += length
        content = self._objects.read_range(digest, offset, length)
        return bytes([content[0] ^ 1]) + content[1:] if self.flips else content


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("source") / "pets", {"train": {"a": 60, "b": 60}})
    repository = Repository.create(str(tmp_path_factory.mktemp("repository") / "repo"))
    ingest(repository, str(folder), "pets", shard_bytes=8192)
    return open_dataset(repository, "pets@1")["train"]


def ignore(_name, _number):
    pass


def wanted(split, shard, rows):
    return ShardRequest(split.table.shard(shard), split.table.index(shard), np.array(rows))


def blobs(shard, rows):
    return [bytes(view) for view in shard.blobs("image", np.array(rows))]


def test_samples_of_several_shards_come_without_their_shards(split):
    objects = Counting(split.repository.objects)
    counted = Counter()
    early = PartialShardReader(objects, 1 << 40, count=lambda name, number: counted.update({name: number}))
    found = early.read([wanted(split, 0, [1, 0]), wanted(split, 2, [2])])
    for shard, rows in ((0, [1, 0]), (2, [2])):
        info = split.table.shard(shard)
        assert blobs(found[info.digest], rows) == blobs(split.origin.open_shard(info), rows)
    before = objects.num_bytes
    assert counted == {"early_bytes": before, "origin_bytes": before}
    early.read([wanted(split, 0, [0])])
    assert objects.num_bytes == before  # what is there is not read again


def test_no_more_is_read_than_the_share_of_the_rank(split):
    objects = Counting(split.repository.objects)
    split_bytes = 50 * split.table.size_bytes  # two per cent of it are this split
    assert PartialShardReader(objects, split_bytes, count=ignore).read([wanted(split, 0, [0])])
    read = objects.num_bytes
    early = PartialShardReader(objects, split_bytes, num_ranks=split.table.size_bytes // read, count=ignore)
    assert early.read([wanted(split, 0, [0])])
    assert early.read([wanted(split, 1, [0])]) == {}
    assert objects.num_bytes == 2 * read


@pytest.mark.parametrize("fault", ["fails", "flips"])
def test_what_cannot_be_read_or_is_wrong_is_left_to_the_whole_shard(split, fault):
    objects = Counting(split.repository.objects)
    setattr(objects, fault, True)
    early = PartialShardReader(objects, 1 << 40, count=ignore)
    assert early.read([wanted(split, 0, [0])]) == {}
    setattr(objects, fault, False)
    assert early.read([wanted(split, 0, [0])]) == {}  # and nothing is tried again


def test_a_shard_without_an_index_is_waited_for(split):
    early = PartialShardReader(split.repository.objects, 1 << 40, count=ignore)
    assert early.read([ShardRequest(split.table.shard(0), None, np.array([0]))]) == {}


@pytest.mark.parametrize("config", [OrderConfig(seed=1), OrderConfig(seed=1, shuffle="windowed", lanes=2, block=8)])
def test_a_cold_start_serves_the_same_batches_as_the_origin(tmp_path, split, config):
    def served(store):
        batches = SampleBatches(
            split, store, config, batch_size=5, rank=0, world_size=1, tail="short", blob="image", columns=("label",)
        )
        for _, batch in zip(range(2 * -(-len(split) // 5)), batches.stream(Cursor(0, 0)), strict=False):
            yield [bytes(blob) for blob in batch.blobs], batch.columns["label"].tolist()
            batches.retire(batch)
        batches.close()

    with Cache(tmp_path / "cache", budget="10MB") as cache:
        shards = PrefetchingShardStore(cache, split, config)
        assert list(served(shards)) == list(served(split.origin))
        shards.close()
        assert cache.counters()["misses"] <= split.table.num_shards
