"""Intact samples of a corrupt shard, found in the record batches that still parse.

`verify --deep` reports the other samples of the shard, those that are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY

# Errors that Arrow and Python raise while they parse corrupt bytes.
_PARSE_ERRORS: Final = (pa.ArrowException, ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError)
# An Arrow IPC file is an IPC stream between this magic number (padded to 8 bytes) and a footer.
_MAGIC_BYTES: Final = 8

SampleIdentity = tuple[str, bytes, bytes]
"""Key, sample digest and payload digest of a sample, as in the sample index."""


def sample_identities(batch: pa.RecordBatch) -> list[SampleIdentity]:
    """Return the key and the digests of each sample of a batch, computed from its values."""
    samples, payloads = digest_batch(batch)
    return list(zip(batch.column(KEY).to_pylist(), samples, payloads, strict=True))


def readable_identities(content: pa.Buffer) -> set[SampleIdentity]:
    """Return the keys and digests of all samples in those record batches of a corrupt shard that still parse."""
    identities: set[SampleIdentity] = set()
    for batch in _readable_batches(content):
        try:
            # Validated first, because Arrow would otherwise follow a corrupt offset out of its buffer.
            batch.validate(full=True)
            identities.update(sample_identities(batch))
        except _PARSE_ERRORS:
            continue
    return identities


def missing_rows(index: SampleIndex, identities: Iterable[SampleIdentity]) -> Integers:
    """Return the rows of the samples in `index` that are not among `identities`: `int64[n]`, ascending."""
    present = set(identities)
    columns = (index.table.column(name).to_pylist() for name in index.table.schema.names)
    return np.array(
        [row for row, identity in enumerate(zip(*columns, strict=True)) if identity not in present], np.int64
    )


def _readable_batches(content: pa.Buffer) -> Iterator[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.BufferReader(content))
    except _PARSE_ERRORS:
        yield from _leading_batches(content)
        return
    for number in range(reader.num_record_batches):
        try:
            yield reader.get_batch(number)
        except _PARSE_ERRORS:
            continue


def _leading_batches(content: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the batches from the start of a file without a readable footer, up to the first that does not parse."""
    try:
        yield from pa.ipc.open_stream(pa.BufferReader(content.slice(_MAGIC_BYTES)))
    except _PARSE_ERRORS:
        return
