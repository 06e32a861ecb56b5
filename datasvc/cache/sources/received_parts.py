"""Which parts of an object have arrived: a small file beside the incoming one, so that a fetch that died continues.

It is only a hint. A part is noted after its bytes were written, but a power cut may keep the note and lose the bytes:
what is continued is trusted only once the digest of the whole is right. Anything odd in the file means start over.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, Self

PART_BYTES: Final = 4 << 20
# A number and its complement: neither zeros nor half a record read as one.
_RECORD = struct.Struct("<II")
_COMPLEMENT = 0xFFFFFFFF


class ReceivedParts:
    """The parts of one object that are in its incoming file. Only the holder of that file's lock opens it.

    Args:
        path: the file, made where missing.
        size_bytes: of the object.

    Raises:
        OSError: the file cannot be made or read.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._header = f"datasvc parts 1 {PART_BYTES} {size_bytes}\n".encode()
        self.size_bytes = size_bytes
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            arrived = self._parse(_read_all(self._descriptor))
            self._arrived = arrived or set()
            if arrived is None:
                self.clear()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it stays for whoever continues."""
        os.close(self._descriptor)

    @property
    def num_parts(self) -> int:
        """How many parts the object has."""
        return -(-self.size_bytes // PART_BYTES)

    @property
    def arrived(self) -> frozenset[int]:
        """Numbers of the parts that are there."""
        return frozenset(self._arrived)

    def add(self, number: int) -> None:
        """Note that all bytes of a part were written. Raises OSError."""
        assert 0 <= number < self.num_parts, number
        os.write(self._descriptor, _RECORD.pack(number, number ^ _COMPLEMENT))
        self._arrived.add(number)

    def clear(self) -> None:
        """Forget everything: the bytes are not what they should be. Raises OSError."""
        self._arrived = set()
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, self._header)

    def _parse(self, content: bytes) -> set[int] | None:
        """Return the numbers that the file holds; None where it is not what this class wrote for this object."""
        body = content.removeprefix(self._header)
        if len(body) == len(content) or len(body) % _RECORD.size:
            return None
        records = list(_RECORD.iter_unpack(body))
        if any(number ^ _COMPLEMENT != check or number >= self.num_parts for number, check in records):
            return None
        return {number for number, _ in records}


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()
