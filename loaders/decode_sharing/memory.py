"""Memory that one process writes and others read. It has no name, and goes when nobody has it open or mapped."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from datasvc.loaders.decode_sharing.packing import Part, pack

_ALIGNMENT: Final = 64
_F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python has no name for it
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_numbers = itertools.count(1)

Span = tuple[int, int]
"""Offset and length in bytes."""


class SharedBuffer:
    """Room for a batch, seen from the writer.

    Of a fixed size, and never writable for who gets the descriptor: no reader can be hit by another.

    Args:
        size_bytes: of the room.

    Attributes:
        number: unlike that of all other memory of this process.
        descriptor: to send to readers.

    Raises:
        OSError: there is no more memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.number = next(_numbers)
        self.descriptor = os.memfd_create("datasvc-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self._mapped = mmap.mmap(self.descriptor, size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.descriptor)
            raise
        self.size_bytes = size_bytes

    def write(self, parts: Sequence[Part]) -> list[Span]:
        """Write runs of bytes one after the other; returns where they lie."""
        spans = lay_out(parts)
        room = np.frombuffer(self._mapped, np.uint8)
        for part, (offset, length) in zip(parts, spans, strict=True):
            np.copyto(room[offset : offset + length], part)
        return spans

    def close(self) -> None:
        """Let go of it; readers keep what they have mapped."""
        self._mapped.close()
        os.close(self.descriptor)


def lay_out(parts: Sequence[Part]) -> list[Span]:
    """Return where runs of bytes lie one after the other, each aligned for any type."""
    spans, offset = [], 0
    for part in parts:
        spans.append((offset, part.size))
        offset = -(-(offset + part.size) // _ALIGNMENT) * _ALIGNMENT
    return spans


def write_batch(batch: object, spare: SharedBuffer | None) -> tuple[SharedBuffer, list[Span]]:
    """Write a batch into spare memory where it fits, else into new; returns which, and where its parts lie."""
    parts = pack(batch)
    offset, length = lay_out(parts)[-1]
    memory = spare if spare is not None and spare.size_bytes >= offset + length else SharedBuffer(offset + length)
    return memory, memory.write(parts)
