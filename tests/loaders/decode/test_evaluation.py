"""Evaluation is what torchvision's `Resize` and `CenterCrop` make of an image with Pillow, to a level per pixel."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from datasvc.loaders.augment.augment import plan_centre_boxes, plan_centre_windows
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.gpu.gpu import GpuBackend
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.loaders.decode.worker import decode_window
from datasvc.loaders.profiling.step_profiler import StepProfiler
from tests.support.odd_images import encode, exif

SIZE, RESIZE = 224, 256
SIDES = [
    (1, 1), (1, 7), (7, 1), (2, 300), (255, 300), (300, 255), (224, 224), (256, 256), (257, 255), (223, 225),
    (224, 5000), (5000, 224), (640, 481), (901, 33), (500, 375),
]  # fmt: skip


def noise(width, height, mode="RGB"):
    pixels = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def torchvision_pixels(image, size=SIZE, resize=RESIZE):
    """Return `CenterCrop(size)(Resize(resize)(image))` with the rounding of torchvision's functions."""
    width, height = image.size
    short, long = sorted((width, height))
    longer = int(resize * long / short)
    scaled = (resize, longer) if width <= height else (longer, resize)
    left, top = (round((side - size) / 2.0) for side in scaled)
    resized = image.convert("RGB").resize(scaled, Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size))).astype(int)


def decode(make, blobs, sides, plan=plan_centre_boxes):
    """Return the images that a backend makes of encoded ones, as levels."""
    config = BackendConfig(
        batch_size=len(blobs),
        size=SIZE,
        pixels=PixelFormat("uint8", "NHWC"),
        num_threads=2,
        prefetch=1,
        has_boxes=plan is plan_centre_boxes,
    )
    backend = make(config)
    widths, heights = np.array(sides).T
    backend.feed([np.frombuffer(blob, np.uint8) for blob in blobs], plan(widths, heights, size=SIZE, resize=RESIZE))
    decoded = backend.take()
    images = np.asarray(decoded.images).astype(int)
    backend.close()
    assert not decoded.bad
    return images


def on_cpu(backend, framework):
    return lambda config: CpuBackend(config, backend=backend, framework=framework, profiler=StepProfiler())


BACKENDS = {
    "cpu": on_cpu("cpu", "torch"),
    "cpu numpy": on_cpu("cpu", "numpy"),
    "pillow": on_cpu("pillow", "torch"),
    "gpu-window": GpuBackend,
    "gpu-whole": lambda config: GpuBackend(config, "whole"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 90}), ("PNG", {"compress_level": 1})])
def test_images_of_any_shape_are_scaled_and_cropped_as_torchvision_does(backend, kind, options):
    blobs = [encode(noise(*sides), kind, **options) for sides in SIDES]
    found = decode(BACKENDS[backend], blobs, SIDES)
    for sides, blob, image in zip(SIDES, blobs, found, strict=True):
        difference = np.abs(image - torchvision_pixels(Image.open(io.BytesIO(blob))))
        assert difference.max() <= 1, sides


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_of_any_mode_are_scaled_and_cropped_as_torchvision_does(backend):
    sides = (301, 203)
    blobs = [
        *(encode(noise(*sides, mode), "JPEG", quality=90) for mode in ("L", "RGB", "CMYK")),
        *(encode(noise(*sides, mode), "PNG") for mode in ("L", "P", "RGBA")),
        encode(noise(*sides), "JPEG", quality=90, progressive=True),
        encode(noise(*sides[::-1]), "JPEG", quality=90, exif=exif(6)),
    ]
    found = decode(BACKENDS[backend], blobs, [sides] * len(blobs))
    for blob, image in zip(blobs, found, strict=True):
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(blob)))
        assert np.abs(image - torchvision_pixels(upright)).max() <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 120), st.integers(1, 120), st.integers(1, 40), st.integers(0, 20))
def test_any_size_and_resize_are_torchvisions(width, height, size, more):
    image, resize = noise(width, height), size + more
    windows = plan_centre_boxes(np.array([width]), np.array([height]), size=size, resize=resize)
    content, box = encode(image, "PNG", compress_level=1), windows.boxes[0].tolist()
    found = decode_window(content, windows.starts[0], windows.shapes[0], size, box=box)
    difference = np.abs(found.astype(int) - torchvision_pixels(image, size, resize))
    # Each of the two passes rounds to levels. At a few pixels of some sizes both round the other way.
    assert difference.max() <= 2
    assert (difference > 1).sum() <= 16


@pytest.mark.parametrize("sides", [(256, 256, 64, 200), (623, 140, 64, 200)])
def test_two_levels_are_the_most_that_differs_at_unusual_sizes(sides):
    width, height, size, resize = sides
    image = noise(width, height)
    windows = plan_centre_boxes(np.array([width]), np.array([height]), size=size, resize=resize)
    content, box = encode(image, "PNG", compress_level=1), windows.boxes[0].tolist()
    found = decode_window(content, windows.starts[0], windows.shapes[0], size, box=box)
    assert np.abs(found.astype(int) - torchvision_pixels(image, size, resize)).max() == 2


@pytest.mark.parametrize("sides", [(1, 60_000), (60_000, 1), (3, 4000)])
def test_a_thin_image_is_not_scaled_as_a_whole(sides):
    (image,) = decode(BACKENDS["cpu"], [encode(noise(*sides), "PNG", compress_level=1)], [sides])
    # The middle pixels of the strip, which fill the output. torchvision would scale to 15 million rows first.
    windows = plan_centre_boxes(*np.array([sides]).T, size=SIZE, resize=RESIZE)
    assert windows.shapes.max() <= 8
    assert image.std() > 0


def test_the_older_window_differs_and_stays():
    sides = (500, 375)
    blob = encode(noise(*sides), "PNG", compress_level=1)
    (window,) = decode(BACKENDS["pillow"], [blob], [sides], plan_centre_windows)
    box = (86, 24, 86 + 328, 24 + 328)
    expected = np.asarray(noise(*sides).crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)).astype(int)
    assert np.array_equal(window, expected)
    assert np.abs(window - torchvision_pixels(noise(*sides))).mean() > 1
