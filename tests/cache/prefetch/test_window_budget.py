import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.prefetch.window_budget import (
    BatchesAtOnce,
    blocks_at_once,
    check_window,
    choose_ahead_bytes,
    choose_windowed,
    window_bytes,
)
from datasvc.errors import CacheFullError
from datasvc.order import AccessOrder, OrderConfig
from tests.examples import examples
from tests.support.live_shards import live_shards

BLOCK = 4096
shards_of_any_size = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 1000)), min_size=1, max_size=20)
orders = st.one_of(
    st.just(OrderConfig(shuffle=None)),
    st.builds(
        OrderConfig,
        seed=st.integers(0, 99),
        shuffle=st.just("windowed"),
        lanes=st.integers(1, 5),
        block=st.integers(1, 40),
        sticky=st.booleans(),
    ),
)


def live_bytes(sizes, order, following, start, run, served):
    """Return the bytes of the shards of `run` positions from `start`, of an epoch that ends at `served`."""
    live = live_shards(order, start, min(start + run, served))
    if start + run > served:
        # Shards of positions that no batch serves stay open until the first batch of the next epoch is served.
        live = np.union1d(live, live_shards(order, start, order.num_samples))
        live = np.union1d(live, live_shards(following, 0, start + run - served))
    return sizes[live].sum()


@examples(300)
@given(shards_of_any_size, orders, st.integers(1, 30), st.integers(0, 10), st.integers(0, 3))
def test_the_window_is_enough_for_every_run_of_every_epoch_and_from_one_to_the_next(
    shards, config, run, skipped, epoch
):
    counts, blocks = (np.array(column) for column in zip(*shards, strict=True))
    sizes = blocks * BLOCK
    order, following = (AccessOrder(counts, config, number) for number in (epoch, epoch + 1))
    served = max(order.num_samples - skipped, 0)
    needed = max((live_bytes(sizes, order, following, start, run, served) for start in range(served)), default=0)
    assert needed <= window_bytes(counts, sizes, config, run, skipped=skipped) <= sizes[counts > 0].sum()


@given(shards_of_any_size, st.integers(1, 30))
def test_without_a_shuffle_the_window_is_exact(shards, run):
    counts, blocks = (np.array(column) for column in zip(*shards, strict=True))
    order = AccessOrder(counts, OrderConfig(shuffle=None), 0)
    used = [
        live_bytes(blocks * BLOCK, order, order, start, run, order.num_samples) for start in range(order.num_samples)
    ]
    if run < order.num_samples:
        assert window_bytes(counts, blocks * BLOCK, OrderConfig(shuffle=None), run) == max(used)


@pytest.mark.parametrize("last", [100, 3])
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_ten_shards_one_after_the_other_fit_in_half_of_their_size(last, tail):
    counts = np.array([100] * 9 + [last])
    batches = BatchesAtOnce(32, prefetch=2, tail=tail)
    window = window_bytes(counts, counts * BLOCK, OrderConfig(shuffle=None), batches.run, skipped=batches.skipped)
    assert window <= 4 * 100 * BLOCK < counts.sum() * BLOCK / 2


def test_a_small_last_shard_is_not_counted_once_per_lane():
    config = OrderConfig(shuffle="windowed", lanes=8, block=250)
    windows = [window_bytes(counts, counts * BLOCK, config, 8) for counts in map(np.array, LAST)]
    assert 0 <= windows[1] - windows[0] <= 2 * 5 * BLOCK


LAST = ([100] * 160, [100] * 160 + [5])


def test_a_window_of_several_lanes_is_met_to_a_shard_per_lane():
    """4 lanes with blocks of a shard: 2 blocks, so at most 3 shards, of each; where an epoch ends some more."""
    counts, config = np.array([100] * 64), OrderConfig(seed=1, shuffle="windowed", lanes=4, block=100)
    assert blocks_at_once(config, 8) == 2
    assert window_bytes(counts, np.full(64, BLOCK), config, 8) == 18 * BLOCK
    order = AccessOrder(counts, config, 0)
    assert max(len(live_shards(order, start, start + 8)) for start in range(0, 6400, 8)) <= 12


def test_a_global_shuffle_needs_everything_in_blocks_of_the_disk():
    assert window_bytes(np.array([5, 5]), np.array([7000, 30]), OrderConfig(), 1) == 8192 + 4096


