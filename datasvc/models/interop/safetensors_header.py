"""The header of a safetensors file, believed in nothing that the file's size does not bear out.

Layout: 8 bytes length of the header, little-endian; the header, a JSON object; the tensors' bytes, without holes. See
https://github.com/huggingface/safetensors, "Format".
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
"""torch's name of every dtype that safetensors and a repository have in common."""

NAMES: Final[Mapping[str, str]] = {dtype: name for name, dtype in DTYPES.items()}

# Some 200,000 tensors. Parsed JSON takes many times its length in memory, so a hostile one must stay small.
MAX_HEADER_BYTES: Final = 32 << 20
_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_MAX_DIMENSIONS: Final = 64
_MAX_SIZE: Final = 1 << 60


@dataclass(frozen=True)
class Placed:
    """A tensor in a safetensors file.

    Attributes:
        name: of the tensor.
        dtype: torch's name of it.
        shape: sizes.
        offset: of its first byte in the file.
        length: bytes.
    """

    name: str
    dtype: str
    shape: Shape
    offset: int
    length: int


def read_header(file: BinaryIO, file_bytes: int, location: str) -> list[Placed]:
    """Return the tensors of an open file, by their place in it.

    Raises:
        CorruptDataError: truncated, or no safetensors file; or tensors overlap, leave holes or lie outside of it.
        ConfigError: a tensor has a dtype that torch or a repository does not know.
    """
    raw = file.read(_LENGTH_BYTES)
    length = int.from_bytes(raw, "little")
    if len(raw) < _LENGTH_BYTES or length > file_bytes - _LENGTH_BYTES:
        raise CorruptDataError(
            f"{location} is no safetensors file, or was cut off: {file_bytes} bytes, its header alone takes {length}"
        )
    if length > MAX_HEADER_BYTES:
        raise CorruptDataError(f"{location}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are believed")
    header = file.read(length)
    if len(header) < length:
        raise CorruptDataError(f"{location} was cut off: {len(header)} of {length} bytes of the header are there")
    placed = [
        _placed(name, about, _LENGTH_BYTES + length, location)
        for name, about in parse_object(header, location).items()
        if name != _METADATA
    ]
    return check_places(placed, _LENGTH_BYTES + length, file_bytes, location)


def check_places(placed: Iterable[Placed], start: int, stop: int, location: str) -> list[Placed]:
    """Return the tensors in the order in which they fill bytes `start` to `stop` exactly. Raises CorruptDataError."""
    ordered = sorted(placed, key=lambda each: (each.offset, each.length))
    end = start
    for each in ordered:
        if each.offset != end:
            what = "overlaps the one before it" if each.offset < end else "leaves a hole before it"
            raise CorruptDataError(f"{location}: tensor {each.name!r} {what}")
        end += each.length
    if end != stop:
        what = "was cut off" if end > stop else "has bytes that belong to no tensor"
        raise CorruptDataError(f"{location} {what}: its header speaks of {end} bytes, it has {stop}")
    return ordered


def parse_object(raw: bytes, location: str) -> dict[str, Any]:
    """Return a JSON object, no key of which may come twice. Raises CorruptDataError."""

    def pairs(found: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) != len(found):
            raise ValueError("a name comes twice")
        return made

    try:
        value = json.loads(raw, object_pairs_hook=pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{location}: this is no JSON that can be used: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{location}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def encode_header(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file whose tensors follow in this order, padded to 8 bytes.

    Args:
        tensors: name, dtype (torch's name) and shape of each.
        metadata: text by text.

    Raises:
        ConfigError: safetensors has no such dtype, or no room for such a name; names the tensor.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name == _METADATA:
            raise ConfigError(f"no tensor in a safetensors file can be called {name}; call it otherwise: --map")
        if dtype not in NAMES:
            raise ConfigError(
                f"safetensors has no dtype for tensor {name!r}, which is {dtype}; leave it out or cast it"
            )
        length = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def _placed(name: str, about: object, start: int, location: str) -> Placed:
    check_tensor_name(name, location)

    def refuse(what: str) -> CorruptDataError:
        return CorruptDataError(f"{location}: tensor {name!r}: {what}")

    if not isinstance(about, dict) or not isinstance(about.get("dtype"), str):
        raise refuse("its dtype is missing")
    if about["dtype"] not in DTYPES:
        raise ConfigError(
            f"{location}: tensor {name!r} has the dtype {about['dtype'][:20]!r}, which is not supported"
        )
    dtype = DTYPES[about["dtype"]]
    shape, offsets = _sizes(about.get("shape"), _MAX_DIMENSIONS), _sizes(about.get("data_offsets"), 2)
    if shape is None:
        raise refuse("its shape is damaged")
    if offsets is None or len(offsets) != 2:
        raise refuse("its offsets are damaged")
    begin, end = offsets
    length = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != length:
        raise refuse(f"{shape} {dtype} takes {length} bytes, its offsets say {end - begin}")
    return Placed(name, dtype, tuple(shape), start + begin, length)


def _sizes(value: Any, most: int) -> list[int] | None:
    """Return `value` where it is a list of at most `most` sizes."""
    if not isinstance(value, list) or len(value) > most:
        return None
    return value if all(type(each) is int and 0 <= each < _MAX_SIZE for each in value) else None
