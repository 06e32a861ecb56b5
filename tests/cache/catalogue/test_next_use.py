"""The timeline of uses: it says of every position what the access order will read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.cache.catalogue.next_use import Uses, bias_owned, bytes_per_position, next_uses, plan_uses
from datasvc.order import NEVER, AccessOrder, OrderConfig

shards = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000)), min_size=1, max_size=15).filter(
    lambda columns: any(count for count, _ in columns)
)


@given(shards, st.integers(1, 5), st.integers(1, 40), st.booleans(), st.integers(0, 3))
def test_at_every_position_its_shard_is_in_use_by_its_lane(shards, lanes, block, sticky, start):
    counts, sizes = (np.array(column) for column in zip(*shards, strict=True))
    config = OrderConfig(shuffle="windowed", lanes=lanes, block=block, sticky=sticky)
    uses = plan_uses(counts, sizes, config, range(start, start + 2))
    step = bytes_per_position(counts, sizes)
    for epoch in (start, start + 1):
        order = AccessOrder(counts, config, epoch)
        positions = np.arange(order.num_samples)
        found, _ = order.locate(positions)
        for position, shard in zip(positions.tolist(), found.tolist(), strict=True):
            now = (epoch * order.num_samples + position) * step
            live = (uses.first <= now) & (now < uses.stop) & (uses.shards == shard)
            assert (live & (uses.lanes == position % lanes) & (uses.epochs == epoch)).any()
    assert (np.diff(uses.first) >= 0).all()
    assert len(uses) == sum(len(AccessOrder(counts, config, epoch).windows.shards) for epoch in (start, start + 1))


def test_the_clock_counts_the_bytes_that_the_order_served():
    counts, sizes = np.array([10, 10]), np.array([3000, 5000])
    uses = plan_uses(counts, sizes, OrderConfig(shuffle=None), range(2))
    assert uses.first.tolist() == [0, 4000, 8000, 12000]
    assert uses.stop.tolist() == [4000, 8000, 12000, 16000]


def test_the_clock_advances_for_samples_smaller_than_a_byte():
    assert bytes_per_position(np.array([8]), np.array([7])) == 1
    assert bytes_per_position(np.array([0]), np.array([0])) == 1


@st.composite
def timelines(draw):
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 10), st.integers(0, 3)),
            min_size=1,
            max_size=20,
        )
    )
    first, shard, length, epoch = (np.array(column) for column in zip(*sorted(rows), strict=True))
    return Uses(shard, epoch, np.zeros_like(shard), first, first + length)


@given(timelines())
def test_the_next_use_is_the_first_that_begins_once_a_use_has_stopped(uses):
    for number, again in enumerate(next_uses(uses).tolist()):
        later = np.flatnonzero((uses.shards == uses.shards[number]) & (uses.first >= uses.stop[number]))
        following = min(later.tolist(), key=lambda use: uses.first[use], default=None)
        if following is not None:
            seen = [
                use
                for use in later[uses.first[later] == uses.first[following]].tolist()
                if uses.epochs[use] - uses.epochs[number] <= 1
            ]
            following = seen[0] if seen else None
        assert again == (NEVER if following is None else uses.first[following])


def test_every_shard_of_an_order_is_needed_again_in_the_next_epoch():
    counts = np.full(20, 10)
    uses = plan_uses(counts, counts * 100, OrderConfig(shuffle="windowed", lanes=2, block=7), range(3))
    again = next_uses(uses)
    assert (again[uses.epochs < 2] < NEVER).all()
    assert (again >= uses.stop).all()


def test_a_node_among_peers_keeps_what_it_owns_longest():
    again = np.array([500, 100, NEVER, NEVER, 900])
    owned = np.array([True, False, True, False, True])
    kept = bias_owned(again, owned)
    assert np.argsort(kept).tolist() == [0, 4, 1, 2, 3]
    assert kept[[0, 4]].tolist() == [500, 900]
    assert 900 < kept[1] < UNKNOWN
    assert kept[2:4].tolist() == [UNKNOWN, NEVER]
