"""Which data set serves which position of a mixture: shares that do not drift, and streams without gaps."""

from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datasvc.mix_order import MixOrder

shares = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


@given(weights=shares, extra=st.integers(0, 40), numbers=st.lists(st.integers(0, 10**15), min_size=1, max_size=5))
def test_after_any_number_of_blocks_no_data_set_is_a_whole_sample_off_its_share(weights, extra, numbers):
    total = sum(weights)
    block = -(-total // min(filter(None, weights))) + extra
    order = MixOrder([3] * len(weights), weights, epoch_samples=10, block=block, seed=0)
    for number in numbers:
        served = order.served_before(number)
        assert sum(served) == number * block
        shares = [Fraction(number * block * weight, total) for weight in weights]
        assert all(abs(found - share) < 1 for found, share in zip(served, shares, strict=True))
        in_block = [stop - start for start, stop in zip(served, order.served_before(number + 1), strict=True)]
        assert all(found >= 0 for found in in_block)
        assert all(found == 0 for found, weight in zip(in_block, weights, strict=True) if not weight)


@given(weights=shares, times=st.integers(1, 3), start=st.integers(0, 50), blocks=st.integers(1, 5))
def test_where_shares_of_a_block_are_whole_numbers_every_run_of_blocks_has_exactly_these(
    weights, times, start, blocks
):
    block = sum(weights) * times
    order = MixOrder([3] * len(weights), weights, epoch_samples=block, block=block, seed=1)
    found = Counter()
    for epoch in range(start, start + blocks):
        found.update(order.locate(epoch, np.arange(block)).sources.tolist())
    assert found == Counter({number: weight * times * blocks for number, weight in enumerate(weights) if weight})


@given(
    weights=shares,
    sizes=st.lists(st.integers(1, 30), min_size=6, max_size=6),
    epoch_samples=st.integers(1, 200),
    start=st.integers(0, 500),
)
def test_each_data_set_is_served_in_its_own_order_without_gaps_and_the_cursors_say_how_far(
    weights, sizes, epoch_samples, start
):
    sizes, block = sizes[: len(weights)], max(sum(weights), 7)
    order = MixOrder(sizes, weights, epoch_samples=epoch_samples, block=block, seed=3)
    places = np.arange(start, start + 300)
    at = [divmod(place, epoch_samples) for place in places.tolist()]
    served = [order.locate(epoch, np.array([position])) for epoch, position in at]
    for number, size in enumerate(sizes):
        own = [(int(each.epochs[0]), int(each.positions[0])) for each in served if each.sources[0] == number]
        first = order.cursors(*divmod(start, epoch_samples))[number]
        ordinal = first[0] * size + first[1]
        assert own == [divmod(ordinal + count, size) for count in range(len(own))]
        assert order.cursors(*divmod(start + 300, epoch_samples))[number] == divmod(ordinal + len(own), size)


@given(weights=shares, extra=st.integers(0, 20), start=st.integers(0, 10**12))
def test_where_a_sample_of_a_stream_lies_on_the_line_is_the_inverse_of_what_lies_there(weights, extra, start):
    block, epoch_samples = -(-sum(weights) // min(filter(None, weights))) + extra, 97
    order = MixOrder([7] * len(weights), weights, epoch_samples=epoch_samples, block=block, seed=5)
    line = np.arange(start, start + 150)
    found = [
        order.locate(epoch, np.array([place])) for epoch, place in (divmod(x, epoch_samples) for x in line.tolist())
    ]
    for number in (number for number, weight in enumerate(weights) if weight):
        own = [place for place, each in enumerate(found) if each.sources[0] == number]
        ordinals = np.array([int(found[place].epochs[0]) * 7 + int(found[place].positions[0]) for place in own], int)
        turned = ordinals[::-1].copy()
        assert order.line_of(number, turned).tolist() == line[own][::-1].tolist()
        for place in own:
            assert int(found[place].epochs[0]) in order.own_epochs(number, int(line[place]) // epoch_samples)


@given(weights=shares, block=st.integers(1, 60), run=st.integers(1, 200), start=st.integers(0, 1000))
def test_no_run_of_positions_has_more_of_a_data_set_than_is_promised_to_the_cache(weights, block, run, start):
    block += -(-sum(weights) // min(filter(None, weights)))
    order = MixOrder([5] * len(weights), weights, epoch_samples=1 << 40, block=block, seed=0)
    found = np.bincount(order.locate(0, np.arange(start, start + run)).sources, minlength=len(weights))
    assert (found <= order.most_of(run)).all()


def test_any_position_of_a_huge_mixture_is_found_at_once():
    order = MixOrder([10**9, 7], [999, 1], epoch_samples=1_200_000_000, block=4096, seed=0)
    positions = np.arange(1_000_000_000, 1_000_000_100)
    found = order.locate(10**6, positions)
    assert order.cursors(10**6, 10**9)[0][0] == (10**6 * 12 + 10) * 999 // 10_000
    assert order.served_before(10**15 + 1)[0] == (10**15 + 1) * 4096 * 999 // 1000
    pieces = [order.locate(10**6, piece) for piece in np.split(positions, [1, 50])]
    joined = [np.concatenate(each) for each in zip(*pieces, strict=True)]
    assert all((one == whole).all() for one, whole in zip(joined, found, strict=True))


def test_blocks_and_seeds_are_mixed_differently():
    seen = set()
    for seed in range(3):
        order = MixOrder([5, 5], [1, 1], epoch_samples=64, block=64, seed=seed)
        seen |= {tuple(order.locate(epoch, np.arange(64)).sources.tolist()) for epoch in range(3)}
    assert len(seen) == 9
