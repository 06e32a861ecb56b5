"""Reads the index and the shards of a MosaicML MDS data set.

A shard consists of the number of samples, the offset of each sample and of the end (uint32, little-endian), a JSON
description of the columns (not used here), and the samples. A sample begins with one size (uint32) for each column of
variable size; the values of all columns follow.

Hashes of `hashlib` (md5, sha1, sha256, ...) are verified before a shard is read; MosaicML's xxhash variants (xxh64,
...) are not verified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError
from datasvc.printable import count_text
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.source import SourcePart
from datasvc.shards.sources.common.streams import DECOMPRESSION_ERRORS, decompress, read_up_to, skip
from datasvc.shards.sources.common.tensors import MAX_SAMPLE_BYTES
from datasvc.shards.sources.mds.encodings import MdsColumn

COMPRESSIONS: Final = ("gz", "zstd")
_STEP_BYTES: Final = 4 << 20
INDEX_FILE: Final = "index.json"
_VERSION: Final = 2  # of the index, and of each shard in it


def decode_sample(content: bytes, columns: tuple[MdsColumn, ...]) -> dict[str, Any]:
    """Return the values of one sample by decoded name.

    A decoded name is the name of a column, or NAME.shape for the shape of the array if the column's shapes vary.

    Raises:
        BadSampleError: its sizes do not match its length, or a value does not have the encoding of its column.
    """
    num_sizes = sum(column.size_bytes is None for column in columns)
    start = 4 * num_sizes
    if start > len(content):
        raise BadSampleError(f"it has {len(content)} bytes; expected at least {start} for {num_sizes} sizes")
    stored_sizes = iter(np.frombuffer(content[:start], "<u4").tolist())
    sizes = [next(stored_sizes) if column.size_bytes is None else column.size_bytes for column in columns]
    offsets = list(accumulate(sizes, initial=start))
    if offsets[-1] != len(content):
        raise BadSampleError(
            f"its sizes sum to {offsets[-1] - start} bytes, but its values have {len(content) - start}"
        )
    decoded: dict[str, Any] = {}
    for column, (begin, stop) in zip(columns, pairwise(offsets), strict=True):
        decoded.update(column.decode(memoryview(content)[begin:stop]))
    return decoded


def check_hashes(reader: FileReader, part: SourcePart) -> str:
    """Return a description of the first mismatch with the hashes in the index; "" if there is none."""
    expected = {name: value for name, value in part.where["hashes"].items() if name in hashlib.algorithms_available}
    # SHAKE is not verified: its digests have no fixed length, which `hexdigest` would need.
    hashers = {name: hashlib.new(name) for name in expected if not name.startswith("shake")}
    if not hashers:
        return ""
    offset = 0
    while content := reader.read_range(part.where["path"], offset, _STEP_BYTES):
        for hasher in hashers.values():
            hasher.update(content)
        offset += len(content)
    for name, hasher in hashers.items():
        actual = hasher.hexdigest()
        if actual != expected[name]:
            return f"its {name} is {actual}; the index has {expected[name]}; none of its samples is used"
    return ""


def read_samples(reader: FileReader, part: SourcePart) -> Iterator[tuple[str, bytes | BadSampleError]]:
    """Yield the name of each sample of a shard, with its content or the error of reading it."""
    path, num_samples, row = part.where["path"], part.num_samples or 0, 0
    with map_exceptions("read", reader.location(path)), _open(reader, path, part.where["compression"]) as stream:
        try:
            offsets = _read_offsets(stream, num_samples, part.where["raw_bytes"])
            for row, size_bytes in enumerate(np.diff(offsets).tolist()):
                yield f"{part.name}#{row}", _read_sample(stream, size_bytes)
            row = num_samples  # all samples are read; only the end is left to check
            _check_end(stream, part.where["raw_bytes"])
        except (_ShardReadError, *DECOMPRESSION_ERRORS) as error:
            message = f"the rest of the shard ({count_text(num_samples - row, 'sample')}) cannot be read: {error}"
            # One error stands for all samples that are left. Its key is the first of them, or the name of the shard
            # if no sample was read.
            yield f"{part.name}#{row}" if row else part.name, BadSampleError(message)


class _ShardReadError(Exception):
    """A shard is truncated or invalid, so no further sample of it can be read."""


def _read_offsets(stream: BinaryIO, num_samples: int, raw_bytes: int) -> npt.NDArray[np.int64]:
    """Return the offsets of the samples and of the end, `int64[num_samples + 1]`; `stream` is then at the first."""
    # The index and the shard must agree, since the index gives the size of the offset table.
    head = read_up_to(stream, 4)
    stored_samples = int.from_bytes(head, "little")
    if len(head) < 4 or stored_samples != num_samples:
        raise _ShardReadError(f"it declares {count_text(stored_samples, 'sample')}, the index {num_samples}")
    table = read_up_to(stream, 4 * (num_samples + 1))
    if len(table) < 4 * (num_samples + 1):
        raise _ShardReadError("it is truncated in its header")
    offsets = np.frombuffer(table, "<u4").astype(np.int64)
    header_bytes = 4 + len(table)
    if offsets[0] < header_bytes or np.any(np.diff(offsets) < 0) or offsets[-1] != raw_bytes:
        raise _ShardReadError(
            f"its samples are between {offsets[0]} and {offsets[-1]}; expected a start from {header_bytes}, "
            f"ascending offsets, and the end {raw_bytes} of the index"
        )
    if skip(stream, int(offsets[0]) - header_bytes) < offsets[0] - header_bytes:
        raise _ShardReadError("it is truncated in its header")
    return offsets


def _check_end(stream: BinaryIO, raw_bytes: int) -> None:
    # This read also makes a compressed stream verify its checksum, which is at its end.
    if stream.read(1):
        raise _ShardReadError(f"it is longer than the {raw_bytes} bytes in the index")


def _read_sample(stream: BinaryIO, size_bytes: int) -> bytes | BadSampleError:
    """Return the content of the next sample, or an error if it is too large. Raise `_ShardReadError` if it is cut."""
    if size_bytes > MAX_SAMPLE_BYTES:
        skip(stream, size_bytes)
        return BadSampleError(f"it has {size_bytes} bytes; expected at most {MAX_SAMPLE_BYTES}")
    content = read_up_to(stream, size_bytes)
    if len(content) < size_bytes:
        raise _ShardReadError("it is truncated")
    return content


def _open(reader: FileReader, path: str, compression: str | None) -> BinaryIO:
    """Open a file of a shard as a decompressed stream; its name need not have the extension of its compression."""
    stream = reader.open(path)  # decompresses .gz and .zst by the name
    if compression is None or path.endswith((".gz", ".zst")):
        return stream
    return decompress(stream, "gzip" if compression == "gz" else compression)


@dataclass(frozen=True)
class MdsFile:
    """One file of a shard: its path below the folder of the index, and size and hexadecimal hashes of the index.

    `compression` is such as "zstd" or "gz"; None: not compressed.
    """

    name: str
    size_bytes: int
    hashes: dict[str, str]
    compression: str | None


@dataclass(frozen=True)
class MdsShard:
    """One shard of an index: its uncompressed and its compressed file, of which at least one must exist.

    The columns are in the order of the values of a sample.
    """

    raw: MdsFile
    compressed: MdsFile | None
    num_samples: int
    columns: tuple[MdsColumn, ...]


def parse_index(content: bytes, location: str) -> list[MdsShard]:
    """Return the shards that an index lists, in its order.

    Raises:
        CorruptDataError: the index is not JSON.
        ConfigError: it is not an index of MDS shards in version 2; or a path in it leads out of the folder.
    """
    try:
        index = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{location} is not JSON: {error}; restore another copy") from error
    try:
        _check_version(index["version"], location)
        return [_shard(shard, location) for shard in index["shards"]]
    except ConfigError:  # a ValueError with a complete message
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # a key is missing, or a value is unexpected
        raise ConfigError(f"{location} is not an index of MDS shards: {type(error).__name__} {error}") from error


def _check_version(version: Any, location: str) -> None:
    if version != _VERSION:
        raise ConfigError(
            f"{location} has version {version}; datasvc reads version {_VERSION}: write it again with a current "
            "MosaicML Streaming"
        )


def _shard(shard: dict[str, Any], location: str) -> MdsShard:
    """Return the shard that an element of the index describes. For errors, see `parse_index`."""
    if (shard["format"], shard["version"]) != ("mds", _VERSION):
        raise ConfigError(
            f"{location} lists shards of the format {shard['format']!r}, version {shard['version']}; expected 'mds', "
            f"version {_VERSION}: ingest CSV and JSON lines as sources of those formats"
        )
    columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=False)
    # Compare the lengths before `columns` is read, for an error that names the columns.
    if not len(shard["column_names"]) == len(shard["column_encodings"]) == len(shard["column_sizes"]):
        raise ConfigError(f"{location} lists columns without encodings or sizes: {shard['column_names']}")
    # The name may end with a level, as in "zstd:7".
    compression = (shard["compression"] or "").partition(":")[0] or None
    return MdsShard(
        _file(shard["raw_data"], None, location),
        _file(shard["zip_data"], compression, location) if shard["zip_data"] else None,
        _count(shard["samples"], location),
        # Size 0 means that the size varies: MosaicML's own reader reads it so.
        tuple(MdsColumn(str(name), str(encoding), size or None) for name, encoding, size in columns),
    )


def _file(described: dict[str, Any], compression: str | None, location: str) -> MdsFile:
    """Return a file of a shard from its description in the index. Raise ConfigError if it is not in the folder."""
    # An index that was written on Windows has backslashes.
    name = described["basename"].replace("\\", "/")
    if name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"{location} lists {name!r}, which is outside its folder; expected a path below it")
    return MdsFile(name, _count(described["bytes"], location), dict(described["hashes"]), compression)


def _count(number: Any, location: str) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigError(f"{location} has {number!r} as a count; expected an integer from 0")
    return number
