"""Tensor tables: what tensors a checkpoint has, and where the bytes of each piece of them lie.

A table is complete in itself: to restore it no other table and no other version's entry is needed. Everything that
a table says is checked here, before anyone allocates memory or asks a store for what it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.arrow_compression import has_compressed_batch
from datasvc.models.tensors.chunks import Box, Shape, is_tiling
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.objects.objects import digest_of, parse_digest

TENSOR_TABLE_FORMAT: Final = 2
# What a reader believes. A piece in an encoding is never larger, so that a few bytes cannot claim all memory.
MAX_ENCODED_PIECE_BYTES: Final = 64 << 20
MAX_CHAIN: Final = 64
# Room for ten million pieces in short chains: a mixture of experts of 140,000 tensors, moments counted, each cut over
# 64 ranks. Records take some ten times as much in memory.
MAX_TABLE_BYTES: Final = 2048 << 20
MAX_TENSORS: Final = 1 << 20
_MAX_DIMENSIONS: Final = 64
_MAX_BYTES: Final = 1 << 60
_ROWS_AT_ONCE: Final = 256

ALONE: Final = ("raw", "planes")
DIFFERENCES: Final = ("xor", "difference")

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element of every dtype that can be stored, by torch's name of it."""

_METADATA_KEY = b"datasvc.tensors.format"
_MAGIC = b"ARROW1\0\0"
_FIRST_MESSAGE = len(_MAGIC)


def _required(*fields: tuple[str, pa.DataType]) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=False) for name, kind in fields]


def _list(of: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", of, nullable=False))


_LINK = pa.struct(
    _required(
        ("object", pa.binary(32)),
        ("object_bytes", pa.int64()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("encoding", pa.string()),
    )
)
_PIECE = pa.struct(
    _required(
        ("start", _list(pa.int64())),
        ("shape", _list(pa.int64())),
        ("digest", pa.binary(32)),
        ("chain", _list(_LINK)),
    )
)
_COLUMNS = pa.schema(
    _required(("name", pa.string()), ("dtype", pa.string()), ("shape", _list(pa.int64())), ("pieces", _list(_PIECE))),
    metadata={_METADATA_KEY: str(TENSOR_TABLE_FORMAT).encode()},
)
_COLUMNS_1 = pa.schema(
    [
        *_required(("name", pa.string()), ("dtype", pa.string())),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        *_required(
            ("digest", pa.binary(32)), ("object", pa.binary(32)), ("offset", pa.int64()), ("length", pa.int64())
        ),
    ]
)


@dataclass(frozen=True)
class ChainLink:
    """Stored bytes that a piece is made of.

    Attributes:
        object: the object that holds them.
        object_bytes: its size.
        offset: where they start in it.
        length: their number.
        encoding: "raw" and "planes" stand alone, "xor" and "difference" change what the links before them gave.
    """

    object: Digest
    object_bytes: int
    offset: int
    length: int
    encoding: str

    @property
    def info(self) -> ObjectInfo:
        """Name and size of the object."""
        return ObjectInfo(self.object, self.object_bytes)

    @property
    def is_whole_object(self) -> bool:
        """Whether the object holds nothing else, so that its name is the digest of these bytes."""
        return self.offset == 0 and self.length == self.object_bytes


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, stored and checked by itself.

    Attributes:
        start: its first element in the tensor, one index per dimension.
        shape: its sizes.
        digest: of its elements' bytes in row-major order.
        chain: the first link stands alone, each further one is the difference to what came before it.
    """

    start: Shape
    shape: Shape
    digest: Digest
    chain: tuple[ChainLink, ...]

    @property
    def box(self) -> Box:
        """Where the piece lies in its tensor."""
        return self.start, self.shape

    @property
    def stored_bytes(self) -> int:
        """Bytes that a reader of the piece reads."""
        return sum(link.length for link in self.chain)

    def to_json(self) -> dict[str, Any]:
        """Return the piece as JSON values, for other ranks."""
        return {
            "start": list(self.start),
            "shape": list(self.shape),
            "digest": self.digest,
            "chain": [vars(link).copy() for link in self.chain],
        }

    @classmethod
    def from_json(cls, value: Any) -> Chunk:
        """Return the piece that `to_json` gave. Raises CorruptDataError where it is none."""
        try:
            chain = tuple(ChainLink(**{**link, "object": parse_digest(link["object"])}) for link in value["chain"])
            return cls(tuple(value["start"]), tuple(value["shape"]), parse_digest(value["digest"]), chain)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{str(value)[:80]} is no piece of a tensor: {error!r}") from error


@dataclass(frozen=True)
class TensorRecord:
    """One row of a tensor table.

    Attributes:
        name: dotted path in the state tree.
        dtype: torch's name of it, "float32".
        shape: sizes.
        pieces: tile the tensor exactly, by their start; () for a tensor without elements.
    """

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def content(self) -> tuple[object, ...]:
        """Equal for two records where the tensors are equal and cut alike, however they are stored."""
        return self.dtype, self.shape, tuple((*piece.box, piece.digest) for piece in self.pieces)

    def piece_bytes(self, piece: Chunk) -> int:
        """Return the bytes of a piece in memory."""
        return math.prod(piece.shape) * ITEM_BYTES[self.dtype]


def join_pieces(name: str, dtype: str, shape: Sequence[int], pieces: Iterable[Chunk]) -> TensorRecord:
    """Return the record of a tensor whose pieces several ranks may have stored, in any order.

    Raises:
        ConfigError: the pieces leave out elements or hold some twice, or there is no such dtype.
    """
    joined = TensorRecord(name, dtype, tuple(shape), tuple(sorted(pieces, key=lambda piece: piece.start)))
    try:
        _check_record(joined, "this save")
    except CorruptDataError as error:
        raise ConfigError(str(error)) from error
    return joined


def check_tiling(name: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise CorruptDataError unless the boxes tile tensor `name` of `shape`."""
    if len(shape) > _MAX_DIMENSIONS or min((*shape, 0)) < 0:
        raise CorruptDataError(f"tensor {name!r}: {shape} cannot be a shape")
    if not is_tiling(shape, boxes):
        raise CorruptDataError(f"tensor {name!r} of shape {shape}: its pieces leave out elements or hold some twice")


def digest_of_content(records: Iterable[TensorRecord]) -> Digest:
    """Return a digest that is equal for checkpoints of equal tensors, cut alike, however they are stored."""
    ordered = sorted(records, key=lambda record: record.name)
    return digest_of(json.dumps([[record.name, *record.content] for record in ordered]).encode())


def encode_table(records: Iterable[TensorRecord]) -> bytes:
    """Return the table as an Arrow IPC file, sorted by name; equal records give equal bytes.

    Raises:
        ConfigError: it would be larger than any that is read again.
    """
    rows = [_row(record) for record in sorted(records, key=lambda record: record.name)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _COLUMNS) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=_COLUMNS))
    table = sink.getvalue()
    if table.size > MAX_TABLE_BYTES or len(rows) > MAX_TENSORS:
        raise ConfigError(
            f"the table of {len(rows)} tensors would have {table.size} bytes, and nobody reads more than "
            f"{MAX_TENSORS} in {MAX_TABLE_BYTES}; save parts of this state as models of their own"
        )
    return bytes(table.to_pybytes())


