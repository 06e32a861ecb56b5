import math

from hypothesis import given
from hypothesis import strategies as st

from datasvc.models.saving.partition import SMALL_BYTES, partition_writes
from datasvc.models.tensors.chunks import is_tiling

SHAPES = st.lists(st.integers(0, 40), max_size=2).map(tuple) | st.sampled_from(
    [(3000, 2000), (17000, 300), (40_000,)]
)
TENSORS = st.dictionaries(
    st.text("abcd", min_size=1, max_size=3), st.tuples(st.sampled_from(["float32", "int8"]), SHAPES), max_size=8
)


@given(tensors=TENSORS, num_ranks=st.integers(1, 5), data=st.data())
def test_every_element_is_dealt_once_and_large_ones_evenly(tensors, num_ranks, data):
    rank0_only = data.draw(st.sets(st.sampled_from(sorted(tensors)))) if tensors else set()
    assigned = partition_writes(tensors, num_ranks, rank0_only=rank0_only)
    assert assigned == partition_writes(dict(reversed(tensors.items())), num_ranks, rank0_only=rank0_only)
    assert len(assigned) == num_ranks
    shares = [(rank, name, box) for rank, chunks in enumerate(assigned) for name, box in chunks]
    for name, (_, shape) in tensors.items():
        assert is_tiling(shape, [box for _, tensor, box in shares if tensor == name])
        assert name not in rank0_only or all(rank == 0 for rank, tensor, _ in shares if tensor == name)
    load, largest, small = [0] * num_ranks, 0, 0
    for rank, name, box in shares:
        nbytes = math.prod(box[1]) * (4 if tensors[name][0] == "float32" else 1)
        assert nbytes >= SMALL_BYTES or rank == 0, "the small ones share an object"
        load[rank] += nbytes
        small += nbytes if nbytes < SMALL_BYTES else 0
        largest = max(largest, nbytes)
    if not rank0_only:
        assert max(load) <= max(small, sum(load) / num_ranks + largest)