@given(st.lists(st.integers(1, 1 << 18).map(lambda blocks: blocks * 4096), min_size=1), st.integers(1, 1 << 40))
def test_fetching_ahead_takes_a_small_share_of_the_budget_but_one_shard_in_any_case(sizes, budget):
    ahead = choose_ahead_bytes(np.array(sizes), budget)
    assert max(sizes) <= ahead <= max(*sizes, 0, budget // 16)
    assert ahead >= min(4 * max(sizes), budget // 16)


def need_of(counts, sizes):
    def need(order, batches):
        return window_bytes(counts, sizes, order, batches.run, skipped=batches.skipped)

    return need


def refusal_of(order, batches, budget, counts):
    with pytest.raises(CacheFullError) as refused:
        check_window(order, batches, need_of(counts, counts * BLOCK), budget, counts, "the order")
    return str(refused.value)


def test_a_budget_below_the_window_is_refused_with_its_parts_and_the_largest_values_that_fit():
    counts = np.array([100] * 40)
    order, batches = OrderConfig(shuffle="windowed", lanes=8, block=300), BatchesAtOnce(64, 2, prefetch=3)
    need, budget = need_of(counts, counts * BLOCK), 16 * 100 * BLOCK
    message = refusal_of(order, batches, budget, counts)
    assert f"needs {need(order, batches)} bytes of the cache at once, and {budget} are available" in message
    assert f"({need(order, batches) / 1e6:.2f} MB of {budget / 1e6:.2f} MB)" in message
    assert "8 lanes x 2 blocks of 300 samples" in message
    assert (
        "640 positions in progress: 5 batches (1 in use, 3 prefetched, 1 for a rank that is a step ahead) of 64"
        in message
    )
    found = {name: int(value) for name, value in re.findall(r"(lanes|block|batch_size)=(\d+) \(", message)}
    assert "lanes" in found
    for name, value in found.items():
        changed = batches if name != "batch_size" else replace(batches, batch_size=value)
        assert need(order if changed is not batches else replace(order, **{name: value}), changed) <= budget
        more = batches if name != "batch_size" else replace(batches, batch_size=value + 1)
        assert need(order if more is not batches else replace(order, **{name: value + 1}), more) > budget


def test_the_refusal_of_a_global_shuffle_names_a_windowed_one_that_fits():
    counts = np.array([100] * 40)
    message = refusal_of(OrderConfig(), BatchesAtOnce(16), 20 * 100 * BLOCK, counts)
    lanes, block = map(int, re.search(r"use shuffle='windowed', lanes=(\d+), block=(\d+)", message).groups())
    check_window(
        OrderConfig(0, "windowed", lanes, block),
        BatchesAtOnce(16),
        need_of(counts, counts * BLOCK),
        20 * 100 * BLOCK,
        counts,
        "the order",
    )


def test_a_budget_in_which_no_order_fits_says_how_much_the_smallest_one_needs():
    message = refusal_of(OrderConfig(), BatchesAtOnce(16), BLOCK, np.array([100] * 40))
    assert "ingest smaller shards, or give smaller batches: even one lane in blocks of one sample needs" in message


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 64), st.integers(2, 100), st.booleans())
def test_a_derived_windowed_order_fits_wherever_one_of_single_samples_does(sizes, batch_size, share, has_budget):
    counts = np.array(sizes)
    need, batches = need_of(counts, counts * BLOCK), BatchesAtOnce(batch_size)
    budget = int(counts.sum()) * BLOCK * share // 100 if has_budget else None
    order = choose_windowed(counts, batches, seed=5, need=need, budget_bytes=budget)
    assert (order.seed, order.shuffle) == (5, "windowed")
    smallest = OrderConfig(5, "windowed", 1, 1)
    if budget is not None:
        assert need(order, batches) <= budget or order == smallest


def test_a_larger_budget_gives_a_derived_order_that_mixes_more():
    counts = np.array([100] * 200)
    need, batches = need_of(counts, counts * BLOCK), BatchesAtOnce(32)
    found = [
        choose_windowed(counts, batches, seed=0, need=need, budget_bytes=budget and budget * 100 * BLOCK)
        for budget in (10, 30, 60, 200, None)
    ]
    mixed = [order.lanes * order.block for order in found]
    assert mixed[:4] == sorted(set(mixed[:4]))
    assert found[3] == OrderConfig(0, "windowed", 8, 400)
    assert need(found[4], batches) <= 50 * 100 * BLOCK
