"""Who holds what: planned from what the ranks describe, with an error that names the tensor if it does not fit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.models.saving.shared_plan import (
    SMALL_BYTES,
    BlockId,
    HeldTensor,
    SharedBlock,
    SharedPlan,
    merge_skeletons,
    outline,
    partition_writes,
    plan_replicas,
    plan_shared,
)
from datasvc.models.tensors.chunks import is_tiling
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


SHAPES = st.lists(st.integers(0, 40), max_size=2).map(tuple) | st.sampled_from(
    [(3000, 2000), (17000, 300), (40_000,)]
)
TENSORS = st.dictionaries(
    st.text("abcd", min_size=1, max_size=3), st.tuples(st.sampled_from(["float32", "int8"]), SHAPES), max_size=8
)


def block_of(name, shape, ranks):
    return SharedBlock(name, ((0,) * len(shape), shape), ranks)


@given(tensors=TENSORS, num_ranks=st.integers(1, 5), data=st.data())
def test_every_element_is_dealt_once_and_large_ones_evenly(tensors, num_ranks, data):
    ids = {BlockId(name, (0,) * len(shape)) for name, (_, shape) in tensors.items()}
    first_only = data.draw(st.sets(st.sampled_from(sorted(ids)))) if tensors else set()
    assigned = partition_writes(plan_replicas(tensors, num_ranks), num_ranks, first_only=first_only)
    again = plan_replicas(dict(reversed(tensors.items())), num_ranks)
    assert assigned == partition_writes(again, num_ranks, first_only=first_only)
    assert len(assigned) == num_ranks
    shares = [(rank, name, box) for rank, chunks in enumerate(assigned) for name, box in chunks]
    alone = {name for name, _ in first_only}
    for name, (_, shape) in tensors.items():
        assert is_tiling(shape, [box for _, tensor, box in shares if tensor == name])
        assert name not in alone or all(rank == 0 for rank, tensor, _ in shares if tensor == name)
    load, largest, small = [0] * num_ranks, 0, 0
    for rank, name, box in shares:
        nbytes = math.prod(box[1]) * (4 if tensors[name][0] == "float32" else 1)
        assert nbytes >= SMALL_BYTES or rank == 0, "the small ones share an object"
        load[rank] += nbytes
        small += nbytes if nbytes < SMALL_BYTES else 0
        largest = max(largest, nbytes)
    if not first_only:
        assert max(load) <= max(small, sum(load) / num_ranks + largest)


@given(data=st.data(), num_ranks=st.integers(1, 5))
def test_a_block_is_stored_by_ranks_that_hold_it(data, num_ranks):
    holders = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    blocks = tuple(block_of(f"t{number}", (40_000,), data.draw(holders)) for number in range(6))
    plan = SharedPlan({block.name: ("float32", (40_000,)) for block in blocks}, blocks)
    assigned = partition_writes(plan, num_ranks, first_only={blocks[0].id})
    rank_of = {name: rank for rank, chunks in enumerate(assigned) for name, _ in chunks}
    assert all(rank_of[block.name] in block.ranks for block in blocks)
    assert rank_of["t0"] == blocks[0].ranks[0]


def test_replicas_share_the_work_and_parts_stay_where_they_are():
    shape = (4, 100_000)
    boxes = [((row, 0), (1, 100_000)) for row in range(4)]
    # Two replicas of two halves each: ranks 0 and 2 have the first rows, ranks 1 and 3 the last.
    blocks = tuple(SharedBlock(name, boxes[row], (row % 2, row % 2 + 2)) for name in ("a", "b") for row in range(4))
    assigned = partition_writes(SharedPlan(dict.fromkeys(("a", "b"), ("float32", shape)), blocks), 4)
    assert [len(chunks) for chunks in assigned] == [2, 2, 2, 2]
    alone = tuple(SharedBlock("a", boxes[row], (row,)) for row in range(4))
    assert partition_writes(SharedPlan({"a": ("float32", shape)}, alone), 4) == [[("a", box)] for box in boxes]
