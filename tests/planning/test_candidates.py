"""Which layouts and candidates are tried."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.candidates import Candidate, Choices, enumerate_candidates, enumerate_layouts
from datasvc.planning.layout import Layout, ModelSizes

SIZES = ModelSizes(layers=8, heads=4, width=64, block=32, splits_tokens=True)
ONE = Choices(recompute=(False,), schedules=("1f1b",), zero_stages=(3,))


def find(layout, *, global_batch=8, sizes=SIZES, choices=ONE):
    return enumerate_candidates(layout, global_batch=global_batch, sizes=sizes, choices=choices)


@given(st.integers(1, 64))
def test_every_layout_of_the_ranks_occurs_once(world_size):
    found = list(enumerate_layouts(world_size))
    assert len(found) == len(set(found))
    assert all(layout.size == world_size for layout in found)
    assert found[0] == Layout(data=world_size)


@pytest.mark.parametrize(("world_size", "number"), [(1, 1), (2, 5), (4, 15), (6, 25), (64, 210)])
def test_the_number_of_layouts_is_that_of_divisions_into_five_factors(world_size, number):
    assert len(list(enumerate_layouts(world_size))) == number


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="there are 0 ranks; expected at least 1"):
        list(enumerate_layouts(0))


def test_passes_are_the_powers_of_two_that_divide_the_batch_of_a_data_rank():
    candidates, reason = find(Layout(data=2), global_batch=24)
    assert [(each.micro_batch, each.num_micro_batches) for each in candidates] == [(1, 12), (2, 6), (4, 3)]
    assert reason == ""


def test_given_passes_are_limited_to_the_batch():
    candidates, _ = find(Layout(), choices=Choices(micro_batches=(3, 16), recompute=(False,)))
    assert [(each.micro_batch, each.num_micro_batches) for each in candidates] == [(3, 3), (8, 1)]


def test_settings_without_effect_are_not_varied():
    everything = Choices(micro_batches=(1,))
    candidates, _ = find(Layout(tensor=2), choices=everything, sizes=ModelSizes(heads=4))
    assert candidates == [Candidate(Layout(tensor=2), 1, 8)]
    assert len(find(Layout(shard=2), choices=everything)[0]) == 3 * 2
    assert len(find(Layout(pipeline=2), choices=everything)[0]) == 4 * 2


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        (Layout(data=2), {0}),
        (Layout(data=2, shard=2), {1, 2, 3}),
        (Layout(shard=2, tensor=2), {2, 3}),
        (Layout(context=2), {3}),
        (Layout(data=2, tensor=2), {3}),
        (Layout(data=2, pipeline=2), {0}),
        (Layout(data=2, pipeline=2, context=2), {3}),
        (Layout(tensor=2), {0}),
    ],
)
def test_stages_of_zero_are_those_that_the_training_program_has(layout, stages):
    assert {each.zero for each in find(layout, choices=Choices())[0]} == stages


def test_zero_1_is_not_for_layouts_that_divide_the_model():
    candidates, reason = find(Layout(shard=2, tensor=2), choices=Choices(zero_stages=(1,)))
    assert candidates == []
    assert "allow --zero 2 or 3 for layout shard=2,tensor=2" in reason


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(data=16), "data x shard may be 1, 2, 4, 8"),
        (Layout(tensor=8), "the model has 4; tensor may be 1, 2, 4"),
        (Layout(pipeline=16), "at least 16 of them"),
        (Layout(context=64), "context may be 1, 2, 4, 8, 16, 32"),
    ],
)
def test_a_layout_that_does_not_divide_has_the_sizes_that_would_do(layout, reason):
    candidates, found = find(layout)
    assert candidates == []
    assert reason in found


def test_a_convolutional_net_is_for_data_and_shard_only():
    sizes = ModelSizes()
    assert find(Layout(data=2, shard=2), sizes=sizes)[0]
    for axis in ("tensor", "pipeline", "context"):
        assert "model" in find(Layout(**{axis: 2}), sizes=sizes)[1]


def test_a_pass_of_no_samples_is_refused():
    with pytest.raises(ConfigError, match="micro_batch is 0; expected at least 1"):
        Choices(micro_batches=(0,))
