"""The index of a MosaicML MDS data set: which shards it has, and what is in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.sources.mds.encodings import MdsColumn

INDEX_FILE: Final = "index.json"
_VERSION: Final = 2


@dataclass(frozen=True)
class MdsFile:
    """One file of a shard.

    Attributes:
        name: path below the folder of the index.
        size_bytes: as the index says.
        hashes: hexadecimal, by the name of the algorithm.
        compression: "zstd", "gz", ...; None: none.
    """

    name: str
    size_bytes: int
    hashes: dict[str, str]
    compression: str | None


@dataclass(frozen=True)
class MdsShard:
    """One shard of an index.

    Attributes:
        raw: the shard.
        compressed: its compressed copy, None without.
        num_samples: in it.
        columns: in the order of its values.
    """

    raw: MdsFile
    compressed: MdsFile | None
    num_samples: int
    columns: tuple[MdsColumn, ...]


def parse_index(content: bytes, location: str) -> list[MdsShard]:
    """Return the shards that an index names, in its order.

    Raises:
        CorruptDataError: it is no JSON.
        ConfigError: it is no index of version 2 of MDS shards, or a file's path climbs out of its folder.
    """
    try:
        index = json.loads(content)
    except ValueError as error:
        raise CorruptDataError(f"{location} is no JSON: {error}; restore another copy") from error
    try:
        if index["version"] != _VERSION:
            raise ConfigError(f"{location} is of version {index['version']}; datasvc reads version {_VERSION}")
        return [_shard(shard, location) for shard in index["shards"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{location} is no index of MDS shards: {type(error).__name__} {error}") from error


def _shard(shard: dict[str, Any], location: str) -> MdsShard:
    if (shard["format"], shard["version"]) != ("mds", _VERSION):
        raise ConfigError(
            f"{location} names shards of the format {shard['format']!r}, version {shard['version']}; expected 'mds', "
            f"version {_VERSION}: CSV and JSON lines are sources of their own"
        )
    columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=False)
    if not len(shard["column_names"]) == len(shard["column_encodings"]) == len(shard["column_sizes"]):
        raise ConfigError(f"{location} names columns without encodings or sizes: {shard['column_names']}")
    compression = (shard["compression"] or "").partition(":")[0] or None
    return MdsShard(
        _file(shard["raw_data"], None, location),
        _file(shard["zip_data"], compression, location) if shard["zip_data"] else None,
        _count(shard["samples"], location),
        # Size 0 means what None means, to MosaicML's own reader.
        tuple(MdsColumn(str(name), str(encoding), size or None) for name, encoding, size in columns),
    )


def _file(described: dict[str, Any], compression: str | None, location: str) -> MdsFile:
    name = described["basename"].replace("\\", "/")
    if name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"{location} names {name!r}, which is outside its folder")
    return MdsFile(name, _count(described["bytes"], location), dict(described["hashes"]), compression)


def _count(number: Any, location: str) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigError(f"{location} has {number!r} where a count should be")
    return number
