import math

from hypothesis import given
from hypothesis import strategies as st

from datasvc.models.saving.partition import SMALL_BYTES, partition_writes
from datasvc.models.saving.shared_plan import BlockId, SharedBlock, SharedPlan, plan_replicas
from datasvc.models.tensors.chunks import is_tiling

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
