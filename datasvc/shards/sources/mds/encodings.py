"""Decode the values of MosaicML MDS shards, and choose the sample columns for them.

Encoded images stay unchanged; raw images become PNG. Arrays of a fixed shape are tensors. Arrays of varying shape are
lists of values in C order, with the shapes in a second column NAME.shape. Pickles are refused, because reading a
pickle can run code.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError
from datasvc.printable import count_text
from datasvc.shards.sources.common.tensors import tensor_field

# numpy types by MDS type code. An array starts with this code if its encoding does not give the type.
_ARRAY_TYPES: Final = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
# numpy types of single numbers by encoding.
_SCALARS: Final = {"int": "int64", **{name: name for name in _ARRAY_TYPES.values()}}
# Bits per pixel of the modes of raw images that a PNG can hold.
_MODE_BITS: Final = {"1": 1, "L": 8, "P": 8, "LA": 16, "I;16": 16, "RGB": 24, "RGBA": 32}
# Of 0 to 9. A higher level saves little space, but slows down the encoding, which runs in one thread.
_PNG_LEVEL: Final = 1
SHAPE_SUFFIX: Final = ".shape"


@dataclass(frozen=True)
class MdsColumn:
    """A column as an MDS index describes it. One or two sample columns hold its values, see `fields`.

    Attributes:
        name: name of the column.
        encoding: such as "jpeg" or "ndarray:float32:3,4".
        size_bytes: size of each value; None: it varies, so each sample stores the size of its value.
    """

    name: str
    encoding: str
    size_bytes: int | None

    @property
    def is_image(self) -> bool:
        """Whether each value is one image."""
        return self.encoding in ("jpeg", "png", "pil")

    def fields(self, first: dict[str, Any]) -> list[pa.Field]:
        """Return the fields of the sample columns that hold this column.

        Args:
            first: first sample, decoded by `decode`; its arrays give the types that the encoding does not give.

        Raises:
            ConfigError: the encoding is a pickle, or unknown.
        """
        kind, _, settings = self.encoding.partition(":")
        if kind == "ndarray":
            dtype, shape = array_type(self.name, settings)
            if dtype is not None and shape is not None:
                return [tensor_field(self.name, dtype, shape)]
            values = pa.list_(pa.from_numpy_dtype(dtype or first[self.name].dtype))
            return [pa.field(self.name, values), pa.field(self.name + SHAPE_SUFFIX, pa.list_(pa.int64()))]
        if self.encoding in _SCALARS:
            return [pa.field(self.name, pa.from_numpy_dtype(np.dtype(_SCALARS[self.encoding])))]
        return [pa.field(self.name, _type_and_decoder(self)[0])]

    def decode(self, content: memoryview) -> dict[str, Any]:
        """Return the values of one sample, by the names of the sample columns that hold this column.

        Raises:
            BadSampleError: `content` does not have this encoding.
        """
        kind, _, settings = self.encoding.partition(":")
        # No ConfigError, which the `except` below would catch too, is raised here: `fields` has refused all invalid
        # encodings when the source was listed.
        try:
            if kind == "ndarray":
                return self._decode_array(content, *array_type(self.name, settings))
            if self.encoding in _SCALARS:
                # Raises ValueError unless `content` is exactly one number.
                (value,) = np.frombuffer(content, np.dtype(_SCALARS[self.encoding]).newbyteorder("<"))
                return {self.name: value.item()}
            return {self.name: _type_and_decoder(self)[1](content)}
        except ValueError as error:
            raise BadSampleError(f"column {self.name!r} is not a valid {self.encoding}: {error}") from error

    def _decode_array(self, content: memoryview, dtype: str | None, shape: tuple[int, ...] | None) -> dict[str, Any]:
        """Return an array, and its shape if it varies. A `dtype` or `shape` of None is stored before the values."""
        offset = 0
        if dtype is None:
            dtype, offset = _ARRAY_TYPES.get(_byte(content, 0), ""), 1
            if not dtype:
                raise ValueError(f"its type code {content[0]} is unknown")
        if shape is not None:
            values = _numbers(content, offset, dtype)
            if len(values) != np.prod(shape):
                raise ValueError(f"it has {count_text(len(values), 'value')}; expected the shape {list(shape)}")
            # `fields` makes a column of numbers, not of tensors, for arrays of one value.
            return {self.name: values if len(values) > 1 else values[0]}
        # One byte packs the number of dimensions (upper 6 bits) and log2 of the bytes per dimension (lower 2 bits).
        packed = _byte(content, offset)
        num_dimensions, log2_bytes = packed >> 2, packed & 3
        shape_start = offset + 1
        shape_stop = shape_start + (num_dimensions << log2_bytes)
        stored_shape = _numbers(content[:shape_stop], shape_start, f"uint{8 << log2_bytes}").tolist()
        values = _numbers(content, shape_stop, dtype)
        # The product of damaged sizes may be too large for int64, so multiply Python integers (`object`).
        if len(stored_shape) != num_dimensions or len(values) != np.prod(stored_shape, dtype=object):
            raise ValueError(f"it has {count_text(len(values), 'value')}, but the shape {stored_shape}")
        return {self.name: values, self.name + SHAPE_SUFFIX: stored_shape}


def array_type(name: str, settings: str) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the type and shape of an encoding "ndarray:TYPE:SHAPE"; None if the encoding does not give them.

    Raises:
        ConfigError: the type or the shape is invalid.
    """
    dtype, _, sizes = settings.partition(":")
    try:
        shape = tuple(map(int, sizes.split(","))) if sizes else None
    except ValueError as error:
        raise ConfigError(f"column {name!r} has the shape {sizes!r}; expected numbers") from error
    if dtype and dtype not in _ARRAY_TYPES.values():
        raise ConfigError(f"column {name!r} has arrays of {dtype!r}; expected {sorted(_ARRAY_TYPES.values())}")
    return dtype or None, shape


