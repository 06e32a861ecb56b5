"""The eviction policy, against an exhaustive search and against the share of the data that fits."""

import math
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.next_use import Uses, plan_uses
from datasvc.errors import CacheFullError
from datasvc.order import OrderConfig
from datasvc.planning.replay import replay

EPOCHS = 10


def data_set(num_shards, *, equal, seed=0):
    """Return samples and bytes of each shard."""
    generator = np.random.default_rng(seed)
    counts = np.full(num_shards, 100) if equal else generator.integers(20, 181, num_shards)
    return counts, counts * (1000 if equal else generator.integers(500, 1500, num_shards))


def hit_ratio(done, epochs=slice(1, None)):
    """Return the share of hits over all epochs but the first."""
    return sum(each.hit_bytes for each in done.epochs[epochs]) / sum(each.used_bytes for each in done.epochs[epochs])


def timeline(rows):
    """Return uses of (first, shard, length), all in one epoch."""
    first, shard, length = (np.array(column) for column in zip(*sorted(rows), strict=True))
    return Uses(shard, np.zeros_like(shard), np.zeros_like(shard), first, first + length)


def most_hit_bytes(uses, sizes, budget):
    """Return the most bytes that any way of evicting whole shards hits; below 0 where what is in use does not fit."""
    stops = [(int(stop), 0, use) for use, stop in enumerate(uses.stop)]
    events = sorted([*stops, *((int(first), 1, use) for use, first in enumerate(uses.first))])

    @cache
    def best(number, resident, held):
        if number == len(events):
            return 0
        _, begins, use = events[number]
        shard = int(uses.shards[use])
        if not begins:
            rest = list(held)
            rest.remove(shard)
            return best(number + 1, resident, tuple(rest))
        holding = tuple(sorted((*held, shard)))
        if shard in resident:
            return sizes[shard] + best(number + 1, resident, holding)
        loose = sorted(resident - set(held))
        chosen = (victims for count in range(len(loose) + 1) for victims in combinations(loose, count))
        rests = ((resident - set(victims)) | {shard} for victims in chosen)
        tries = (best(number + 1, rest, holding) for rest in rests if sum(sizes[each] for each in rest) <= budget)
        return max(tries, default=-math.inf)

    return best(0, frozenset(), ())


rows = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=9)


@given(rows, st.integers(1, 5))
def test_of_equal_shards_no_way_of_evicting_has_more_hits(rows, budget):
    uses = timeline(rows)
    best = most_hit_bytes(uses, [1] * 5, budget)
    if best < 0:
        with pytest.raises(CacheFullError):
            replay([uses], np.ones(5, np.int64), budget)
    else:
        (epoch,) = replay([uses], np.ones(5, np.int64), budget).epochs
        assert epoch.hit_bytes == best


@given(rows, st.lists(st.integers(1, 6), min_size=5, max_size=5), st.integers(6, 20))
def test_of_unequal_shards_the_search_never_finds_fewer_hits(rows, sizes, budget):
    uses = timeline(rows)
    best = most_hit_bytes(uses, sizes, budget)
    if best >= 0:
        assert replay([uses], np.array(sizes), budget).epochs[0].hit_bytes <= best


def test_a_job_sees_the_next_epoch_only():
    # Shard 1 comes again two epochs later, shard 0 never does; shard 2 needs the space of one of them.
    shards, epochs, first = np.array([0, 1, 2, 1]), np.array([0, 0, 1, 2]), np.arange(4)
    uses = Uses(shards, epochs, np.zeros(4, np.int64), first, first + 1)
    assert replay([uses], np.ones(3, np.int64), 2).epochs[2].hit_bytes == 0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("share", [0.10, 0.25, 0.50, 0.75])
@pytest.mark.parametrize("equal", [True, False], ids=["equal shards", "unequal shards"])
def test_hits_come_within_a_point_of_the_share_that_fits_over_ten_shuffled_epochs(equal, share, seed):
    counts, sizes = data_set(200, equal=equal, seed=seed)
    config = OrderConfig(seed=seed, shuffle="windowed", lanes=2, block=50)
    uses = plan_uses(counts, sizes, config, range(EPOCHS))
    budget = int(sizes.sum() * share)
    # Each shard is used once an epoch, so no policy has a higher hit ratio than this share, but for single shards.
    assert hit_ratio(replay([uses], sizes, budget)) == pytest.approx(share, abs=0.01)
    # Two shards ahead: what keeps the requests to an origin busy.
    assert hit_ratio(replay([uses], sizes, budget, ahead_bytes=int(sizes.sum() * 0.005))) >= share - 0.01


