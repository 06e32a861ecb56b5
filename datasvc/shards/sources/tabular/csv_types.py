"""Choose the types of the columns of a CSV file, and convert its text to them, for `csv_files`.

Arrow infers the types. Where a number would lose what the text says, the column is text, or a later value is bad:
leading zeros and signs (`01234`, `+5`), codes such as `1E5` and `0x10`, quoted values, and integers that no float
holds.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

# Values that Arrow's type inference treats as missing; in text columns they are kept as text.
_NULLS: Final = pa.array(sorted(pyarrow.csv.ConvertOptions().null_values), pa.string())
# Put before a time of day, to make the text of a timestamp.
_EPOCH_DATE: Final = pa.scalar("1970-01-01 ", pa.string())
_CODE: Final = r"^(\+|-?0[0-9xX])"
# Programs write an exponent with a sign or a point (1e+05, 1.0e5); without both, `1E5` is more often a code.
_EXPONENT_CODE: Final = r"^[0-9]+[eE][0-9]+$"
_PLAIN_OR_EXPONENT_CODE: Final = r"^-?[0-9]+([eE][0-9]+)?$"
_INTEGER: Final = r"^-?[0-9]+$"
_MAX_DIGITS: Final = 400  # of an integer that is compared with its float; a float has at most 309
_LONG_INTEGER: Final = r"^-?[0-9]{16,}$"  # a float holds all integers of 15 digits


def value_type(inferred: pa.DataType, values: pa.Array, *, is_quoted: bool) -> pa.DataType:
    """Return the type of a column.

    Args:
        inferred: the type that Arrow inferred.
        values: the first values, as bytes.
        is_quoted: whether these values are in quotes, unlike those of other columns.
    """
    # A column without values becomes text, because later rows may have any text in it.
    # Arrow infers bytes if some text is not UTF-8. The column becomes text, so only the rows with such text are bad.
    if is_quoted or pa.types.is_null(inferred) or pa.types.is_binary(inferred):
        return pa.string()
    if not (pa.types.is_integer(inferred) or pa.types.is_floating(inferred)):
        return inferred
    text = _filled(values.cast(pa.string())).drop_null()
    if _any(text, _CODE) or (_any(text, _EXPONENT_CODE) and _all(text, _PLAIN_OR_EXPONENT_CODE)):
        return pa.string()
    if pa.types.is_floating(inferred) and _all(text, _INTEGER):
        # Arrow makes floats of integers beyond int64.
        try:
            text.cast(pa.uint64())
        except pa.ArrowInvalid:
            return pa.string()
        return pa.uint64()
    return inferred


def convert_values(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Return a column of bytes as `data_type`. Raise an Arrow or Unicode error if a value does not."""
    text = values.cast(pa.string())
    if pa.types.is_string(data_type):
        return text
    text = _filled(text)
    if pa.types.is_time(data_type):
        # Arrow casts text to a timestamp, but not to a time of day.
        timestamps = pc.binary_join_element_wise(_EPOCH_DATE, text, "").cast(pa.timestamp(data_type.unit))
        return timestamps.cast(data_type)
    converted = text.cast(data_type)
    if pa.types.is_integer(data_type) or pa.types.is_floating(data_type):
        if _any(text, _CODE):
            raise pa.ArrowInvalid("as a number it would lose its first characters; keep the column with --as-text")
        if pa.types.is_floating(data_type):
            _check_floats(text, converted)
    return converted


def quoted_columns(block: bytes, delimiter: str) -> set[int]:
    """Return the numbers of the columns whose values in the first lines of a file are all quoted.

    Empty values do not count. If all columns are quoted, also in the header, the result is empty: some programs quote
    every value, and then quotes do not distinguish text from numbers.
    """
    if b'"' not in block:
        return set()
    block = block.removeprefix(codecs.BOM_UTF8)  # as Excel writes it, before the quote of the first name
    separator = re.escape(delimiter.encode())
    value = re.compile(rb'("(?:[^"]|"")*+"|[^' + separator + rb"\r\n]*+)(" + separator + rb"|\r\n|\r|\n|\Z)")
    quoted: set[int] = set()
    unquoted: set[int] = set()
    is_header, header_is_quoted, column = True, True, 0
    for match in value.finditer(block):
        content, end = match.groups()
        if not end:
            break  # the last line may be cut
        if is_header:
            header_is_quoted = header_is_quoted and content.startswith(b'"')
        elif content:
            (quoted if content.startswith(b'"') else unquoted).add(column)
        column += 1
        if end != delimiter.encode():
            is_header, column = False, 0
    return set() if header_is_quoted and not unquoted else quoted - unquoted


def _filled(text: pa.Array) -> pa.Array:
    """Return text without white space around it, and null for a value that stands for a missing one."""
    text = pc.ascii_trim_whitespace(text)
    return pc.if_else(pc.is_in(text, value_set=_NULLS), pa.scalar(None, pa.string()), text)


def _check_floats(text: pa.Array, floats: pa.Array) -> None:
    """Raise ArrowInvalid if an integer or a large number is another number as a float."""
    for value in text.filter(pc.match_substring_regex(text, _LONG_INTEGER)).to_pylist():
        if len(value) > _MAX_DIGITS or int(value) != float(value):
            raise pa.ArrowInvalid("a float does not hold this integer; keep the column with --as-text")
    infinite = text.filter(pc.is_inf(floats))
    if len(infinite) and not _all(infinite, r"(?i)inf"):
        raise pa.ArrowInvalid("it is too large for a float")


def _any(text: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(text, pattern)).as_py())


def _all(text: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(text, pattern)).as_py())
