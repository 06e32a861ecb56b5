"""Values of CSV files: columns of bytes to columns of the types that the first block has."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

# What Arrow takes for missing when it finds out the types; in text they are what they say.
_NULLS: Final = pa.array(sorted(pyarrow.csv.ConvertOptions().null_values), pa.string())
_TIME_OF_DAY: Final = pa.scalar("1970-01-01 ", pa.string())


def parse_column(values: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return values as `wanted`, null where one does not convert, and those: index and reason."""
    try:
        return _parse(values, wanted), []
    except (pa.ArrowException, UnicodeDecodeError) as error:
        if len(values) == 1:
            return pa.nulls(1, wanted), [(0, f"{values[0].as_py()!r:.100} is no {wanted}: {error}")]
    middle = len(values) // 2
    first, bad = parse_column(values.slice(0, middle), wanted)
    second, more = parse_column(values.slice(middle), wanted)
    return pa.concat_arrays([first, second]), bad + [(middle + index, reason) for index, reason in more]


def _parse(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    texts = values.cast(pa.string())
    if pa.types.is_string(wanted):
        return texts
    texts = pc.ascii_trim_whitespace(texts)
    texts = pc.if_else(pc.is_in(texts, value_set=_NULLS), pa.scalar(None, pa.string()), texts)
    if pa.types.is_time(wanted):
        moments = pc.binary_join_element_wise(_TIME_OF_DAY, texts, "").cast(pa.timestamp(wanted.unit))
        return moments.cast(wanted)
    return texts.cast(wanted)
