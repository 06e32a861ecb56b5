"""DALI's graphs, here on the CPU: both give the same pixels, and what becomes of images that DALI does not decode."""

import contextlib
import re
import sys
import weakref
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from datasvc.errors import DeviceError
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.gpu import dali, gpu
from datasvc.loaders.decode.gpu.dali import DaliPipeline, device_errors
from datasvc.loaders.decode.gpu.gpu import GpuBackend
from tests.loaders.decode.photos import broken, config, decode, on_cpu, photos, windows
from tests.loaders.decode.recorded_stream import Moment
from tests.support.odd_images import HEIGHT, WIDTH, encode, picture, without_tiles

OUT_OF_MEMORY = "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"


def levels_of(images):
    """Undo the normalising."""
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))
    return (images * std + mean) * 255


def test_dali_and_the_cpu_agree_to_a_fraction_of_a_level():
    images, crops = photos(8), windows(8)
    crops.shapes[:] = np.minimum(crops.shapes + 12, (70, 90) - crops.starts)
    backend = on_cpu()
    own = torch.from_numpy(decode(backend, images, crops).images)
    by_dali = decode(GpuBackend(config(prefetch=1)), images, crops).images
    backend.close()
    assert (levels_of(own) - levels_of(by_dali)).abs().mean() < 1


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_a_bad_sample_ends_dalis_pipeline_but_no_batch_is_lost(prefetch):
    images, crops = photos(8), windows(8)
    backend = GpuBackend(config(prefetch=prefetch))
    first = backend._pipeline
    fed, taken = count(), []
    batches = [photos(8, seed=20 * k) for k in range(7)]
    batches[3][5] = broken(images[5])
    for _ in range(prefetch):
        backend.feed(batches[next(fed)], crops)
    for number in range(7):
        taken.append(backend.take())
        backend.feed(batches[next(fed)] if number + prefetch < 7 else images, crops)
    assert [list(batch.bad) for batch in taken] == [[], [], [], [5], [], [], []]
    assert not taken[3].images[5].any()
    assert backend._pipeline is not first  # DALI does not say that one is good for anything after an error
    # Equal to DALI's own bytes, which Pillow's are not.
    undisturbed = GpuBackend(config(prefetch=1))
    for number in (0, 1, 2, 4, 5, 6):
        assert torch.equal(taken[number].images, decode(undisturbed, batches[number], crops).images)


def test_closed_with_batches_under_way_dali_is_done_with_their_images():
    images = [image.copy() for image in photos(8)]
    backend = GpuBackend(config(prefetch=2))
    for _ in range(2):
        backend.feed(images, windows(8))
    pipeline = weakref.ref(backend._pipeline._pipe)
    backend.close()
    assert pipeline() is None


def test_closed_while_an_exception_refers_to_it_dali_is_done_with_the_images_too():
    pipeline = DaliPipeline(config(prefetch=1))
    inner = pipeline._pipe
    try:
        raise KeyboardInterrupt  # noqa: TRY301 - its traceback refers to this frame, and so to `inner`
    except KeyboardInterrupt:
        pipeline.close()
        assert inner._pipe is None


def test_another_pipeline_is_built_after_the_exception_of_the_first_is_gone(monkeypatch):
    images, seen = photos(2), []
    backend = GpuBackend(config(prefetch=1))
    monkeypatch.setattr(backend, "_rebuild_pipeline", lambda: seen.append(sys.exception()))
    images[1] = broken(images[1])
    assert list(decode(backend, images, windows(2)).bad) == [1]
    assert seen == [None]


@pytest.mark.parametrize("prefetch", [1, 2])
def test_what_might_end_the_process_in_dali_is_for_the_cpu_and_the_rest_is_dalis(prefetch):
    whole, damaged = (np.frombuffer(odd, np.uint8) for odd in jpeg_2000_files())
    images = [*photos(2, width=WIDTH, height=HEIGHT), whole, damaged]
    crops = windows(4, width=WIDTH, height=HEIGHT)
    plain = photos(4, seed=9, width=WIDTH, height=HEIGHT)
    backend = GpuBackend(config(prefetch=prefetch))
    for batch in (images, plain)[:prefetch]:
        backend.feed(batch, crops)
    mixed = backend.take()
    assert list(mixed.bad) == [3]
    assert not mixed.images[3].any()
    by_dali = decode(GpuBackend(config(prefetch=1)), images[:2], windows_of(crops, 2)).images
    assert torch.equal(mixed.images[:2], by_dali)
    by_pillow = decode(on_cpu("pillow"), images[:3], windows_of(crops, 3)).images
    assert torch.equal(mixed.images[2], torch.from_numpy(by_pillow[2]))


