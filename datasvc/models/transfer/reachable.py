"""Which objects a version is made of: what another repository needs to have to restore it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.entry_refs import objects_of_entry
from datasvc.repository import Digest, ObjectInfo, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.shard_table import ShardTable

_DIGEST: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def named_objects(repository: Repository, version: Resolved, content: Mapping[str, Any]) -> list[ObjectInfo]:
    """Return every object that a version needs, each once.

    Args:
        repository: where it lies.
        version: of a model or data set.
        content: of its entry.

    Raises:
        CorruptDataError: its tables were changed, or do not say what they should.
        NotFoundError: one of its objects is not there.
        ConfigError: a table has a later format.
        UnavailableError: the store did not answer.
    """
    try:
        if version.kind == "models":
            named = dict(_of_model(repository, version, content))
        else:
            named = dict(_of_dataset(repository, content))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} does not say what it is made of: {error!r}") from error
    except NotFoundError as error:
        raise NotFoundError(f"{version} is not whole: {error}") from error
    # What else the entry names and is there: which samples were seen, what a later datasvc may add.
    for digest in set(_digests_in(content)) - named.keys():
        size_bytes = repository.objects.size(digest)
        if size_bytes is not None:
            named[digest] = size_bytes
    return [ObjectInfo(digest, size_bytes) for digest, size_bytes in sorted(named.items())]


def _of_model(repository: Repository, version: Resolved, content: Mapping[str, Any]) -> Iterator[tuple[Digest, int]]:
    named = objects_of_entry(content, version)
    yield from _sized(repository, named.all)
    for record in read_table(repository.objects, named.tensors):
        for chunk in record.chunks:
            for link in chunk.chain:
                yield link.object, link.object_bytes


def _of_dataset(repository: Repository, content: Mapping[str, Any]) -> Iterator[tuple[Digest, int]]:
    for split in content["splits"].values():
        digest = parse_digest(split["table"])
        table = ShardTable.decode(repository.objects.read(digest), repository.objects.location(digest))
        rows = table.rows.select(["digest", "bytes"]).to_pylist()
        shards = {Digest(row["digest"].hex()): int(row["bytes"]) for row in rows}
        yield from shards.items()
        yield from _sized(repository, [digest, *(table.objects() - shards.keys())])


def _sized(repository: Repository, digests: Iterable[Digest]) -> Iterator[tuple[Digest, int]]:
    for digest in digests:
        size_bytes = repository.objects.size(digest)
        if size_bytes is None:
            raise NotFoundError(f"object {repository.objects.location(digest)} is missing")
        yield digest, size_bytes


def _digests_in(value: Any) -> Iterator[Digest]:
    if isinstance(value, str):
        yield from map(Digest, _DIGEST.findall(value))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _digests_in(name)
            yield from _digests_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _digests_in(each)
