"""Images of 32 and 64 pixels, as PNG and uncompressed, beside torch's loader of a folder with Pillow."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

import datasvc
from datasvc.loaders import IMAGENET_MEAN, IMAGENET_STD, DecodeConfig, ImageLoader
from datasvc.shards import Split
from tools.bench.runner import Options, Report, bench, run_rounds

CLASSES = 10
WARM_UP_STEPS = 2
KINDS: Final = ("png", "bmp")
SIZES: Final = (32, 64)
TRIES = 10  # random windows, of which the first that fits is taken
_CHANCE: Final = random.Random(0)  # noqa: S311 - no secrets


@bench(
    repeats=5, images=(6000, "of each kind and size"), batch=128, threads=(2, "that decode; as many workers of torch")
)
def small_images(options: Options) -> Report:
    """Images/s of `ImageLoader` and of torch's `DataLoader` on files, for images that take little decoding.

    Both make random windows, scaled to the size of the image, flips and normalised floats. torch's workers do it with
    Pillow and `random`, as torchvision does. The images are parts of the two photos that scikit-learn has.
    """
    arms: dict[str, Callable[[], float]] = {}
    for kind in KINDS:
        for size in SIZES:
            folder = options.folder / f"{kind}-{size}"
            write_images(folder / "images", kind=kind, size=size, count=options.images)
            repository = datasvc.open(str(folder / "repository"), create=True)
            repository.datasets.ingest(str(folder / "images"), "small")
            split = next(iter(repository.dataset("small@1").values()))
            case = f"{kind.upper()}, {size} pixels"
            arms[f"{case}: ImageLoader"] = partial(rate_loader, split, size, options)
            arms[f"{case}: torch"] = partial(rate_torch, folder / "images", size, options)
    rates = run_rounds(arms, options.repeats, warm_up=True)
    report = Report(
        f"{options.images:,} images of each kind, batches of {options.batch}, {options.threads} threads or workers"
    )
    report.add_rows("images/s", rates)
    for case in dict.fromkeys(arm.rpartition(": ")[0] for arm in rates):
        report.add_ratio(f"{case}: ImageLoader / torch", rates[f"{case}: ImageLoader"], rates[f"{case}: torch"])
    return report


def write_images(folder: Path, *, kind: str, size: int, count: int) -> None:
    """Write `FOLDER/{0..9}/NUMBER.KIND`."""
    from sklearn.datasets import load_sample_images

    photos = load_sample_images().images
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
    for number in range(count):
        photo = photos[number % 2]
        top, left = rng.integers(0, (photo.shape[0] - 2 * size, photo.shape[1] - 2 * size))
        part = Image.fromarray(photo[top : top + 2 * size, left : left + 2 * size])
        part.resize((size, size)).save(folder / str(number % CLASSES) / f"{number:06d}.{kind}")


def rate_loader(split: Split, size: int, options: Options) -> float:
    """Return the images per second of an epoch of `ImageLoader`, without its first batches."""
    decode = DecodeConfig("cpu", num_threads=options.threads)
    with ImageLoader(split, batch_size=options.batch, training=True, size=size, seed=0, decode=decode) as loader:
        return _rate(loader, options.batch)


def rate_torch(folder: Path, size: int, options: Options) -> float:
    """Return the images per second of an epoch of torch's loader, without its first batches."""
    from torch.utils.data import DataLoader

    images: Any = ImageFiles(folder, size)
    return _rate(
        DataLoader(images, batch_size=options.batch, shuffle=True, num_workers=options.threads, drop_last=True),
        options.batch,
    )


def _rate(batches: Iterable[object], size: int) -> float:
    rest = iter(batches)
    for _ in islice(rest, WARM_UP_STEPS):
        pass
    started = time.perf_counter()
    return sum(1 for _ in rest) * size / (time.perf_counter() - started)


class ImageFiles:
    """A map-style data set of files with the usual transforms: random resized crop, flip, tensor, normalisation."""

    def __init__(self, folder: Path, size: int) -> None:
        import torch

        self._paths, self._size = sorted(folder.glob("*/*")), size
        self._mean, self._std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        import torch

        path = self._paths[number]
        with Image.open(path) as file:
            image = file.convert("RGB")
        scaled = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=_draw_box(*image.size))
        if _CHANCE.random() < 0.5:
            scaled = scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(scaled)).permute(2, 0, 1).contiguous().float().div_(255)
        return tensor.sub_(self._mean).div_(self._std), int(path.parent.name)


def _draw_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(TRIES):
        area = width * height * _CHANCE.uniform(0.08, 1)
        ratio = math.exp(_CHANCE.uniform(math.log(3 / 4), math.log(4 / 3)))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = _CHANCE.randint(0, width - columns), _CHANCE.randint(0, height - rows)
            return left, top, left + columns, top + rows
    return 0, 0, width, height