def windows_of(crops, number):
    return Windows(crops.starts[:number], crops.shapes[:number], crops.flips[:number])


def jpeg_2000_files():
    """A whole file and one whose tiles are gone."""
    whole = encode(picture(), "JPEG2000")
    return whole, without_tiles(whole)


def test_both_graphs_give_the_same_pixels_of_upright_and_turned_images():
    turned = encode(picture(), "JPEG", quality=95, exif=_orientation(6))  # stored lying, 60x44; upright it is 44x60
    images = [np.frombuffer(turned, np.uint8)] * 2
    crops = windows(2, width=HEIGHT, height=WIDTH)
    by_window, whole = (decode(GpuBackend(config(prefetch=1), graph), images, crops) for graph in ("window", "whole"))
    assert not by_window.bad
    assert not whole.bad
    assert torch.equal(by_window.images, whole.images)


@pytest.mark.parametrize(
    ("graph", "operators"), [("window", [b"decoders__ImageSlice"]), ("whole", [b"decoders__Image", b"Slice"])]
)
def test_one_graph_decodes_windows_and_the_other_whole_images_of_which_it_cuts_them(graph, operators):
    serialized = DaliPipeline(config(prefetch=1), graph)._pipe.serialize()
    assert set(re.findall(rb"\b(?:decoders__Image\w*|Slice)\b", serialized)) == set(operators)


def _orientation(value):
    found = Image.Exif()
    found[0x0112] = value
    return found


@pytest.mark.parametrize("output", ["float32", "bfloat16", "uint8"])
def test_other_formats_are_decoded_by_all_threads_of_the_cpu_beside_the_jpegs_of_dali(output):
    jpegs = photos(4, width=WIDTH, height=HEIGHT)
    others = [np.frombuffer(encode(picture(seed=k), kind), np.uint8) for k, kind in enumerate(("PNG", "GIF", "WEBP"))]
    crops = windows(7, width=WIDTH, height=HEIGHT)
    images = [jpegs[0], others[0], *jpegs[1:3], *others[1:], jpegs[3]]
    fed = []
    backend = GpuBackend(config(prefetch=1, output=output))
    backend._pipeline.feed = lambda images, windows, feed=backend._pipeline.feed: (
        fed.append(len(images)) or feed(images, windows)
    )
    mixed = decode(backend, images, crops)
    assert fed == [4]  # a GIF alone would have ended DALI's pipeline
    assert not mixed.bad
    by_dali = decode(GpuBackend(config(prefetch=1, output=output)), jpegs, part_of(crops, [0, 2, 3, 6])).images
    by_cpu = decode(on_cpu(output=output), others, part_of(crops, [1, 4, 5])).images
    assert torch.equal(mixed.images[[0, 2, 3, 6]], by_dali)
    assert torch.equal(mixed.images[[1, 4, 5]], torch.as_tensor(by_cpu))


def part_of(crops, indices):
    return Windows(crops.starts[indices], crops.shapes[indices], crops.flips[indices])


def test_a_batch_without_a_jpeg_runs_no_pipeline_and_an_empty_one_nothing_at_all():
    backend = GpuBackend(config(prefetch=1))
    backend._pipeline.feed = backend._pipeline.take = None  # not to be called
    png = np.frombuffer(encode(picture(), "PNG"), np.uint8)
    assert decode(backend, [png], windows(1, width=WIDTH, height=HEIGHT)).images.shape == (1, 3, 24, 24)
    assert decode(backend, [], windows(0)).images.shape == (0, 3, 24, 24)


def test_fewer_batches_may_be_fed_than_are_prefetched():
    """As where some have no JPEG, so that DALI gets nothing of them."""
    images, crops = photos(2), windows(2)
    png = np.frombuffer(encode(picture(), "PNG"), np.uint8)
    backend, alone = GpuBackend(config(prefetch=3)), GpuBackend(config(prefetch=1))
    expected = decode(alone, images, crops).images
    backend.feed(images, crops)
    backend.feed([png], windows(1, width=WIDTH, height=HEIGHT))
    assert torch.equal(backend.take().images, expected)
    backend.feed(images, crops)
    backend.take()
    assert torch.equal(backend.take().images, expected)


class Failing:
    """A pipeline of DALI that fails on every run."""

    reason = ""

    def __init__(self, config, graph):
        pass

    def feed(self, images, windows):
        pass

    def take(self):
        raise RuntimeError(self.reason)

    def close(self):
        pass


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(gpu, "DaliPipeline", Failing)
    return Failing


