"""The timeline of uses, against the order itself: what a job needs when, of every position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.cache.catalogue.next_use import Uses, UseTimeline, bias_owned, bytes_per_position, next_uses, plan_uses
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


class Table:
    """What a timeline reads of a shard table without weights and groups."""

    grouping = None

    def __init__(self, samples, sizes):
        self.positions_per_shard = self.samples_per_shard = np.asarray(samples, np.int64)
        self.bytes_per_shard = np.asarray(sizes, np.int64)

    def epoch_counts(self, _config, _epoch):
        return self.samples_per_shard


TABLES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5000)), min_size=1, max_size=12).map(
    lambda pairs: Table(*zip(*pairs, strict=True))
)
CONFIGS = st.builds(
    OrderConfig,
    seed=st.integers(0, 9),
    shuffle=st.just("windowed"),
    lanes=st.integers(1, 4),
    block=st.integers(1, 8),
    sticky=st.booleans(),
)


def shards_by_position(table, config, epoch):
    order = AccessOrder(table.samples_per_shard, config, epoch)
    return order.locate(np.arange(order.num_samples))[0]


@given(TABLES, CONFIGS, st.integers(0, 3), st.data())
def test_a_shard_is_never_needed_before_its_time_comes_nor_after_its_piece_ended(table, config, epoch, data):
    position = data.draw(st.integers(0, int(table.samples_per_shard.sum())))
    timeline = UseTimeline(table, config)
    now = timeline.clock(epoch, position)
    pieces = timeline.needed_shards(epoch, position)
    assert [piece.first for piece in pieces] == sorted(piece.first for piece in pieces)
    for each, start in ((epoch, position), (epoch + 1, 0)):
        for index, shard in list(enumerate(shards_by_position(table, config, each)))[start:]:
            when = timeline.clock(each, index)
            assert any(piece.shard == shard and piece.first <= when < piece.stop for piece in pieces)
    assert all(piece.stop > now for piece in pieces)


@given(TABLES, CONFIGS, st.integers(0, 3), st.data())
def test_the_next_use_comes_no_later_than_the_first_sample_that_needs_it(table, config, epoch, data):
    num_samples = int(table.samples_per_shard.sum())
    position = data.draw(st.integers(0, num_samples))
    timeline = UseTimeline(table, config)
    next_uses = timeline.next_uses(epoch, position)
    served = np.concatenate([shards_by_position(table, config, each) for each in (epoch, epoch + 1)])
    for shard in range(len(table.samples_per_shard)):
        later = np.flatnonzero(served[position:] == shard)
        assert next_uses[shard] <= timeline.clock(epoch, position + int(later[0]))
        assert timeline.reuse(shard, epoch, position).now == timeline.clock(epoch, position)
        assert timeline.next_use(shard, epoch, position) == next_uses[shard]


def test_a_shard_let_go_of_is_needed_again_in_the_next_epoch():
    table, config = Table([4] * 6, [4096] * 6), OrderConfig(seed=3, shuffle="windowed", lanes=1, block=4)
    timeline = UseTimeline(table, config)
    last = int(shards_by_position(table, config, 0)[3])
    again = int(np.flatnonzero(shards_by_position(table, config, 1) == last)[0])
    assert timeline.reuse(last, 0, 4).next_use == timeline.clock(1, again)


def test_a_rank_fetches_for_its_own_lanes_and_a_released_shard_has_the_next_use_of_any_lane():
    table, config = Table([8] * 8, [4096] * 8), OrderConfig(seed=1, shuffle="windowed", lanes=2, block=8, sticky=True)
    whole, halves = UseTimeline(table, config), [UseTimeline(table, config, [lane]) for lane in (0, 1)]
    shards = [{piece.shard for piece in half.needed_shards(0, 0)} for half in halves]
    assert shards[0].isdisjoint(shards[1])
    assert shards[0] | shards[1] == {piece.shard for piece in whole.needed_shards(0, 0)} == set(range(8))
    for half, own in zip(halves, shards, strict=True):
        assert half.next_uses(0, 0) == {shard: use for shard, use in whole.next_uses(0, 0).items() if shard in own}
    for shard in range(8):
        assert halves[0].reuse(shard, 0, 0) == whole.reuse(shard, 0, 0)


@pytest.mark.parametrize("epoch", [0, 2])
def test_the_clock_increases_with_each_sample(epoch):
    table = Table([3, 5], [3000, 5000])
    timeline = UseTimeline(table, OrderConfig(shuffle=None))
    assert timeline.clock(epoch, 8) == timeline.clock(epoch + 1, 0) == (epoch + 1) * 8 * 1000
    assert bytes_per_position(table.samples_per_shard, table.bytes_per_shard) == 1000
