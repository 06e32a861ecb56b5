import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.models.tensors.chunks import intersect, is_tiling, plan_chunks, slices

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return start, tuple(draw(st.integers(1, size - begin)) for size, begin in zip(shape, start, strict=True))


full_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(8, 200))
def test_chunks_tile_a_tensor_in_order_and_none_is_larger_than_asked_for(shape, item_bytes, chunk_bytes):
    boxes = plan_chunks(shape, item_bytes, chunk_bytes=chunk_bytes)
    assert is_tiling(shape, boxes)
    assert all(math.prod(size) * item_bytes <= chunk_bytes for _, size in boxes)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    in_order = [numbers[slices(box)].ravel() for box in boxes]
    assert np.concatenate([*in_order, ()]).tolist() == numbers.ravel().tolist(), (
        "each one is a run of the row-major order"
    )


@given(st.data(), full_shapes)
def test_boxes_tile_exactly_when_every_element_is_covered_once(data, shape):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    if data.draw(st.booleans()):  # make tilings likely
        boxes = [*boxes, *plan_chunks(shape, 1, chunk_bytes=data.draw(st.integers(1, 20)))]
        boxes = [
            box for number, box in enumerate(boxes) if not any(intersect(box, other) for other in boxes[:number])
        ]
    covered = np.zeros(shape, int)
    for box in boxes:
        covered[slices(box)] += 1
    assert is_tiling(shape, boxes) == bool((covered == 1).all())


@given(st.data(), full_shapes)
def test_what_two_boxes_share_is_what_numpy_says(data, shape):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    shared = np.intersect1d(numbers[slices(a)], numbers[slices(b)])
    both = intersect(a, b)
    assert (numbers[slices(both)].ravel().tolist() if both else []) == shared.tolist()


def test_a_tiling_that_no_straight_cut_takes_apart_is_one():
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert is_tiling((3, 3), boxes)
    assert not is_tiling((3, 3), [*boxes[:-1], ((1, 0), (1, 1))])


@pytest.mark.parametrize("along", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_hundred_thousand_chunks_are_checked_at_once(along):
    boxes = [((number, 0), (1, 4)) if along == 0 else ((0, number), (4, 1)) for number in range(100_000)]
    shape = (100_000, 4) if along == 0 else (4, 100_000)
    assert is_tiling(shape, boxes)
    assert not is_tiling(shape, [*boxes[:-1], boxes[0]])
