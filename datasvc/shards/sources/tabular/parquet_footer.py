"""Finds cells in the footer of a Parquet file that would fill the memory: 12 kB may hold a list of 50 million zeros.

A list of repeated values takes a few bytes, and `total_byte_size` of its row group counts these. Only the number of
values of a column chunk shows its size. Arrow has this number, but aborts the process if the description of a column
is damaged, so the footer is parsed here: a struct in Thrift's compact protocol, see parquet.thrift.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_MAX_CELLS_BYTES: Final = 64 << 20
# Ordinary files have less: images and text compress to a half, tables of numbers to a tenth.
_MAX_RATIO: Final = 200
_MAX_DEPTH: Final = 32
# Bytes of a value by its type: boolean, int32, int64, int96, float, double, bytes (at least), bytes of fixed length.
_WIDTHS: Final = (1, 4, 8, 12, 4, 8, 4, 1)
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12  # types of Thrift


def largest_cells(footer: bytes, file_bytes: int) -> int | None:
    """Return the bytes of the cells of a row group that are too large for the file; None if there are none.

    A footer that cannot be parsed gives None: Arrow reports it.

    Args:
        footer: the footer, without its length.
        file_bytes: size of the file.
    """
    limit = max(_MAX_CELLS_BYTES, _MAX_RATIO * file_bytes)
    try:
        sizes = _cell_bytes(_Reader(footer).struct(0))
        return next((size for size in sizes if size > limit), None)
    except (IndexError, ValueError, TypeError, AttributeError):
        return None


def _cell_bytes(footer: dict[int, Any]) -> Iterator[int]:
    """Yield the bytes of one row on average, and those of all lists, of each row group."""
    for group in footer.get(4, ()):
        num_rows = group.get(3, 0)
        yield group.get(2, 0) // max(num_rows, 1)
        for column in group.get(1, ()):
            described = column.get(3, {})
            # A column without lists has a value per row, and is decoded in small batches of rows.
            yield max(described.get(5, 0) - num_rows, 0) * _WIDTHS[described.get(1, 0)]


class _Reader:
    """Reads a struct as a dict by the numbers of its fields. Each element takes a byte or more: the time is bounded.

    Raises IndexError or ValueError: the bytes are no struct.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._offset = content, 0

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        if kind in (_TRUE, _FALSE, _BYTE):  # Booleans only in a list: a field has them in its head
            return self._byte()
        if kind < _DOUBLE:
            return self._integer()
        if kind in (_DOUBLE, _BINARY):
            length = 8 if kind == _DOUBLE else self._varint()
            self._offset += length
            if self._offset > len(self._content):
                raise IndexError("the footer ends within a value")
            return None
        if kind in (_LIST, _SET):
            head = self._byte()
            length = self._varint() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15, depth + 1) for _ in range(length)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"{kind} is no type of a Parquet footer")

    def _byte(self) -> int:
        self._offset += 1
        return self._content[self._offset - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number has more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
