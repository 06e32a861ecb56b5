"""Tensor tables: Arrow IPC files that list the tensors of a version, and the objects that store each of their chunks.

A table is self-contained: a restore needs no other table and no other version's entry. A table from a store is not
trusted: `decode_table` validates all values before they are used to allocate memory or to read objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from datasvc.arrow_messages import checked_messages
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.chunks import Box, Shape, is_tiling
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.objects.objects import digest_of, parse_digest
from datasvc.threads import collection_paused

TENSOR_TABLE_FORMAT: Final = 2
# Limits of a table. Compressed chunks have one, because a few bytes could decompress to fill the memory.
MAX_ENCODED_CHUNK_BYTES: Final = 64 << 20
MAX_CHAIN: Final = 64  # links of a chunk; a save writes fewer, see `chunk_writer.MAX_CHAIN_LENGTH`
# Enough for ten million chunks in short chains. A mixture of experts with 140,000 tensors (moments included) has as
# many if each tensor is divided over 64 ranks. Decoded records take some ten times as much memory.
MAX_TABLE_BYTES: Final = 2048 << 20
MAX_TENSORS: Final = 1 << 20
_MAX_DIMENSIONS: Final = 64
_MAX_TENSOR_BYTES: Final = 1 << 60
_ROWS_AT_ONCE: Final = 1024

# Encodings of the first link of a chain, and of the links after it. All except "raw" are described in `codec`.
STANDALONE: Final = ("raw", "planes")
DIFFERENCES: Final = ("xor", "difference")

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "complex32": 4, "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}  # fmt: skip
"""Bytes per element of every dtype that can be stored, by torch's name of the dtype."""

_METADATA_KEY = b"datasvc.tensors.format"
_MAGIC = b"ARROW1\0\0"  # an Arrow file is these bytes, an Arrow stream and a footer


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
_CHUNK = pa.struct(
    _required(
        ("start", _list(pa.int64())),
        ("shape", _list(pa.int64())),
        ("digest", pa.binary(32)),
        ("chain", _list(_LINK)),
    )
)
_COLUMNS = pa.schema(
    _required(("name", pa.string()), ("dtype", pa.string()), ("shape", _list(pa.int64())), ("pieces", _list(_CHUNK))),
    metadata={_METADATA_KEY: str(TENSOR_TABLE_FORMAT).encode()},
)
# Columns of format 1, in which every tensor is one range of one object.
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
    """A range of stored bytes: an encoded chunk, or its difference to the bytes that the earlier links decode to.

    Attributes:
        object: digest of the object that holds the bytes.
        object_bytes: size of the object.
        offset: first byte in the object.
        length: number of bytes.
        encoding: of a whole chunk, "raw" or "planes"; of a difference, "xor" or "difference" (of integers). All but
            "raw" are compressed; see `codec`.
    """

    object: Digest
    object_bytes: int
    offset: int
    length: int
    encoding: str

    @property
    def info(self) -> ObjectInfo:
        """Digest and size of the object."""
        return ObjectInfo(self.object, self.object_bytes)

    @property
    def is_whole_object(self) -> bool:
        """Whether the range is the whole object; the object's digest is then the digest of these bytes."""
        return self.offset == 0 and self.length == self.object_bytes


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor that is stored and verified separately.

    Attributes:
        start: index of its first element in the tensor, one number per dimension.
        shape: size per dimension.
        digest: digest of its elements' bytes in row-major order.
        chain: links in decoding order; the first encodes a whole chunk, each further one a difference.
    """

    start: Shape
    shape: Shape
    digest: Digest
    chain: tuple[ChainLink, ...]

    @property
    def box(self) -> Box:
        """Start and shape of the chunk in its tensor."""
        return self.start, self.shape

    @property
    def stored_bytes(self) -> int:
        """Bytes of all links: a reader of the chunk reads all of them."""
        return sum(link.length for link in self.chain)

    def to_json(self) -> dict[str, Any]:
        """Return the chunk as JSON values."""
        return {
            "start": list(self.start),
            "shape": list(self.shape),
            "digest": self.digest,
            "chain": [vars(link).copy() for link in self.chain],
        }

    @classmethod
    def from_json(cls, value: Any) -> Chunk:
        """Return the chunk of a `to_json` result. Raises CorruptDataError: `value` has another form."""
        try:
            chain = tuple(ChainLink(**{**link, "object": parse_digest(link["object"])}) for link in value["chain"])
            return cls(tuple(value["start"]), tuple(value["shape"]), parse_digest(value["digest"]), chain)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{str(value)[:80]} is not a chunk of a tensor: {error!r}") from error


@dataclass(frozen=True)
class TensorRecord:
    """One row of a tensor table.

    Attributes:
        name: dotted path in the state tree.
        dtype: torch's name of the dtype, "float32".
        shape: size per dimension.
        chunks: chunks that tile the tensor exactly, sorted by `start`; () for a tensor without elements.
    """

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def content(self) -> list[object]:
        """Value for comparisons: equal for equal tensors in equal chunks, whatever their encodings are."""
        return [self.dtype, self.shape, [(chunk.start, chunk.shape, chunk.digest) for chunk in self.chunks]]

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Return the size of a chunk in memory, in bytes."""
        return math.prod(chunk.shape) * ITEM_BYTES[self.dtype]


