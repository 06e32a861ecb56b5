"""Which copy runs when, and when memory that it reads is decoded to again."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.augment.augment import AugmentConfig
from datasvc.loaders.augment.edits import plan_edit
from datasvc.loaders.decode.gpu import device_stream
from datasvc.loaders.decode.gpu.device_stream import CudaStream, current_gpu, place
from datasvc.loaders.decode.gpu.upload import ColourBackend, PinnedRing, UploadBackend
from datasvc.loaders.profiling.step_profiler import StepProfiler
from tests.loaders.decode.recorded_stream import RecordedStream
from tests.loaders.decode.test_backends import broken, config, decode, on_cpu, photos, windows

JITTER = AugmentConfig(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)


def upload(stream, **settings):
    return UploadBackend(config(**settings), backend="cpu", device="cpu", profiler=StepProfiler(), stream=stream)


def wait_until_decoded(backend):
    for fed in backend._fed:
        for part in fed.run.parts:
            part.exception()


def edit(count, transform=None):
    return plan_edit(np.arange(count), seed=3, epoch=1, colours=JITTER, transform=transform)


def test_the_next_batch_is_copied_while_the_caller_uses_one():
    stream = RecordedStream()
    backend = upload(stream)
    for seed in (0, 20, 40):
        backend.feed(photos(8, seed), windows(8))
    wait_until_decoded(backend)
    backend.take()
    assert stream.log == [("copy", 0), ("hand over", 0), ("copy", 1)]
    assert backend.take().images is stream.handed[1]
    assert stream.log[3:] == [("hand over", 1), ("copy", 2)]
    backend.take()
    assert stream.log[5:] == [("hand over", 2)]
    backend.close()


def test_a_batch_that_was_not_decoded_at_the_last_take_is_copied_when_another_is_fed():
    stream = RecordedStream()
    backend = upload(stream)
    backend.feed(photos(8, 0), windows(8))
    wait_until_decoded(backend)
    assert stream.log == []
    backend.feed(photos(8, 20), windows(8))
    assert stream.log == [("copy", 0)]
    wait_until_decoded(backend)
    backend.feed(photos(8, 40), windows(8))
    assert stream.log == [("copy", 0)]  # one ahead of the caller takes memory enough
    backend.take()
    assert stream.log == [("copy", 0), ("hand over", 0), ("copy", 1)]
    backend.close()


def test_without_memory_on_the_device_smaller_batches_are_advised_and_another_runtime_error_is_left_alone(
    monkeypatch,
):
    backend = upload(RecordedStream())
    for said, kind, message in (
        ("CUDA out of memory. Tried to allocate 20 MiB", DeviceError, r"'cpu'; .* smaller batch_size or prefetch; "),
        ("another", RuntimeError, "^another$"),
    ):

        def fail(array, said=said):
            raise RuntimeError(said)

        monkeypatch.setattr(backend._stream, "copy", fail)
        backend.feed(photos(8), windows(8))
        with pytest.raises(kind, match=message):
            backend.take()
        backend._stream.is_active = False
    backend.close()


def test_memory_is_decoded_to_again_only_when_the_copy_from_it_is_done():
    stream = RecordedStream()
    backend = upload(stream, prefetch=1)
    for number in range(3):  # as many as it has slots
        decode(backend, photos(8, seed=20 * number), windows(8))
    kept = [slot.copy() for slot in stream.slots]
    assert len(stream.slots) == 3
    stream.moments[1].is_past = True
    stream.log.clear()
    # All are read but what lies behind a copy that is not done: the host waits for the oldest, and no other.
    backend.feed(photos(8, seed=80), windows(8))
    assert stream.log == [("host waits", 0)]
    wait_until_decoded(backend)
    assert [np.array_equal(slot, before) for slot, before in zip(stream.slots, kept, strict=True)] == [
        False,
        True,
        True,
    ]
    backend.take()
    backend.feed(photos(8, seed=90), windows(8))  # the second copy is done: no wait
    wait_until_decoded(backend)
    assert stream.log == [("host waits", 0), ("copy", 0), ("hand over", 3)]
    assert np.array_equal(stream.slots[2], kept[2])
    backend.close()


def test_closing_waits_for_every_copy_before_its_memory_goes():
    stream = RecordedStream()
    backend = upload(stream)
    for _ in range(2):
        decode(backend, photos(8), windows(8))
    stream.log.clear()
    backend.close()
    assert stream.log == [("host waits", 0), ("host waits", 1)]


def test_batches_that_are_fed_beyond_the_ring_get_memory_of_their_own_and_empty_ones_need_none():
    stream = RecordedStream()
    ring = PinnedRing(lambda: stream.allocate((2, 2)), keep=1)
    first, second = ring.take(), ring.take()
    assert first is not second
    ring.release(first, stream.record())
    assert ring.take() is first
    backend = upload(stream)
    slots = len(stream.slots)
    assert decode(backend, [], windows(0)).images.shape == (0, 3, 24, 24)
    assert len(stream.slots) == slots
    backend.close()


@pytest.mark.parametrize("output", ["uint8", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_is_uploaded_is_what_threads_make_of_it(output, layout):
    images, crops = photos(5), windows(5)
    images[2] = broken(images[2])
    threads, backend = on_cpu(output=output, layout=layout), upload(RecordedStream(), output=output, layout=layout)
    expected, found = (decode(each, images, crops) for each in (threads, backend))
    threads.close()
    backend.close()
    assert list(found.bad) == list(expected.bad) == [2]
    wanted = torch.as_tensor(expected.images)
    assert (found.images.dtype, found.images.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.images, wanted)


def test_a_batch_that_failed_is_raised_in_its_own_turn():
    def fail(image, generator):
        raise ValueError("no such colour")

    backend = upload(RecordedStream())
    backend.feed(photos(8), windows(8))
    backend.feed(photos(8), windows(8), plan_edit(np.arange(8), seed=0, epoch=0, colours=None, transform=fail))
    wait_until_decoded(backend)
    assert len(backend.take().images) == 8
    with pytest.raises(ValueError, match="no such colour"):
        backend.take()
    backend.close()


LEVELS = {"output": "uint8", "layout": "NHWC"}


def coloured(backend, images, crops, change):
    backend.feed(images, crops, change)
    found = torch.as_tensor(backend.take().images)
    backend.close()
    return found


def test_colours_on_the_device_are_those_of_the_threads_to_a_level():
    images, crops, change = photos(8), windows(8), edit(8)
    expected = coloured(on_cpu(**LEVELS), images, crops, change)
    plain = coloured(on_cpu(**LEVELS), images, crops, None)
    found = coloured(upload(RecordedStream(), **LEVELS), images, crops, change)
    assert (found.int() - expected.int()).abs().max() <= 1
    assert (expected.int() - plain.int()).abs().double().mean() > 5


def test_a_transform_comes_after_the_colours_wherever_these_change():
    images, crops = photos(8), windows(8)
    change = edit(8, transform=lambda image, _: 255 - image)
    expected = coloured(on_cpu(**LEVELS), images, crops, change)
    assert torch.equal(coloured(upload(RecordedStream(), **LEVELS), images, crops, change), expected)


@pytest.mark.parametrize("output", ["uint8", "float32"])
def test_batches_that_dali_decodes_get_the_same_colours(output):
    images, crops, change = photos(8), windows(8), edit(8)
    crops.shapes[:] = np.minimum(crops.shapes + 12, (70, 90) - crops.starts)
    settings = {"output": output, "layout": "NHWC", "prefetch": 1}
    both = dataclasses.replace(config(**settings), changes_colours=True)
    found = coloured(ColourBackend(both), images, crops, change)
    expected = coloured(on_cpu(**settings), images, crops, change)
    level = 1 if output == "uint8" else 1 / (255 * 0.25)
    # DALI scales by a kernel of its own, a fraction of a level off in the mean; colours stretch that.
    assert (found.double() - expected.double()).abs().mean() < 2 * level
    assert found.dtype == expected.dtype
    images[3] = broken(images[3])
    bad = ColourBackend(both)
    bad.feed(images, crops, change)
    decoded = bad.take()
    bad.close()
    assert list(decoded.bad) == [3]
    assert not decoded.images[3].any()


@pytest.fixture
def full(monkeypatch):
    """Raises, at a point of the work on the device, what torch raises on a GPU without memory."""

    def fail(name):
        def out_of_memory(*_args, **_settings):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        monkeypatch.setattr(name, out_of_memory)

    return fail


COLOURED_ON = {
    "gpu-whole": lambda both: ColourBackend(both, "whole"),
    "cpu": lambda _: upload(RecordedStream()),
}


@pytest.mark.parametrize("name", COLOURED_ON)
def test_no_memory_to_finish_a_batch_is_raised_with_what_helps(full, name):
    backend = COLOURED_ON[name](dataclasses.replace(config(prefetch=1), changes_colours=True))
    backend.feed(photos(8), windows(8), edit(8))
    full("datasvc.loaders.decode.gpu.gpu.change_colours")
    with pytest.raises(DeviceError, match=rf"decode='{name}'; there is no memory left: use a smaller batch_size"):
        backend.take()
    backend.close()


@pytest.mark.parametrize("name", COLOURED_ON)
def test_no_memory_for_what_finishes_batches_is_said_when_it_is_made(full, name):
    full("torch.from_numpy")
    with pytest.raises(DeviceError, match=rf"decode='{name}'; there is no memory left"):
        COLOURED_ON[name](dataclasses.replace(config(prefetch=1), changes_colours=True))


def test_no_memory_to_hand_a_batch_over_is_raised_too(full):
    stream = RecordedStream()
    backend = upload(stream)
    backend.feed(photos(8), windows(8))
    full("tests.loaders.decode.recorded_stream.RecordedStream.hand_over")
    with pytest.raises(DeviceError, match="there is no memory left"):
        backend.take()
    backend.close()


def test_cuda_is_torchs_current_device_and_a_gpu_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert current_gpu() == 3
    with pytest.raises(ConfigError, match="device is 'cuda:4', and torch finds 4 GPUs"):
        CudaStream("cuda:4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        current_gpu()


class FakeCuda:
    """What `CudaStream` asks of torch, written down."""

    def __init__(self):
        self.log = []

    def Stream(self, device):
        self.log.append(("stream of", str(device)))
        return FakeStream("side", self.log)

    def current_stream(self, device):
        return FakeStream(f"current of {device}", self.log)

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(("on", stream.name))
        yield
        self.log.append(("off", stream.name))

    def is_available(self):
        return True

    def device_count(self):
        return 2


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append((self.name, "records"))
        return "event"

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))


class FakeTensor:
    def __init__(self, log):
        self.log = log

    def to(self, device, *, non_blocking):
        self.log.append(("copy to", str(device), non_blocking))
        return self

    def record_stream(self, stream):
        self.log.append(("kept for", stream.name))


def test_with_cuda_the_copy_is_on_the_side_and_the_callers_stream_waits_for_it(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "from_numpy", lambda _: FakeTensor(cuda.log))
    stream = CudaStream("cuda:1")
    with stream.active():
        tensor = stream.copy(np.zeros(1))
    stream.hand_over(tensor, stream.record())
    assert cuda.log == [
        ("stream of", "cuda:1"),
        ("on", "side"),
        ("copy to", "cuda:1", True),
        ("off", "side"),
        ("side", "records"),
        ("current of cuda:1", "waits for", "event"),
        ("kept for", "current of cuda:1"),
    ]


def test_a_small_array_goes_to_a_gpu_from_page_locked_memory_without_a_wait(monkeypatch):
    calls = []

    class Tensor:
        def pin_memory(self):
            calls.append("pin")
            return self

        def to(self, device, *, non_blocking):
            calls.append((device, non_blocking))

    monkeypatch.setattr(torch, "from_numpy", lambda _: Tensor())
    device_stream.place(np.zeros(2), "cuda:1")
    assert calls == ["pin", ("cuda:1", True)]
    monkeypatch.undo()
    assert place(np.arange(2), "meta").device.type == "meta"
