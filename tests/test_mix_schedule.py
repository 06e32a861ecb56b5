"""Weights that change: shares of every prefix, pieces that end, ramps, and the inverse."""

import math
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.mix_order import MixOrder
from datasvc.mix_schedule import MixSchedule, MixStage, split_stages

BLOCK = 240  # of so many samples, so that 6 weights up to 20 have two samples in a block at the ends of ramps too


@st.composite
def schedules(draw, *, least=0, max_sets=6):
    num_sets = draw(st.integers(1, max_sets))
    weights = st.tuples(*[st.integers(least, 20)] * num_sets).filter(any)
    stages, first = [MixStage(0, draw(weights))], 0
    for _ in range(draw(st.integers(0, 5))):
        first += draw(st.integers(1, 9))
        stages.append(MixStage(first, draw(weights), draw(st.booleans())))
    return stages


def shares_of(stages, num_blocks):
    """Return the share of each data set in each of the first blocks, one after the other."""
    blocks = []
    for piece in split_stages(stages):
        last = piece.first + piece.blocks if piece.blocks else max(num_blocks, piece.first)
        for block in range(piece.first, last):
            at = Fraction(2 * (block - piece.first) + 1, 2 * (piece.blocks or 1))
            ends = []
            for here, there in ((piece.start, piece.stop), (piece.stop, piece.start)):
                single = sum(1 for weight, other in zip(here, there, strict=True) if other and not weight)
                ends.append([
                    Fraction(weight * (BLOCK - single), sum(here)) if weight else Fraction(bool(other))
                    for weight, other in zip(here, there, strict=True)
                ])  # fmt: skip
            at = at if piece.start != piece.stop else 0
            blocks.append([low + (high - low) * at for low, high in zip(*ends, strict=True)])
    return blocks[:num_blocks]


def is_paused(stages, block):
    piece = split_stages(stages)[bisect_right(stages, block, key=lambda stage: stage.first) - 1]
    return [not (start or stop) for start, stop in zip(piece.start, piece.stop, strict=True)]


@given(stages=schedules())
def test_each_prefix_of_blocks_has_the_shares_of_the_pieces_to_a_sample_and_what_paused_sets_keep(stages):
    schedule, num_blocks = MixSchedule(stages, BLOCK), stages[-1].first + 20
    due = [Fraction(0)] * len(stages[0].weights)
    part = Fraction(0)
    served = schedule.served_before(0)
    assert served == [0] * len(due)
    for block, shares in enumerate(shares_of(stages, num_blocks)):
        paused = is_paused(stages, block)
        if block in {stage.first for stage in stages}:
            kept = sum((count - share for count, share, each in zip(served, due, paused, strict=True) if each), 0)
            part = abs(kept) / paused.count(False) if abs(kept) >= 1 else 0
        due = [share + more for share, more in zip(due, shares, strict=True)]
        assert sum(shares) == BLOCK
        before, served = served, schedule.served_before(block + 1)
        assert sum(served) == (block + 1) * BLOCK
        in_block = [stop - start for start, stop in zip(before, served, strict=True)]
        assert all(0 <= count <= most for count, most in zip(in_block, schedule.most_in_block(), strict=True))
        for count, share, each, earlier in zip(served, due, paused, before, strict=True):
            if each:
                assert count == earlier
            else:
                assert abs(count - share) < 1 + part


@given(stages=st.one_of(schedules(least=1), schedules(max_sets=3)))
def test_without_pauses_or_with_up_to_three_sets_no_prefix_is_a_whole_sample_off(stages):
    schedule, num_blocks = MixSchedule(stages, BLOCK), stages[-1].first + 20
    due = [Fraction(0)] * len(stages[0].weights)
    for block, shares in enumerate(shares_of(stages, num_blocks)):
        due = [share + more for share, more in zip(due, shares, strict=True)]
        served = schedule.served_before(block + 1)
        assert all(abs(count - share) < 1 for count, share in zip(served, due, strict=True))