def test_the_images_of_a_batch_on_which_dali_fails_go_to_the_threads_of_the_cpu_together(failing, monkeypatch):
    monkeypatch.setattr(failing, "reason", "nvImageCodec failure: '#8'")
    images, crops = photos(8), windows(8)
    images[5] = broken(images[5])
    backend = GpuBackend(config(prefetch=1))
    backend.feed(images, crops)
    threads, started = backend._cpu(), []
    start = threads.start
    monkeypatch.setattr(
        threads, "start", lambda images, *rest, **more: started.append(len(images)) or start(images, *rest, **more)
    )
    decoded = backend.take()
    assert started == [8]
    assert list(decoded.bad) == [5]
    expected = decode(on_cpu(), images, crops)
    assert torch.equal(decoded.images, torch.as_tensor(expected.images))
    backend.close()


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (OUT_OF_MEMORY, "smaller batch_size"),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "smaller batch_size"),
        ("CUDA driver API error CUDA_ERROR_ILLEGAL_ADDRESS (700)", "start the process again"),
        ("nvml error (999): A nvml internal driver error occurred", "start the process again"),
        ("CUDA error: an illegal memory access was encountered", "start the process again"),
        ("nvImageCodec failure: '#5'", "smaller batch_size"),
        ("nvImageCodec failure: '#7'", "start the process again"),
    ],
)
def test_a_failure_of_the_device_or_its_memory_is_raised_and_no_sample_is_bad(failing, monkeypatch, reason, advice):
    monkeypatch.setattr(failing, "reason", reason)
    backend = GpuBackend(config(prefetch=1))
    backend.feed(photos(2), windows(2))
    with pytest.raises(DeviceError, match=rf"with decode='gpu-window'; .*{advice}.* decode='cpu'") as caught:
        backend.take()
    assert str(caught.value).count("decode='gpu-window'") == 1  # it is no remedy for itself
    assert reason in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_what_a_damaged_image_makes_dali_say_is_no_failure_of_the_device():
    for reason in (
        "nvImageCodec failure: '#8'",
        "NVJPEG_STATUS_BAD_JPEG in nvjpeg_cuda_decoder",
        "#3 bad code stream",
    ):
        with pytest.raises(RuntimeError, match=r"^[^ ]") as caught, device_errors("gpu-window"):
            raise RuntimeError(reason)
        assert str(caught.value) == reason


def test_a_graph_that_fails_on_every_batch_though_its_images_decode_is_given_up(failing, monkeypatch):
    """So it was on some GPUs with windows: an internal error for each, which no image is to blame for."""
    monkeypatch.setattr(failing, "reason", "nvImageCodec failure: '#8'")
    backend = GpuBackend(config(prefetch=1))
    for _ in range(2):
        assert not decode(backend, photos(2), windows(2)).bad
    with pytest.raises(DeviceError, match=r"3 batches in a row.*decode='gpu-whole' or decode='cpu'.*'#8'"):
        decode(backend, photos(2), windows(2))


def test_no_memory_for_the_pipeline_itself_is_said_when_it_is_built(monkeypatch):
    def build(config, graph):
        raise RuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(dali, "_build", build)
    with pytest.raises(DeviceError, match="no memory left"):
        GpuBackend(config(prefetch=1))


class FakeStream:
    """Notes what is ordered after what."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"recorded on {self.name}")
        self.moment = Moment(0, self.log)
        return self.moment

    def wait_stream(self, other):
        self.log.append(f"{self.name} after {other.name}")

    def synchronize(self):
        self.log.append("the host waits")


def test_outputs_on_a_gpu_are_bound_to_the_stream_that_copies_them_and_the_host_does_not_wait(monkeypatch):
    log = []
    current, copies = FakeStream("current", log), FakeStream("copies", log)
    pipeline = DaliPipeline(config(prefetch=1))
    pipeline._copy_stream = copies
    pipeline._pipe = SimpleNamespace(
        share_outputs=lambda cuda_stream=None: [log.append(f"shared on {cuda_stream.name}")],
        release_outputs=lambda: log.append("released"),
    )
    pipeline._pipe.feed_input = lambda name, values: None
    pipeline._pipe.schedule_run = lambda: None
    images = photos(2)
    kept = weakref.ref(images[0])
    pipeline.feed(images, windows(2))
    del images
    source = torch.zeros(2, 3)
    monkeypatch.setattr(dali, "_to_torch", lambda output: source)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"in {stream.name}")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: log.append(f"kept for {stream.name}"))
    taken = pipeline.take()
    assert taken.data_ptr() != source.data_ptr()
    ordered = ["released", "recorded on copies", "current after copies", "kept for current"]
    assert log == ["in copies", "shared on copies", *ordered]
    pipeline.feed(photos(2), windows(2))
    assert kept() is not None  # the device is not done with the run that reads it
    copies.moment.is_past = True
    pipeline.feed(photos(2), windows(2))
    assert kept() is None
