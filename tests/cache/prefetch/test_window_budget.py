import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.prefetch.window_budget import check_window, choose_ahead_bytes, window_bytes
from datasvc.errors import CacheFullError
from datasvc.order import AccessOrder, OrderConfig
from tests.live_shards import live_shards


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 1000)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(0, 3),
)
def test_the_window_is_enough_for_every_run_of_every_epoch(shards, lanes, block, run, epoch):
    counts, blocks = (np.array(column) for column in zip(*shards, strict=True))
    sizes = blocks * 4096
    config = OrderConfig(shuffle="windowed", lanes=lanes, block=block)
    order = AccessOrder(counts, config, epoch)
    needed = max(sizes[live_shards(order, start, start + run)].sum() for start in range(0, order.num_samples, run))
    assert needed <= window_bytes(counts, sizes, config, run) <= sizes.sum()


def test_a_global_shuffle_needs_everything_in_blocks_of_the_disk():
    assert window_bytes(np.array([5, 5]), np.array([7000, 30]), OrderConfig(), 1) == 8192 + 4096


@given(st.lists(st.integers(1, 1 << 18).map(lambda blocks: blocks * 4096), min_size=1), st.integers(1, 1 << 40))
def test_fetching_ahead_takes_a_small_share_of_the_budget_but_one_shard_in_any_case(sizes, budget):
    ahead = choose_ahead_bytes(np.array(sizes), budget)
    assert max(sizes) <= ahead <= max(*sizes, 0, budget // 16)
    assert ahead >= min(4 * max(sizes), budget // 16)


def test_a_budget_below_the_window_is_refused_with_the_number():
    check_window(100, 100, "the order")
    with pytest.raises(CacheFullError, match="the order needs 101 bytes of the cache at once, and 100 are available"):
        check_window(101, 100, "the order")
