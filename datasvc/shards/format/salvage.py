"""What of a damaged shard still parses, and which samples that leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY

# What Arrow and Python say of bytes that are not what they should be.
_DAMAGE: Final = (pa.ArrowException, ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError)
# The file format is the stream format between this magic and a footer.
_MAGIC_BYTES: Final = 8

SampleMark = tuple[str, bytes, bytes]
"""Key, sample digest and payload digest: what the sample index says of a sample."""


def marks_of(batch: pa.RecordBatch) -> list[SampleMark]:
    """Return key and digests of a batch's samples, computed from their values."""
    samples, payloads = digest_batch(batch)
    return list(zip(batch.column(KEY).to_pylist(), samples, payloads, strict=True))


def readable_marks(content: pa.Buffer) -> set[SampleMark]:
    """Return key and digests of all samples that still parse in the bytes of a damaged shard."""
    marks: set[SampleMark] = set()
    for batch in _readable_batches(content):
        try:
            batch.validate(full=True)  # an offset that points outside would be followed
            marks.update(marks_of(batch))
        except _DAMAGE:
            continue
    return marks


def rows_not_among(index: SampleIndex, marks: Iterable[SampleMark]) -> Integers:
    """Return the rows of the samples in `index` that are not among `marks`: `int64[n]`, ascending."""
    found = set(marks)
    columns = (index.table.column(name).to_pylist() for name in index.table.schema.names)
    return np.array([row for row, mark in enumerate(zip(*columns, strict=True)) if mark not in found], np.int64)


def _readable_batches(content: pa.Buffer) -> Iterator[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.BufferReader(content))
    except _DAMAGE:
        yield from _leading_batches(content)
        return
    for number in range(reader.num_record_batches):
        try:
            yield reader.get_batch(number)
        except _DAMAGE:
            continue


def _leading_batches(content: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the batches from the start of a file whose footer is gone, until one does not parse."""
    try:
        yield from pa.ipc.open_stream(pa.BufferReader(content.slice(_MAGIC_BYTES)))
    except _DAMAGE:
        return
