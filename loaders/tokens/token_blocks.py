"""Reads token blocks from shards, many blocks per call, for `TokenDecoder`.

A token block is the tokens of one sample. It is stored as a list of a fixed size, as a list of variable size, or as a
blob of little-endian integers. In each case the block is consecutive bytes of a mapped file: a window. A view of all
windows of the file takes no memory. Indexing it with many starts copies all these blocks at once (a gather).
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
# Up to this number of blocks, a loop of copies is faster than one gather.
_MAX_LOOPED_ROWS: Final = 8


@dataclass(frozen=True)
class BlockFormat:
    """Storage format of a column of blocks.

    Attributes:
        column: name of the column.
        block_tokens: maximum number of tokens in a block.
        dtype: dtype of a stored token.
        is_ragged: whether blocks may be shorter than `block_tokens`.
    """

    column: str
    block_tokens: int
    dtype: np.dtype[Any]
    is_ragged: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block."""
        return self.block_tokens * self.dtype.itemsize

    @property
    def may_be_negative(self) -> bool:
        """Whether a stored number may be negative, or become negative by the conversion to int64 (from uint64)."""
        return self.dtype.kind == "i" or self.dtype.itemsize == np.int64().itemsize


def choose_format(
    schema: pa.Schema, column: str, block_tokens: int | None, dtype: npt.DTypeLike | None
) -> BlockFormat:
    """Return the storage format of a column of blocks.

    Args:
        schema: schema of the samples.
        column: name of the column.
        block_tokens: maximum number of tokens of a block; None only for lists of a fixed size.
        dtype: dtype of a token in blobs; None for lists.

    Raises:
        ConfigError: the column is missing or does not contain integers; `block_tokens` or `dtype` is missing or
            contradicts the column's type.
    """
    if column not in schema.names:
        raise ConfigError(
            f"there is no column {column!r} with tokens; the columns are {_list_columns(schema)}: give one as "
            "tokens='COLUMN'"
        )
    kind = schema.field(column).type
    is_fixed = pa.types.is_fixed_size_list(kind)
    is_list = is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_blob(kind) or (is_list and pa.types.is_integer(kind.value_type))):
        raise ConfigError(
            f"column {column!r} is {kind}; expected lists of integers, or blobs of integers. The columns are "
            f"{_list_columns(schema)}"
        )
    if is_list and dtype is not None:
        raise ConfigError(
            f"dtype is only for blobs, and column {column!r} is {kind}; leave it out of the TokenFormat"
        )
    if is_blob(kind) and dtype is None:
        raise ConfigError(
            f"column {column!r} contains blobs; give the type of a token in them, such as "
            f"tokens=TokenFormat({column!r}, dtype='uint16')"
        )
    if is_fixed:
        if block_tokens not in (None, kind.list_size):
            raise ConfigError(
                f"block_tokens is {block_tokens}, but the blocks of column {column!r} have {kind.list_size} tokens; "
                "leave it out of the TokenFormat"
            )
        block_tokens = kind.list_size
    elif block_tokens is None:
        raise ConfigError(
            f"column {column!r} is {kind}, which has no fixed block size; give "
            f"tokens=TokenFormat({column!r}, block_tokens=N)"
        )
    token_dtype: Any = kind.value_type.to_pandas_dtype() if is_list else dtype
    return BlockFormat(column, block_tokens, _integer_type(token_dtype), is_ragged=not is_fixed)


def find_stored_size(schema: pa.Schema, column: str) -> int | None:
    """Return the size of the lists of a column; None if it has no fixed one, or does not exist."""
    kind = schema.field(column).type if column in schema.names else None
    return kind.list_size if kind is not None and pa.types.is_fixed_size_list(kind) else None


