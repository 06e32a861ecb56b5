"""MXNet's RecordIO, written by hand, as `im2rec` writes it: records of images with a header, and an index of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from .contents import HELD_OUT, TRAIN, Contents

_MAGIC = 0xCED7230A


def write_recordio(folder: Path, contents: Contents) -> None:
    """Write a file and its index for each split."""
    folder.mkdir(parents=True)
    for split in (TRAIN, HELD_OUT):
        digits = contents.digits_of(split)
        file = b"".join(part(0, image_record(digit.number, digit.label, digit.jpeg)) for digit in digits)
        offsets = [0]
        for digit in digits:
            offsets.append(offsets[-1] + len(part(0, image_record(digit.number, digit.label, digit.jpeg))))
        (folder / f"{split}.rec").write_bytes(file)
        lines = (f"{digit.number}\t{offset}\n" for digit, offset in zip(digits, offsets, strict=False))
        (folder / f"{split}.idx").write_text("".join(lines))


def part(flag: int, content: bytes) -> bytes:
    """Return a part of a record: 0 is a whole record, 1 its first part, 2 one in the middle, 3 the last."""
    return struct.pack("<II", _MAGIC, flag << 29 | len(content)) + content + bytes(-len(content) % 4)


def image_record(number: int, label: float | Sequence[float], image: bytes) -> bytes:
    """Return a record of an image: number of labels after the header (0: none), label, number, and zeros."""
    if isinstance(label, (int, float)):
        return struct.pack("<IfQQ", 0, label, number, 0) + image
    return struct.pack(f"<IfQQ{len(label)}f", len(label), 0, number, 0, *label) + image
