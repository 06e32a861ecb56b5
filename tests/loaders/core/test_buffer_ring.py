"""Whose memory it is: what is held stays as it is, what is let go of comes again."""

import weakref

import numpy as np
import pytest
import torch

from datasvc.loaders.core.pinned import BufferRing

HOLDERS = {
    "the buffer": lambda buffer: buffer,
    "a view": lambda buffer: buffer[:2],
    "a view of a view": lambda buffer: buffer[:2][1:],
    "a tensor": torch.from_numpy,
    "a tensor of a view": lambda buffer: torch.from_numpy(buffer[1:])[:1],
    "a memoryview": memoryview,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_buffer_is_not_lent_again_while_anything_refers_to_it(hold):
    ring = BufferRing((4, 3), np.int64, keep=2)
    first = weakref.ref(ring.take())
    held = hold(ring.take())
    assert ring.take() is not first()
    del held
    assert ring.take() is first()


def test_of_more_buffers_than_are_kept_the_rest_go_with_their_holders():
    ring = BufferRing((4,), np.uint8, keep=2)
    held = [ring.take() for _ in range(5)]
    assert len({id(each) for each in held}) == 5
    lent = [weakref.ref(each) for each in held]
    del held
    assert [each() is not None for each in lent] == [True, True, False, False, False]
    assert ring.take() is lent[0]()
