"""Blocks of tokens as a shard stores them, gathered many at once.

Three kinds of columns hold blocks: lists of one size, lists of any size, and blobs of bare little-endian integers.
All are rows of bytes in a mapped file, so one indexing of windows over the file copies the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.reader import blob_part
from datasvc.shards.format.schema import is_blob

_NO_BUFFER: Final = pa.py_buffer(b"")
# Rows that are faster copied one by one than gathered.
_FEW: Final = 8


@dataclass(frozen=True)
class BlockFormat:
    """How a column holds blocks.

    Attributes:
        column: its name.
        block_tokens: tokens of a block, at most.
        dtype: of a stored token.
        is_ragged: blocks may be shorter.
    """

    column: str
    block_tokens: int
    dtype: np.dtype[Any]
    is_ragged: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.block_tokens * self.dtype.itemsize

    @property
    def may_be_negative(self) -> bool:
        """Whether a stored number may be, or become as int64, negative."""
        return self.dtype.kind == "i" or self.dtype.itemsize == np.int64().itemsize


def choose_format(
    schema: pa.Schema, column: str, block_tokens: int | None, dtype: npt.DTypeLike | None
) -> BlockFormat:
    """Return how a column holds blocks.

    Args:
        schema: of the samples.
        column: its name.
        block_tokens: tokens of a block; needed but for lists of one size.
        dtype: of a token; for blobs, which do not say.

    Raises:
        ConfigError: no such column, it holds no integers, or `block_tokens` or `dtype` is missing or contradicts it.
    """
    if column not in schema.names:
        raise ConfigError(f"there is no column {column!r} with tokens; the columns are {_described(schema)}")
    kind = schema.field(column).type
    is_fixed = pa.types.is_fixed_size_list(kind)
    is_list = is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_blob(kind) or (is_list and pa.types.is_integer(kind.value_type))):
        raise ConfigError(
            f"column {column!r} is {kind}; tokens are lists of integers, or blobs of them. The columns are "
            f"{_described(schema)}"
        )
    if is_list and dtype is not None:
        raise ConfigError(f"dtype says how blobs hold tokens; column {column!r} is {kind}")
    if is_blob(kind) and dtype is None:
        raise ConfigError(f"column {column!r} holds blobs: say what a token is in them, dtype='uint16' or the like")
    if is_fixed:
        if block_tokens not in (None, kind.list_size):
            raise ConfigError(
                f"block_tokens is {block_tokens}, but the blocks of column {column!r} have {kind.list_size} tokens"
            )
        block_tokens = kind.list_size
    elif block_tokens is None:
        raise ConfigError(f"column {column!r} is {kind}, which says no block size: give block_tokens=N")
    stored: Any = kind.value_type.to_pandas_dtype() if is_list else dtype
    return BlockFormat(column, block_tokens, _integer_type(stored), is_ragged=not is_fixed)


class StoredBlocks:
    """Where the blocks of one shard lie.

    Args:
        batches: the shard's record batches.
        format_: how its column holds blocks.

    Raises:
        ConfigError: single tokens are null.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], format_: BlockFormat) -> None:
        self.format = format_
        self._contents: list[Bytes] = []
        places: dict[int, int] = {}
        content_of, starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for batch in batches:
            buffer, own_starts, own_sizes = _rows_of(batch.column(format_.column), format_)
            root = _root(buffer)
            if root.address not in places:
                places[root.address] = len(self._contents)
                self._contents.append(np.frombuffer(root, np.uint8))
            content_of.append(np.full(batch.num_rows, places[root.address]))
            starts.append(own_starts + (buffer.address - root.address))
            sizes.append(own_sizes)
        self._content_of, self._starts = np.concatenate(content_of), np.concatenate(starts)
        self._windows = [_windows(content, format_.block_bytes) for content in self._contents]
        self.sizes: Integers = np.concatenate(sizes)
        """`int64[num_samples]`, bytes of each block."""

    def copy(self, rows: Integers, out: Integers, indices: Integers) -> None:
        """Write the blocks of `rows` to `out[indices]`; arbitrary behind a block's end.

        Args:
            rows: `int64[k]`.
            out: `int64[n, block]`.
            indices: `int64[k]`, ascending.
        """
        if len(rows) == len(out):
            np.copyto(out, self.gather(rows), casting="unsafe")
        elif len(rows) <= _FEW and len(self._contents) == 1 and not self.format.is_ragged:
            windows, dtype = self._windows[0], self.format.dtype
            for index, start in zip(indices.tolist(), self._starts[rows].tolist(), strict=True):
                out[index] = windows[start].view(dtype)
        else:
            out[indices] = self.gather(rows)

    def gather(self, rows: Integers) -> npt.NDArray[Any]:
        """Return the blocks of `rows` in that order: `dtype[n, block]`, a copy; arbitrary behind a block's end."""
        if len(self._contents) == 1:
            return self._gather_from(0, self._starts[rows], rows).view(self.format.dtype)
        found = np.empty((len(rows), self.format.block_bytes), np.uint8)
        content_of = self._content_of[rows]
        for number in np.unique(content_of).tolist():
            chosen = np.flatnonzero(content_of == number)
            found[chosen] = self._gather_from(number, self._starts[rows[chosen]], rows[chosen])
        return found.view(self.format.dtype)

    def _gather_from(self, number: int, starts: Integers, rows: Integers) -> npt.NDArray[np.uint8]:
        windows = self._windows[number]
        if not self.format.is_ragged or (len(starts) and starts.max() < len(windows)):
            return windows[starts]
        # The last blocks of a file may be too short for a window.
        found = np.zeros((len(rows), self.format.block_bytes), np.uint8)
        for index, (start, size) in enumerate(zip(starts.tolist(), self.sizes[rows].tolist(), strict=True)):
            found[index, :size] = self._contents[number][start : start + size]
        return found