def read_table(objects: Objects, table: Digest) -> tuple[TensorRecord, ...]:
    """Return the records of a stored tensor table of any format, by name.

    Raises:
        CorruptDataError: changed, or it says what cannot be.
        ConfigError: of a later format, or with a dtype that this datasvc does not know.
        NotFoundError, UnavailableError: see `Objects.read`.
    """
    return decode_table(objects.read(table, MAX_TABLE_BYTES), objects.location(table))


def decode_table(content: bytes | memoryview, location: str) -> tuple[TensorRecord, ...]:
    """Return the records in a table's bytes, checked; `location` is for messages. Raises as `read_table`."""
    try:
        rows, found = _read_rows(content)
        if found > TENSOR_TABLE_FORMAT:
            raise ConfigError(
                f"{location} has tensor format {found}; this datasvc reads up to {TENSOR_TABLE_FORMAT}: upgrade it"
            )
        records = tuple(_check_sorted(_records_1(rows) if found == 1 else map(_record, _in_parts(rows)), location))
    except (pa.ArrowException, OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptDataError(f"{location} is no tensor table: {error!r}") from error
    return records


def _check_sorted(records: Iterable[TensorRecord], location: str) -> Iterator[TensorRecord]:
    """Yield records as they are made, so that the first one that cannot be is the last that takes memory."""
    before: str | None = None
    for record in records:
        if before is not None and before >= record.name:
            raise CorruptDataError(f"{location} is no tensor table: its tensors are not sorted by name")
        _check_record(record, location)
        before = record.name
        yield record


def _read_rows(content: bytes | memoryview) -> tuple[pa.Table, int]:
    """Return the rows and the format of a table of a format that is known, else no rows."""
    messages = pa.py_buffer(content)[_FIRST_MESSAGE:]
    if bytes(content[:_FIRST_MESSAGE]) != _MAGIC:
        raise ValueError("it is no Arrow file")
    # Read as the stream that an Arrow file is, so that what is looked at here is what is read.
    reader = pa.ipc.open_stream(messages)
    found = int((reader.schema.metadata or {})[_METADATA_KEY])
    if found not in {1, 2}:
        if found < 1:
            raise ValueError(f"format {found}")
        return pa.table({}), found
    if not reader.schema.equals(_COLUMNS_1 if found == 1 else _COLUMNS):
        raise ValueError(f"columns {reader.schema}")
    if has_compressed_batch(messages):
        raise ValueError("its buffers are compressed, which datasvc never writes")
    rows = reader.read_all()
    if rows.num_rows > MAX_TENSORS:
        raise ValueError(f"{rows.num_rows} tensors, of at most {MAX_TENSORS}")
    rows.validate(full=True)
    return rows, found


def _in_parts(rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield rows as Python values, a few at a time: in memory these take ten times as much as the table."""
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        yield from batch.to_pylist()


def _row(record: TensorRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "pieces": [
            {
                "start": list(piece.start),
                "shape": list(piece.shape),
                "digest": bytes.fromhex(piece.digest),
                "chain": [{**vars(link), "object": bytes.fromhex(link.object)} for link in piece.chain],
            }
            for piece in record.pieces
        ],
    }


def _record(row: Mapping[str, Any]) -> TensorRecord:
    pieces = tuple(
        Chunk(
            tuple(piece["start"]),
            tuple(piece["shape"]),
            _digest(piece["digest"]),
            tuple(ChainLink(**{**link, "object": _digest(link["object"])}) for link in piece["chain"]),
        )
        for piece in row["pieces"]
    )
    return TensorRecord(row["name"], row["dtype"], tuple(row["shape"]), pieces)


def _records_1(table: pa.Table) -> Iterable[TensorRecord]:
    """Yield the records of a table of format 1: every tensor in one piece, raw."""
    # It does not say how large objects are; they end with their last tensor.
    rows: list[dict[str, Any]] = table.to_pylist()
    sizes: dict[bytes, int] = {}
    for row in rows:
        sizes[row["object"]] = max(sizes.get(row["object"], 0), row["offset"] + row["length"])
    for row in rows:
        shape = tuple(row["shape"])
        link = ChainLink(_digest(row["object"]), sizes[row["object"]], row["offset"], row["length"], "raw")
        piece = Chunk((0,) * len(shape), shape, _digest(row["digest"]), (link,))
        yield TensorRecord(row["name"], row["dtype"], shape, (piece,) if 0 not in shape else ())


def _digest(raw: bytes) -> Digest:
    return parse_digest(raw.hex())


def _check_record(record: TensorRecord, location: str) -> None:
    """Raise where a record says what cannot be."""
    if record.dtype not in ITEM_BYTES:
        raise ConfigError(f"tensor {record.name!r} in {location} has the unknown dtype {record.dtype!r}")
    try:
        check_tiling(record.name, record.shape, [piece.box for piece in record.pieces])
    except CorruptDataError as error:
        raise CorruptDataError(f"{location}: {error}") from error
    if math.prod(max(size, 1) for size in record.shape) * ITEM_BYTES[record.dtype] > _MAX_BYTES:
        raise CorruptDataError(f"{location}: tensor {record.name!r} of shape {record.shape} cannot be in any memory")
    for piece in record.pieces:
        wrong = fault_of_chain(piece.chain, record.piece_bytes(piece))
        if wrong:
            raise CorruptDataError(f"{location}: tensor {record.name!r}, its piece at {piece.start}: {wrong}")


def fault_of_chain(chain: Sequence[ChainLink], piece_bytes: int) -> str | None:
    """Return what cannot be about the links of a piece, None when all is well."""
    encodings = [link.encoding for link in chain]
    if not 1 <= len(chain) <= MAX_CHAIN:
        return f"its chain has {len(chain)} links"
    if encodings[0] not in ALONE or any(encoding not in DIFFERENCES for encoding in encodings[1:]):
        return f"{encodings} cannot be its encodings"
    if encodings != ["raw"] and piece_bytes > MAX_ENCODED_PIECE_BYTES:
        return f"a piece in encoding {encodings[-1]!r} has at most {MAX_ENCODED_PIECE_BYTES} bytes"
    for link in chain:
        if min(link.offset, link.length) < 0 or link.offset + link.length > link.object_bytes:
            return f"bytes {link.offset} to {link.offset + link.length} cannot lie in {link.object_bytes}"
        if link.length != piece_bytes if link.encoding == "raw" else not 0 < link.length <= piece_bytes:
            return f"{link.length} bytes cannot be it in encoding {link.encoding!r}"
    return None
