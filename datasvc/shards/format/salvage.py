"""Finds the intact samples of a corrupt shard, in the record batches that still parse.

`verify --deep` reports all other samples of the shard as lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from datasvc.arrow_messages import checked_messages
from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, IpcReader, check_schema, read_batch
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.text_digests import text_digests

# Errors that Arrow and Python raise while they parse corrupt bytes, or make Python values and digests of them.
_DAMAGE_ERRORS: Final = (CorruptDataError, ArithmeticError, LookupError, MemoryError, *PARSE_ERRORS)
# An Arrow IPC file is an IPC stream between this magic number (padded to 8 bytes) and a footer.
_MAGIC_BYTES: Final = 8

SampleIdentity = tuple[str, bytes, bytes]
"""Key, sample digest and payload digest of a sample, as in the sample index."""


def sample_identities(batch: pa.RecordBatch, index: SampleIndex | None) -> list[tuple[SampleIdentity, ...]]:
    """Return key and digests of each sample of a batch, computed from its values.

    An old `index` may have one of two digests, see `text_digests`: a sample has as many identities.
    """
    is_text = index is not None and index.hashes_text
    digests = text_digests(batch) if is_text else [digest_batch(batch)]
    keys = batch.column(KEY).to_pylist()
    return list(zip(*(zip(keys, samples, payloads, strict=True) for samples, payloads in digests), strict=True))


def readable_identities(content: pa.Buffer, index: SampleIndex | None) -> set[SampleIdentity]:
    """Return the keys and digests of all samples in those record batches of a corrupt shard that still parse.

    `index` is the sample index of the shard, which they are compared with.
    """
    identities: set[SampleIdentity] = set()
    for batch in readable_batches(content):
        try:
            identities.update(*sample_identities(batch, index))
        except _DAMAGE_ERRORS:
            continue
    return identities


def missing_rows(index: SampleIndex, identities: Iterable[SampleIdentity]) -> Integers:
    """Return the rows of the samples in `index` that are not among `identities`: `int64[n]`, ascending."""
    present = set(identities)
    columns = [index.table.column(name).to_pylist() for name in index.table.schema.names]
    listed = zip(*columns, strict=True)  # key, sample digest and payload digest: the columns of the index
    return np.array([row for row, identity in enumerate(listed) if identity not in present], np.int64)


def readable_batches(content: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a corrupt shard that still parse; their values may be wrong.

    Without a readable footer, these are only the batches at the start of the file.
    """
    try:
        reader = IpcReader(pa.BufferReader(content), "the shard")
    except _DAMAGE_ERRORS:
        yield from _leading_batches(content)
        return
    for number in range(reader.num_batches):
        try:
            yield reader.batch(number)
        except _DAMAGE_ERRORS:
            continue


def _leading_batches(content: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the batches from the start of a file without a readable footer, up to the first that does not parse."""
    try:
        messages = checked_messages(content.slice(_MAGIC_BYTES))
        schema = pa.ipc.read_schema(next(messages, b""))
        check_schema(schema)
        for message in messages:
            yield read_batch(message, schema)
    except _DAMAGE_ERRORS:
        return
