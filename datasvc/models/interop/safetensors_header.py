"""Reads headers of safetensors files with the package safetensors; encodes headers before tensors are in memory.

Layout: length of the header (8 bytes, little-endian); the header, a JSON object; the bytes of the tensors, without
gaps. See https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.state import check_tensor_name
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.printable import count_text

DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""torch's name of each dtype that both safetensors and a repository support."""

NAMES: Final[Mapping[str, str]] = {dtype: name for name, dtype in DTYPES.items()}  # safetensors' names

# Enough for about 200,000 tensors. Parsed JSON takes many times its length in memory, so a larger header is refused.
MAX_HEADER_BYTES: Final = 32 << 20
_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
# Limits for untrusted headers.
_MAX_DIMENSIONS: Final = 64
_MAX_SIZE: Final = 1 << 60


class PlacedTensor(NamedTuple):
    """A tensor in a file: its name, torch's name of its dtype, its shape, and the offset of its first byte."""

    name: str
    dtype: str
    shape: Shape
    offset: int


def read_header(path: Path) -> list[PlacedTensor]:
    """Return the tensors of a file, ordered by their offset.

    Raises:
        CorruptDataError: the file is truncated or no safetensors file; or tensors overlap, leave gaps or exceed it.
        ConfigError: a tensor has a dtype that torch or a repository does not support.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    # The package rejects a header that is longer than the file. Its limit for other headers is higher than ours.
    if MAX_HEADER_BYTES < header_bytes < path.stat().st_size:
        raise CorruptDataError(
            f"{path} has a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are supported"
        )
    try:
        # `safe_open` needs a framework for the tensors, but no tensor is read here.
        with safe_open(path, "numpy") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            described = [(name, tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices]
    except SafetensorError as error:
        raise CorruptDataError(f"{path} is damaged, or is not a safetensors file: {error}") from None
    placed: list[PlacedTensor] = []
    # safetensors has checked that there are no gaps, so each tensor begins where the one before it ends.
    offset = _LENGTH_BYTES + header_bytes
    for name, dtype, shape in described:
        check_tensor_name(name, str(path))
        if dtype not in DTYPES:
            raise ConfigError(f"{path}: tensor {name!r} has the dtype {dtype!r}, which is not supported")
        if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) >= _MAX_SIZE:
            raise CorruptDataError(
                f"{path}: tensor {name!r} has {count_text(len(shape), 'dimension')} or a size that is too large"
            )
        placed.append(PlacedTensor(name, DTYPES[dtype], shape, offset))
        offset += math.prod(shape) * ITEM_BYTES[DTYPES[dtype]]
    return placed


def parse_object(raw: bytes, location: str) -> dict[str, Any]:
    """Parse a JSON object of an untrusted file.

    Raises:
        CorruptDataError: `raw` is not a JSON object, or a key occurs twice.
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
    """Refuse NaN and infinities, which `json.loads` would accept."""
    raise ValueError(f"{text} is not valid JSON")


def encode_header(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file, padded to 8 bytes; the tensors follow in the given order.

    A tensor is a triple (name, torch's name of the dtype, shape).

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
