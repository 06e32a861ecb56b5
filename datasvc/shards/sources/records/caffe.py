"""Parses Caffe's `Datum`, a protobuf message of one image or tensor and its label, for the LMDB source.

Fields as in caffe.proto: channels 1, height 2, width 3, data 4, label 5, float_data 6, encoded 7. Pixels are stored
plane by plane (CHW), in the order blue, green, red.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.printable import count_text
from datasvc.shards.sources.common.columns import looks_like_image
from datasvc.shards.sources.common.protobuf import BYTES, FIXED32, VARINT, read_fields, to_signed

# Allowed wire types of protobuf by field number.
_WIRE_TYPES: Final = {
    1: (VARINT,), 2: (VARINT,), 3: (VARINT,), 4: (BYTES,), 5: (VARINT,), 6: (FIXED32, BYTES), 7: (VARINT,),
}  # fmt: skip
# Low: a higher level saves little space, but slows down the encoding, which runs in one thread.
_PNG_LEVEL: Final = 1


@dataclass(frozen=True)
class Datum:
    """The fields of one message that make a sample.

    Attributes:
        shape: channels, height, width; 0 for each one that an encoded image does not declare.
        data: encoded image, or `uint8[channels, height, width]`.
        floats: `float32[channels * height * width]` in place of `data`, in C order.
        label: class index; 0 if absent.
        is_encoded: whether `data` is an encoded image.
    """

    shape: tuple[int, int, int]
    data: bytes
    floats: npt.NDArray[np.float32]
    label: int
    is_encoded: bool

    @property
    def is_image(self) -> bool:
        """Whether the message is one image: either encoded, or bytes in 1 or 3 channels."""
        return self.is_encoded or (not len(self.floats) and self.shape[0] in (1, 3))


def parse_datum(message: bytes | memoryview) -> Datum:
    """Parse a Datum.

    Raises:
        BadSampleError: `message` is not a Datum, or its shape does not match its number of values.
    """
    numbers = {1: 0, 2: 0, 3: 0, 5: 0, 7: 0}  # integers by field number; an absent field is 0
    data = b""
    floats: list[bytes] = []
    for number, wire_type, value in read_fields(message):
        # Unknown fields are errors, although protobuf skips them, because `is_datum` detects a Datum by its fields.
        if wire_type not in _WIRE_TYPES.get(number, ()):
            raise BadSampleError(f"not a Datum: it has a field {number} of wire type {wire_type}")
        if isinstance(value, int):
            numbers[number] = to_signed(value, 32)
        elif number == 4:
            data = bytes(value)
        else:
            floats.append(bytes(value))  # one float, or several that are packed
    float_bytes = b"".join(floats)
    if len(float_bytes) % 4:
        raise BadSampleError(f"its floats take {len(float_bytes)} bytes; expected a multiple of 4")
    shape = (numbers[1], numbers[2], numbers[3])
    datum = Datum(shape, data, np.frombuffer(float_bytes, "<f4"), numbers[5], bool(numbers[7]))
    _check(datum)
    return datum


def is_datum(value: bytes | memoryview) -> bool:
    """Return whether `value` parses as a Datum, and its encoded image, if any, looks like an image."""
    try:
        datum = parse_datum(value)
    except BadSampleError:
        return False
    return not datum.is_encoded or looks_like_image(datum.data)


def datum_image(datum: Datum) -> bytes:
    """Return the encoded image unchanged, or the pixels as a lossless PNG in RGB or grey.

    Raises:
        BadSampleError: the message is not an image of 1 or 3 channels.
    """
    if datum.is_encoded:
        return datum.data
    if not datum.is_image:
        raise BadSampleError(
            f"not an image: shape {list(datum.shape)}, {len(datum.floats)} floats; expected 1 or 3 channels of bytes"
        )
    planes = np.frombuffer(datum.data, np.uint8).reshape(datum.shape)
    # Pillow expects the values pixel by pixel, in the order red, green, blue.
    pixels = planes[0] if len(planes) == 1 else planes[::-1].transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


def datum_values(datum: Datum) -> npt.NDArray[Any]:
    """Return the values of a Datum that is not encoded: `uint8` or `float32[channels * height * width]`.

    Raises:
        BadSampleError: the message is an encoded image.
    """
    if datum.is_encoded:
        raise BadSampleError("it is an encoded image; expected a tensor, as in the first samples")
    return datum.floats if len(datum.floats) else np.frombuffer(datum.data, np.uint8)


def _check(datum: Datum) -> None:
    """Raise BadSampleError if the fields of a message contradict each other."""
    if datum.is_encoded:
        if not datum.data:
            raise BadSampleError("it is marked as an encoded image, but it is empty")
        return
    if datum.data and len(datum.floats):
        raise BadSampleError("it has both bytes and floats; expected one of them")
    channels, height, width = datum.shape
    num_values = len(datum.floats) or len(datum.data)
    if min(datum.shape) < 1 or channels * height * width != num_values:
        raise BadSampleError(f"its shape is {list(datum.shape)}, but it holds {count_text(num_values, 'value')}")
