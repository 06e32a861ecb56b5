"""Infer the types of the columns of JSON lines from the first objects, and parse all objects by these types."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from datasvc.errors import ConfigError
from datasvc.shards.sources.common.columns import bisect_errors

# Arrow's parser recurses once per level while it infers types, and crashes at a few thousand levels.
_MAX_DEPTH: Final = 64
# A string in JSON. The possessive `*+` does not backtrack.
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
# An integer of 16 or more digits, which a float may not hold; digits in text match too.
_LONG_INTEGER: Final = re.compile(rb"(?<![0-9.])[0-9]{16}")
# A number that a float may not hold: Arrow reads it as infinity, and JSON has no infinity of its own.
_HUGE_NUMBER: Final = re.compile(rb"[0-9]{300}")
_MAX_EXACT_FLOAT: Final = float(1 << 53)  # all integers up to this one are floats
_MAX_UINT64: Final = (1 << 64) - 1
# Start of Arrow's error messages, which is left out of ours.
_ARROW_PREFIX: Final = "JSON parse error: "


def parse_json(content: bytes, schema: pa.Schema | None, *, num_lines: int) -> pa.RecordBatch:
    """Parse objects, one per line, and return them as one batch. Without `schema`, it is inferred.

    `num_lines` is the number of lines that are not blank.

    Raises:
        ValueError: a line does not parse or has several objects, or an integer is another number in its column of
            floats; the message is the reason.
    """
    options = pj.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
    )
    # One block, so that the result is one batch.
    read_options = pj.ReadOptions(use_threads=False, block_size=len(content) + 1)
    try:
        table = pj.read_json(io.BytesIO(content), read_options, options).combine_chunks()
    # A field name that is not UTF-8 can raise UnicodeDecodeError, which is no ArrowException.
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(str(error).removeprefix(_ARROW_PREFIX)) from error
    if _HUGE_NUMBER.search(content) and any(_reaches(column, math.inf) for column in table.columns):
        raise ValueError("a number is too large for a float")
    # Parse again in Python only if a float is so large that an integer may have become it.
    is_suspect = schema is not None and any(_reaches(column, _MAX_EXACT_FLOAT) for column in table.columns)
    if is_suspect and _LONG_INTEGER.search(content):
        for value in _long_integers(content, table.schema):
            if not _is_float(value):
                raise ValueError(f"the integer {value} has no equal float, and its column has floats")
    # The caller numbers the samples by lines, so each line must be one object.
    if table.num_rows != num_lines:
        raise ValueError(f"{num_lines} lines hold {table.num_rows} objects")
    return table.to_batches()[0]


def infer_json_types(content: bytes, name: str) -> pa.Schema:
    """Return the columns of all lines together, with their types.

    Lines that do not parse are left out: they become bad samples when they are read.

    Raises:
        ConfigError: no line is an object with a field, or `join_json_schemas` cannot join the types of a column.
    """
    lines = [line for line in content.split(b"\n") if line and not line.isspace()]
    # A line that is nested too deeply would crash Arrow's parser.
    shallow = [line for line in lines if _depth(line) <= _MAX_DEPTH]

    def infer(start: int, stop: int) -> pa.Schema:
        batch = parse_json(b"\n".join(shallow[start:stop]), None, num_lines=stop - start)
        return pa.schema([pa.field(field.name, _string_for_timestamp(field.type)) for field in batch.schema])

    schemas = []
    problem = "nested too deeply"  # the reason if no line is shallow enough to be parsed
    for _, inferred in bisect_errors(len(shallow), infer, (ValueError,)):
        if isinstance(inferred, Exception):
            problem = str(inferred)
        else:
            schemas.append((name, inferred))
    if not schemas:
        raise ConfigError(
            f"no line at the start of {name} is a JSON object ({problem}); expected one object per line"
        )
    schema = join_json_schemas(schemas)
    schema = _with_long_integers(schema, b"\n".join(shallow), name)
    if not schema.names:
        raise ConfigError(f"the objects at the start of {name} have no fields; expected at least one")
    return schema


def join_json_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return the union of the columns of files, given as pairs of a name and a schema.

    A column that holds integers in one file and floats in another is float. Raise ConfigError for types that cannot
    be joined. Several schemas may have the same name: those of lines of one file.
    """
    joined, first_name = pa.schema([]), ""
    for name, schema in schemas:
        # Arrow joins both as int64, which does not hold the integers for which a column is uint64.
        for field in schema:
            number = joined.get_field_index(field.name)
            if number >= 0 and {field.type, joined.field(number).type} == {pa.int64(), pa.uint64()}:
                joined = joined.set(number, field.with_type(pa.uint64()))
                schema = schema.set(schema.get_field_index(field.name), field.with_type(pa.uint64()))  # noqa: PLW2901
        try:
            joined = pa.unify_schemas([joined, schema], promote_options="permissive")
        except pa.ArrowException as error:
            detail = str(error).removeprefix("Unable to merge: ")
            places = name if first_name in ("", name) else f"{first_name} and {name}"
            raise ConfigError(
                f"the first lines of {places} differ in their types: {detail}; give each column one type"
            ) from error
        first_name = first_name or name
    return joined