def join_chunks(name: str, dtype: str, shape: Sequence[int], chunks: Iterable[Chunk]) -> TensorRecord:
    """Return the record of a tensor whose chunks come from several ranks, in any order.

    Raises:
        ConfigError: the chunks do not tile the tensor, or the dtype is unknown.
    """
    joined = TensorRecord(name, dtype, tuple(shape), tuple(sorted(chunks, key=attrgetter("start"))))
    try:
        _check_record(joined, "this save")
    except CorruptDataError as error:
        raise ConfigError(str(error)) from error
    return joined


@collection_paused()
def digest_of_content(records: Iterable[TensorRecord]) -> Digest:
    """Return a digest that is equal for equal tensors in equal chunks, whatever their encodings are."""
    ordered = sorted(records, key=attrgetter("name"))
    return digest_of(json.dumps([[record.name, *record.content] for record in ordered]).encode())


@collection_paused()
def encode_table(records: Iterable[TensorRecord]) -> bytes:
    """Return the table as an Arrow IPC file, sorted by name; equal records give equal bytes.

    Raises:
        ConfigError: the table exceeds `MAX_TABLE_BYTES` or `MAX_TENSORS`, the limits of a reader.
    """
    ordered = sorted(records, key=attrgetter("name"))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _COLUMNS) as file:
        file.write_table(_table(ordered))
    table = sink.getvalue()
    if table.size > MAX_TABLE_BYTES or len(ordered) > MAX_TENSORS:
        raise ConfigError(
            f"the table of {len(ordered)} tensors would have {table.size} bytes; the limits are {MAX_TENSORS} "
            f"tensors and {MAX_TABLE_BYTES} bytes. Save parts of this state as separate models"
        )
    return bytes(table.to_pybytes())


def read_table(objects: Objects, table: Digest) -> tuple[TensorRecord, ...]:
    """Return the records of a stored tensor table of any format, sorted by name.

    Raises:
        CorruptDataError: the table does not match its digest, or a value in it is invalid.
        ConfigError: the table has a later format, or a dtype that this release does not support.
        NotFoundError, UnavailableError: see `Objects.read`.
    """
    return decode_table(objects.read(table, MAX_TABLE_BYTES), objects.location(table))


