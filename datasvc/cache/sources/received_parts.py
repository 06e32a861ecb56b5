"""The list of received parts of an object: a small file next to the incoming one, to resume an interrupted fetch.

A part is `PART_BYTES` of the object; the last part may be shorter. The list is only a hint. A part is added after its
bytes were written, but a power cut may keep the part in the list and lose its bytes. So a resumed file is accepted
only if the digest of the complete object is right. An invalid list restarts the fetch.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, Self

PART_BYTES: Final = 4 << 20
# A part number and its complement, so that zeros or half a record are recognised as invalid.
_RECORD = struct.Struct("<II")
_COMPLEMENT = 0xFFFFFFFF


class ReceivedParts:
    """The received parts of one object. The caller has locked the incoming file while this list is open.

    Args:
        path: file of the list, created if missing.
        size_bytes: size of the object.

    Raises:
        OSError: the file cannot be created or read.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._header = f"datasvc parts 1 {PART_BYTES} {size_bytes}\n".encode()
        self.size_bytes = size_bytes
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            arrived = self._parse(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
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
        """Close the file; it is kept to resume the fetch."""
        os.close(self._descriptor)

    @property
    def num_parts(self) -> int:
        """Number of parts of the complete object."""
        return -(-self.size_bytes // PART_BYTES)

    @property
    def arrived(self) -> frozenset[int]:
        """Numbers of the received parts."""
        return frozenset(self._arrived)

    def add(self, number: int) -> None:
        """Add a part whose bytes are all written. Raises OSError."""
        assert 0 <= number < self.num_parts, number
        os.write(self._descriptor, _RECORD.pack(number, number ^ _COMPLEMENT))
        self._arrived.add(number)

    def clear(self) -> None:
        """Empty the list, because the received bytes are wrong. Raises OSError."""
        self._arrived = set()
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, self._header)

    def _parse(self, content: bytes) -> set[int] | None:
        """Return the part numbers in the file; None if it is not a valid list for an object of this size."""
        body = content.removeprefix(self._header)
        has_header = len(body) < len(content)
        if not has_header or len(body) % _RECORD.size:
            return None
        records = list(_RECORD.iter_unpack(body))
        if any(number ^ _COMPLEMENT != check or number >= self.num_parts for number, check in records):
            return None
        return {number for number, _ in records}
