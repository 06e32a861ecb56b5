"""Protobuf messages, written by hand: Caffe's Datum in LMDB, TensorFlow's Example in TFRecord; and plain LMDB.

Field numbers as in caffe.proto, and in TensorFlow's example.proto and feature.proto.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import lmdb

from .contents import HELD_OUT, TRAIN, Contents, Digit

_MAP_BYTES = 64 << 20
_VARINT, _BYTES = 0, 2
_CRC_MASK = 0xA282EAD8


def write_caffe_lmdb(folder: Path, contents: Contents) -> None:
    """Write a database a split; each value a Datum that holds an encoded image and its label."""
    for split in (TRAIN, HELD_OUT):
        digits = contents.digits_of(split)
        _write_lmdb(folder / f"digits_{split}_lmdb", {caffe_key(digit): encoded_datum(digit) for digit in digits})


def write_caffe_pixels(folder: Path, contents: Contents) -> None:
    """Write a database of Datums that hold pixels, as Caffe's own tool writes them unless told otherwise."""
    digits = contents.digits_of(TRAIN)
    _write_lmdb(folder / "digits_train_lmdb", {caffe_key(digit): pixel_datum(digit) for digit in digits})


def write_plain_lmdb(folder: Path, contents: Contents) -> None:
    """Write a database of keys and encoded images."""
    _write_lmdb(folder, {f"{digit.number:04d}": digit.jpeg for digit in contents.digits})


def write_tfrecord(folder: Path, contents: Contents) -> None:
    """Write two files of the training digits, and a compressed one of the others."""
    folder.mkdir(parents=True)
    train = contents.digits_of(TRAIN)
    for number, digits in enumerate((train[0::2], train[1::2])):
        content = b"".join(map(_framed, map(example, digits)))
        (folder / f"train-{number:05d}-of-00002.tfrecord").write_bytes(content)
    content = b"".join(map(_framed, map(example, contents.digits_of(HELD_OUT))))
    (folder / "val-00000-of-00001.tfrecord.gz").write_bytes(gzip.compress(content, mtime=0))


def caffe_key(digit: Digit) -> str:
    """Return a key as Caffe's own tool writes it."""
    return f"{digit.number:08d}_{digit.name}/{digit.number:04d}.jpg"


def encoded_datum(digit: Digit) -> bytes:
    """Return a Datum: data 4, label 5, encoded 7."""
    return _bytes_field(4, digit.jpeg) + _varint_field(5, digit.label) + _varint_field(7, 1)


def pixel_datum(digit: Digit) -> bytes:
    """Return a Datum: channels 1, height 2, width 3, data 4 (planes of blue, green and red), label 5."""
    height, width, channels = digit.pixels.shape
    planes = digit.pixels[:, :, ::-1].transpose(2, 0, 1).tobytes()
    shape = b"".join(_varint_field(number, size) for number, size in enumerate((channels, height, width), 1))
    return shape + _bytes_field(4, planes) + _varint_field(5, digit.label)


def example(digit: Digit) -> bytes:
    """Return an Example: a map of features, each a list of bytes 1, floats 2 or integers 3."""
    features = {
        "image/encoded": _bytes_field(1, _bytes_field(1, digit.jpeg)),
        "image/class/label": _bytes_field(3, _varint_field(1, digit.label)),
        "image/class/text": _bytes_field(1, _bytes_field(1, digit.name.encode())),
        "image/filename": _bytes_field(1, _bytes_field(1, f"{digit.number:04d}.jpg".encode())),
        "ink": _bytes_field(2, _bytes_field(1, struct.pack("<8f", *digit.levels.mean(axis=0)))),
    }
    entries = (_bytes_field(1, name.encode()) + _bytes_field(2, feature) for name, feature in features.items())
    return _bytes_field(1, b"".join(_bytes_field(1, entry) for entry in entries))


def _write_lmdb(folder: Path, pairs: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    with lmdb.open(str(folder), map_size=_MAP_BYTES, lock=False) as database, database.begin(write=True) as writing:
        for key, value in sorted(pairs.items()):
            writing.put(key.encode(), value)


def _framed(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", _masked_crc(length)) + message + struct.pack("<I", _masked_crc(message))


def _masked_crc(content: bytes) -> int:
    crc = google_crc32c.value(content)
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