@collection_paused()
def decode_table(content: bytes | memoryview, location: str) -> tuple[TensorRecord, ...]:
    """Return the validated records of an encoded table; `location` is for messages. For errors see `read_table`."""
    try:
        rows, table_format = _read_rows(content)
        if table_format > TENSOR_TABLE_FORMAT:
            raise ConfigError(
                f"{location} has tensor format {table_format}; this datasvc reads up to {TENSOR_TABLE_FORMAT}: "
                "upgrade it"
            )
        records: list[TensorRecord] = []
        # Validate records one by one: after an invalid record, no further one is decoded.
        for record in _records_1(rows) if table_format == 1 else _records(rows):
            if records and records[-1].name >= record.name:
                raise CorruptDataError(f"{location} is not a valid tensor table: its tensors are not sorted by name")
            _check_record(record, location)
            records.append(record)
    except (pa.ArrowException, OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        # A ConfigError is a ValueError, so it is caught here too. Its message is complete already.
        if isinstance(error, ConfigError):
            raise
        raise CorruptDataError(f"{location} is not a valid tensor table: {error!r}") from error
    return tuple(records)


def _read_rows(content: bytes | memoryview) -> tuple[pa.Table, int]:
    """Return the rows and the format of a table; no rows if the format is a later one."""
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("the file does not begin with Arrow's magic bytes")
    # Read the stream inside the Arrow file, not the footer, which could refer to bytes that are not checked here.
    stream = pa.py_buffer(content)[len(_MAGIC) :]
    reader = pa.ipc.open_stream(stream)
    table_format = int((reader.schema.metadata or {})[_METADATA_KEY])
    if table_format < 1:
        raise ValueError(f"format {table_format}; expected 1 or 2")
    if table_format > TENSOR_TABLE_FORMAT:
        return pa.table({}), table_format
    if not reader.schema.equals(_COLUMNS_1 if table_format == 1 else _COLUMNS):
        raise ValueError(f"unexpected columns {reader.schema}")
    # Check the messages before the rows are read: Arrow would decompress a buffer to any size that it claims.
    for _ in checked_messages(stream):
        pass
    rows = reader.read_all()
    if rows.num_rows > MAX_TENSORS:
        raise ValueError(f"{rows.num_rows} tensors; the limit is {MAX_TENSORS}")
    rows.validate(full=True)
    return rows, table_format


def _table(records: Sequence[TensorRecord]) -> pa.Table:
    """Return the columns of a table. In it, digests are bytes, and the column of the chunks is called `pieces`."""
    # Build whole columns: a dict for each row, chunk and link would take three times as long.
    chunks = [chunk for record in records for chunk in record.chunks]
    links = [link for chunk in chunks for link in chunk.chain]
    stored = pa.StructArray.from_arrays(
        [
            _binary([link.object for link in links]),
            *(pa.array([*map(attrgetter(name), links)], pa.int64()) for name in ("object_bytes", "offset", "length")),
            pa.array([link.encoding for link in links], pa.string()),
        ],
        fields=list(_LINK),
    )
    pieces = pa.StructArray.from_arrays(
        [
            _sizes([chunk.start for chunk in chunks]),
            _sizes([chunk.shape for chunk in chunks]),
            _binary([chunk.digest for chunk in chunks]),
            _nested([len(chunk.chain) for chunk in chunks], stored),
        ],
        fields=list(_CHUNK),
    )
    columns = [
        pa.array([record.name for record in records], pa.string()),
        pa.array([record.dtype for record in records], pa.string()),
        _sizes([record.shape for record in records]),
        _nested([len(record.chunks) for record in records], pieces),
    ]
    return pa.Table.from_arrays(columns, schema=_COLUMNS)


def _nested(lengths: Sequence[int], items: pa.Array) -> pa.Array:
    """Return `items` divided into lists of these lengths."""
    offsets = pa.array(list(accumulate(lengths, initial=0)), pa.int32())
    return pa.ListArray.from_arrays(offsets, items, type=_list(items.type))


def _sizes(sizes: Sequence[Shape]) -> pa.Array:
    return _nested([*map(len, sizes)], pa.array([length for size in sizes for length in size], pa.int64()))


def _binary(digests: Sequence[Digest]) -> pa.Array:
    content = pa.py_buffer(bytes.fromhex("".join(digests)))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(digests), [None, content])


def _records(table: pa.Table) -> Iterator[TensorRecord]:
    """Yield the records of a table of format 2, see `_table`."""
    # Convert parts of the table: rows as Python values take ten times as much memory as rows in the table.
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        names, dtypes, shapes, pieces = batch.columns
        starts, sizes, digests, chains = (pieces.flatten().field(index) for index in range(4))
        objects, *numbers, encodings = (chains.flatten().field(index) for index in range(5))
        links = map(ChainLink, _hex(objects), *(each.to_numpy().tolist() for each in numbers), encodings.to_pylist())
        chunks = map(Chunk, _tuples(starts), _tuples(sizes), _hex(digests), _tuples(chains, list(links)))
        yield from map(
            TensorRecord, names.to_pylist(), dtypes.to_pylist(), _tuples(shapes), _tuples(pieces, list(chunks))
        )


