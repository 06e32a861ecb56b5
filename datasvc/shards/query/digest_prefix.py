"""Finds shards and samples by the beginning of a digest, in a shard table and in sample indexes. No shard is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.repository import Digest
from datasvc.shards.format.digests import DIGEST_BYTES
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.threads import map_in_threads

MIN_DIGITS: Final = 6
"""Fewer digits would match many digests by chance."""
MAX_SAMPLE_DIGITS: Final = 2 * DIGEST_BYTES
_PREFIX: Final = re.compile(f"[0-9a-f]{{{MIN_DIGITS},64}}")
_READS_AT_ONCE: Final = 8


@dataclass(frozen=True)
class ShardMatch:
    """An object of a shard table.

    Attributes:
        digest: its digest.
        kind: "shard", "sample index" or "deletions".
        shard: number of the shard that it belongs to; None for the deletions of all shards.
    """

    digest: Digest
    kind: str
    shard: int | None


@dataclass(frozen=True)
class SampleMatch:
    """A live sample.

    Attributes:
        digest: its digest, 32 hexadecimal digits.
        kind: "sample", or "payload" for the digest of its blobs.
        number: its number in the split.
        key: its key.
    """

    digest: str
    kind: str
    number: int
    key: str


def is_digest_prefix(text: str) -> bool:
    """Return whether a text may be the beginning of a digest: 6 to 64 hexadecimal digits."""
    return _PREFIX.fullmatch(text) is not None


def find_shards(table: ShardTable, prefix: str) -> list[ShardMatch]:
    """Return the objects of a shard table whose digests begin with `prefix`, see `is_digest_prefix`."""
    found = [
        ShardMatch(Digest(digest), kind, row)
        for kind, column in (("shard", "digest"), ("sample index", "index"))
        for row, digest in _find_rows(table.rows.column(column), prefix)
    ]
    if table.deletions is not None and table.deletions.startswith(prefix):
        found.append(ShardMatch(table.deletions, "deletions", None))
    return found


def find_samples(reader: NumberedSamples, prefix: str) -> list[SampleMatch]:
    """Return the live samples whose digest, or whose payload's digest, begins with `prefix`.

    Reads the sample index of each shard. Shards of old versions have none; their samples are not found.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: a sample index cannot be read.
    """
    if len(prefix) > MAX_SAMPLE_DIGITS:
        return []
    shards = [shard for shard in range(reader.split.table.num_shards) if reader.split.table.index(shard) is not None]
    found = map_in_threads(lambda shard: _find_in_shard(reader, shard, prefix), shards, _READS_AT_ONCE)
    return [match for matches in found for match in matches]


def _find_in_shard(reader: NumberedSamples, shard: int, prefix: str) -> list[SampleMatch]:
    objects, index_digest = reader.split.repository.objects, reader.split.table.index(shard)
    assert index_digest is not None, "only shards with an index are searched"
    index = SampleIndex.decode(objects.read(index_digest), objects.location(index_digest)).table
    # Without blobs, both digests may be equal: such a sample is found once.
    found: dict[tuple[int, str], str] = {}
    for kind in ("sample", "payload"):
        for row, digest in _find_rows(index.column(kind), prefix):
            found.setdefault((row, digest), kind)
    live = reader.live_numbers(shard, np.unique([row for row, _ in found])) if found else {}
    keys = index.column(KEY)
    return [
        SampleMatch(digest, kind, live[row], keys[row].as_py())
        for (row, digest), kind in found.items()
        if row in live
    ]


def _find_rows(digests: pa.ChunkedArray, prefix: str) -> list[tuple[int, str]]:
    """Return row and hexadecimal digits of the digests that begin with `prefix`."""
    # Whole bytes are compared first: few rows are left for the digit that an odd number of them has.
    whole = bytes.fromhex(prefix[: len(prefix) // 2 * 2])
    begins = pc.fill_null(pc.starts_with(digests.cast(pa.binary()), whole), fill_value=False)
    # Not by `pc.indices_nonzero`: that of pyarrow 21 and 22 ends the process for an empty column.
    rows = np.flatnonzero(begins.to_numpy()).tolist()
    values = [(row, digests[row].as_py().hex()) for row in rows]
    return [(row, value) for row, value in values if value.startswith(prefix)]
