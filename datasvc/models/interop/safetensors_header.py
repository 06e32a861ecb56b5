"""Read and write the header of a safetensors file; every size in it is checked against the size of the file.

Layout: length of the header (8 bytes, little-endian); the header, a JSON object; the bytes of the tensors, without
gaps. See https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.state import check_tensor_name
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.tensor_table import ITEM_BYTES

DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""torch's name of each dtype that both safetensors and a repository support."""

NAMES: Final[Mapping[str, str]] = {dtype: name for name, dtype in DTYPES.items()}

# Enough for about 200,000 tensors. Parsed JSON takes many times its length in memory, so a malicious header must be
# limited.
MAX_HEADER_BYTES: Final = 32 << 20
_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_MAX_DIMENSIONS: Final = 64
_MAX_SIZE: Final = 1 << 60


@dataclass(frozen=True)
class Placed:
    """Place of a tensor in a safetensors file.

    Attributes:
        name: name of the tensor.
        dtype: torch's name of its dtype.
        shape: shape of the tensor.
        offset: offset of its first byte in the file.
        length: number of bytes.
    """

    name: str
    dtype: str
    shape: Shape
    offset: int
    length: int


def read_header(file: BinaryIO, file_bytes: int, location: str) -> list[Placed]:
    """Return the tensors of an open file, ordered by their offset.

    Raises:
        CorruptDataError: the file is truncated or is not a safetensors file, or tensors overlap, leave gaps or exceed
            the file.
        ConfigError: a tensor has a dtype that torch or a repository does not support.
    """
    raw = file.read(_LENGTH_BYTES)
    length = int.from_bytes(raw, "little")
    if len(raw) < _LENGTH_BYTES or length > file_bytes - _LENGTH_BYTES:
        raise CorruptDataError(
            f"{location} is not a safetensors file, or is truncated: it has {file_bytes} bytes, its header alone "
            f"needs {length}"
        )
    if length > MAX_HEADER_BYTES:
        raise CorruptDataError(f"{location} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are supported")
    header = file.read(length)
    if len(header) < length:
        raise CorruptDataError(f"{location} is truncated: it has {len(header)} of {length} bytes of the header")
    placed = [
        _placed(name, description, _LENGTH_BYTES + length, location)
        for name, description in parse_object(header, location).items()
        if name != _METADATA
    ]
    return check_places(placed, _LENGTH_BYTES + length, file_bytes, location)


def check_places(placed: Iterable[Placed], start: int, stop: int, location: str) -> list[Placed]:
    """Check that the tensors fill the bytes from `start` to `stop` exactly; return them ordered by offset.

    Raises:
        CorruptDataError: they overlap, leave a gap, or do not end at `stop`.
    """
    ordered = sorted(placed, key=lambda tensor: (tensor.offset, tensor.length))
    end = start
    for tensor in ordered:
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise CorruptDataError(f"{location}: tensor {tensor.name!r} {what}")
        end += tensor.length
    if end != stop:
        what = "is truncated" if end > stop else "has bytes that belong to no tensor"
        raise CorruptDataError(f"{location} {what}: its header describes {end} bytes, it has {stop}")
    return ordered


def parse_object(raw: bytes, location: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CorruptDataError: it is not a JSON object, or a key occurs twice.
    """

    def from_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            raise ValueError("a name occurs twice")
        return parsed

    try:
        value = json.loads(raw, object_pairs_hook=from_pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{location}: the JSON is not valid: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{location}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not valid JSON")


def encode_header(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file, padded to 8 bytes; the tensors follow in the given order.

    Args:
        tensors: triples (name, torch's name of the dtype, shape).
        metadata: metadata of the file, text by text.

    Raises:
        ConfigError: safetensors does not support the dtype or the name of a tensor.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name == _METADATA:
            raise ConfigError(f"a tensor in a safetensors file cannot have the name {name}; rename it with --map")
        if dtype not in NAMES:
            raise ConfigError(
                f"safetensors does not support the dtype {dtype} of tensor {name!r}; leave it out or cast it"
            )
        length = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    raw = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces at the end of the header; they align the tensors to 8 bytes.
    raw += b" " * (-len(raw) % _ALIGNMENT)
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def _placed(name: str, description: object, start: int, location: str) -> Placed:
    check_tensor_name(name, location)

    def refuse(what: str) -> CorruptDataError:
        return CorruptDataError(f"{location}: tensor {name!r}: {what}")

    if not isinstance(description, dict) or not isinstance(description.get("dtype"), str):
        raise refuse("its dtype is missing")
    if description["dtype"] not in DTYPES:
        raise ConfigError(
            f"{location}: tensor {name!r} has the dtype {description['dtype'][:20]!r}, which is not supported"
        )
    dtype = DTYPES[description["dtype"]]
    shape, offsets = _sizes(description.get("shape"), _MAX_DIMENSIONS), _sizes(description.get("data_offsets"), 2)
    if shape is None:
        raise refuse("its shape is not valid")
    if offsets is None or len(offsets) != 2:
        raise refuse("its offsets are not valid")
    begin, end = offsets
    length = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != length:
        raise refuse(f"shape {shape} and dtype {dtype} need {length} bytes, but its offsets give {end - begin}")
    return Placed(name, dtype, tuple(shape), start + begin, length)


def _sizes(value: Any, max_length: int) -> list[int] | None:
    """Return `value` if it is a list of at most `max_length` sizes, else None."""
    if not isinstance(value, list) or len(value) > max_length:
        return None
    return value if all(type(size) is int and 0 <= size < _MAX_SIZE for size in value) else None
