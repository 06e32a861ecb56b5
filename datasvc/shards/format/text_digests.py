"""Digests as in the formats 1 and 2 of the sample index, which hash dates, times, durations and decimals as text.

They verify old shards. All other values have the same encoding in all formats, see `digests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from datasvc.shards.format.digests import digest_batch, encode_array, encode_items, has_units

_NS_PER_DAY = 86_400_000_000_000


def text_digests(batch: pa.RecordBatch) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield the sample and payload digests of a batch as the formats 1 and 2 may have them.

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