def _tuples(lists: pa.ListArray, items: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    """Return the lists as tuples; `items` are the Python values of their elements, by default integers."""
    if items is None:
        items = lists.flatten().to_numpy().tolist()
    offsets = lists.offsets.to_numpy()
    return [tuple(items[start:stop]) for start, stop in pairwise((offsets - offsets[0]).tolist())]


def _hex(digests: pa.FixedSizeBinaryArray) -> list[Digest]:
    return [Digest(digest.hex()) for digest in digests.to_pylist()]


def _records_1(table: pa.Table) -> Iterable[TensorRecord]:
    """Yield the records of a table of format 1, in which every tensor is one raw chunk."""
    # Format 1 does not store the sizes of objects: an object ends where its last tensor ends.
    rows: list[dict[str, Any]] = table.to_pylist()
    sizes: dict[bytes, int] = {}
    for row in rows:
        sizes[row["object"]] = max(sizes.get(row["object"], 0), row["offset"] + row["length"])
    for row in rows:
        shape = tuple(row["shape"])
        link = ChainLink(Digest(row["object"].hex()), sizes[row["object"]], row["offset"], row["length"], "raw")
        chunk = Chunk((0,) * len(shape), shape, Digest(row["digest"].hex()), (link,))
        yield TensorRecord(row["name"], row["dtype"], shape, (chunk,) if 0 not in shape else ())


def _check_record(record: TensorRecord, location: str) -> None:
    """Raise ConfigError or CorruptDataError if a value of the record is invalid."""
    if record.dtype not in ITEM_BYTES:
        raise ConfigError(f"tensor {record.name!r} in {location} has the unknown dtype {record.dtype!r}")
    shape = record.shape
    if len(shape) > _MAX_DIMENSIONS or min((*shape, 0)) < 0:
        raise CorruptDataError(f"{location}: tensor {record.name!r}: {shape} is not a valid shape")
    if not is_tiling(shape, [chunk.box for chunk in record.chunks]):
        raise CorruptDataError(
            f"{location}: tensor {record.name!r} of shape {shape}: its chunks leave out elements or hold some twice"
        )
    # Leave out sizes of 0, so that the other sizes of a tensor without elements are limited too.
    if math.prod(filter(None, shape)) * ITEM_BYTES[record.dtype] > _MAX_TENSOR_BYTES:
        raise CorruptDataError(f"{location}: tensor {record.name!r} of shape {shape} is larger than any memory")
    for chunk in record.chunks:
        fault = fault_of_chain(chunk.chain, record.chunk_bytes(chunk))
        if fault:
            raise CorruptDataError(f"{location}: tensor {record.name!r}, its chunk at {chunk.start}: {fault}")


def fault_of_chain(chain: Sequence[ChainLink], chunk_bytes: int) -> str | None:
    """Return a description of the first invalid value in a chain; None if the chain is valid.

    `chunk_bytes` is the size of the chunk in memory.
    """
    if not 1 <= len(chain) <= MAX_CHAIN:
        return f"its chain has {len(chain)} links"
    is_raw = len(chain) == 1 and chain[0].encoding == "raw"
    if not is_raw and chunk_bytes > MAX_ENCODED_CHUNK_BYTES:
        return f"a chunk in encoding {chain[-1].encoding!r} has at most {MAX_ENCODED_CHUNK_BYTES} bytes"
    allowed = STANDALONE  # for the first link
    for link in chain:
        if link.encoding not in allowed:
            encodings = [link.encoding for link in chain]
            return f"its encodings {encodings} are not valid; expected one of {STANDALONE}, then of {DIFFERENCES}"
        allowed = DIFFERENCES
        if min(link.offset, link.length) < 0 or link.offset + link.length > link.object_bytes:
            return (
                f"bytes {link.offset} to {link.offset + link.length} exceed its object of {link.object_bytes} bytes"
            )
        is_length_valid = 0 < link.length <= chunk_bytes
        if link.encoding == "raw":
            is_length_valid = link.length == chunk_bytes
        if not is_length_valid:
            return f"{link.length} bytes are not a valid length for encoding {link.encoding!r}"
    return None
