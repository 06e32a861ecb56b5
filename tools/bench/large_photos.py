"""Photos of 12 megapixels: windows at a reduced scale beside the full size, and beside DALI's graph."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.loaders import AugmentConfig, PixelFormat
from datasvc.loaders.augment.augment import Windows, plan_random_windows, plan_whole_images
from datasvc.loaders.decode.backend import Backend, BackendConfig, ImageBackend
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.gpu.gpu import GpuBackend
from datasvc.loaders.decode.reduced import DecodeScale
from datasvc.loaders.profiling.step_profiler import StepProfiler
from tools.bench.runner import Options, Report, bench, run_rounds, timed

WIDTH, HEIGHT = 4000, 3000
DETAIL = (1.0, 2.0, 4.0)  # levels of noise at each grain, from photo to photo
GRAINS = (1, 2, 4)
QUALITY = 90
TURNED = 6  # EXIF orientation of a phone held upright

Photo = npt.NDArray[np.uint8]


@bench(repeats=5, images=(12, "photos of each kind"), threads=(2, "that decode"), size=224)
def large_photos(options: Options) -> Report:
    """Images/s of photos of 12 megapixels, at a reduced scale and at full size, beside DALI's graph on the CPU.

    The photos are the two that scikit-learn has, enlarged, with noise: as the sensor reads them, turned by their EXIF
    orientation, and progressive. Each is decoded to a random window of training, and as a whole. All are in memory.
    """
    with ThreadPoolExecutor(options.threads) as pool:
        photos = {
            kind: list(pool.map(partial(make_photo, **settings), range(options.images)))
            for kind, settings in {
                "plain": {},
                "turned": {"orientation": TURNED},
                "progressive": {"progressive": True},
            }.items()
        }
    arms: dict[str, Callable[[], float]] = {}
    for kind, blobs in photos.items():
        for name, windows in plan_windows(options.images, is_turned=kind == "turned").items():
            for decoder in ("auto", "full", "DALI"):
                arms[f"{kind}, {name}: {decoder}"] = partial(rate, decoder, "cpu", blobs, windows, options)
    whole = plan_windows(options.images, is_turned=False)["whole image"]
    for decoder in ("auto", "full"):
        arms[f"plain, whole image, Pillow: {decoder}"] = partial(
            rate, decoder, "pillow", photos["plain"], whole, options
        )
    rates = run_rounds(arms, options.repeats, warm_up=True)
    size_bytes = sum(len(blob) for blob in photos["plain"]) / options.images
    report = Report(
        f"{options.images} photos of {WIDTH}x{HEIGHT}, {size_bytes / 1e6:.1f} MB each, to {options.size} pixels, "
        f"{options.threads} threads"
    )
    report.add_rows("images/s", rates)
    for arm, values in rates.items():
        case, _, other = arm.rpartition(": ")
        if other != "auto":
            report.add_ratio(f"{case}: auto / {other}", rates[f"{case}: auto"], values)
        if other == "DALI":
            report.add_ratio(f"{case}: full / DALI", rates[f"{case}: full"], values)
    return report


def make_photo(number: int, *, orientation: int = 1, progressive: bool = False) -> Photo:
    """Return an encoded photo of a phone. Equal arguments give equal bytes."""
    from sklearn.datasets import load_sample_images

    base = Image.fromarray(load_sample_images().images[number % 2])
    pixels = np.asarray(base.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    rng = np.random.default_rng(number)
    for grain in GRAINS:
        noise = rng.standard_normal((HEIGHT // grain, WIDTH // grain), np.float32)
        enlarged = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        pixels = pixels + DETAIL[number // 2 % len(DETAIL)] * np.asarray(enlarged)[..., None]
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
        buffer, "JPEG", quality=QUALITY, progressive=progressive, exif=exif
    )
    return np.frombuffer(buffer.getvalue(), np.uint8)


def plan_windows(count: int, *, is_turned: bool) -> dict[str, Windows]:
    """Return a random window of each photo, as in training, and the whole photos."""
    width, height = (HEIGHT, WIDTH) if is_turned else (WIDTH, HEIGHT)
    widths, heights = np.full(count, width), np.full(count, height)
    config = AugmentConfig()
    random = plan_random_windows(widths, heights, np.arange(count), seed=0, epoch=0, config=config)
    return {"training": random, "whole image": plan_whole_images(widths, heights)}


def rate(decoder: str, backend: Backend, blobs: list[Photo], windows: Windows, options: Options) -> float:
    """Return the images per second of a decoder: a scale of our own, or DALI."""
    settings: dict[str, Any] = {"batch_size": len(blobs), "size": options.size, "pixels": PixelFormat()}
    config = BackendConfig(**settings, num_threads=options.threads, prefetch=1)
    if decoder == "DALI":
        decoding: ImageBackend = GpuBackend(config)  # without a device, its graph runs on the CPU
    else:
        scale: DecodeScale = "auto" if decoder == "auto" else "full"
        config = BackendConfig(**settings, num_threads=options.threads, prefetch=1, decode_scale=scale)
        decoding = CpuBackend(config, backend=backend, framework="torch", profiler=StepProfiler())

    def decode() -> None:
        decoding.feed(blobs, windows)
        assert not decoding.take().bad

    try:
        decode()  # starts the threads
        return len(blobs) / timed(decode)
    finally:
        decoding.close()
