"""Read the rows of a CSV file as columns of bytes with their row numbers, and convert them, for `csv_files`.

Arrow skips rows with a wrong number of columns and returns no row numbers. This module finds the number of each row.
So a message can name the row, and a key with the number stays the same when an earlier row is repaired.

Arrow infers the types. Where a number would lose what the text says, the column is text, or a later value is bad:
leading zeros and signs (`01234`, `+5`), codes such as `1E5` and `0x10`, quoted values, and integers that no float
holds.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from datasvc.errors import ConfigError
from datasvc.printable import count_text

# Sizes of a block. A row must fit into one block; if a row does not, the next size is tried.
BLOCKS_BYTES: Final = (1 << 20, 8 << 20, 64 << 20)
# For each skipped row, its number, counted from 0 after the header, and the reason.
Skipped = list[tuple[int, str]]
# Words in the error messages of Arrow.
_TOO_LONG: Final = "straddling object"
_EMPTY: Final = "Empty CSV file"
_SHOWN_CHARACTERS: Final = 100
_BYTE_ORDER_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
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


@dataclass(frozen=True)
class CsvRows:
    """Consecutive rows of a file.

    Attributes:
        batch: columns of bytes.
        numbers: `int64[samples]`, numbers of the rows in `batch`, from 0 after the header.
        bad: numbers of the rows left out, each with the reason.
        stop: one more than the number of the last row in `batch` or `bad`.
    """

    batch: pa.RecordBatch
    numbers: npt.NDArray[np.int64]
    bad: Skipped
    stop: int

    def since(self, first: int) -> CsvRows:
        """Return the rows from number `first` onwards."""
        keep = self.numbers >= first
        if keep.all():
            return self
        bad = [(number, reason) for number, reason in self.bad if number >= first]
        return replace(self, batch=self.batch.filter(pa.array(keep)), numbers=self.numbers[keep], bad=bad)


def read_rows(open_file: Callable[[], BinaryIO], names: Sequence[str], delimiter: str) -> Iterator[CsvRows]:
    """Yield the rows of a file in order; `open_file` is called once for each block size tried.

    Raises:
        pa.ArrowException, OSError, DECOMPRESSION_ERRORS: the file cannot be read, or a row exceeds the largest block.
        ConfigError: the header has changed.
    """
    next_number = 0  # of the first row that was not yielded yet
    for block_bytes in BLOCKS_BYTES:
        try:
            for rows in _read_blocks(open_file, names, delimiter, block_bytes):
                # With a larger block, the file is read again from its start; rows already yielded are left out.
                if rows.stop > next_number:
                    yield rows.since(next_number)
                    next_number = rows.stop
        except pa.ArrowInvalid as error:
            if not is_too_long(error):
                raise
            if block_bytes == BLOCKS_BYTES[-1]:
                limit = f"longer than {block_bytes >> 20} MiB"
                raise pa.ArrowInvalid(f"a row is {limit}; check for a quote that is not closed") from error
        else:
            return


def open_csv(
    stream: BinaryIO,
    delimiter: str,
    *,
    block_bytes: int,
    types: dict[str, pa.DataType] | None = None,
    skipped: Skipped | None = None,
) -> pyarrow.csv.CSVStreamingReader | None:
    """Open a file for reading block by block; return None if it is empty.

    Rows with too few or too many columns are appended to `skipped`. Without `types`, the types of the columns are
    inferred from the first block. Raise pa.ArrowInvalid if a row is longer than a block, or the file is not CSV.
    """

    def skip(row: Any) -> str:
        if skipped is not None:
            counts = f"expected {count_text(row.expected_columns, 'column')}, found {row.actual_columns}"
            lines = row.text.count("\n") + 1
            is_long = len(row.text) > _SHOWN_CHARACTERS
            shown = f"{row.text[:_SHOWN_CHARACTERS]}..." if is_long else row.text
            spans = f" (it spans {lines} lines; check for a quote that is not closed)" if lines > 1 else ""
            # Arrow counts the header as row 1; `Skipped` counts the row after the header as 0.
            skipped.append((row.number - 2, f"{counts}: {shown!r}{spans}"))
        return "skip"

    try:
        return pyarrow.csv.open_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
            ),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types),
        )
    except pa.ArrowInvalid as error:
        if _EMPTY in str(error):
            return None
        raise


def header_of(start: bytes, delimiter: str) -> list[str] | None:
    """Return the column names of a file that starts with `start`; None if it is empty.

    Raises:
        ConfigError: the file is UTF-16, or its column names are not UTF-8.
        pa.ArrowInvalid: the file is not CSV.
    """
    if start.startswith(_BYTE_ORDER_MARKS):
        raise ConfigError("is UTF-16; convert it to UTF-8, for instance with `iconv -f UTF-16 -t UTF-8`")
    # One block holds all of `start`, however long its rows are.
    opened = open_csv(io.BytesIO(start), delimiter, block_bytes=len(start) + 1)
    try:
        return None if opened is None else list(opened.schema.names)
    except UnicodeDecodeError as error:
        raise ConfigError(f"has a header that is not UTF-8 ({error}); convert it to UTF-8") from error


def is_too_long(error: BaseException) -> bool:
    """Return whether Arrow failed because a row is longer than a block."""
    return _TOO_LONG in str(error)


def _read_blocks(
    open_file: Callable[[], BinaryIO], names: Sequence[str], delimiter: str, block_bytes: int
) -> Iterator[CsvRows]:
    """Yield the rows of a file, read in blocks of one size. For arguments and errors, see `read_rows`."""
    skipped: Skipped = []
    types = dict.fromkeys(names, pa.binary())
    next_number = 0  # number after the last row that Arrow returned
    with open_file() as stream:
        opened = open_csv(stream, delimiter, block_bytes=block_bytes, types=types, skipped=skipped)
        if opened is None:
            return
        if opened.schema.names != list(names):
            raise ConfigError(
                f"its header has changed since it was listed, to {opened.schema.names}; list the source again"
            )
        for batch in opened:
            # Arrow does not return row numbers. The rows of this batch are those that Arrow did not skip, in order.
            # A skipped row after the last of these rows may belong to the next batch.
            candidates = np.arange(next_number, next_number + batch.num_rows + len(skipped))
            numbers = candidates[~np.isin(candidates, [number for number, _ in skipped])][: batch.num_rows]
            next_number = int(numbers[-1]) + 1 if len(numbers) else next_number
            yield CsvRows(batch, numbers, [entry for entry in skipped if entry[0] < next_number], next_number)
            # Change the list in place, because Arrow's handler appends to it.
            skipped[:] = [entry for entry in skipped if entry[0] >= next_number]
    # These rows follow the last row that Arrow returned.
    if skipped:
        empty = pa.RecordBatch.from_pylist([], opened.schema)
        yield CsvRows(empty, np.arange(0), skipped, skipped[-1][0] + 1)


# Arrow infers the types. Where a number would lose what the text says, the column is text, or a later value is bad:
# leading zeros and signs (`01234`, `+5`), codes such as `1E5` and `0x10`, quoted values, and integers that no float
# holds.


def value_type(inferred: pa.DataType, values: pa.Array, *, is_quoted: bool) -> pa.DataType:
    """Return the type of a column, from the type that Arrow inferred and the first values as bytes.

    `is_quoted`: these values are in quotes, unlike those of other columns.
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
