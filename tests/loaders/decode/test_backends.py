"""Every way to decode a batch, on the CPU: what comes out, what becomes of bad samples, whose memory it is."""

import io
import weakref
from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.augment import Windows
from loaders.decode.backend import DecodeConfig
from loaders.decode.choose import measure_rate
from loaders.decode.cpu import CpuBackend
from loaders.decode.fastest import FastestBackend
from loaders.decode.gpu import GpuBackend
from loaders.decode.pixels import PixelFormat
from loaders.decode.resize import make_resizer
from loaders.decode.upload import normalise_on_device
from loaders.stopwatch import Stopwatch
from tests.odd_images import HEIGHT, WIDTH, encode, picture, without_tiles
from tests.samples import jpeg

SIZE = 24
LEVELS = {"output": "uint8", "layout": "NHWC"}


def config(batch_size=8, num_threads=2, prefetch=2, output="float32", layout="NCHW"):
    pixels = PixelFormat(SIZE, output, layout, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    return DecodeConfig(batch_size=batch_size, pixels=pixels, num_threads=num_threads, prefetch=prefetch)


def on_cpu(backend="cpu", framework="torch", **settings):
    return CpuBackend(config(**settings), backend=backend, framework=framework, stopwatch=Stopwatch())


def photos(number, seed=0, width=90, height=70):
    return [np.frombuffer(jpeg(width, height, seed=seed + k, quality=95), np.uint8) for k in range(number)]


def windows(number, width=90, height=70, seed=0):
    rng = np.random.default_rng(seed)
    shapes = rng.integers(1, (height, width), (number, 2)).astype(np.int32)
    starts = rng.integers(0, (height, width) - shapes + 1).astype(np.int32)
    return Windows(starts, shapes, rng.integers(0, 2, number).astype(np.int32))


def decode(backend, images, crops):
    backend.feed(images, crops)
    return backend.take()


def reference(image, crops, index):
    """Return what Pillow makes of the window: `uint8[SIZE, SIZE, 3]`."""
    (top, left), (height, width) = crops.starts[index].tolist(), crops.shapes[index].tolist()
    window = Image.open(io.BytesIO(image.tobytes())).crop((left, top, left + width, top + height))
    scaled = np.asarray(window.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return scaled[:, ::-1] if crops.flips[index] else scaled


@pytest.mark.parametrize(
    ("backend", "framework", "most"), [("cpu", "torch", 1), ("cpu", "numpy", 0), ("pillow", "torch", 0)]
)
def test_windows_of_any_shape_are_pillows_to_a_level(backend, framework, most):
    images, crops = photos(8), windows(8)
    backend = on_cpu(backend, framework, **LEVELS)
    found = decode(backend, images, crops).images
    backend.close()
    for index, image in enumerate(images):
        assert np.abs(found[index].astype(int) - reference(image, crops, index)).max() <= most


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (70, 1), (SIZE, SIZE), (23, 25)])
def test_a_resizer_takes_the_thinnest_windows(framework, shape):
    window = np.random.default_rng(3).integers(0, 256, (*shape, 3), np.uint8)
    expected = np.asarray(Image.fromarray(window).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    found = make_resizer(framework, SIZE).resize(window)
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_batches_are_equal_bit_for_bit_at_any_number_of_threads():
    images, crops = photos(8), windows(8)
    one, three = on_cpu(num_threads=1), on_cpu(num_threads=3)
    first, second = decode(one, images, crops), decode(three, images, crops)
    assert np.array_equal(first.images, second.images)
    one.close()
    three.close()


def test_memory_is_used_again_once_nobody_holds_a_view_or_a_tensor_of_it():
    backend = on_cpu(prefetch=1)
    images, crops = photos(8), windows(8)

    def address(images):
        return images.__array_interface__["data"][0]

    first = decode(backend, images, crops).images
    kept = first.copy()
    part = torch.from_numpy(first)[2:4]
    held = address(first)
    del first
    others = [decode(backend, photos(8, seed=9 * k), crops).images for k in range(1, 6)]
    assert held not in [address(other) for other in others]
    assert np.array_equal(part.numpy(), kept[2:4])
    del part, others
    assert held in [address(decode(backend, images, crops).images) for _ in range(4)]
    backend.close()


def broken(image):
    """Return a JPEG whose header is right, and whose Huffman table cannot be."""
    content = bytearray(image.tobytes())
    table = content.index(b"\xff\xc4")
    content[table + 5 : table + 21] = b"\xff" * 16
    return np.frombuffer(bytes(content), np.uint8)


def test_a_bad_sample_is_named_and_zero_and_spoils_nothing_beside_it():
    images, crops = photos(8), windows(8)
    backend = on_cpu()
    good = decode(backend, images, crops).images
    found = decode(backend, [*images[:3], broken(images[3]), *images[4:]], crops)
    backend.close()
    assert list(found.bad) == [3]
    assert not found.images[3].any()
    assert all(np.array_equal(good[k], found.images[k]) for k in range(8) if k != 3)


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


@pytest.mark.parametrize("prefetch", [1, 2])
def test_what_might_end_the_process_in_dali_is_pillows_and_the_rest_is_dalis(prefetch):
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


def test_bytes_normalised_on_a_device_are_those_normalised_in_threads():
    images, crops = photos(8), windows(8)
    for output in ("uint8", "float32", "float16", "bfloat16"):
        for layout in ("NCHW", "NHWC"):
            threads, levels = on_cpu(output=output, layout=layout), on_cpu(**LEVELS)
            expected = torch.as_tensor(decode(threads, images, crops).images)
            pixels = config(output=output, layout=layout).pixels
            found = normalise_on_device(decode(levels, images, crops).images, pixels, "cpu", bad=[2])
            threads.close()
            levels.close()
            assert found.dtype == expected.dtype
            assert not found[2].any() or output == "uint8"
            others = [0, 1, *range(3, 8)]
            assert torch.allclose(found[others].double(), expected[others].double(), atol=1e-2, rtol=1e-2)


def test_a_rate_counts_what_was_decoded_while_the_clock_ran():
    """The clock ticks a tenth of a second per batch: 8 images in it are 80 per second."""
    ticks = count()
    rate = measure_rate(on_cpu(), photos(8), windows(8), prefetch=2, duration_s=0.5, clock=lambda: next(ticks) / 10)
    assert rate == pytest.approx(80)


def test_of_several_backends_one_is_chosen_and_gives_every_batch():
    chosen = []
    makers = {"cpu": on_cpu, "pillow": lambda: on_cpu("pillow")}
    backend = FastestBackend(
        makers, prefetch=2, on_choice=lambda name, rates: chosen.append((name, rates)), duration_s=0.01
    )
    images, crops = photos(8), windows(8)
    backend.feed(images, crops)
    backend.feed(images[:3], windows(3))
    assert [len(backend.take().images) for _ in range(2)] == [8, 3]
    backend.close()
    ((name, rates),) = chosen
    assert rates.keys() == {"cpu", "pillow"}
    assert rates[name] == max(rates.values())
