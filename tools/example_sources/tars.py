"""Tars: ImageNet as it is distributed, in miniature, and WebDataset's, compressed or not."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import zstandard

from .contents import HELD_OUT, NAMES, TRAIN, Contents, Digit

# Like the devkit's, the list of synsets is not in alphabetical order.
SYNSETS = tuple(f"n{90000000 + (7 * digit + 3) % 10:08d}" for digit in range(len(NAMES)))
_PER_TAR = 30


def write_imagenet(folder: Path, contents: Contents) -> None:
    """Write both tars, and what the devkit says of the validation images."""
    folder.mkdir(parents=True)
    classes = {
        f"{synset}.tar": tar_of(
            (f"{synset}_{digit.number}.JPEG", digit.jpeg)
            for digit in contents.digits_of(TRAIN)
            if digit.label == label
        )
        for label, synset in sorted(enumerate(SYNSETS), key=lambda each: each[1])
    }
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_of(classes.items()))
    held_out = contents.digits_of(HELD_OUT)
    images = [(f"ILSVRC2012_val_{number:08d}.JPEG", digit.jpeg) for number, digit in enumerate(held_out, 1)]
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_of(images))
    ids = "".join(f"{digit.label + 1}\n" for digit in held_out)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(ids)
    (folder / "synsets.txt").write_text("".join(f"{synset}\n" for synset in SYNSETS))


def write_webdataset(folder: Path, contents: Contents) -> None:
    """Write `digits-SPLIT-000000.tar`, ...: an image, its label and what else is known of it a sample."""
    folder.mkdir(parents=True)
    for split in (TRAIN, HELD_OUT):
        for number, digits in enumerate(_cut(contents.digits_of(split))):
            (folder / f"digits-{split}-{number:06d}.tar").write_bytes(_samples(digits))


def write_compressed_webdataset(folder: Path, contents: Contents) -> None:
    """Write the same, the training tars as `.tar.gz` and the others as `.tar.zst`."""
    folder.mkdir(parents=True)
    for number, digits in enumerate(_cut(contents.digits_of(TRAIN))):
        packed = gzip.compress(_samples(digits), mtime=0)
        (folder / f"digits-train-{number:06d}.tar.gz").write_bytes(packed)
    for number, digits in enumerate(_cut(contents.digits_of(HELD_OUT))):
        packed = zstandard.ZstdCompressor().compress(_samples(digits))
        (folder / f"digits-val-{number:06d}.tar.zst").write_bytes(packed)


def described(digit: Digit) -> str:
    """Return the JSON beside a digit."""
    return json.dumps({"number": digit.number, "name": digit.name})


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a tar of these files, without times and owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _samples(digits: Sequence[Digit]) -> bytes:
    return tar_of(
        (f"{digit.number:04d}.{extension}", content)
        for digit in digits
        for extension, content in (
            ("jpg", digit.jpeg),
            ("cls", str(digit.label).encode()),
            ("json", described(digit).encode()),
        )
    )


def _cut(digits: Sequence[Digit]) -> list[Sequence[Digit]]:
    return [digits[start : start + _PER_TAR] for start in range(0, len(digits), _PER_TAR)]
