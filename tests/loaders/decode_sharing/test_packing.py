"""Batches as bytes, and the memory in which they are lent."""

import fcntl
import gc
import mmap
import os
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from datasvc.loaders.decode_sharing.mapped_batch import MappedBatches
from datasvc.loaders.decode_sharing.memory import SharedBuffer, write_batch
from datasvc.loaders.decode_sharing.packing import pack, unpack


def through_memory(batch, spare=None, borrowed=None):
    memory, spans = write_batch(batch, spare)
    return memory, (borrowed or MappedBatches(4)).read(1, memory.number, memory.descriptor, spans)


def of_any_type():
    kinds = [np.bool_, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]
    shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    return arrays.arrays(st.sampled_from(kinds), shapes)


@given(st.dictionaries(st.text(max_size=3), of_any_type(), max_size=4))
def test_arrays_come_back_as_they_were(batch):
    memory, found = through_memory(batch)
    assert found.keys() == batch.keys()
    for name, array in batch.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    memory.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64", "uint8", "bool"])
def test_tensors_come_back_with_their_type_and_order_of_axes(dtype):
    plain = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(getattr(torch, dtype))
    given_tensors = [
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.permute(3, 1, 0, 2),
        plain[:, :, 1:3, ::2],  # part of something larger
        plain[0, 0, 0, 0],
        plain[:0],
    ]
    memory, found = through_memory(given_tensors)
    for expected, tensor in zip(given_tensors, found, strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor, expected)
    assert found[1].stride() == given_tensors[1].stride()
    assert found[2].stride() == given_tensors[2].stride()
    memory.close()


def test_the_header_does_not_grow_with_the_arrays_and_nothing_is_copied_when_read():
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    parts = pack({"a": array, "b": [1, None, "x"], "c": torch.from_numpy(array)})
    assert len(parts[-1]) < 1000
    found = unpack([memoryview(part) for part in parts])
    assert np.shares_memory(found["a"], array)
    assert found["c"].data_ptr() == array.ctypes.data
    assert found["b"] == [1, None, "x"]


@pytest.mark.parametrize("is_written", [False, True])
def test_the_next_batch_in_the_same_memory_is_seen_whatever_was_written_into_the_last(is_written):
    borrowed, memory = MappedBatches(4), None
    for number in range(5):
        memory, batch = through_memory(np.arange(number, number + 5000), memory, borrowed)
        assert batch.tolist() == list(range(number, number + 5000))
        if is_written:
            batch[number * 700] = -1
        del batch
        assert borrowed.collect() == [1]
        assert len(borrowed._kept) == (not is_written)
    memory.close()


def test_two_loans_of_the_same_memory_do_not_see_what_is_written_into_the_other():
    borrowed = MappedBatches(4)
    memory, first = through_memory(np.arange(5000), None, borrowed)
    first[...] = 0
    memory, second = through_memory(np.arange(5000), memory, borrowed)
    assert second.tolist() == list(range(5000))
    assert not first.any()
    memory.close()


def test_a_loan_lasts_until_the_last_view_is_gone_and_outlives_its_lender():
    borrowed = MappedBatches(4)
    memory, batch = through_memory({"a": np.arange(10), "t": torch.arange(4)}, None, borrowed)
    memory.close()
    part = batch["t"][1:].numpy()[1:]
    del batch
    gc.collect()
    assert (borrowed.collect(), part.tolist()) == ([], [2, 3])
    del part
    gc.collect()
    assert borrowed.collect() == [1]


def test_no_more_mappings_are_kept_than_asked_for():
    borrowed = MappedBatches(2)
    for _ in range(5):
        memory, batch = through_memory(np.arange(10), None, borrowed)
        del batch
        borrowed.collect()
        memory.close()
    assert len(borrowed._kept) == 2


def test_a_batch_that_was_packed_is_not_kept():
    array = np.arange(10)
    batch = {"a": array, "t": torch.from_numpy(array)}
    gone = []
    weakref.finalize(batch["t"], gone.append, 1)
    gc.disable()  # what only the collector finds keeps memory of the decoder from being used again
    try:
        pack(batch)
        del batch
        assert gone == [1]
    finally:
        gc.enable()


def test_a_larger_batch_gets_new_memory_and_a_smaller_one_the_old():
    first, _ = write_batch(np.zeros(1000), None)
    second, _ = write_batch(np.zeros(10), first)
    assert second is first
    third, _ = write_batch(np.zeros(100_000), first)
    assert third is not first
    first.close()
    third.close()


def test_nobody_who_gets_the_memory_can_change_or_shrink_it():
    memory = SharedBuffer(4096)
    copy = os.dup(memory.descriptor)
    with pytest.raises(PermissionError):
        mmap.mmap(copy, 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(copy, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(copy)
    memory.close()
