"""Bytes that the versions of a data set share: a shard that several versions have is stored once."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.repository import Digest, Repository, Resolved
from datasvc.shards.versions.dataset import read_version, readable_versions
from datasvc.threads import map_in_threads

_READS_AT_ONCE: Final = 8


@dataclass(frozen=True)
class VersionBytes:
    """Bytes of the shards of a version.

    Attributes:
        version: number of the version.
        total_bytes: of all its shards.
        new_bytes: of shards that none of the compared versions before it has.
        unique_bytes: of shards that no other compared version has: what its removal would free, if no other data set
            has them.
    """

    version: int
    total_bytes: int
    new_bytes: int
    unique_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def shared_bytes(repository: Repository, name: str, *, last: int | None = None) -> list[VersionBytes]:
    """Compare the shards of the `last` newest versions of a data set (None: all) that are not removed, oldest first.

    Only shard tables are read. A version whose entry cannot be read is left out, see `readable_versions`.

    Raises:
        ConfigError: `last` is not positive.
        NotFoundError, CorruptDataError, UnavailableError: an entry or a shard table cannot be read.
    """
    if last is not None and last < 1:
        raise ConfigError(f"last is {last}; expected 1 or more")
    log = readable_versions(repository, name, last=last)
    removed = repository.state("datasets", log.name).removed
    numbers = [entry.number for entry in log if entry.number not in removed]

    def read(number: int) -> dict[Digest, int]:
        """Return the size of each shard of a version."""
        splits = read_version(repository, Resolved("datasets", log.name, number)).values()
        return {shard.digest: shard.size_bytes for split in splits for shard in split.table.shards()}

    sizes = map_in_threads(read, numbers, _READS_AT_ONCE)
    num_versions = Counter(digest for shards in sizes for digest in shards)
    seen: set[Digest] = set()
    result = []
    for number, shards in zip(numbers, sizes, strict=True):
        result.append(
            VersionBytes(
                number,
                total_bytes=sum(shards.values()),
                new_bytes=sum(size for digest, size in shards.items() if digest not in seen),
                unique_bytes=sum(size for digest, size in shards.items() if num_versions[digest] == 1),
            )
        )
        seen |= shards.keys()
    return result