def test_where_one_data_set_is_read_more_often_it_stays():
    # Two data sets of equal size in one mix: the first is read three times while the second is read once.
    counts, sizes = data_set(100, equal=False)
    often, seldom = (
        plan_uses(counts, sizes, OrderConfig(seed=seed, shuffle="windowed", block=50), range(9)) for seed in (1, 2)
    )
    seldom = seldom.only(seldom.epochs < 3)
    mixed = (
        np.concatenate([often.shards, seldom.shards + 100]),
        np.concatenate([often.epochs, seldom.epochs]),
        np.concatenate([often.lanes, seldom.lanes]),
        np.concatenate([often.first, seldom.first * 3]),
        np.concatenate([often.stop, seldom.stop * 3]),
    )
    by_time = np.argsort(mixed[3], kind="stable")
    uses = Uses(*(column[by_time] for column in mixed))
    both = np.concatenate([sizes, sizes])
    # Nine epochs of the first data set are read in the time of three of the second: it is resident for eight of them.
    assert hit_ratio(replay([uses], both, int(both.sum() / 2)), slice(None)) >= 8 / 12 - 0.02


def test_with_all_of_the_data_resident_nothing_is_read_twice():
    counts, sizes = data_set(50, equal=False)
    uses = plan_uses(counts, sizes, OrderConfig(shuffle="windowed", block=30), range(3))
    done = replay([uses], sizes, int(sizes.sum()), ahead_bytes=50_000)
    assert [each.origin_bytes for each in done.epochs] == [sizes.sum(), 0, 0]
    assert done.resident_bytes == [sizes.sum()]


def test_shards_are_there_before_they_are_needed_even_at_the_start_of_an_epoch():
    counts, sizes = data_set(50, equal=True)
    uses = plan_uses(counts, sizes, OrderConfig(shuffle="windowed", block=100), range(3))
    early = replay([uses], sizes, int(sizes.sum() / 2), ahead_bytes=int(sizes[:3].sum()))
    late = replay([uses], sizes, int(sizes.sum() / 2))
    assert [each.late_bytes for each in early.epochs] == [0, 0, 0]
    assert [each.late_bytes for each in late.epochs] == [each.origin_bytes for each in late.epochs]


def test_nothing_is_fetched_early_in_the_place_of_what_is_needed_sooner():
    # Shard 0 waits for its second use while shard 1 is in use; there is no room for shard 2 until then.
    uses = timeline([(0, 0, 1), (1, 1, 10), (5, 0, 1), (8, 2, 1)])
    (epoch,) = replay([uses], np.ones(3, np.int64), 2, ahead_bytes=6).epochs
    assert (epoch.hit_bytes, epoch.late_bytes) == (1, 1)


def test_a_budget_below_what_is_in_use_is_refused():
    counts, sizes = data_set(10, equal=True)
    uses = plan_uses(counts, sizes, OrderConfig(), range(1))
    with pytest.raises(CacheFullError, match="raise the budget, or use shuffle='windowed'"):
        replay([uses], sizes, int(sizes.sum()) - 1)


NODES = 4


@pytest.fixture(scope="module")
def shared():
    """Samples, bytes and owners of shards that four nodes all need, and the uses of each node."""
    counts, sizes = data_set(200, equal=True)
    uses = plan_uses(counts, sizes, OrderConfig(seed=3, shuffle="windowed", block=50), range(5))
    return sizes, np.random.default_rng(0).permutation(200) % NODES, [uses] * NODES


@pytest.mark.parametrize("ahead", [0, 300_000])
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_a_cold_start_of_many_nodes_reads_the_origin_once(shared, share, ahead):
    sizes, owners, nodes = shared
    first = replay(nodes, sizes, int(sizes.sum() * share), owners=owners, ahead_bytes=ahead).epochs[0]
    assert first.origin_bytes == sizes.sum()
    assert first.peer_bytes == (NODES - 1) * sizes.sum()


def test_nodes_that_keep_what_they_own_read_the_origin_never_again(shared):
    sizes, owners, nodes = shared
    last = replay(nodes, sizes, int(sizes.sum() * 0.3), owners=owners, ahead_bytes=300_000).epochs[-1]
    assert last.origin_bytes == 0


def test_without_peers_every_node_reads_the_origin(shared):
    sizes, _, nodes = shared
    first = replay(nodes, sizes, int(sizes.sum()))
    assert [each.origin_bytes for each in first.epochs] == [NODES * sizes.sum(), 0, 0, 0, 0]
    assert first.epochs[0].peer_bytes == 0