def _byte(content: memoryview, offset: int) -> int:
    """Return the byte at `offset`. Raise ValueError beyond the end."""
    if offset >= len(content):
        raise ValueError("it is truncated")
    return int(content[offset])


def _numbers(content: memoryview, offset: int, dtype: str) -> npt.NDArray[Any]:
    """Return the bytes from `offset` to the end as numbers. Raise ValueError if the last number is not complete."""
    return np.frombuffer(content[offset:], np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)


def _type_and_decoder(column: MdsColumn) -> tuple[pa.DataType, Callable[[memoryview], Any]]:
    """Return the type of the sample column, and the function that decodes a value."""
    if column.encoding == "pkl":
        raise ConfigError(
            f"column {column.name!r} holds pickles, which run code when they are read, so datasvc never reads them; "
            "write it again as bytes, json or ndarray"
        )
    if column.encoding not in _SIMPLE:
        raise ConfigError(
            f"column {column.name!r} has the encoding {column.encoding!r}; expected one of {', '.join(_SIMPLE)}, "
            "ndarray or a number type"
        )
    return _SIMPLE[column.encoding]


def _text(content: memoryview) -> str:
    return str(content, "utf-8")


def _raw_image(content: memoryview) -> bytes:
    """Return an MDS "pil" image (uint32 width, height and size of mode; mode; pixels) as a PNG."""
    width, height, mode_bytes = np.frombuffer(content[:12], "<u4").tolist()
    mode = bytes(content[12 : 12 + mode_bytes]).decode()
    pixels = content[12 + mode_bytes :]
    # MDS stores no palette, so palette indices ("P", often classes of pixels) are kept as grey values.
    if mode not in _MODE_BITS:
        raise ValueError(f"mode {mode!r} is not supported by PNG; expected {', '.join(_MODE_BITS)}")
    if len(pixels) != (width * _MODE_BITS[mode] + 7) // 8 * height or not len(pixels):
        raise ValueError(f"{width} x {height} pixels of mode {mode!r} do not match {len(pixels)} bytes")
    buffer = io.BytesIO()
    image = Image.frombytes("L" if mode == "P" else mode, (width, height), bytes(pixels))
    image.save(buffer, "PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


def _pieces(content: memoryview, offset: int) -> list[memoryview]:
    """Return the pieces of a list, which is stored at `offset` as their count, their sizes (uint32 each) and them."""
    (count,) = np.frombuffer(content[offset : offset + 4], "<u4").tolist()
    start = offset + 4 + 4 * count
    if start > len(content):
        raise ValueError("it is truncated")
    stops = np.cumsum(np.frombuffer(content[offset + 4 : start], "<u4"), dtype=np.int64) + start
    if (stops[-1] if count else start) != len(content):
        raise ValueError("the sizes of its pieces do not match its length")
    starts = [start, *stops[:-1].tolist()]  # without pieces, `zip` ignores this start, because `stops` is empty
    return [content[begin:stop] for begin, stop in zip(starts, stops.tolist(), strict=False)]


def _images(content: memoryview, offset: int = 4) -> list[bytes]:
    # MosaicML's "list[...]" encodings have four other bytes before the count: skip them. "jpeg_array" has none.
    return list(map(bytes, _pieces(content, offset)))


_BLOBS: Final = pa.list_(pa.large_binary())
# All encodings except arrays and numbers: type of the sample column, and function that decodes a value.
_SIMPLE: Final[dict[str, tuple[pa.DataType, Callable[[memoryview], Any]]]] = {
    "bytes": (pa.large_binary(), bytes),
    "str": (pa.string(), _text),
    "json": (pa.string(), _text),
    "str_int": (pa.int64(), lambda content: int(_text(content))),
    "str_float": (pa.float64(), lambda content: float(_text(content))),
    "str_decimal": (pa.string(), _text),
    "jpeg": (pa.large_binary(), bytes),
    "png": (pa.large_binary(), bytes),
    "pil": (pa.large_binary(), _raw_image),
    "jpeg_array": (_BLOBS, lambda content: _images(content, 0)),
    "jpegarray": (_BLOBS, lambda content: _images(content, 0)),
    "list[jpeg]": (_BLOBS, _images),
    "list[png]": (_BLOBS, _images),
    "list[pil]": (_BLOBS, lambda content: list(map(_raw_image, _pieces(content, 4)))),
}
