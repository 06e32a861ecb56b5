"""Which shards a stream of batches holds open, and when: what a small cache rests on."""

import itertools
from collections import Counter

import pytest

from datasvc.order import AccessOrder, OrderConfig
from loaders.batches import Cursor, SampleBatches


class Recording:
    """The origin's shards; remembers which are open."""

    def __init__(self, split):
        self._origin = split.origin
        self.open = Counter()

    def open_shard(self, info):
        self.open[info.digest] += 1
        return self._origin.open_shard(info)

    def release_shard(self, info):
        self.open[info.digest] -= 1
        assert self.open[info.digest] >= 0

    def digests(self):
        return set(+self.open)


def batches_of(split, config, batch_size, tail="short"):
    store = Recording(split)
    batches = SampleBatches(
        split, store, config, batch_size=batch_size, rank=0, world_size=1, tail=tail, blob="image", columns=()
    )
    return batches, store


@pytest.mark.parametrize(
    "config",
    [
        OrderConfig(shuffle=None),
        OrderConfig(seed=1, shuffle="windowed", lanes=3, block=50),
        OrderConfig(seed=1, shuffle="windowed", lanes=16, block=20),
    ],
    ids=["table order", "few lanes", "many lanes"],
)
def test_a_shard_is_released_once_nothing_needs_it_and_not_while_something_does(digits, config):
    split = digits["train"]
    batches, store = batches_of(split, config, 1)
    order = AccessOrder(split.table.samples_per_shard, config, 0)
    digests = [info.digest for info in split.table.shards()]
    for batch in itertools.islice(batches.stream(Cursor(0, 0)), len(split)):
        before, position = store.digests(), batch.after.position
        batches.retire(batch)
        assert store.digests() <= {digests[shard] for shard in order.live_shards(position, len(split)).tolist()}
        under_way = {digests[shard] for shard in order.live_shards(position, position).tolist()}
        assert not (before - store.digests()) & under_way
    assert store.digests() == set()


def test_the_first_batch_of_an_epoch_releases_what_a_dropped_tail_left_open(digits):
    split = digits["train"]
    batches, store = batches_of(split, OrderConfig(shuffle=None), 500, tail="drop")
    for batch in itertools.islice(batches.stream(Cursor(0, 0)), 3):
        batches.retire(batch)
    assert batch.epoch == 1
    assert store.digests() <= {split.table.shard(shard).digest for shard in set(batch.shards.tolist())}
    batches.close()
    assert store.digests() == set()
