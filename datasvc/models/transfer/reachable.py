"""Lists the objects that a version references by its entry and its tables: a transfer copies these objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.provenance.sample_query import split_tables
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.entry_fields import objects_of_entry
from datasvc.repository import Digest, ObjectInfo, Repository, Resolved
from datasvc.shards.format.shard_table import ShardTable

# Exactly 64 hexadecimal digits: part of a longer number is not a digest.
_DIGEST: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def reachable_objects(repository: Repository, version: Resolved, content: Mapping[str, Any]) -> list[ObjectInfo]:
    """Return the distinct objects that a version of a model or data set needs, sorted by digest.

    Raises:
        CorruptDataError: the entry or one of its tables is damaged.
        NotFoundError: one of its objects is missing.
        ConfigError: a table has a format that this version of datasvc does not support.
        UnavailableError: the store does not respond.
    """
    try:
        if version.kind == "models":
            sizes = dict(_of_model(repository, version, content))
        else:
            sizes = dict(_of_dataset(repository, version, content))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} has no valid list of its objects: {error!r}") from error
    except NotFoundError as error:
        raise NotFoundError(f"{version} is incomplete: {error}") from error
    # A later release of datasvc may add fields that name objects: also include every other digest in the entry, if
    # the repository has an object for it. The digest in the field `content`, for example, has no object.
    for digest in set(_digests_in(content)) - sizes.keys():
        size_bytes = repository.objects.size(digest)
        if size_bytes is not None:
            sizes[digest] = size_bytes
    return [ObjectInfo(digest, size_bytes) for digest, size_bytes in sorted(sizes.items())]


def _of_model(repository: Repository, version: Resolved, content: Mapping[str, Any]) -> Iterator[tuple[Digest, int]]:
    """Yield the digest and size of each object of a model version; an object may occur several times."""
    refs = objects_of_entry(content, version)
    yield from _with_sizes(repository, refs.all)
    for record in read_table(repository.objects, refs.tensors):
        for chunk in record.chunks:
            for link in chunk.chain:
                yield link.object, link.object_bytes


def _of_dataset(
    repository: Repository, version: Resolved, content: Mapping[str, Any]
) -> Iterator[tuple[Digest, int]]:
    """Like `_of_model`, for a data-set version: its shard tables, and the objects that these name."""
    for digest in split_tables(content, str(version)).values():
        table = ShardTable.decode(repository.objects.read(digest), repository.objects.location(digest))
        rows = table.rows.select(["digest", "bytes"]).to_pylist()
        # The table has the sizes of the shards. Ask the store only for the sizes of the other objects.
        shards = {Digest(row["digest"].hex()): int(row["bytes"]) for row in rows}
        yield from shards.items()
        yield from _with_sizes(repository, [digest, *(table.objects() - shards.keys())])


def _with_sizes(repository: Repository, digests: Iterable[Digest]) -> Iterator[tuple[Digest, int]]:
    """Yield each digest with the size that the store reports. Raises NotFoundError: an object is missing."""
    for digest in digests:
        size_bytes = repository.objects.size(digest)
        if size_bytes is None:
            raise NotFoundError(f"object {repository.objects.location(digest)} is missing")
        yield digest, size_bytes


def _digests_in(value: Any) -> Iterator[Digest]:
    """Yield every digest in the strings of a JSON value, at any depth."""
    if isinstance(value, str):
        yield from map(Digest, _DIGEST.findall(value))
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _digests_in(key)
            yield from _digests_in(child)
    elif isinstance(value, list):
        for child in value:
            yield from _digests_in(child)
