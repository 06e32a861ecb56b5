"""What readers rely on of every shard store; each store is a subclass of `ShardStoreLaws` of a few lines."""

import math

import numpy as np
import pytest

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.shards import ShardRequest
from datasvc.testing import small_dataset


class ShardStoreLaws:
    """The laws of shard stores. A subclass gives the fixture `store`, and may read `split` from elsewhere."""

    @pytest.fixture
    def split(self, repository):
        return small_dataset(repository, samples=40, shard_bytes=4000)["train"]

    @pytest.fixture
    def infos(self, split):
        infos = list(split.table.shards())
        assert len(infos) > 3
        return infos

    def damage(self, split, info):
        path = split.repository.objects.local_path(info.digest)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def remove(self, split, info):
        assert split.repository.storage.delete_if_older(split.repository.objects.path(info.digest), math.inf)

    def test_shards_hold_the_samples_of_the_split(self, store, split, infos):
        samples = []
        for info in infos:
            shard = store.open_shard(info)
            samples += [shard.sample(row) for row in range(shard.num_samples)]
            store.release_shard(info)
        assert [sample["image"] for sample in samples] == [sample["image"] for sample in split]

    def test_a_shard_stays_readable_after_its_release_and_is_opened_again(self, store, infos):
        shard = store.open_shard(infos[0])
        before = shard.sample(0)
        store.release_shard(infos[0])
        for info in infos[1:]:
            store.open_shard(info)
            store.release_shard(info)
        assert shard.sample(0) == store.open_shard(infos[0]).sample(0) == before
        store.release_shard(infos[0])

    def test_each_user_of_a_shard_releases_it(self, store, infos):
        first, second = store.open_shard(infos[0]), store.open_shard(infos[0])
        store.release_shard(infos[0])
        assert first.sample(1) == second.sample(1)
        store.release_shard(infos[0])

    def test_no_sample_of_a_damaged_shard_is_served(self, store, split, infos):
        self.damage(split, infos[1])
        for _ in range(2):
            with pytest.raises(CorruptDataError, match=infos[1].digest):
                store.open_shard(infos[1])
        assert store.open_shard(infos[0]).num_samples
        store.release_shard(infos[0])

    def test_a_shard_that_is_gone_is_not_found(self, store, split, infos):
        self.remove(split, infos[1])
        with pytest.raises(NotFoundError):
            store.open_shard(infos[1])

    def test_an_early_shard_has_the_samples_that_were_asked_for(self, store, split, infos):
        requests = [ShardRequest(info, split.table.index(number), np.array([1])) for number, info in enumerate(infos)]
        early = store.open_early(requests)
        assert early.keys() <= {info.digest for info in infos}
        for info in infos:
            whole = store.open_shard(info)
            if info.digest in early:
                assert early[info.digest].sample(1) == whole.sample(1)
            store.release_shard(info)

    def test_a_position_changes_no_sample(self, store, infos):
        before = store.open_shard(infos[0]).sample(0)
        for epoch, position in ((0, 1), (0, 40), (1, 0)):
            store.advance(epoch, position)
        store.release_shard(infos[0])
        assert store.open_shard(infos[0]).sample(0) == before
        store.release_shard(infos[0])
