"""Finds damage in the compressed pixels of a JPEG, which most decoders repair without an error.

The decode check of images uses this module. libjpeg continues after damage, and only counts warnings. Pillow and GPU
decoders ignore the warnings, but simplejpeg raises them as errors. A lost disk sector may leave a run of zeros that
decodes without a warning, because each code of the run is valid. `_find_zeros` finds such a run if the Huffman tables
of the file show that no encoder writes it.
"""

from __future__ import annotations

import re
from typing import Final

from datasvc.errors import BadSampleError
from datasvc.extras import explain_missing
from datasvc.shards.images.jpeg_segments import PLAIN_FRAMES, PROGRESSIVE, START_OF_SCAN, jpeg_segments

# Beginnings of the warnings that mean damage. Other warnings, such as that of an unknown Adobe segment, do not
# concern the pixels.
_DAMAGE: Final = ("Corrupt JPEG data", "Premature end of JPEG file")
_MIN_ZEROS: Final = 64  # bytes
# A decoder passes over all pixels in each scan. A progressive file has about ten, so 89 million pixels may have 24.
_MAX_SCANNED_PIXELS: Final = 1 << 31
_MARKER: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # none that is part of compressed pixels, and no fill byte
_HUFFMAN_TABLES: Final = 0xC4
_END_OF_IMAGE: Final = b"\xff\xd9"
_END_OF_BLOCK: Final = 0  # a symbol of the AC tables, which encode all frequencies of a block but the first


def decode_jpeg(content: bytes | memoryview) -> bool:
    """Decode a JPEG, and check that no decoder has to repair it.

    Args:
        content: the file; with several pictures, as in MPO files, only the first is decoded.

    Returns:
        False if TurboJPEG does not support the file, for instance CMYK with subsampled colours, so that another
        decoder has to decode it.

    Raises:
        BadSampleError: the compressed pixels are damaged; the message has the report of the decoder.
        MissingPackageError: simplejpeg is not installed.
        IndexError: a segment is too short. The caller runs in `open_image`, which maps it to BadSampleError.
    """
    with explain_missing("a decode check of JPEG files"):
        import simplejpeg  # here, so that everything else works where it is not installed
    offset = _find_zeros(bytes(content))
    if offset is not None:
        raise BadSampleError(f"does not decode: Corrupt JPEG data: {_MIN_ZEROS} zero bytes at byte {offset}")
    try:
        # Decode to grey: libjpeg decompresses all colours anyway, and this skips their conversion.
        simplejpeg.decode_jpeg(content, "gray", strict=True)
    except ValueError as error:
        if str(error).startswith(_DAMAGE):
            raise BadSampleError(f"does not decode: {error}") from error
        return False
    return True


def check_scans(content: bytes | memoryview, offset: int, num_pixels: int) -> None:
    """Raise BadSampleError if a JPEG has so many scans that a decoder would take minutes.

    A scan of a few bytes may cover all pixels, so a file of 33 kB can hold thousands. `offset` is that of the first.
    """
    raw, num_scans = memoryview(content), 0
    while offset + 4 <= len(raw) and raw[offset] == 0xFF and raw[offset + 1] != _END_OF_IMAGE[1]:
        num_scans += raw[offset + 1] == START_OF_SCAN
        if num_scans * num_pixels > _MAX_SCANNED_PIXELS:
            raise BadSampleError(
                f"its {num_pixels:,} pixels have {num_scans} scans or more, so that decoders would take very long; "
                f"expected at most {_MAX_SCANNED_PIXELS // num_pixels}: encode it again"
            )
        offset += 2 + int.from_bytes(raw[offset + 2 : offset + 4], "big")
        marker = _MARKER.search(raw, offset)  # after compressed pixels or fill bytes
        if marker is None:
            return
        offset = marker.start()


def _find_zeros(raw: bytes) -> int | None:
    """Return the offset of a run of zero bytes in compressed pixels that no encoder writes; None without one.

    In a Huffman table, the code that is all zero bits belongs to the first symbol. If this symbol is the end of a
    block, the run means empty blocks, which encoders write for plain areas. Otherwise, the run sets the frequencies
    of at least one whole block to the same value, which no block of pixels has. Only files with one sequential scan
    are searched: others may have long runs of zeros.
    """
    first_symbols: dict[int, int] = {}  # by AC table
    num_components = None
    for marker, start, stop in jpeg_segments(raw):
        segment = raw[start:stop]
        if marker in PLAIN_FRAMES - {PROGRESSIVE}:
            num_components = segment[5]  # of the picture, such as 3 for colour
        elif marker == _HUFFMAN_TABLES:
            first_symbols |= _first_symbols(segment)
        elif marker == START_OF_SCAN:
            if segment[0] != num_components:
                return None  # more scans follow, or the frame is not sequential
            # Two bytes per component: its id, and the numbers of its DC table (4 bits) and AC table (4 bits).
            ac_tables = {segment[position] & 15 for position in range(2, 2 * num_components + 1, 2)}
            # One table that rules the run out is enough, because the run spans blocks of all components.
            if all(first_symbols.get(table) == _END_OF_BLOCK for table in ac_tables):
                return None
            found = raw.find(bytes(_MIN_ZEROS), stop, raw.find(_END_OF_IMAGE, stop))
            return found if found >= 0 else None
    return None


def _first_symbols(segment: bytes) -> dict[int, int]:
    """Return the first symbol of each AC table of a segment, by the number of the table."""
    symbols: dict[int, int] = {}
    # Each table: a byte with its class and number, 16 bytes with the number of codes per length, and the symbols.
    while len(segment) > 17:
        num_symbols = sum(segment[1:17])
        if segment[0] >> 4:  # the class of AC tables is 1
            symbols[segment[0] & 15] = segment[17]
        segment = segment[17 + num_symbols :]
    return symbols
