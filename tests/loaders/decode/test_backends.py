"""Decoding a batch on the CPU: what comes out, what becomes of bad samples, whose memory it is."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from datasvc.loaders.decode.gpu.gpu import DeviceFinish
from datasvc.loaders.decode.worker import make_resizer
from tests.loaders.decode.photos import LEVELS, SIZE, broken, config, decode, on_cpu, photos, windows


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
    found = make_resizer(framework, SIZE)(window)
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


def test_a_bad_sample_is_named_and_zero_and_spoils_nothing_beside_it():
    images, crops = photos(8), windows(8)
    backend = on_cpu()
    good = decode(backend, images, crops).images
    found = decode(backend, [*images[:3], broken(images[3]), *images[4:]], crops)
    backend.close()
    assert list(found.bad) == [3]
    assert not found.images[3].any()
    assert all(np.array_equal(good[k], found.images[k]) for k in range(8) if k != 3)


def test_bytes_normalised_on_a_device_are_those_normalised_in_threads():
    images, crops = photos(8), windows(8)
    for output in ("uint8", "float32", "float16", "bfloat16"):
        for layout in ("NCHW", "NHWC"):
            threads, levels = on_cpu(output=output, layout=layout), on_cpu(**LEVELS)
            expected = torch.as_tensor(decode(threads, images, crops).images)
            pixels = config(output=output, layout=layout).pixels
            decoded = torch.from_numpy(decode(levels, images, crops).images)
            found = DeviceFinish(pixels, "cpu").finish(decoded, bad=[2])
            threads.close()
            levels.close()
            assert found.dtype == expected.dtype
            assert not found[2].any()
            assert found.is_contiguous()
            others = [0, 1, *range(3, 8)]
            assert torch.allclose(found[others].double(), expected[others].double(), atol=1e-2, rtol=1e-2)
