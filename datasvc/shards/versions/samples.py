"""Samples of a split: one as a dict that a notebook shows with its pictures, many as an Arrow table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.shards.format.reader import Shard, text_errors
from datasvc.shards.format.schema import IMAGE, LABEL, is_blob, is_image
from datasvc.shown import Shown


class Sample(Shown, dict[str, Any]):
    """The values of a sample by column; equal to the dict of the same values.

    Attributes:
        images: names of its columns that hold encoded images.
        class_name: class name of its label; None if it has none.
    """

    __slots__ = ("class_name", "images")

    def __init__(
        self, values: Mapping[str, Any] | None = None, images: tuple[str, ...] = (), class_name: str | None = None
    ) -> None:
        super().__init__(values or {})
        self.images = images
        self.class_name = class_name

    @classmethod
    def of(cls, values: Mapping[str, Any], images: tuple[str, ...], classes: Sequence[str]) -> Sample:
        """Return a sample of a split with these columns of images and class names."""
        label = values.get(LABEL)
        name = classes[label] if isinstance(label, int) and 0 <= label < len(classes) else None
        return cls(values, images, name)

    def __repr__(self) -> str:
        # Without encoded images: a slice of a split is a list of samples, whose representation has all of them.
        shown = (
            f"{name!r}: " + (f"<{count_text(len(value), 'byte')}>" if isinstance(value, bytes) else repr(value))
            for name, value in self.items()
        )
        return "{" + ", ".join(shown) + "}"


def image_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that hold encoded images."""
    return tuple(field.name for field in schema if is_image(field) or (field.name == IMAGE and is_blob(field.type)))


def choose_columns(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of the chosen columns, in that order; by default all but blobs.

    Raises:
        NotFoundError: there is no such column.
    """
    if columns is None:
        return pa.schema([field for field in schema if not is_blob(field.type)])
    if unknown := [name for name in columns if name not in schema.names]:
        raise NotFoundError(f"there is no column {unknown[0]!r}; the columns are: {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


def read_columns(shards: Iterable[tuple[Shard, Integers]], schema: pa.Schema) -> pa.Table:
    """Return columns of samples as copies.

    Args:
        shards: shards, each with `int64[n]`, the rows of its samples.
        schema: the columns; one that a shard does not have is null there.

    Raises:
        CorruptDataError: a text is not UTF-8.
    """
    tables = [_read(shard, rows, schema) for shard, rows in shards]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _read(shard: Shard, rows: Integers, schema: pa.Schema) -> pa.Table:
    with text_errors(shard.name):
        shard.check_texts()
        columns = [
            shard.column(field.name).take(pa.array(rows)).cast(field.type)
            if field.name in shard.schema.names
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
    # Nulls of a column that some shards lack: its field says that it has none.
    return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in schema]))