class StoredLists:
    """A column of integer lists of any size, of one shard.

    Args:
        column: of lists; null ones count as empty.

    Raises:
        ConfigError: a list has null in it.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        values = pc.list_flatten(column)
        if values.null_count:
            raise ConfigError("where documents start is null in a list; it is a number")
        self._values = values.to_numpy().astype(np.int64, copy=False)

    def gather(self, rows: Integers) -> tuple[Integers, npt.NDArray[Any]]:
        """Return the lists of `rows` end to end: for each value the index of its row in `rows`, and the value."""
        counts = self._counts[rows]
        ends = np.cumsum(counts)
        places = np.repeat(self._starts[rows] - (ends - counts), counts) + np.arange(counts.sum())
        return np.repeat(np.arange(len(rows)), counts), self._values[places]


def _rows_of(array: pa.Array, format_: BlockFormat) -> tuple[pa.Buffer, Integers, Integers]:
    """Return the bytes that hold an array's tokens, and where each row starts in them and how many it has."""
    item_bytes = format_.dtype.itemsize
    if is_blob(array.type):
        _, starts, stops = blob_part(array)
        return array.buffers()[2] or _NO_BUFFER, starts, stops - starts
    values = array.values
    # A list that is null has null in it too; whoever wants it is told elsewhere.
    if values.null_count and array.flatten().null_count:
        raise ConfigError(f"column {format_.column!r} has lists with null in them; a token is a number")
    if format_.is_ragged:
        offsets = array.offsets.to_numpy().astype(np.int64)
    else:
        offsets = (array.offset + np.arange(len(array) + 1)) * format_.block_tokens
    return (
        values.buffers()[1] or _NO_BUFFER,
        (values.offset + offsets[:-1]) * item_bytes,
        np.diff(offsets) * item_bytes,
    )


def _root(buffer: pa.Buffer) -> pa.Buffer:
    """Return what a buffer is a slice of, in the end: the mapped file."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer


def _windows(content: Bytes, size: int) -> npt.NDArray[np.uint8]:
    """Return every run of `size` bytes: a read-only view, `uint8[runs, size]`."""
    if len(content) < size:
        return np.empty((0, size), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(content, size)


def _integer_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype is {dtype!r}; expected integers, such as 'uint16'") from error
    if found.kind not in "iu":
        raise ConfigError(f"dtype is {found}; expected integers, such as 'uint16'")
    return found.newbyteorder("<")


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
