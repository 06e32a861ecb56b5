"""Map raw types (those of a column in its file) to types in samples, and join the schemas of several files.

`ColumnMap` maps the types. The Parquet and Arrow sources join schemas into one whose types hold all values.

In samples, a column of bytes is `large_binary`, and text is `string`. Run-end encoding and list views are decoded at
the top level, dictionaries at any depth. All other types are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError

_TEXT: Final = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARY: Final = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def sample_type(raw: pa.DataType) -> pa.DataType:
    """Return the type in samples of a column whose raw type is `raw`."""
    raw = _decoded(raw)
    # All columns of bytes get one type, because readers return the values of this type as zero-copy views.
    if is_binary(raw) or is_file(raw):
        return pa.large_binary()
    if pa.types.is_list_view(raw):
        raw = pa.list_(raw.value_type)
    elif pa.types.is_large_list_view(raw):
        raw = pa.large_list(raw.value_type)
    return _nested_type(raw)


def is_text(data_type: pa.DataType) -> bool:
    """Return whether a raw column of this type holds text, with or without dictionary encoding."""
    return any(check(_decoded(data_type)) for check in _TEXT)


def is_binary(data_type: pa.DataType) -> bool:
    """Return whether a raw column of this type holds bytes, with or without dictionary encoding."""
    return any(check(_decoded(data_type)) for check in _BINARY)


def is_file(data_type: pa.DataType) -> bool:
    """Return whether this is a file struct, `struct<bytes, path>`: images and audio in Hugging Face data sets."""
    if not pa.types.is_struct(data_type):
        return False
    return set(data_type.names) == {"bytes", "path"} and is_binary(data_type.field("bytes").type)


def decode_column(column: pa.Array) -> pa.Array:
    """Return the values of a raw column without dictionary, run-end encoding, list views or file structs.

    Only the outermost type is decoded; `cast_column` also converts the inner ones. A file struct becomes its bytes.
    Raise ConfigError if it holds a path without bytes.
    """
    if pa.types.is_dictionary(column.type):
        return decode_column(column.dictionary_decode())
    if pa.types.is_run_end_encoded(column.type):
        return decode_column(pc.run_end_decode(column))
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        return _list_from_views(column)
    if is_file(column.type):
        content = pc.struct_field(column, "bytes")
        # A path alone refers to a file on the machine that wrote the data set, so its content cannot be read here.
        has_only_path = pc.and_(content.is_null(), pc.struct_field(column, "path").is_valid())
        if content.null_count and pc.any(has_only_path).as_py():
            path = pc.struct_field(column, "path").filter(has_only_path)[0].as_py()
            raise ConfigError(f"only the path {path!r} is stored, no bytes; store the files' content in the column")
        return content
    return column


def cast_column(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Return a raw column as `data_type`; it is not copied if it has this type already.

    Raise pa.ArrowException if a value does not convert without loss, ConfigError as `decode_column` does.
    """
    values = decode_column(column)
    return values if values.type == data_type else values.cast(data_type)


def join_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return one schema for the raw columns of several files, in the column order of the first of them.

    `schemas` are pairs of a file's name, for messages, and its raw schema. Integers of different widths become the
    widest, and so do floats; a column without values takes the type that it has in another file.

    Raises:
        ConfigError: the files differ in the names or types of their columns, or a name occurs twice in one file.
    """
    first_name, joined = "", None
    for name, schema in schemas:
        check_unique(schema.names, name)
        if joined is None:
            first_name, joined = name, schema
        elif not schema.equals(joined):
            joined = _join_two(first_name, joined, name, schema)
    assert joined is not None, "at least one file"
    return joined


def checked_names(schema: pa.Schema) -> pa.Schema:
    """Return `schema`. Raise UnicodeDecodeError if a name in it, at any depth, is not UTF-8."""
    for field in schema:
        _nested_field(field)  # reads all names, which raises the error
    return schema


def check_unique(names: list[str], location: str) -> None:
    """Raise ConfigError if one of the column `names` of `location` occurs twice."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(f"{location} has two columns called {duplicates}; rename one of them")


