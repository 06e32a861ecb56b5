"""Pipelines, by the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.recipes.layouts.layout import PIPELINE_SCHEDULES
from datasvc.trainer.recipes.planning.stages import RankParts, divide_parts, held_micro_batches, idle_s

sizes = st.integers(1, 16)


def test_the_first_rank_has_the_embeddings_and_the_last_one_the_logits():
    assert divide_parts(8, 4, "1f1b") == [
        RankParts(2, True, False),
        RankParts(2, False, False),
        RankParts(2, False, False),
        RankParts(2, False, True),
    ]
    assert divide_parts(8, 1, "1f1b") == [RankParts(8, True, True)]


def test_the_first_rank_has_both_ends_under_zbv():
    assert divide_parts(8, 2, "zbv") == [RankParts(4, True, True), RankParts(4, False, False)]


@given(st.sampled_from(PIPELINE_SCHEDULES), sizes, sizes)
def test_the_ranks_have_each_block_and_each_end_once(schedule, pipeline, blocks):
    parts = divide_parts(pipeline * blocks, pipeline, schedule)
    assert sum(each.blocks for each in parts) == pipeline * blocks
    assert sum(each.has_first for each in parts) == sum(each.has_last for each in parts) == 1


def test_gpipe_holds_all_micro_batches_and_1f1b_those_on_the_way():
    assert [held_micro_batches("gpipe", rank, 4, 16) for rank in range(4)] == [16] * 4
    assert [held_micro_batches("1f1b", rank, 4, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [held_micro_batches("zbv", rank, 4, 16) for rank in range(4)] == [4] * 4
    assert held_micro_batches("1f1b", 0, 4, 2) == 2


@given(st.integers(2, 64))
def test_interleaving_holds_more_by_the_factor_of_korthikanti(pipeline):
    # 1 + (p - 1) / (p v) of what 1F1B holds (Korthikanti et al. 2022, section 4.2.3), with v = 2.
    factor = 1 + (pipeline - 1) / (2 * pipeline)
    assert held_micro_batches("interleaved", 0, pipeline, 10**6) == pytest.approx(pipeline * factor)


@given(st.sampled_from(PIPELINE_SCHEDULES), st.integers(1, 64))
def test_without_a_pipeline_one_micro_batch_is_held_and_no_rank_is_idle(schedule, num_micro_batches):
    assert held_micro_batches(schedule, 0, 1, num_micro_batches) == 1
    assert idle_s(schedule, [1.0], [2.0]) == 0


@given(sizes, sizes)
def test_the_bubble_of_gpipe_is_that_of_huang(pipeline, num_micro_batches):
    bubble_s = idle_s("gpipe", [1.0] * pipeline, [2.0] * pipeline)
    # O((K - 1) / (M + K - 1)) of the step (Huang et al. 2019, section 2.3).
    share = (pipeline - 1) / (num_micro_batches + pipeline - 1)
    assert bubble_s / (bubble_s + 3.0 * num_micro_batches) == pytest.approx(share)


@given(sizes, sizes)
def test_the_bubbles_of_1f1b_and_of_interleaving_are_those_of_narayanan(pipeline, num_micro_batches):
    ideal_s = 3.0 * num_micro_batches
    forward_s, backward_s = [1.0] * pipeline, [2.0] * pipeline
    # (p - 1) / m and (p - 1) / (v m) of the ideal time (Narayanan et al. 2021, sections 2.2.1 and 2.2.2), with v = 2.
    share = (pipeline - 1) / num_micro_batches
    assert idle_s("1f1b", forward_s, backward_s) / ideal_s == pytest.approx(share)
    assert idle_s("interleaved", forward_s, backward_s) / ideal_s == pytest.approx(share / 2)


def test_zbv_has_no_bubble_if_both_halves_of_a_backward_pass_take_as_long_as_a_forward_pass():
    assert idle_s("zbv", [1.0] * 4, [2.0] * 4) == 0
    assert idle_s("zbv", [2.0] * 4, [2.0] * 4) == pytest.approx(3.0)


def test_a_slower_rank_makes_the_others_wait():
    assert idle_s("1f1b", [1.0, 2.0, 1.0], [1.0, 2.0, 1.0]) == pytest.approx(4.0)
