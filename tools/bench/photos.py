"""Photo-like JPEGs for the benchmarks: 500x375, about 110 kB each, 100 class folders. Equal seeds give equal bytes.

A picture is a gradient, noise at eight scales that falls off as in photographs, and a few shapes with sharp edges.
Few are drawn; each file is one of them shifted, mirrored and lit otherwise, so no two files are equal.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

import datasvc
from datasvc.api import DataRepository
from datasvc.cache import Cache
from datasvc.shards import Split

WIDTH, HEIGHT = 500, 375
CLASSES = 100
DRAWN = 60
JPEG_QUALITY = 95
# Standard deviation of the noise by its grain in pixels: coarse grain is strong, as in photographs.
NOISE = {256: 40, 128: 30, 64: 20, 32: 14, 16: 11, 8: 9, 4: 9, 2: 9, 1: 8}
DETAIL = (0.5, 1.7)  # how strong the noise is, from picture to picture
SHAPES = 25

Pixels = npt.NDArray[np.uint8]


def write_photos(folder: Path, *, num_images: int, seed: int = 0) -> int:
    """Write `FOLDER/{000..099}/NUMBER.jpg`; returns the bytes of all files."""
    drawn = [draw_photo(np.random.default_rng((seed, number))) for number in range(min(DRAWN, num_images))]
    for label in range(min(CLASSES, num_images)):
        (folder / f"{label:03d}").mkdir(parents=True, exist_ok=True)

    def write(number: int) -> int:
        target = folder / f"{number % CLASSES:03d}" / f"{number:06d}.jpg"
        rng = np.random.default_rng((seed, DRAWN, number))
        Image.fromarray(_vary(drawn[number % len(drawn)], rng)).save(target, "JPEG", quality=JPEG_QUALITY)
        return target.stat().st_size

    # Pillow encodes without the interpreter's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(write, range(num_images)))


def draw_photo(rng: np.random.Generator) -> Pixels:
    """Return a picture: `uint8[HEIGHT, WIDTH, 3]`."""
    corners = Image.fromarray(rng.integers(40, 216, (2, 2, 3), np.uint8))
    canvas = corners.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(canvas)
    for _ in range(SHAPES):
        left, top = rng.uniform(-80, WIDTH), rng.uniform(-80, HEIGHT)
        box = (left, top, left + rng.uniform(10, 160), top + rng.uniform(10, 160))
        draw = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        draw(box, fill=tuple(rng.integers(0, 256, 3).tolist()))
    pixels = np.asarray(canvas, np.float32)
    detail = rng.uniform(*DETAIL)
    for grain, deviation in NOISE.items():
        pixels = pixels + detail * deviation * _noise(rng, grain)
    return pixels.clip(0, 255).astype(np.uint8)


def _noise(rng: np.random.Generator, grain: int) -> npt.NDArray[np.float32]:
    """Noise of one scale, mostly common to the channels as light is: `float32[HEIGHT, WIDTH, 3]`."""
    height, width = -(-HEIGHT // grain) + 1, -(-WIDTH // grain) + 1
    light = rng.standard_normal((height, width), np.float32)
    planes = [0.9 * light + 0.3 * rng.standard_normal((height, width), np.float32) for _ in range(3)]
    return np.stack([_enlarge(plane, grain) for plane in planes], axis=-1)


def _enlarge(plane: npt.NDArray[np.float32], grain: int) -> npt.NDArray[Any]:
    size = (plane.shape[1] * grain, plane.shape[0] * grain)
    enlarged = np.asarray(Image.fromarray(plane).resize(size, Image.Resampling.BICUBIC))
    return enlarged[:HEIGHT, :WIDTH]


def _vary(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """Return the picture shifted, perhaps mirrored, and lit otherwise."""
    shifted = np.roll(pixels, rng.integers(0, (HEIGHT, WIDTH)), axis=(0, 1))
    light = rng.uniform(0.8, 1.1)
    curve = (np.arange(256) * light + rng.uniform(-8, 8)).clip(0, 255).astype(np.uint8)
    return curve[shifted[:, ::-1] if rng.random() < 0.5 else shifted]


def read_photos(folder: Path) -> Iterator[bytes]:
    """Yield the bytes of all files, in order of their names."""
    return (path.read_bytes() for path in sorted(folder.glob("*/*.jpg")))


def write_tars(paths: Sequence[Path], folder: Path, per_tar: int) -> None:
    """Pack files into tars in a new folder, in their order."""
    folder.mkdir()
    for number, start in enumerate(range(0, len(paths), per_tar)):
        with tarfile.open(folder / f"{number:06d}.tar", "w") as packed:
            for path in paths[start : start + per_tar]:
                packed.add(path, f"{path.stem}.jpg")


def ingest_photos(folder: Path, *, num_images: int) -> tuple[DataRepository, int]:
    """Write photos to `FOLDER/photos`, and ingest them; returns the repository, with `photos@1`, and their bytes."""
    size_bytes = write_photos(folder / "photos", num_images=num_images)
    repository = datasvc.open(str(folder / "repository"), create=True)
    repository.datasets.ingest(str(folder / "photos"), "photos")
    return repository, size_bytes


@contextmanager
def staged_photos(folder: Path, *, num_images: int) -> Iterator[tuple[Split, Cache, int]]:
    """Yield the split of such photos, a cache in `FOLDER/cache` that has all of it, and their bytes."""
    repository, size_bytes = ingest_photos(folder, num_images=num_images)
    split = next(iter(repository.dataset("photos@1").values()))
    with Cache(folder / "cache", budget=2 * size_bytes) as cache:
        cache.stage([split])
        yield split, cache, size_bytes