@given(stages=schedules(), other=schedules(), number=st.integers(1, 40))
def test_what_is_planned_later_changes_nothing_before_it(stages, other, number):
    kept = [stage for stage in stages if stage.first < number]
    if len(kept) < len(stages) and stages[len(kept)].is_ramp:
        return  # a ramp has begun
    changed = [
        MixStage(number + stage.first, (stage.weights * 6)[: len(stages[0].weights)], stage.is_ramp)
        for stage in other
    ]
    changed = [stage for stage in changed if any(stage.weights)]
    if changed:
        changed[0] = changed[0]._replace(is_ramp=False)
    first, second = MixSchedule(stages, BLOCK), MixSchedule([*kept, *changed], BLOCK)
    stop = min([number] + [stage.first for stage in stages[len(kept) :]])
    assert [first.served_before(block) for block in range(stop + 1)] == [
        second.served_before(block) for block in range(stop + 1)
    ]


@given(stages=schedules(), size=st.integers(1, 50), epoch_samples=st.integers(100, 500))
def test_the_line_is_the_inverse_of_the_samples_and_streams_go_on_over_changes(stages, size, epoch_samples):
    order = MixOrder(
        [size] * len(stages[0].weights), stages[0].weights, epoch_samples=epoch_samples, block=BLOCK, seed=2,
        stages=stages[1:],
    )  # fmt: skip
    num_epochs = -(-(stages[-1].first + 2) * BLOCK // epoch_samples)
    found = [order.locate(epoch, np.arange(epoch_samples)) for epoch in range(num_epochs)]
    sources, epochs, positions = (np.concatenate(each) for each in zip(*found, strict=True))
    for source in range(len(stages[0].weights)):
        line = np.flatnonzero(sources == source)
        ordinals = epochs[line] * size + positions[line]
        assert ordinals.tolist() == list(range(len(line)))
        assert order.line_of(source, ordinals[::-1]).tolist() == line[::-1].tolist()
        assert order.cursors(num_epochs, 0)[source] == divmod(len(line), size)


@given(stages=schedules(), run=st.integers(1, 900), start=st.integers(0, 9000))
def test_no_run_of_positions_has_more_of_a_data_set_than_is_promised_to_the_cache(stages, run, start):
    order = MixOrder(
        [5] * len(stages[0].weights), stages[0].weights, epoch_samples=1 << 40, block=BLOCK, seed=0, stages=stages[1:]
    )
    found = np.bincount(order.locate(0, np.arange(start, start + run)).sources, minlength=len(stages[0].weights))
    assert (found <= order.most_of(run)).all()


def test_a_ramp_of_a_billion_blocks_is_read_anywhere_at_once():
    length = 10**9
    order = MixOrder(
        [7, 7], (1, 1), epoch_samples=1 << 50, block=4096, seed=0, stages=[MixStage(10, (1, 3), is_ramp=True),
        MixStage(10 + length, (1, 0), is_ramp=True)],
    )  # fmt: skip
    # The line goes from 3/4 of a block to one sample; over its first half, its mean is that at a quarter.
    half = length // 2
    first, second = order.served_before(10)[1], order.served_before(10 + half)[1]
    share = Fraction(half * 4096 * 3, 4) * Fraction(3, 4) + Fraction(half, 4)
    assert abs(second - first - share) < 2
    for ordinal in (0, first, second, second + 1, order.served_before(10 + length)[1] - 1):
        (line,) = order.line_of(1, np.array([ordinal])).tolist()
        epoch, position = divmod(line, 1 << 50)
        found = order.locate(epoch, np.array([position]))
        assert (int(found.sources[0]), int(found.epochs[0]) * 7 + int(found.positions[0])) == (1, ordinal)
    assert math.isclose(order.served_before(10 + length)[1] - first, length * 4096 * 3 / 8, rel_tol=1e-3)


def test_a_weight_of_less_than_a_sample_in_a_block_of_a_ramp_is_refused():
    MixSchedule([MixStage(0, (9, 1, 0)), MixStage(5, (8, 1, 1))], 10)
    with pytest.raises(ConfigError, match="less than one sample in a block of 10; give a larger block"):
        MixSchedule([MixStage(0, (9, 1, 0)), MixStage(5, (8, 1, 1), is_ramp=True)], 10)
    MixSchedule([MixStage(0, (9, 1, 0)), MixStage(5, (8, 1, 1), is_ramp=True)], 20)


def test_pieces_of_a_schedule_end_where_the_next_begins():
    stages = [MixStage(0, (1,)), MixStage(4, (2,)), MixStage(9, (3,), is_ramp=True)]
    assert [(piece.first, piece.blocks) for piece in split_stages(stages)] == [(0, 4), (4, 5), (9, None)]
    assert all(first.first < second.first for first, second in pairwise(stages))
