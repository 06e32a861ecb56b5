"""Tensors as objects: raw little-endian bytes, named by digest, listed in a tensor table.

A tensor of `OWN_OBJECT_BYTES` or more is an object of its own, so that an unchanged one is stored once over all
versions; smaller ones share one pack object per checkpoint. Every tensor has a digest of its own, so that damage is
pinned on a tensor by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.objects import digest_of, parse_digest

if TYPE_CHECKING:
    import torch

OWN_OBJECT_BYTES: Final = 64 << 10
TENSOR_TABLE_FORMAT: Final = 1
_IO_THREADS = 4
_METADATA_KEY = b"datasvc.tensors.format"
_COLUMNS = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("object", pa.binary(32), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
    ],
    metadata={_METADATA_KEY: str(TENSOR_TABLE_FORMAT).encode()},
)
_DTYPES: Final = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


@dataclass(frozen=True)
class TensorRecord:
    """One row of a tensor table.

    Attributes:
        name: dotted path in the state tree.
        dtype: torch's name of it, "float32".
        shape: sizes.
        digest: of the tensor's bytes.
        object: the object that holds them.
        offset: where they start in it.
        length: their number.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: Digest
    object: Digest
    offset: int
    length: int


def store_tensors(objects: Objects, tensors: Mapping[str, torch.Tensor]) -> ObjectInfo:
    """Store every tensor and their table; returns the table's object. Equal bytes are written once.

    Raises:
        ConfigError: a tensor is of a kind that has no raw bytes (sparse, quantised); names it.
        UnavailableError: the store failed.
    """
    raw = {name: _raw_bytes(name, tensor) for name, tensor in tensors.items()}
    pack = bytearray()
    small = [name for name in sorted(raw) if raw[name].nbytes < OWN_OBJECT_BYTES]
    offsets: dict[str, int] = {}
    for name in small:
        offsets[name] = len(pack)
        pack += raw[name]
    pack_digest = objects.put(bytes(pack)).digest if small else None

    def store_one(name: str) -> TensorRecord:
        view = raw[name]
        if name in offsets:
            assert pack_digest is not None
            digest, held = digest_of(view), pack_digest
        else:
            digest = held = objects.put(view).digest
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        shape = tuple(tensors[name].shape)
        return TensorRecord(name, dtype, shape, digest, held, offsets.get(name, 0), view.nbytes)

    with ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="datasvc-tensor") as pool:
        records = list(pool.map(store_one, sorted(raw)))
    return objects.put(encode_table(records))


def load_tensors(objects: Objects, table: Digest) -> dict[str, torch.Tensor]:
    """Return every tensor of a table on the CPU, each byte verified.

    Raises:
        CorruptDataError: bytes were changed; names the tensor.
        NotFoundError: an object is missing; names the tensor.
        UnavailableError: the store did not answer.
    """
    records = read_records(objects, table)
    by_object: dict[Digest, list[TensorRecord]] = {}
    for record in records:
        by_object.setdefault(record.object, []).append(record)

    def load_object(digest: Digest) -> list[tuple[str, torch.Tensor]]:
        content = _read_object(objects, digest, by_object[digest])
        return [(record.name, _tensor(record, content)) for record in by_object[digest]]

    with ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="datasvc-tensor") as pool:
        loaded = dict(pair for part in pool.map(load_object, by_object) for pair in part)
    return {record.name: loaded[record.name] for record in records}


def encode_table(records: list[TensorRecord]) -> bytes:
    """Return the table as an Arrow IPC file; equal records give equal bytes."""
    rows = [
        {
            "name": record.name,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "digest": bytes.fromhex(record.digest),
            "object": bytes.fromhex(record.object),
            "offset": record.offset,
            "length": record.length,
        }
        for record in records
    ]
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, schema=_COLUMNS)
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def read_records(objects: Objects, table: Digest) -> list[TensorRecord]:
    """Return the rows of a tensor table. Raises CorruptDataError, ConfigError (later format), NotFoundError."""
    content = objects.read(table)
    try:
        rows = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        found = int(rows.schema.metadata[_METADATA_KEY])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{objects.location(table)} is no tensor table: {error!r}") from error
    if found > TENSOR_TABLE_FORMAT:
        raise ConfigError(
            f"{objects.location(table)} has tensor format {found}; this datasvc reads up to {TENSOR_TABLE_FORMAT}"
        )
    return [_record(row, objects.location(table)) for row in rows.to_pylist()]


def _record(row: dict[str, Any], location: str) -> TensorRecord:
    """Check a row before anything is allocated by what it says."""
    import torch

    record = TensorRecord(
        row["name"],
        row["dtype"],
        tuple(row["shape"]),
        parse_digest(row["digest"].hex()),
        parse_digest(row["object"].hex()),
        row["offset"],
        row["length"],
    )
    if record.dtype not in _DTYPES:
        raise ConfigError(f"tensor {record.name!r} in {location} has the unknown dtype {record.dtype!r}")
    item_bytes = getattr(torch, record.dtype).itemsize
    if min((*record.shape, record.offset, 0)) < 0 or math.prod(record.shape) * item_bytes != record.length:
        raise CorruptDataError(
            f"tensor {record.name!r} in {location}: {record.length} bytes cannot be {record.shape} {record.dtype}"
        )
    return record


def _read_object(objects: Objects, digest: Digest, records: list[TensorRecord]) -> bytes:
    try:
        return objects.read(digest)
    except NotFoundError as error:
        raise NotFoundError(f"tensor {_named(records)} is missing: {error}") from error
    except CorruptDataError:
        # A pack is shared: find out which of its tensors the damage hit.
        content = objects.read_unverified(digest)
        bad = [each for each in records if digest_of(_window(each, content)) != each.digest] or records
        raise CorruptDataError(
            f"tensor {_named(bad)} is corrupt: the bytes in {objects.location(digest)} do not match their "
            "digest; restore that object from another copy, or restore another version"
        ) from None


def _named(records: list[TensorRecord]) -> str:
    names = ", ".join(repr(record.name) for record in records[:5])
    return names if len(records) <= 5 else f"{names} and {len(records) - 5} more"


def _window(record: TensorRecord, content: bytes) -> memoryview:
    return memoryview(content)[record.offset : record.offset + record.length]


def _raw_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, copied only where it is not contiguous on the CPU."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or dtype not in _DTYPES:
        raise ConfigError(
            f"tensor {name!r} ({tensor.layout}, {dtype}) cannot be stored; make it a dense tensor with data first"
        )
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor(record: TensorRecord, content: bytes) -> torch.Tensor:
    import torch

    window = _window(record, content)
    # An object of its own was hashed as a whole when it was read.
    is_whole_object = record.digest == record.object and len(window) == len(content)
    if not is_whole_object and digest_of(window) != record.digest:
        raise CorruptDataError(f"tensor {record.name!r} is corrupt: its bytes do not match its digest")
    dtype = getattr(torch, record.dtype)
    if not record.length:
        return torch.empty(record.shape, dtype=dtype)
    return torch.frombuffer(bytearray(window), dtype=dtype).reshape(record.shape)
