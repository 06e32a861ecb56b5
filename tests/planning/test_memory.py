"""Memory of a rank: the papers' cases, and laws."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.candidates import Candidate
from datasvc.planning.layout import PIPELINE_SCHEDULES, Layout
from datasvc.planning.memory import (
    RankMemory,
    RankParts,
    StateBytes,
    divide_parts,
    divide_states,
    estimate_memory,
    held_micro_batches,
    rank_parameters,
    state_bytes,
)
from datasvc.planning.model_costs import ModelCosts, PartCosts
from tests.planning.examples import ADAM, SMALL_GPT, candidates

ALONE = Layout()
# A block of 100 parameters, 80 of which tensor parallelism divides, and 10 activations, 8 of them divided.
BLOCK = PartCosts(20, 80, 1000.0, kept_elements=2, split_elements=8)
MODEL = ModelCosts("m", "blocks", PartCosts(50), BLOCK, PartCosts(7), layers=4, boundary_elements=3, heads=4)


def memory(layout=ALONE, **settings):
    return estimate_memory(MODEL, Candidate(layout, **settings), ADAM, precision="fp32")


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_divides_the_states_as_in_its_paper(zero, gigabytes):
    # Figure 1 of Rajbhandari et al. 2020: 7.5 billion parameters, 64 ranks, 2 + 2 + 12 bytes.
    states = divide_states(StateBytes(2, 2, 12), 64, zero)
    total = states.parameter + states.gradient + states.optimizer
    assert 7.5 * total == pytest.approx(gigabytes, abs=0.05)


def test_a_stage_that_zero_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="zero is 4; expected a stage of 0, 1, 2 or 3"):
        divide_states(ADAM, 2, 4)


@pytest.mark.parametrize(
    ("optimizer", "precision", "states"),
    [
        ("adamw", "fp32", StateBytes(4, 4, 8)),
        ("lamb", "bf16", StateBytes(4, 4, 8, cast=2)),
        ("sgd", "fp16", StateBytes(4, 4, 4, cast=2)),
    ],
)
def test_the_training_program_has_float32_weights_and_moments(optimizer, precision, states):
    assert state_bytes(optimizer, precision) == states


def test_sgd_without_momentum_has_no_state():
    assert state_bytes("sgd", "fp32", momentum=0.0).optimizer == 0


def test_one_rank_has_everything():
    # 50 + 4 * 100 + 7 parameters, and 4 blocks of 10 activations for 3 samples, 4 bytes each.
    assert memory(micro_batch=3) == RankMemory(457 * 4, 457 * 4, 457 * 8, 0, 4 * 10 * 3 * 4)


def test_a_tensor_group_divides_the_matrices_of_blocks_and_the_activations_between_them():
    found = memory(Layout(tensor=4))
    assert found.parameters == (57 + 4 * (20 + 80 / 4)) * 4
    assert found.activations == 4 * (2 + 8 / 4) * 4


def test_a_context_group_divides_activations_but_has_all_keys_and_values():
    found = memory(Layout(context=2), zero=2)
    assert found.activations == 4 * (10 / 2 + 2 * 3 / 2) * 4
    assert found.optimizer == 457 / 2 * 8


def test_zero_3_gathers_two_blocks_and_what_is_outside_the_blocks():
    found = memory(Layout(shard=2), zero=3)
    assert (found.parameters, found.gathered) == (457 / 2 * 4, (57 + 2 * 100) * 4)
    assert memory(Layout(shard=2), zero=2).parameters == 457 * 4


def test_recomputation_keeps_the_inputs_of_blocks_and_one_block():
    assert memory(recompute=True).activations == (4 * 3 + 10) * 4


def test_a_pipeline_holds_the_activations_of_several_micro_batches():
    first = memory(Layout(pipeline=2), num_micro_batches=8)
    # The first rank has the most parameters, and two blocks for two micro-batches.
    assert first.parameters == (50 + 200) * 4
    assert first.activations == 2 * 2 * 10 * 4
    assert memory(Layout(pipeline=2), num_micro_batches=8, schedule="gpipe").activations == 8 * 2 * 10 * 4


def test_both_ends_of_a_pipeline_have_tied_weights():
    model = dataclasses.replace(MODEL, tied_parameters=40)
    first, last = divide_parts(4, 2, "1f1b")
    assert rank_parameters(model, first, 1) == 50 + 200
    assert rank_parameters(model, last, 1) == 200 + 7 + 40
    (alone,) = divide_parts(4, 1, "1f1b")
    assert rank_parameters(model, alone, 1) == model.parameters


def test_mixed_precision_keeps_a_cast_of_the_weights():
    states = dataclasses.replace(ADAM, cast=2)
    found = estimate_memory(MODEL, Candidate(Layout(pipeline=2), num_micro_batches=8), states, precision="bf16")
    assert found.gathered == 250 * 2
    assert found.activations == 2 * 2 * 10 * 2


def estimate(candidate):
    return estimate_memory(SMALL_GPT, candidate, ADAM, precision="fp32")


@given(candidates(), st.sampled_from(["shard", "tensor"]))
def test_more_ranks_of_an_axis_never_need_more_memory_each(candidate, axis):
    size = candidate.layout.size_of(axis)
    layout = dataclasses.replace(candidate.layout, **{axis: 2 * size})
    more = dataclasses.replace(candidate, layout=layout)
    assert estimate(more).total <= estimate(candidate).total


@given(candidates())
def test_larger_passes_need_more_memory_and_recomputation_less(candidate):
    larger = dataclasses.replace(candidate, micro_batch=2 * candidate.micro_batch)
    assert estimate(candidate).total < estimate(larger).total
    kept = dataclasses.replace(candidate, recompute=False)
    assert estimate(dataclasses.replace(candidate, recompute=True)).total <= estimate(kept).total


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
def test_without_a_pipeline_one_micro_batch_is_held(schedule, num_micro_batches):
    assert held_micro_batches(schedule, 0, 1, num_micro_batches) == 1
