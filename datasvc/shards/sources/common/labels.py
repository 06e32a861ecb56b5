"""Choose the column of labels of a table, and number its class names.

`ColumnMap` makes `label` of a column of integers. Here, floats become integers if they are whole, since pandas writes
integers with missing values as floats; and text becomes classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources.common.column_types import cast_column
from datasvc.shards.sources.common.columns import ColumnMap
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.tables import TableSource


def name_table_labels(source: TableSource, options: SourceOptions) -> TableSource:
    """Return a source whose labels are numbers, with the classes of a column of text. For errors, see `name_labels`.

    A column of text is read once for its class names, before the ingest reads the samples.
    """

    def read(name: str) -> Iterable[pa.Array]:
        for part in source.parts:
            yield from source.read_column(part, name)

    columns, classes = name_labels(source.columns, options, read, source.classes)
    if columns is source.columns:
        return source
    return replace(source, columns=columns, schema=columns.schema, classes=classes)


def name_labels(
    columns: ColumnMap,
    options: SourceOptions,
    read: Callable[[str], Iterable[pa.Array | pa.ChunkedArray]],
    classes: Sequence[str] | None,
) -> tuple[ColumnMap, tuple[str, ...]]:
    """Return the columns with labels that are numbers, and the class names.

    Args:
        columns: columns of the source.
        options: `label` names the column of labels.
        read: returns the values of a raw column, piece by piece.
        classes: class names that the source defines; None: they cannot be found, since the source is read only once.

    Raises:
        ConfigError: the column that `options` names does not exist, or its type holds no labels.
    """
    name, is_asked = options.label or columns.label, options.label is not None
    known = tuple(classes or ())
    missing = set(options.as_text) - set(columns.raw_names)
    if missing:
        raise ConfigError(f"the columns {sorted(missing)}, to keep as text, do not exist; found {columns.raw_names}")
    if name in options.as_text and not is_asked:
        return columns, known
    field = None if name is None else columns.field(name)
    if name is None or field is None:
        if is_asked:
            raise ConfigError(f"the label column {name!r} does not exist; found {columns.raw_names}")
        return columns, known
    if pa.types.is_integer(field.type):
        return (columns, known) if name == columns.label else (columns.with_labels(name), ())
    has_images = any(is_image(each) for each in columns.schema)
    if pa.types.is_string(field.type) and classes is not None and (is_asked or has_images):
        found = _class_names(read(name))
        return columns.with_labels(name, found), found
    if (pa.types.is_boolean(field.type) and is_asked) or (pa.types.is_floating(field.type) and _is_whole(read(name))):
        return columns.with_labels(name), ()
    if is_asked:
        way = "; ingest files, or pass the index of each class and `classes`" if classes is None else ""
        raise ConfigError(
            f"column {name!r} cannot hold labels: its type is {field.type}; expected whole numbers, booleans or "
            f"text{way}"
        )
    return columns, known


def _class_names(pieces: Iterable[pa.Array | pa.ChunkedArray]) -> tuple[str, ...]:
    """Return the sorted names in a column; null and an empty text stand for no class."""
    names: set[str | None] = set()
    for piece in pieces:
        for chunk in _chunks(piece):
            names.update(pc.unique(cast_column(chunk, pa.string())).to_pylist())
    return tuple(sorted(name for name in names if name))


def _is_whole(pieces: Iterable[pa.Array | pa.ChunkedArray]) -> bool:
    """Return whether all labels that have a value are whole numbers, and one has a value.

    All are read, because a target of a regression may be sorted: 1.0 for the first thousands of samples, then 1.5. Of
    an iterator, only the first samples are known, and a later one that is not whole is a bad sample. NaN is no value
    here: pandas writes it for a missing integer, so it becomes null.
    """
    has_value = False
    for piece in pieces:
        for chunk in _chunks(piece):
            values = cast_column(chunk, pa.float64()).drop_null()
            values = values.filter(pc.invert(pc.is_nan(values)))
            if not pc.all(pc.equal(values, pc.trunc(values)), min_count=0).as_py():
                return False
            has_value = has_value or len(values) > 0
    return has_value


def _chunks(piece: pa.Array | pa.ChunkedArray) -> Sequence[pa.Array]:
    return piece.chunks if isinstance(piece, pa.ChunkedArray) else [piece]
