"""Who holds what: planned from what the ranks describe, with an error that names the tensor if it does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.models.saving.shared_plan import HeldTensor, merge_skeletons, outline, plan_replicas, plan_shared
from datasvc.models.tensors.state_tree import flatten

KEYS = st.text("ab$", max_size=2) | st.integers(0, 3)
TREES = st.recursive(
    st.integers() | st.none() | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def skeleton_of(*names):
    return {name: {"$tensor": name} for name in names}


def whole(shape, dtype="float32"):
    return HeldTensor(dtype, shape, ((0,) * len(shape), shape))


def row(number, shape=(2, 3)):
    return HeldTensor("float32", shape, ((number, 0), (1, shape[1])))


def test_equal_ranks_have_the_plan_of_replicas():
    tensors = {"b": whole((2, 3)), "a": whole(())}
    planned = plan_shared([tensors] * 3, [outline(skeleton_of("b", "a"))] * 3)
    assert planned == plan_replicas({"a": ("float32", ()), "b": ("float32", (2, 3))}, 3)


def test_parts_and_tensors_of_some_ranks_are_planned():
    held = [
        {"w": row(0), "first": whole((5,)), "none": HeldTensor("int8", (0,), None)},
        {"w": row(1), "first": whole((5,)), "none": HeldTensor("int8", (0,), None)},
        {"w": row(0), "last": whole((4,))},
        {"w": HeldTensor("float32", (2, 3), None), "last": whole((4,))},
    ]
    planned = plan_shared(held, [outline(skeleton_of(*tensors)) for tensors in held])
    assert [(block.name, block.box[0], block.ranks) for block in planned.blocks] == [
        ("first", (0,), (0, 1)),
        ("last", (0,), (2, 3)),
        ("w", (0, 0), (0, 2)),
        ("w", (1, 0), (1,)),
    ]
    assert planned.tensors["none"] == ("int8", (0,))
    assert planned.skeleton_ranks == (2,), "rank 2 is the first with the keys of the second stage"


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([{"w": row(0)}, {"w": row(0)}], "each element of tensor 'w' of shape \\[2, 3\\] exactly once"),
        ([{"w": row(0)}, {"w": whole((2, 3))}], "they hold \\[1, 3\\] at \\[0, 0\\] on rank 0, \\[2, 3\\]"),
        ([{"w": HeldTensor("float32", (1,), None)}], "they hold nothing"),
        (
            [{"w": whole((3,))}, {"w": whole((4,))}],
            "rank 0 has 'w float32\\[3\\]' where rank 1 has 'w float32\\[4\\]'",
        ),
    ],
)
def test_what_does_not_fit_is_named(held, message):
    with pytest.raises(ConfigError, match=message):
        plan_shared(held, [outline(skeleton_of("w"))] * len(held))


def test_a_tensor_that_the_merged_state_could_not_reach_is_refused():
    held = [{"groups.0": whole((1,))}, {"groups.0": whole((1,)), "groups.1": whole((1,))}]
    outlines = [outline({"groups": [{"$tensor": name} for name in tensors]}) for tensors in held]
    with pytest.raises(ConfigError, match=r"rank 1 has the tensor 'groups\.1' where a lower rank has another list"):
        plan_shared(held, outlines)


def test_states_of_stages_are_merged_by_key_and_values_are_those_of_the_first():
    states = [
        {"model": {"a": 1, 7: 2}, "pair": ({"x": 1}, 2), "step": 3, "params": ["a"]},
        {"model": {"b": 4, 7: 5}, "pair": ({"y": 6}, 7), "step": 8, "params": ["b", "c"], "more": [9]},
    ]
    merged = merge_skeletons(*[flatten(state)[0] for state in states])
    expected = {
        "model": {"a": 1, 7: 2, "b": 4},
        "pair": ({"x": 1, "y": 6}, 2),
        "step": 3,
        "params": ["a"],
        "more": [9],
    }
    assert merged == flatten(expected)[0]


@given(TREES)
def test_a_state_merged_with_itself_is_itself(tree):
    skeleton = flatten(tree)[0]
    assert merge_skeletons(skeleton, skeleton) == skeleton
    assert outline(merge_skeletons(outline(skeleton), outline(skeleton))) == outline(skeleton)
