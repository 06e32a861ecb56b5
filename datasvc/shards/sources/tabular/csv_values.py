"""Convert columns of bytes of CSV files to typed columns."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

# Values that Arrow's type inference treats as missing; in text columns they are kept as text.
_NULLS: Final = pa.array(sorted(pyarrow.csv.ConvertOptions().null_values), pa.string())
_TIME_OF_DAY: Final = pa.scalar("1970-01-01 ", pa.string())


def parse_column(values: pa.Array, data_type: pa.DataType) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return `values` as `data_type`, null where one does not convert, with the index and reason of each of those."""
    try:
        return _parse(values, data_type), []
    except (pa.ArrowException, UnicodeDecodeError) as error:
        if len(values) == 1:
            reason = f"{values[0].as_py()!r:.100} is not a valid {data_type}: {error}"
            return pa.nulls(1, data_type), [(0, reason)]
    # One value fails the whole column: find it by bisection.
    middle = len(values) // 2
    first, bad = parse_column(values.slice(0, middle), data_type)
    second, more = parse_column(values.slice(middle), data_type)
    return pa.concat_arrays([first, second]), bad + [(middle + index, reason) for index, reason in more]


def _parse(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    texts = values.cast(pa.string())
    if pa.types.is_string(data_type):
        return texts
    texts = pc.ascii_trim_whitespace(texts)
    texts = pc.if_else(pc.is_in(texts, value_set=_NULLS), pa.scalar(None, pa.string()), texts)
    if pa.types.is_time(data_type):
        # Arrow casts no text to a time of day, but to a timestamp.
        moments = pc.binary_join_element_wise(_TIME_OF_DAY, texts, "").cast(pa.timestamp(data_type.unit))
        return moments.cast(data_type)
    return texts.cast(data_type)
