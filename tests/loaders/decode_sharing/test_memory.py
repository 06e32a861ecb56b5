"""Batches as bytes, and the memory in which jobs share them."""

import gc
import os
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from datasvc.loaders.decode_sharing.memory import KEY_BYTES, MappedBatches, SharedBuffer, pack, size_of, unpack

KEY = b"k" * KEY_BYTES


def write(batch):
    parts = pack(batch)
    memory = SharedBuffer(size_of(parts))
    memory.write(KEY, parts)
    return memory


def read(memory, key=KEY, mapped=None):
    """Read as another process does: by a descriptor that can only read."""
    descriptor = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDONLY)
    try:
        return (mapped or MappedBatches(4)).read(descriptor, key)
    finally:
        os.close(descriptor)


def of_any_type():
    kinds = [np.bool_, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]
    shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    return arrays.arrays(st.sampled_from(kinds), shapes)


@given(st.dictionaries(st.text(max_size=3), of_any_type(), max_size=4))
def test_arrays_come_back_as_they_were(batch):
    memory = write(batch)
    found = read(memory)
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
    memory = write(given_tensors)
    found = read(memory)
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


def test_memory_is_in_use_until_the_last_view_is_gone():
    memory = write({"a": np.arange(10), "t": torch.arange(4)})
    gc.disable()  # what only the collector finds keeps memory from being used again
    try:
        batch = read(memory)
        part = batch["t"][1:].numpy()[1:]
        del batch
        assert not memory.try_lock()
        assert part.tolist() == [2, 3]
        del part
        assert memory.try_lock()
    finally:
        gc.enable()
    memory.close()


def test_a_forked_child_that_drops_a_batch_leaves_it_to_its_parent():
    memory = write(np.arange(10))
    batch = read(memory)
    if (child := os.fork()) == 0:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert not memory.try_lock()
    del batch
    assert memory.try_lock()
    memory.close()


def test_a_batch_outlives_the_job_that_wrote_it():
    memory = write(np.arange(5000))
    batch = read(memory)
    memory.close()
    assert batch.tolist() == list(range(5000))


def test_what_a_job_writes_into_its_batch_no_other_sees():
    memory = write(np.arange(5000))
    first = read(memory)
    first[...] = 0
    second = read(memory)
    assert second.tolist() == list(range(5000))
    assert not first.any()
    memory.close()


def test_memory_that_is_written_again_is_another_batch():
    memory = write(np.arange(5000))
    assert memory.try_lock()
    assert read(memory) is None
    memory.write(b"l" * KEY_BYTES, pack(np.arange(10)))
    memory.unlock()
    assert read(memory) is None
    assert read(memory, b"l" * KEY_BYTES).tolist() == list(range(10))
    memory.close()


@pytest.mark.parametrize("is_written", [False, True])
def test_the_next_batch_in_the_same_memory_is_seen_whatever_was_written_into_the_last(is_written):
    mapped, memory = MappedBatches(4), write(np.arange(5000))
    for number in range(5):
        assert memory.try_lock()
        memory.write(KEY, pack(np.arange(number, number + 5000)))
        memory.unlock()
        batch = read(memory, mapped=mapped)
        assert batch.tolist() == list(range(number, number + 5000))
        if is_written:
            batch[number * 700] = -1
        del batch
        assert read(memory, b"l" * KEY_BYTES, mapped=mapped) is None
        assert len(mapped._kept) == 1
    memory.close()


def test_two_readers_of_one_memory_have_mappings_of_their_own():
    mapped, memory = MappedBatches(4), write(np.arange(5000))
    first, second = read(memory, mapped=mapped), read(memory, mapped=mapped)
    first[...] = 0
    assert second.tolist() == list(range(5000))
    memory.close()


def test_no_more_mappings_and_files_are_kept_than_asked_for():
    before = len(os.listdir("/proc/self/fd"))
    mapped = MappedBatches(2)
    for _ in range(5):
        memory = write(np.arange(10))
        assert len(read(memory, mapped=mapped)) == 10
        memory.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 3
    mapped.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_memory_of_a_batch_is_none(tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "long").write_bytes(b"x" * 100)
    for path in (tmp_path / "short", tmp_path / "long", tmp_path):
        descriptor = os.open(path, os.O_RDONLY)
        assert MappedBatches(4).read(descriptor, KEY) is None
        os.close(descriptor)


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
