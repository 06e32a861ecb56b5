import os

import pytest
import torch

from datasvc.models.saving import staging_buffer
from datasvc.models.saving.staging_buffer import HostBuffer, plan_offsets


def odd_tensors():
    base = torch.arange(60.0).reshape(3, 4, 5)
    return {
        "strided": base.transpose(0, 2),
        "slice": base[:, ::2],
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "no columns": torch.empty(4, 0, dtype=torch.bfloat16),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "expanded": torch.tensor([3.0]).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "bool": torch.tensor([True, False]),
    }


def bits(tensor):
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def test_copies_are_the_same_bits_in_the_same_shape_and_need_no_gradient():
    tensors = odd_tensors()
    copies = HostBuffer().copy(tensors)
    assert copies.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        copied = copies.tensors[name]
        assert (copied.dtype, copied.shape, copied.requires_grad) == (tensor.dtype, tensor.shape, False), name
        assert bits(copied) == bits(tensor), name
        assert copied.is_contiguous()
    assert copies.wait() == 0.0


def test_nothing_that_changes_later_reaches_a_copy_and_no_copy_reaches_the_original():
    weight = torch.nn.Parameter(torch.zeros(1000))
    copied = HostBuffer().copy({"w": weight}).tensors["w"]
    with torch.no_grad():
        weight += 1
    assert not copied.any()
    copied += 5
    assert (weight == 1).all()


def test_tied_tensors_are_copied_once_and_others_of_the_same_memory_are_not_confused():
    weight = torch.arange(1000.0)
    tensors = {
        "a": weight,
        "tied": weight,
        "again": weight.view(1000),
        "head": weight[:500],
        "as": weight.view(10, 100),
    }
    places, nbytes = plan_offsets(tensors)
    assert places["a"] == places["tied"] == places["again"]
    assert len(set(places.values())) == 3
    assert nbytes == 4032 + 2048 + 4032  # each rounded up to 64
    square = torch.arange(9.0).view(3, 3)
    tensors |= {"square": square, "turned": square.t()}
    copies = HostBuffer().copy(tensors)
    assert copies.tensors["a"] is copies.tensors["tied"]
    assert all(bits(copies.tensors[name]) == bits(tensor) for name, tensor in tensors.items())


def test_memory_is_used_again_and_grows_only_for_what_does_not_fit():
    buffer = HostBuffer()
    first = buffer.copy({"w": torch.zeros(1000)}).tensors["w"]
    size = buffer.capacity_bytes
    second = buffer.copy({"w": torch.ones(900)}).tensors["w"]
    assert (buffer.capacity_bytes, first.data_ptr()) == (size, second.data_ptr())
    assert bits(buffer.copy({"w": torch.full((5000,), 3.0)}).tensors["w"]) == bits(torch.full((5000,), 3.0))
    assert buffer.capacity_bytes >= 20_000
    other = HostBuffer()
    other.reserve_like(buffer)
    assert other.capacity_bytes == buffer.capacity_bytes
    buffer.release()
    assert buffer.capacity_bytes == 0
    other.reserve_like(buffer)
    assert other.capacity_bytes > 0


def test_a_forked_child_holds_no_copy_of_the_memory():
    buffer = HostBuffer()
    copied = buffer.copy({"w": torch.ones(1 << 20)}).tensors["w"]
    pid = os.fork()
    if not pid:
        os._exit(int(copied[0].item()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert copied.sum() == 1 << 20


def test_memory_that_cannot_be_pinned_is_used_all_the_same_and_not_asked_for_again(monkeypatch):
    asked = []
    monkeypatch.setattr(staging_buffer, "_pin", lambda memory, device: asked.append((memory.numel(), device)))
    buffer, other, device = HostBuffer(), HostBuffer(), torch.device("cuda", 1)
    for _ in range(3):
        buffer._grow(5000, pin_for=device)
    other.reserve_like(buffer)
    other._grow(5000, pin_for=device)
    assert asked == [(8192, device)] * 2


def test_tensors_without_elements_need_no_memory():
    class OnCuda(torch.Tensor):
        device, is_cuda = torch.device("cuda", 0), True

    copied = HostBuffer().copy({"none": torch.empty(0, 3).as_subclass(OnCuda)})
    assert copied.tensors["none"].shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_tensor_is_copied_as_it_was_when_asked_though_nobody_waited():
    weights = torch.zeros(64 << 20, device="cuda")
    buffer = HostBuffer()
    copies = buffer.copy({"w": weights})
    for _ in range(10):
        weights += 1
    assert copies.wait() > 0
    assert not copies.tensors["w"].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_tensors_that_are_conjugated_or_negated_when_read_are_copied_as_they_are_read():
    real = torch.randn(16 << 20, device="cuda")
    tensors = {"conjugate": torch.complex(real, real).conj(), "negated": torch.complex(real, real).conj().imag}
    for _ in range(3):
        copies = HostBuffer().copy(tensors)
        copies.wait()
        for name, tensor in tensors.items():
            expected = tensor.resolve_conj().resolve_neg().cpu()
            assert torch.equal(copies.tensors[name], expected), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_tensor_of_another_stream_may_be_freed_while_it_is_copied():
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        weights = torch.ones(64 << 20, device="cuda")
    own.synchronize()
    buffer = HostBuffer()
    buffer.copy({"w": torch.zeros(64 << 20, device="cuda")}).wait()  # to pin its memory waits for the device
    torch.cuda._sleep(200_000_000)  # the current stream comes to the copy late
    copies = buffer.copy({"w": weights})
    del weights
    with torch.cuda.stream(own):
        torch.zeros(64 << 20, device="cuda")  # in the same memory, if nobody said that it is read
    copies.wait()
    assert copies.tensors["w"].all()
