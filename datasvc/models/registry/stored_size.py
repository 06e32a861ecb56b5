"""How a version is stored: the bytes that a restore reads, and the lengths of its chains of differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.errors import NotFoundError
from datasvc.models.registry.registry import describe_model
from datasvc.models.tensors.tensor_table import read_table
from datasvc.repository import Digest, Objects, Repository


@dataclass(frozen=True)
class StoredSize:
    """Size of the tensors of a version.

    Attributes:
        tensor_bytes: bytes in memory.
        stored_bytes: stored bytes that a restore reads. Several versions may share them.
        num_objects: number of objects that contain these bytes.
        num_chunks: number of chunks, which are stored and verified separately.
        chain_lengths: number of chunks by the number of links that a restore decodes: 1 for a chunk that is stored
            whole, and one more for each difference.
    """

    tensor_bytes: int
    stored_bytes: int
    num_objects: int
    num_chunks: int
    chain_lengths: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        return {**vars(self), "chain_lengths": {str(length): num for length, num in self.chain_lengths.items()}}


def stored_size(repository: Repository, ref: str) -> StoredSize:
    """Return how a model version is stored; no tensor is read.

    Raises:
        NotFoundError: there is no such version, or it was removed.
        CorruptDataError, UnavailableError: its entry or its table of tensors cannot be read.
    """
    version = describe_model(repository, ref)
    if version.removed:
        raise NotFoundError(f"{version} was removed, so gc may have deleted its bytes")
    return measure_stored_size(repository.objects, version.tensors)


def measure_stored_size(objects: Objects, table: Digest) -> StoredSize:
    """Return the size of a version by its tensor table; no tensor is read.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: the table cannot be read.
    """
    records = read_table(objects, table)
    chunks = [chunk for record in records for chunk in record.chunks]
    # Tensors with equal elements share a range: count it once.
    ranges = {(link.object, link.offset): link.length for chunk in chunks for link in chunk.chain}
    lengths = Counter(len(chunk.chain) for chunk in chunks)
    return StoredSize(
        sum(record.nbytes for record in records),
        sum(ranges.values()),
        len({digest for digest, _ in ranges}),
        len(chunks),
        dict(sorted(lengths.items())),
    )
