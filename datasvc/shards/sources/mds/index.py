"""Parse the index of a MosaicML MDS data set, `index.json`, which lists its shards and their columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.sources.mds.encodings import MdsColumn

INDEX_FILE: Final = "index.json"
_VERSION: Final = 2  # of the index, and of each shard in it


@dataclass(frozen=True)
class MdsFile:
    """One file of a shard.

    Attributes:
        name: path below the folder of the index.
        size_bytes: size according to the index.
        hashes: hexadecimal digests by name of the algorithm.
        compression: such as "zstd" or "gz"; None: not compressed.
    """

    name: str
    size_bytes: int
    hashes: dict[str, str]
    compression: str | None


@dataclass(frozen=True)
class MdsShard:
    """One shard of an index: its uncompressed and its compressed file, of which at least one must exist.

    Attributes:
        raw: the uncompressed file.
        compressed: the compressed file; None: the index has none.
        num_samples: number of samples.
        columns: columns in the order of the values of a sample.
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
