import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.recipes.profiling.measure.measure import _split_reduce
from datasvc.trainer.recipes.profiling.measure.messages import TimedBucket, plan_messages
from datasvc.trainer.recipes.profiling.measure.profiled_run import PARTS

BUCKETS = [TimedBucket(10, 0.25, 0.1), TimedBucket(20, 1.0, 0.3)]


def test_messages_are_complete_in_the_last_pass_of_a_step():
    # Two passes of 1 s forwards and 2 s backwards each: the last one begins backwards at 4.
    messages = plan_messages(BUCKETS, forward_s=2.0, backward_s=4.0, num_passes=2, reduce_s=0.8)
    assert [message.ready_s for message in messages] == pytest.approx([4.5, 6.0])
    assert [message.reduce_s for message in messages] == pytest.approx([0.2, 0.6])


def test_messages_of_one_rank_keep_their_sizes_and_cost_nothing():
    alone = [TimedBucket(bucket.size_bytes, bucket.ready_share, 0.0) for bucket in BUCKETS]
    messages = plan_messages(alone, forward_s=1.0, backward_s=2.0, num_passes=1, reduce_s=0.0)
    assert [(message.size_bytes, message.reduce_s) for message in messages] == [(10, 0.0), (20, 0.0)]


@st.composite
def tables(draw):
    shape = (draw(st.integers(2, 4)), draw(st.integers(1, 5)), len(PARTS))
    num_times = math.prod(shape)
    wall = np.array(draw(st.lists(st.floats(0, 1), min_size=num_times, max_size=num_times))).reshape(shape)
    own = wall * draw(st.floats(0, 1))
    return np.stack([wall, own, np.zeros(shape)], axis=-1)


@given(tables())
def test_launching_reducing_and_waiting_for_a_rank_are_all_of_the_time_in_all_reduces(table):
    parts = _split_reduce(table, on_cpu=True)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(table[..., PARTS.index("all-reduce"), 0].mean())


def test_the_rank_that_comes_last_waits_for_nobody():
    table = np.zeros((2, 1, len(PARTS), 3))
    table[:, 0, PARTS.index("all-reduce"), 0] = 0.2, 0.9
    assert _split_reduce(table, on_cpu=True) == pytest.approx((0.0, 0.2, 0.35))


def test_ranks_that_wait_equally_long_wait_for_nobody_however_their_mean_is_rounded():
    table = np.zeros((3, 1, len(PARTS), 3))
    table[..., PARTS.index("all-reduce"), 0] = 0.35
    assert table[..., PARTS.index("all-reduce"), 0].mean() < 0.35  # as floats are
    assert _split_reduce(table, on_cpu=False)[2] == 0.0
