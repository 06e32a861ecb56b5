"""Reads only the high bytes of floating-point numbers: partial retrieval, as in ModelHub (Miao et al., ICDE 2017).

Byte planes are stored one after the other, the highest last, so a ranged read gets the sign, the exponent and the
first bits of the mantissa of all numbers of a chunk. What was read cannot be verified, because digests are those of
all bytes. Where the bound of the error would not hold, the caller reads the whole chunk.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from datasvc.errors import CorruptDataError
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.codec import Bytes, ChainDecoder, Decoders, join, word_bytes
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord

PLANES: Final = (2, 3)
"""Numbers of high bytes that can be read of a 4-byte number; of an 8-byte number, one more is read."""

_DTYPES: Final = ("float32", "float64", "complex64", "complex128")
_EXPONENT_BITS: Final = {4: 8, 8: 11}  # by bytes of a number
_UNSIGNED: Final = {4: np.uint32, 8: np.uint64}
_MIN_LINK_BYTES: Final = 64 << 10  # smaller links are packed, and one request reads many of them


class PartialReader:
    """Reads the high bytes of chunks. Safe for threads.

    Args:
        source: source of the bytes.
        planes: number of high bytes of a 4-byte number to read, one of `PLANES`.

    Attributes:
        skipped_bytes: stored bytes of the chunks that were not read, less those that were read twice.
    """

    def __init__(self, source: ChunkSource, planes: int) -> None:
        assert planes in PLANES
        self.skipped_bytes = 0
        self._source, self._planes = source, planes
        self._decoders = Decoders()
        self._lock = threading.Lock()

    def read(self, record: TensorRecord, chunk: Chunk, out: Bytes) -> bool:
        """Fill `out` with the numbers of a chunk, in reduced precision; return False if the chunk must be read whole.

        With planes = 2, the relative error of a float32 is below 2^-7, with 3 below 2^-15; of a float64 it is below
        2^-12 and 2^-20. Of a subnormal number, the absolute error is bounded, by 2^-132 for a float32; it may become
        0. A NaN may become infinite.

        Raises:
            NotFoundError, UnavailableError: see `ChunkSource.read_range`.
        """
        if record.dtype not in _DTYPES or not _is_eligible(chunk.chain):
            return False
        reading = _ChunkReading(self._source, word_bytes(record.dtype), self._planes, out)
        try:
            with self._decoders.borrow() as decoder:
                is_filled = reading.fill(chunk, decoder)
        except CorruptDataError:
            is_filled = False  # the whole chunk is read from the other copies, and verified
        with self._lock:
            self.skipped_bytes += (chunk.stored_bytes if is_filled else 0) - reading.num_bytes
        return is_filled


class _ChunkReading:
    """The read of one chunk; `num_bytes` counts the stored bytes that were read."""

    def __init__(self, source: ChunkSource, word: int, planes: int, out: Bytes) -> None:
        self.num_bytes = 0
        self._source, self._word, self._out = source, word, out
        # An exponent of 8 bytes is longer: with one more byte, the precision is at least that of 4 bytes.
        self._num_left_out = word - planes - (word == 8)
        self._words: np.ndarray[Any, Any] = out.view(_UNSIGNED[word])

    def fill(self, chunk: Chunk, decoder: ChainDecoder) -> bool:
        low, unit = self._num_left_out, self._words.dtype.type(1 << (8 * self._num_left_out))
        is_zero: np.ndarray[Any, Any] | None = None  # None before the first difference
        for link in chunk.chain:
            is_difference = link.encoding == "difference"
            if is_zero is not None and not is_difference:
                return False  # XOR with a number that is not exact can change any bit
            # Of the first difference, the lowest plane has the signs; the planes between it and the high ones are
            # left out. Further differences are read whole, so that the error is below unit / 2 + unit / 4.
            left_out = range(low) if not is_difference else range(1, low) if is_zero is None else range(0)
            planes = self._read_planes(link, left_out, decoder)
            if planes is None:
                return False
            if is_difference:
                if is_zero is None:
                    is_zero = (self._words & self._size_bits) == 0
                    # The unknown low bits of the earlier content are set to the middle of their range.
                    self._words += unit >> 1
                for number, plane in enumerate(planes):
                    if number not in left_out:
                        is_zero &= plane == 0
            join(planes, link.encoding, self._out)
        if is_zero is None:
            self._set_middle(unit)
            return True
        # Numbers whose known bits were 0 and did not change, such as the moments of unused weights, are 0.
        self._words[is_zero] = 0
        return self._is_certain(is_zero, unit)

    def _set_middle(self, unit: Any) -> None:
        """Set the unknown low bits, which are 0, to the middle of their range, except in 0, infinities and NaN."""
        exponents = self._words & self._infinity
        is_normal = (exponents != 0) & (exponents != self._infinity)
        self._words |= is_normal * (unit >> 1)

    def _is_certain(self, is_zero: np.ndarray[Any, Any], unit: Any) -> bool:
        """Return whether no other number, whose bits are wrong by less than `unit`, is near 0 or infinity, or a NaN.

        There, a small difference of the bits would change the sign, or make a number infinite.
        """
        sizes = self._words & self._size_bits
        return bool(np.all(is_zero | ((sizes >= unit) & (sizes <= self._infinity - unit))))

    @property
    def _size_bits(self) -> Any:
        """All bits but that of the sign."""
        return self._words.dtype.type((1 << (8 * self._word - 1)) - 1)

    @property
    def _infinity(self) -> Any:
        """Bits of infinity: those of the exponent."""
        bits = _EXPONENT_BITS[self._word]
        return self._words.dtype.type(((1 << bits) - 1) << (8 * self._word - 1 - bits))

    def _read_planes(self, link: ChainLink, left_out: Collection[int], decoder: ChainDecoder) -> list[Bytes] | None:
        """Return all planes of a link, constant ones for those left out; None if the header is another one."""
        header_bytes, size = 1 + 4 * self._word, self._words.size
        header = bytes(self._read(link, 0, header_bytes))
        lengths = struct.unpack_from(f"<{self._word}I", header, 1)
        if header[0] != self._word or header_bytes + sum(lengths) != link.length:
            return None
        offsets = [header_bytes + sum(lengths[:number]) for number in range(self._word)]
        # In a difference, the highest of the unknown bytes is set to the middle of its range.
        is_difference = link.encoding == "difference"
        planes: list[Bytes] = []
        stored: dict[int, memoryview] = {}
        for start, stop in _runs(self._word, left_out):
            content = memoryview(
                self._read(link, offsets[start], offsets[stop - 1] + lengths[stop - 1] - offsets[start])
            )
            for number in range(start, stop):
                stored[number] = content[offsets[number] - offsets[start] :][: lengths[number]]
        for number in range(self._word):
            if number in stored:
                planes.append(decoder.decode_plane(number, stored[number], size))
            else:
                middle = 0x80 if is_difference and number == max(left_out) else 0
                planes.append(np.full(size, middle, np.uint8))
        return planes

    def _read(self, link: ChainLink, offset: int, length: int) -> bytes | memoryview:
        self.num_bytes += length
        return self._source.read_range(link.object, link.offset + offset, length)


def _is_eligible(chain: Collection[ChainLink]) -> bool:
    """Return whether all links are large and have planes. Raw bytes cannot be read in part."""
    return all(link.encoding != "raw" and link.is_whole_object and link.length >= _MIN_LINK_BYTES for link in chain)


def _runs(stop: int, left_out: Collection[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of the numbers below `stop` that are not in `left_out`."""
    runs: list[tuple[int, int]] = []
    for number in range(stop):
        if number in left_out:
            continue
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