class StoredBlocks:
    """Finds the blocks of one shard in its record batches, and copies them.

    Args:
        batches: record batches of the shard, as views of mapped memory.
        format_: storage format of the blocks.

    Raises:
        ConfigError: a block contains null.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], format_: BlockFormat) -> None:
        self.format = format_
        # The areas of memory that hold the shard: one mapped file, or several areas of a shard that is still fetched.
        self._areas: list[Bytes] = []
        area_at: dict[int, int] = {}  # address of an area -> its index in `_areas`
        # For each block: the index of its area in `_areas`, its start in the area, and its size in bytes. The
        # lists begin with empty arrays, because `np.concatenate` needs at least one and a shard may have no batch.
        area_of, starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for batch in batches:
            buffer, batch_starts, batch_sizes = _find_rows(batch.column(format_.column), format_)
            root = _root(buffer)
            if root.address not in area_at:
                area_at[root.address] = len(self._areas)
                self._areas.append(np.frombuffer(root, np.uint8))
            area_of.append(np.full(batch.num_rows, area_at[root.address]))
            starts.append(batch_starts + (buffer.address - root.address))
            sizes.append(batch_sizes)
        self._area_of, self._starts = np.concatenate(area_of), np.concatenate(starts)
        self._windows = [_windows(area, format_.block_bytes) for area in self._areas]
        self.sizes: Integers = np.concatenate(sizes)
        """Bytes of each block, `int64[num_samples]`."""

    def copy(self, rows: Integers, out: Integers, indices: Integers) -> None:
        """Write the blocks of `rows`, `int64[k]`, to `out[indices]`, `int64[n, block_tokens]`.

        Values after the end of a short block are arbitrary. `indices` are `int64[k]`, ascending and distinct.
        """
        # The blocks fill all of `out`, so the ascending `indices` are 0, 1, ... and need not be applied.
        if len(rows) == len(out):
            np.copyto(out, self.gather(rows), casting="unsafe")
        # This loop is not for ragged blocks, whose window may end after the end of the area, see `_gather_from`.
        elif len(rows) <= _MAX_LOOPED_ROWS and len(self._areas) == 1 and not self.format.is_ragged:
            windows, dtype = self._windows[0], self.format.dtype
            for index, start in zip(indices.tolist(), self._starts[rows].tolist(), strict=True):
                out[index] = windows[start].view(dtype)
        else:
            out[indices] = self.gather(rows)

    def join(
        self, rows: Integers, starts: Integers, sizes: Integers, rests: Integers, is_masked: npt.NDArray[np.bool_]
    ) -> npt.NDArray[Any]:
        """Return a copy of some tokens of the blocks of `rows`, one block after another: `dtype[n]`.

        Args:
            rows: `int64[k]`, rows of the blocks.
            starts: `int64[k]`, the first token of each.
            sizes: `int64[k]`, the number of tokens of each.
            rests: `int64[k]`, the number of zeros after them.
            is_masked: `bool[k]`, True for blocks whose tokens are zeros in the result.
        """
        item_bytes = self.format.dtype.itemsize
        firsts = self._starts[rows] + starts * item_bytes
        stops = firsts + sizes * item_bytes
        views = [memoryview(area.data) for area in self._areas]
        # `bytes.join` of views copies a document in a fraction of the time of an assignment or of a gather.
        if len(views) == 1:
            parts: list[Any] = [
                views[0][first:stop] for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True)
            ]
        else:
            where = zip(self._area_of[rows].tolist(), firsts.tolist(), stops.tolist(), strict=True)
            parts = [views[area][first:stop] for area, first, stop in where]
        for index in np.flatnonzero(is_masked).tolist():
            parts[index] = bytes(int(sizes[index]) * item_bytes)
        followed = np.flatnonzero(rests)[::-1]  # from the last one, so that the indices of the others stay
        for index, rest in zip(followed.tolist(), (rests[followed] * item_bytes).tolist(), strict=True):
            parts.insert(index + 1, bytes(rest))
        return np.frombuffer(b"".join(parts), self.format.dtype)

    def gather(self, rows: Integers) -> npt.NDArray[Any]:
        """Return a copy of the blocks of `rows`, `dtype[k, block_tokens]`; for short blocks, see `copy`."""
        if len(self._areas) == 1:
            return self._gather_from(0, self._starts[rows], rows).view(self.format.dtype)
        blocks = np.empty((len(rows), self.format.block_bytes), np.uint8)
        area_of = self._area_of[rows]
        for area_index in np.unique(area_of).tolist():
            indices = np.flatnonzero(area_of == area_index)
            blocks[indices] = self._gather_from(area_index, self._starts[rows[indices]], rows[indices])
        return blocks.view(self.format.dtype)

    def _gather_from(self, area_index: int, starts: Integers, rows: Integers) -> npt.NDArray[np.uint8]:
        """Return copies of the blocks of `rows`, `uint8[n, block_bytes]`. They are at `starts`, all in one area."""
        windows = self._windows[area_index]
        if not self.format.is_ragged or (len(starts) and starts.max() < len(windows)):
            return windows[starts]
        # The window of a last block would end after the end of the area, so copy only the bytes of each block.
        blocks = np.zeros((len(rows), self.format.block_bytes), np.uint8)
        for index, (start, size) in enumerate(zip(starts.tolist(), self.sizes[rows].tolist(), strict=True)):
            blocks[index, :size] = self._areas[area_index][start : start + size]
        return blocks


class StoredLists:
    """A column of integer lists of variable size, in one shard.

    Args:
        column: the column; null counts as an empty list.
        dtype: dtype of the values in memory.
        what: what a list is, for messages.

    Attributes:
        counts: `int64[samples]`, number of values of each list.
        starts: `int64[samples]`, index of the first value of each list in `values`.
        values: `dtype[n]`, the values of all lists.

    Raises:
        ConfigError: a list contains null.
    """

    def __init__(
        self, column: pa.ChunkedArray, dtype: npt.DTypeLike = np.int64, what: str = "a list of document starts"
    ) -> None:
        self.counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        values = pc.list_flatten(column)
        if values.null_count:
            raise ConfigError(f"{what} has null in a list element; expected integers: ingest the data again")
        self.values = values.to_numpy().astype(dtype, copy=False)

    def gather(self, rows: Integers) -> tuple[Integers, npt.NDArray[Any]]:
        """Return, for each value in the lists of `rows`, the index of its list in `rows`, and the value."""
        counts = self.counts[rows]
        ends = np.cumsum(counts)
        # Positions in `values`: a list begins there at `starts[row]`, and in the result at `ends - counts`.
        positions = np.repeat(self.starts[rows] - (ends - counts), counts) + np.arange(counts.sum())
        return np.repeat(np.arange(len(rows)), counts), self.values[positions]


def _find_rows(array: pa.Array, format_: BlockFormat) -> tuple[pa.Buffer, Integers, Integers]:
    """Return the buffer with an array's tokens, and the start and the size of each row in it, in bytes."""
    item_bytes = format_.dtype.itemsize
    if is_blob(array.type):
        _, starts, stops = blob_part(array)
        return array.buffers()[2] or _NO_BUFFER, starts, stops - starts
    values = array.values
    # A list that is null as a whole is not an error here: the decoder reports it only if a batch needs it. `values`
    # includes the elements of such lists, `flatten` leaves them out.
    if values.null_count and array.flatten().null_count:
        raise ConfigError(
            f"column {format_.column!r} has lists with null in them; a token is a number; ingest data without null"
        )
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
    """Return the outermost parent of a buffer: a mapped file, or an area of other memory."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer


def _windows(content: Bytes, size: int) -> npt.NDArray[np.uint8]:
    """Return a read-only view of all windows of `size` consecutive bytes, `uint8[num_windows, size]`."""
    if len(content) < size:
        return np.empty((0, size), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(content, size)


def _integer_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the little-endian form of an integer dtype. Raises ConfigError: it is another dtype."""
    try:
        parsed = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype is {dtype!r}; expected integers, such as 'uint16'") from error
    if parsed.kind not in "iu":
        raise ConfigError(f"dtype is {parsed}; expected integers, such as 'uint16'")
    return parsed.newbyteorder("<")


def _list_columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