def check_same_names(first: str, expected: Sequence[str], name: str, names: Sequence[str]) -> None:
    """Raise ConfigError if the file `name` has other columns than the file `first`; the order may differ."""
    missing = [column for column in expected if column not in names]
    extra = [column for column in names if column not in expected]
    if missing or extra:
        raise ConfigError(
            f"the columns of {name} differ from those of {first}: {missing} are missing and {extra} are extra; "
            "give all files the same columns, or ingest them separately"
        )


def _join_two(first_name: str, joined: pa.Schema, name: str, schema: pa.Schema) -> pa.Schema:
    """Return `joined`, the joined schema of `first_name` and the files after it, joined with the file `name`."""
    check_same_names(first_name, joined.names, name, schema.names)
    fields = []
    for field in joined:
        other = schema.field(field.name)  # by name, because files may have the columns in different orders
        data_type = _join_types(field.type, other.type)
        if data_type is None:
            raise ConfigError(
                f"column {field.name!r} is {other.type} in {name}, but {field.type} in {first_name}; "
                "give it one type in all files, or ingest them separately"
            )
        fields.append(field.with_type(data_type).with_nullable(field.nullable or other.nullable))
    return pa.schema(fields, metadata=joined.metadata)


def _join_types(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that holds the values of both types; None if there is no such type."""
    # Types that differ only in their encoding, such as text with and without a dictionary, are equal in samples.
    if sample_type(one) == sample_type(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    # Decode the outermost encoding here. The recursion below decodes those of the values of a list.
    one, other = _decoded(one), _decoded(other)
    # Integers are never joined with floats: an integer may lose precision as a float.
    for kind in (pa.types.is_integer, pa.types.is_floating):
        if kind(one) and kind(other):
            # pyarrow finds the wider of two types only when it unifies schemas.
            schemas = [pa.schema([("", data_type)]) for data_type in (one, other)]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    if pa.types.is_list(one) and pa.types.is_list(other):
        inner = _join_types(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    return None


def _list_from_views(views: pa.Array) -> pa.Array:
    """Return an array of list views as an array of lists."""
    # Arrow's own cast is not used, because it writes offsets out of range (seen in pyarrow 26).
    is_small = pa.types.is_list_view(views.type)
    list_class, offset_type = (pa.ListArray, pa.int32()) if is_small else (pa.LargeListArray, pa.int64())
    # `flatten` skips nulls, so they have the length 0.
    lengths = pc.fill_null(pc.list_value_length(views), 0)
    offsets = pc.cumulative_sum(pa.concat_arrays([pa.array([0], offset_type), lengths]))
    return list_class.from_arrays(offsets, views.flatten(), mask=views.is_null())


def _decoded(raw: pa.DataType) -> pa.DataType:
    """Return the type of the values of a raw type, without dictionary or run-end encoding."""
    while pa.types.is_dictionary(raw) or pa.types.is_run_end_encoded(raw):
        raw = raw.value_type
    return raw


def _nested_type(raw: pa.DataType) -> pa.DataType:
    """Return a raw type without dictionaries, with text as `string` and binary views as bytes, at any depth."""
    raw = _decoded(raw)
    if is_text(raw) or pa.types.is_null(raw):
        return pa.string()  # a column of nulls becomes text, because later files may have text in it
    if pa.types.is_binary_view(raw):
        return pa.large_binary()
    # Writers name the values of a list differently, such as `item` and `element`; samples use one name.
    if pa.types.is_list(raw):
        return pa.list_(_nested_field(raw.value_field, "item"))
    if pa.types.is_large_list(raw):
        return pa.large_list(_nested_field(raw.value_field, "item"))
    if pa.types.is_fixed_size_list(raw):
        return pa.list_(_nested_field(raw.value_field, "item"), raw.list_size)
    if pa.types.is_struct(raw):
        return pa.struct(list(map(_nested_field, raw.fields)))
    if pa.types.is_map(raw):
        return pa.map_(_nested_type(raw.key_type), _nested_type(raw.item_type), raw.keys_sorted)
    return raw


def _nested_field(field: pa.Field, name: str | None = None) -> pa.Field:
    """Return a field with its type mapped by `_nested_type`, and called `name` if that is given."""
    return pa.field(field.name if name is None else name, _nested_type(field.type), nullable=field.nullable)