def _with_long_integers(schema: pa.Schema, content: bytes, name: str) -> pa.Schema:
    """Return an inferred schema with uint64 in place of float for columns of integers beyond int64."""
    if not _LONG_INTEGER.search(content):
        return schema
    objects = list(_objects(content))
    for number, field in enumerate(schema):
        if not pa.types.is_floating(field.type):
            continue
        values = [value for each in objects if (value := each.get(field.name)) is not None]
        if not values or not all(type(value) is int for value in values):
            continue
        if min(values) < 0 or max(values) > _MAX_UINT64:
            raise ConfigError(
                f"column {field.name!r} of {name} holds integers from {_shown(min(values))} to "
                f"{_shown(max(values))}, which no integer of 64 bits holds; write them as text"
            )
        schema = schema.set(number, field.with_type(pa.uint64()))
    return schema


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the parser of Arrow reports the line
        if isinstance(value, dict):
            yield value


def _long_integers(content: bytes, schema: pa.Schema) -> Iterator[int]:
    """Yield the integers that the objects have in columns of floats, at any depth."""
    lines = b"\n".join(line for line in content.split(b"\n") if _LONG_INTEGER.search(line))
    for value in _objects(lines):
        for field in schema:
            yield from _integers(value.get(field.name), field.type)


def _integers(value: Any, data_type: pa.DataType) -> Iterator[int]:
    if type(value) is int and pa.types.is_floating(data_type):
        yield value
    elif isinstance(value, list) and pa.types.is_list(data_type):
        for item in value:
            yield from _integers(item, data_type.value_type)
    elif isinstance(value, dict) and pa.types.is_struct(data_type):
        for field in data_type:
            yield from _integers(value.get(field.name), field.type)


def _shown(value: int) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} characters)"


def _is_float(value: int) -> bool:
    """Return whether a float holds an integer."""
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _reaches(column: pa.ChunkedArray | pa.Array, limit: float) -> bool:
    """Return whether the absolute value of a float in a column, at any depth, is `limit` or more."""
    if pa.types.is_struct(column.type):
        flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        return any(_reaches(field, limit) for field in flat.flatten())
    if pa.types.is_list(column.type):
        return _reaches(pc.list_flatten(column), limit)
    return pa.types.is_floating(column.type) and bool(pc.any(pc.greater_equal(pc.abs(column), limit)).as_py())


def _string_for_timestamp(inferred: pa.DataType) -> pa.DataType:
    """Return an inferred type with strings in place of timestamps: Arrow infers these from strings in JSON."""
    if pa.types.is_timestamp(inferred):
        return pa.string()
    if pa.types.is_list(inferred):
        return pa.list_(_string_for_timestamp(inferred.value_type))
    if pa.types.is_struct(inferred):
        return pa.struct([(field.name, _string_for_timestamp(field.type)) for field in inferred.fields])
    return inferred


def _depth(line: bytes) -> int:
    """Return the nesting depth of a line; 0 if it has too few brackets to exceed `_MAX_DEPTH`."""
    if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
        return 0
    # Remove strings first, because brackets within them do not nest. [ and { add a level, ] and } end one.
    characters = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    steps = np.isin(characters, [0x5B, 0x7B]).astype(np.int64) - np.isin(characters, [0x5D, 0x7D])
    return int(np.cumsum(steps).max(initial=0))
