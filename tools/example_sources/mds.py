"""MosaicML's MDS, written by hand: an index and shards, compressed or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from .contents import HELD_OUT, TRAIN, Contents, Digit

_VERSION = 2
_PER_SHARD = 40
# By name; the size where it does not vary.
_COLUMNS: dict[str, tuple[str, int | None]] = {
    "image": ("jpeg", None),
    "label": ("int", 8),
    "levels": ("ndarray:uint8:8,8", 64),
    "name": ("str", None),
}


def write_mds(folder: Path, contents: Contents) -> None:
    """Write a folder a split; the shards of "val" are compressed."""
    for split in (TRAIN, HELD_OUT):
        (folder / split).mkdir(parents=True)
        digits = contents.digits_of(split)
        shards = [digits[start : start + _PER_SHARD] for start in range(0, len(digits), _PER_SHARD)]
        described = [
            _write_shard(folder / split, number, shard, compressed=split == HELD_OUT)
            for number, shard in enumerate(shards)
        ]
        index = {"version": _VERSION, "shards": described}
        (folder / split / "index.json").write_text(json.dumps(index, sort_keys=True))


def _write_shard(folder: Path, number: int, digits: Sequence[Digit], *, compressed: bool) -> dict[str, Any]:
    """Write one shard; returns what the index says of it."""
    described = {
        "version": _VERSION,
        "format": "mds",
        "compression": "zstd" if compressed else None,
        "hashes": ["sha1"],
        "size_limit": None,
        "column_names": [*_COLUMNS],
        "column_encodings": [encoding for encoding, _ in _COLUMNS.values()],
        "column_sizes": [size for _, size in _COLUMNS.values()],
    }
    header = json.dumps(described, sort_keys=True).encode()
    samples = [_encode(digit) for digit in digits]
    start = 4 + 4 * (len(samples) + 1) + len(header)
    offsets = start + np.cumsum([0, *map(len, samples)])
    content = np.uint32(len(samples)).tobytes() + offsets.astype("<u4").tobytes() + header + b"".join(samples)
    name = f"shard.{number:05d}.mds"
    raw, packed = _file(name, content), None
    if compressed:
        content = zstandard.ZstdCompressor().compress(content)
        packed = _file(f"{name}.zstd", content)
    (folder / (f"{name}.zstd" if compressed else name)).write_bytes(content)
    return {**described, "samples": len(samples), "raw_data": raw, "zip_data": packed}


def _encode(digit: Digit) -> bytes:
    """Return a sample: the sizes of what varies, then all values, in the order of the columns."""
    values = [digit.jpeg, np.int64(digit.label).tobytes(), digit.levels.tobytes(), digit.name.encode()]
    sizes = [len(value) for value, (_, size) in zip(values, _COLUMNS.values(), strict=True) if size is None]
    return np.array(sizes, "<u4").tobytes() + b"".join(values)


def _file(name: str, content: bytes) -> dict[str, Any]:
    # The format has it: a checksum against damage, not against people.
    hashes = {"sha1": hashlib.sha1(content, usedforsecurity=False).hexdigest()}
    return {"basename": name, "bytes": len(content), "hashes": hashes}
