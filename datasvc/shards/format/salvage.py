"""Finds the intact samples of a corrupt shard, in the record batches that still parse.

`verify --deep` reports all other samples of the shard as lost. Old sample indexes have digests of the text of dates,
times, durations and decimals: `text_digests` computes them. All other values have the same digests in all formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.arrow_messages import checked_messages
from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import digest_batch, encode_array, encode_items, has_units
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, IpcReader, check_schema, read_batch
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY, has_compression

# Errors that Arrow and Python raise while they parse corrupt bytes, or make Python values and digests of them.
_DAMAGE_ERRORS: Final = (CorruptDataError, ArithmeticError, LookupError, MemoryError, *PARSE_ERRORS)
# An Arrow IPC file is an IPC stream between this magic number (padded to 8 bytes) and a footer.
_MAGIC_BYTES: Final = 8
_NS_PER_DAY: Final = 86_400_000_000_000

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
        reader = IpcReader(pa.BufferReader(content), "the shard", compressed=True)
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
        schema = pa.ipc.read_schema(next(checked_messages(content.slice(_MAGIC_BYTES)), b""))
        check_schema(schema)
        messages = checked_messages(content.slice(_MAGIC_BYTES), compressed=has_compression(schema))
        next(messages)  # the schema
        for message in messages:
            yield read_batch(message, schema)
    except _DAMAGE_ERRORS:
        return


def text_digests(batch: pa.RecordBatch) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield the sample and payload digests of a batch as the formats 1 and 2 of the sample index may have them.

    There are two where durations have nanoseconds as their unit: their text was that of pandas if it was installed,
    and else that of Python.
    """
    yield digest_batch(batch, partial(_encode_texts, is_pandas=True))
    if any(map(has_units, batch.schema.types)):
        yield digest_batch(batch, partial(_encode_texts, is_pandas=False))


def _encode_texts(array: pa.Array, *, is_pandas: bool) -> list[bytes | None]:
    data_type = array.type
    if isinstance(data_type, pa.BaseExtensionType):
        return list(map(_encode_python, array.to_pylist()))
    if getattr(data_type, "unit", None) != "ns":
        texts: list[str | None] = [_text(value) for value in array.to_pylist()]
    elif pa.types.is_duration(data_type) and is_pandas:
        texts = [None if value is None else _pandas_duration(value) for value in array.cast(pa.int64()).to_pylist()]
    else:
        micros = _in_microseconds(data_type)
        nanos = array.cast(pa.int64()).to_pylist()
        rounded = array.cast(micros, safe=False).to_pylist()
        texts = [
            _with_nanos(value, number) if pa.types.is_timestamp(data_type) and value is not None else _text(value)
            for value, number in zip(rounded, nanos, strict=True)
        ]
    return [None if text is None else b"o" + text.encode() for text in texts]


def _encode_python(value: Any) -> bytes | None:
    """Return the encoding of the Python value of an extension type, which the text of its class decides."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return encode_array(pa.array([value]))[0]
    if isinstance(value, Iterable):
        return b"[" + encode_items(map(_encode_python, value))
    return b"o" + str(value).encode()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _in_microseconds(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(data_type):
        return pa.timestamp("us", data_type.tz)
    return pa.duration("us") if pa.types.is_duration(data_type) else pa.time64("us")


def _with_nanos(when: Any, nanos: int) -> str:
    """Return the text of a timestamp; nine digits follow the point if it is not a whole number of microseconds."""
    if nanos % 1000 == 0:
        return str(when)
    text = str(when.replace(microsecond=0))
    return f"{text[:19]}.{nanos % 1_000_000_000:09d}{text[19:]}"


def _pandas_duration(nanos: int) -> str:
    """Return the text of a `pandas.Timedelta`, such as `-1 days +23:59:59.500000`."""
    days, rest = divmod(nanos, _NS_PER_DAY)
    seconds, fraction = divmod(rest, 1_000_000_000)
    digits = "" if not fraction else f".{fraction // 1000:06d}" if fraction % 1000 == 0 else f".{fraction:09d}"
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{digits}"
    return f"{days} days {'+' if days < 0 else ''}{clock}"
