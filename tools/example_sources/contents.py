"""What the examples hold: scans of digits, photos, measured flowers and texts that scikit-learn bundles."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_sample_images, load_wine

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN, HELD_OUT = "train", "val"
_SIDE = 64
_HELD_OUT_EVERY = 5
_QUALITY = 92
_INK = (3, 2, 1)
_TILE_PIXELS = 213
_PHOTO_KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@dataclass(frozen=True)
class Digit:
    """One scanned digit.

    Attributes:
        number: in scikit-learn's set; unique.
        split: "train" or "val".
        label: 0 to 9.
        levels: `uint8[8, 8]`, the scan: 17 levels of grey.
        pixels: `uint8[64, 64, 3]`, the scan enlarged, in blue: readers that swap red and blue show.
        jpeg: these pixels, encoded.
    """

    number: int
    split: str
    label: int
    levels: npt.NDArray[np.uint8]
    pixels: npt.NDArray[np.uint8]
    jpeg: bytes

    @property
    def name(self) -> str:
        """The digit as a word, its class."""
        return NAMES[self.label]


@dataclass(frozen=True)
class Iris:
    """One measured flower; centimetres."""

    key: str
    split: str
    sepal: tuple[float, float]
    petal: tuple[float, float]
    label: int
    species: str


@dataclass(frozen=True)
class Contents:
    """What all examples are made of.

    Attributes:
        digits: in seeded order.
        photos: encoded pieces of two photos, by file name.
        irises: in seeded order.
        texts: descriptions of data sets, by name.
    """

    digits: Sequence[Digit]
    photos: dict[str, bytes]
    irises: Sequence[Iris]
    texts: dict[str, str]

    def digits_of(self, split: str) -> list[Digit]:
        """Return the digits of one split."""
        return [digit for digit in self.digits if digit.split == split]

    def irises_of(self, split: str) -> list[Iris]:
        """Return the irises of one split."""
        return [iris for iris in self.irises if iris.split == split]


def read_contents(num_images: int, seed: int) -> Contents:
    """Return the contents of all examples, with so many digits; the same each time."""
    return Contents(_read_digits(num_images, seed), _read_photos(), _read_irises(seed), _read_texts())


def encode(pixels: npt.NDArray[np.uint8], kind: str = "JPEG") -> bytes:
    """Return pixels as an encoded image."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, quality=_QUALITY)
    return buffer.getvalue()


def _split(rank: int) -> str:
    return HELD_OUT if rank % _HELD_OUT_EVERY == 0 else TRAIN


def _read_digits(num_images: int, seed: int) -> list[Digit]:
    scans = load_digits()
    chosen = np.random.default_rng(seed).permutation(len(scans.images))[:num_images].tolist()
    digits = []
    for rank, number in enumerate(chosen):
        levels = scans.images[number].astype(np.uint8)
        grey = Image.fromarray((scans.images[number] * 255 / 16).round().astype(np.uint8))
        enlarged = np.asarray(grey.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC))
        pixels = np.stack([enlarged // share for share in _INK], axis=2)
        digits.append(Digit(number, _split(rank), int(scans.target[number]), levels, pixels, encode(pixels)))
    return digits


def _read_photos() -> dict[str, bytes]:
    """Cut two photos into squares, encoded in three ways in turn."""
    photos: dict[str, bytes] = {}
    for path, photo in zip(load_sample_images().filenames, load_sample_images().images, strict=True):
        name = path.replace("\\", "/").rpartition("/")[2].partition(".")[0]
        for top in range(0, photo.shape[0] - _TILE_PIXELS + 1, _TILE_PIXELS):
            for left in range(0, photo.shape[1] - _TILE_PIXELS + 1, _TILE_PIXELS):
                extension = [*_PHOTO_KINDS][len(photos) % len(_PHOTO_KINDS)]
                square = np.ascontiguousarray(photo[top : top + _TILE_PIXELS, left : left + _TILE_PIXELS])
                photos[f"{name}-{top:03d}-{left:03d}.{extension}"] = encode(square, _PHOTO_KINDS[extension])
    return photos


def _read_irises(seed: int) -> list[Iris]:
    flowers = load_iris()
    irises = []
    for rank, number in enumerate(np.random.default_rng(seed).permutation(len(flowers.data)).tolist()):
        values, label = flowers.data[number].tolist(), int(flowers.target[number])
        species = str(flowers.target_names[label])
        irises.append(
            Iris(f"iris-{number:03d}", _split(rank), (values[0], values[1]), (values[2], values[3]), label, species)
        )
    return irises


def _read_texts() -> dict[str, str]:
    loaders = {
        "breast-cancer": load_breast_cancer,
        "diabetes": load_diabetes,
        "digits": load_digits,
        "iris": load_iris,
        "wine": load_wine,
    }
    return {name: load().DESCR for name, load in loaders.items()}
