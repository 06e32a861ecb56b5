"""The laws of the access order: everything else rests on them."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.order import AccessOrder, OrderConfig, OrderState, SpanSearch, Step, count_steps, plan_step, slice_step
from tests.examples import examples
from tests.support.live_shards import live_shards

shard_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(sum)


@st.composite
def configs(draw):
    seed = draw(st.integers(0, 2**64 - 1))
    shuffle = draw(st.sampled_from(["global", "windowed", None]))
    if shuffle != "windowed":
        return OrderConfig(seed=seed, shuffle=shuffle)
    return OrderConfig(
        seed=seed,
        shuffle=shuffle,
        lanes=draw(st.integers(1, 9)),
        block=draw(st.integers(1, 60)),
        sticky=draw(st.booleans()),
    )


def served(order, positions):
    shards, rows = order.locate(positions)
    return list(zip(shards.tolist(), rows.tolist(), strict=True))


@examples(300)
@given(shard_sizes, configs(), st.integers(0, 50))
def test_every_epoch_is_a_permutation_and_the_inverse_inverts(sizes, config, epoch):
    order = AccessOrder(sizes, config, epoch)
    positions = np.arange(order.num_samples)
    samples = served(order, positions)
    assert sorted(samples) == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    shards, rows = np.array(samples).T
    assert np.array_equal(order.positions_of(shards, rows), positions)


@given(shard_sizes, configs(), st.integers(0, 50), st.data())
def test_any_positions_in_any_order_are_those_of_the_whole_epoch(sizes, config, epoch, data):
    whole = served(AccessOrder(sizes, config, epoch), np.arange(sum(sizes)))
    positions = data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=50))
    assert served(AccessOrder(sizes, config, epoch), positions) == [whole[position] for position in positions]


def test_no_shuffle_is_the_identity():
    assert served(AccessOrder([2, 0, 3], OrderConfig(shuffle=None), 7), np.arange(5)) == [
        (0, 0), (0, 1), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [{}, {"shuffle": "windowed", "lanes": 4, "block": 50}, {"shuffle": "windowed", "block": 64, "sticky": True}],
)
def test_the_order_differs_per_epoch_and_per_seed_and_seed_plus_epoch_does_not_collide(shape):
    def order_of(seed, epoch):
        return tuple(served(AccessOrder([100] * 20, OrderConfig(seed=seed, **shape), epoch), np.arange(2000)))

    orders = {(seed, epoch): order_of(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == len(orders)


def test_orders_of_neighbouring_epochs_are_unrelated():
    """Fixed points of a random permutation of 10,000 are Poisson(1): more than 8 is a one in a million event."""
    first, second = (
        AccessOrder([500] * 20, OrderConfig(seed=1), epoch).locate(np.arange(10_000)) for epoch in (0, 1)
    )
    assert ((first[0] == second[0]) & (first[1] == second[1])).sum() <= 8


@examples(200)
@given(
    shard_sizes,
    configs(),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from(["short", "pad"]),
)
def test_after_any_resizes_the_union_served_is_the_epoch_each_sample_once(sizes, config, phases, tail):
    """Each phase runs some steps at its own world size and batch size; the last phase runs to the end."""
    order = AccessOrder(sizes, config, 3)
    position, seen = 0, []
    for number, (world_size, batch_size, steps) in enumerate([*phases, (3, 2, 10**6)]):
        # State travels as JSON values only.
        state = OrderState.from_dict(OrderState("v", 3, position, config).to_dict())
        position = state.position
        for _ in range(steps):
            step = plan_step(position, order.num_samples, world_size * batch_size, tail)
            if step is None:
                break
            for rank in range(world_size):
                positions, mask = slice_step(step, rank=rank, world_size=world_size, lanes=config.lanes)
                seen += served(order, positions[mask])
            position = step.next_position
        assert len(seen) == position, number
    assert sorted(seen) == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]


def test_8_to_6_to_12_ranks_at_odd_positions_serve_the_epoch_once():
    order = AccessOrder([97, 101, 89, 7, 203], OrderConfig(seed=5), 2)
    position, seen = 0, []
    for world_size, batch_size, steps in ((8, 3, 5), (6, 5, 7), (12, 1, 10**6)):
        for _ in range(steps):
            step = plan_step(position, order.num_samples, world_size * batch_size, "short")
            if step is None:
                break
            for rank in range(world_size):
                seen += served(order, slice_step(step, rank=rank, world_size=world_size)[0])
            position = step.next_position
    assert len(seen) == len(set(seen)) == order.num_samples


@given(shard_sizes, configs(), st.integers(0, 9), st.integers(1, 40))
def test_a_global_batch_does_not_depend_on_how_many_ranks_share_it(sizes, config, epoch, size):
    order = AccessOrder(sizes, config, epoch)
    step = plan_step(0, order.num_samples, size, "short")
    whole = sorted(served(order, np.arange(step.start, step.stop)))
    for world_size in (1, 2, 3, 8):
        parts = [
            slice_step(step, rank=rank, world_size=world_size, lanes=config.lanes)[0] for rank in range(world_size)
        ]
        assert sorted(served(order, np.concatenate(parts))) == whole


def test_ranks_take_whole_lanes_where_the_sizes_divide():
    order = AccessOrder([50] * 16, OrderConfig(shuffle="windowed", lanes=4, block=20), 0)
    for start in (0, 8, 13):
        step = Step(start, start + 16, order.num_samples)
        for rank in range(2):
            positions, _ = slice_step(step, rank=rank, world_size=2, lanes=4)
            assert len(positions) == 8
            assert set(positions % 4) == {2 * rank, 2 * rank + 1}


@examples(300)
@given(shard_sizes, configs(), st.integers(0, 20), st.integers(1, 30))
def test_a_run_of_positions_needs_no_shard_beside_its_windows(sizes, config, epoch, run):
    order = AccessOrder(sizes, config, epoch)
    for start in range(0, order.num_samples, run):
        stop = min(start + run, order.num_samples)
        live = live_shards(order, start, stop)
        assert set(order.locate(np.arange(start, stop))[0].tolist()) <= set(live.tolist())


@given(shard_sizes, configs(), st.integers(0, 20))
def test_windows_tell_when_each_shard_is_needed(sizes, config, epoch):
    order = AccessOrder(sizes, config, epoch)
    windows = order.windows
    assert (np.diff(windows.first) >= 0).all()
    assert (windows.first < windows.stop).all()
    shards, _ = order.locate(np.arange(order.num_samples))
    for position, shard in enumerate(shards.tolist()):
        inside = (windows.shards == shard) & (windows.first <= position) & (position < windows.stop)
        assert inside.any()


@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_sticky_lanes_keep_their_samples_over_epochs_and_others_do_not(lanes):
    def lane_contents(epoch, sticky):
        config = OrderConfig(seed=2, shuffle="windowed", lanes=lanes, block=16, sticky=sticky)
        order = AccessOrder([33] * 12, config, epoch)
        return [frozenset(served(order, np.arange(lane, order.num_samples, lanes))) for lane in range(lanes)]

    assert lane_contents(0, True) == lane_contents(1, True) == lane_contents(9, True)
    if lanes > 1:
        assert lane_contents(0, False) != lane_contents(1, False)


def classes_per_batch(config, sizes, batch_size):
    """Each shard is one class: the worst source. Returns the mean number of classes in a batch."""
    order = AccessOrder(sizes, config, 0)
    shards, _ = order.locate(np.arange(order.num_samples - order.num_samples % batch_size))
    return np.mean([len(set(batch)) for batch in shards.reshape(-1, batch_size).tolist()])


def test_a_class_sorted_set_mixes_like_independent_draws_under_a_global_shuffle():
    num_classes, batch_size = 100, 64
    expected = num_classes * (1 - (1 - 1 / num_classes) ** batch_size)
    found = classes_per_batch(OrderConfig(seed=3), [200] * num_classes, batch_size)
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("lanes", [4, 16])
def test_a_class_sorted_set_mixes_near_k_classes_with_k_live_shards(lanes):
    """Lanes cut and blocks straddle shards, so a lane shows one class or two at a time."""
    config = OrderConfig(seed=3, shuffle="windowed", lanes=lanes, block=200)
    found = classes_per_batch(config, [200] * 96, 128)
    assert lanes <= found <= 2.2 * lanes


def test_memory_is_per_shard_and_not_per_sample():
    """1.2 billion samples in 2,000 shards: less than a byte for a thousand samples."""
    sizes = np.full(2000, 600_000)
    config = OrderConfig(seed=1, shuffle="windowed", lanes=8, block=1 << 20)
    tracemalloc.start()
    for each in (OrderConfig(seed=1), config):
        order = AccessOrder(sizes, each, 5)
        positions = np.arange(1_000_000_000, 1_000_000_100)
        shards, rows = order.locate(positions)
        assert np.array_equal(order.positions_of(shards, rows), positions)
        live_shards(order, 10**9, 10**9 + 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_200_000


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.data())
def test_span_search_finds_what_a_binary_search_finds(lengths, data):
    # A million tiny spans beside one huge: buckets that hold many.
    lengths = [1] * data.draw(st.integers(0, 40)) + lengths + [data.draw(st.integers(1, 10**6))]
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    points = np.array(data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=40)), np.int64)
    expected = np.searchsorted(starts, points, side="right") - 1
    assert np.array_equal(SpanSearch(starts, sum(lengths)).find(points), expected)


@pytest.mark.parametrize(
    ("tail", "steps", "last", "masked"),
    [("drop", 3, (20, 30), 0), ("short", 4, (30, 34), 0), ("pad", 4, (30, 40), 6)],
)
def test_the_tail_of_an_epoch_is_dropped_short_or_padded(tail, steps, last, masked):
    found, position = [], 0
    while (step := plan_step(position, 34, 10, tail)) is not None:
        found.append(step)
        position = step.next_position
    assert len(found) == steps == count_steps(0, 34, 10, tail)
    assert (found[-1].start, found[-1].stop) == last
    parts = [slice_step(found[-1], rank=rank, world_size=2) for rank in range(2)]
    assert sum(int((~mask).sum()) for _, mask in parts) == masked
    positions = np.concatenate([positions for positions, _ in parts])
    assert positions.max() < 34  # padding shows real samples, masked


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ConfigError, match="rank is 2; expected 0 <= rank < world_size = 2"):
        slice_step(Step(0, 10, 10), rank=2, world_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "shard"}, "expected 'global', 'windowed' or None"),
        ({"shuffle": "windowed"}, "needs lanes >= 1 and block >= 1"),
        ({"shuffle": "windowed", "block": 0}, "needs lanes >= 1 and block >= 1"),
        ({"lanes": 2}, "apply only to shuffle='windowed'"),
        ({"shuffle": None, "sticky": True}, "apply only to shuffle='windowed'"),
        ({"seed": -1}, "expected 0 <= seed"),
    ],
)
def test_contradicting_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        OrderConfig(**options)


def test_positions_and_samples_out_of_range_are_refused():
    order = AccessOrder([2, 3], OrderConfig(), 0)
    for positions in ([5], [-1]):
        with pytest.raises(IndexError):
            order.locate(positions)
    for shards, rows in (([2], [0]), ([0], [2]), ([-1], [0])):
        with pytest.raises(IndexError):
            order.positions_of(shards, rows)


@given(configs(), st.integers(0, 10**9), st.integers(0, 10**12))
def test_a_state_survives_as_json_values(config, epoch, position):
    state = OrderState("digest", epoch, position, config)
    assert OrderState.from_dict(state.to_dict()) == state


def test_a_state_of_another_version_or_order_is_refused_naming_both():
    state = OrderState("a" * 64, 0, 3, OrderConfig(seed=1))
    with pytest.raises(StateMismatchError, match=r"aaaaaaaaaaaa.*bbbbbbbbbbbb"):
        state.check_matches("b" * 64, OrderConfig(seed=1), 10)
    with pytest.raises(StateMismatchError, match=r"seed=1.*seed=2"):
        state.check_matches("a" * 64, OrderConfig(seed=2), 10)
    with pytest.raises(StateMismatchError, match=r"position 3 is outside 0\.\.2"):
        state.check_matches("a" * 64, OrderConfig(seed=1), 2)
    state.check_matches("a" * 64, OrderConfig(seed=1), 3)  # at the very end of an epoch


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"extra": 1}, {"position": ...}, {"epoch": 1.5}, {"position": -1}, {"epoch": "1"},
        {"position": None},
    ],
)  # fmt: skip
def test_a_state_with_other_fields_or_numbers_is_refused(change):
    state = OrderState("a", 0, 0, OrderConfig()).to_dict() | change
    with pytest.raises(ConfigError):
        OrderState.from_dict({name: value for name, value in state.items() if value is not ...})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, [23, 0, 32, 1, 21, 31, 20, 24, 3, 2, 22, 30]),
        ({"shuffle": "windowed", "lanes": 2, "block": 3}, [22, 31, 21, 32, 20, 0, 24, 3, 30, 1, 23, 2]),
        (
            {"shuffle": "windowed", "lanes": 2, "block": 3, "sticky": True},
            [22, 0, 21, 1, 20, 2, 31, 24, 32, 3, 30, 23],
        ),
    ],
)
def test_every_release_serves_the_same_order(shape, expected):
    """Saved states name positions of it: another order here needs a new STATE_FORMAT."""
    order = AccessOrder([4, 0, 5, 3], OrderConfig(seed=1, **shape), 2)
    assert [10 * shard + row for shard, row in served(order, np.arange(12))] == expected


def test_a_shard_is_live_from_its_first_position_to_its_last():
    order = AccessOrder([10] * 5, OrderConfig(shuffle=None), 0)
    assert live_shards(order, 0, 10).tolist() == [0]
    assert live_shards(order, 10, 20).tolist() == [1]
    assert live_shards(order, 9, 21).tolist() == [0, 1, 2]


@given(st.integers(0, 1000), st.integers(1, 64), st.integers(1, 16), st.integers(0, 4))
def test_slices_differ_by_at_most_one_sample(start, size, world_size, lanes_per_rank):
    step, lanes = Step(start, start + size, start + size), max(1, world_size * lanes_per_rank)
    lengths = [len(slice_step(step, rank=rank, world_size=world_size, lanes=lanes)[0]) for rank in range(world_size)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("change", [{"lanes": 3}, {"block": 5}, {"sticky": True}, {"shuffle": None}])
def test_a_state_of_an_order_of_another_shape_is_refused(change):
    shape = {"shuffle": "windowed", "lanes": 2, "block": 4, "sticky": False}
    other = change if change == {"shuffle": None} else shape | change
    with pytest.raises(StateMismatchError, match="the state was saved with"):
        OrderState("a", 0, 0, OrderConfig(**shape)).check_matches("a", OrderConfig(**other), 10)


def test_sticky_lanes_take_their_shards_in_another_order_each_epoch():
    config = OrderConfig(seed=1, shuffle="windowed", lanes=2, block=1, sticky=True)
    first, second = (served(AccessOrder([1] * 200, config, epoch), np.arange(200)) for epoch in (0, 1))
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 20
