"""The segments of a JPEG before its compressed pixels (ISO/IEC 10918-1, annex B)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final

START_OF_SCAN: Final = 0xDA
PROGRESSIVE: Final = 0xC2
PLAIN_FRAMES: Final = frozenset({0xC0, 0xC1, PROGRESSIVE})  # baseline, extended sequential, progressive
SEGMENT: Final = struct.Struct(">BBH")  # 0xFF, marker, length of the segment from this length field on
FRAME: Final = struct.Struct(">BHHB")  # bits per component, height, width, number of components
_FILL: Final = 0xFF  # a byte that may precede any marker
_MARKER: Final = re.compile(rb"\xff[^\xff]")


def jpeg_segments(raw: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and stop of the content of each segment, to the start of the first scan or to damage.

    A segment may end beyond the file.
    """
    offset = 2  # after the marker at the start of the file
    while offset + SEGMENT.size <= len(raw):
        first, marker, length = SEGMENT.unpack_from(raw, offset)
        if first != 0xFF:
            return
        if marker == _FILL:
            after = _MARKER.search(raw, offset)  # not byte by byte: there may be megabytes
            if after is None:
                return
            offset = after.start()
            continue
        stop = offset + 2 + length
        yield marker, offset + SEGMENT.size, stop
        if marker == START_OF_SCAN or length < 2:
            return
        offset = stop
