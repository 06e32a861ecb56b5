"""Anonymous shared memory (`memfd`) that one process writes and others read.

It has no name in a file system. The kernel frees it when no process has it open or mapped.
"""

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
    """A shared buffer for one batch, as seen by the writer.

    File seals fix its size and forbid new writable mappings, so no reader can change what another reader maps.

    Args:
        size_bytes: size of the buffer.

    Attributes:
        number: unique number of the buffer in this process.
        descriptor: file descriptor to send to readers.

    Raises:
        OSError: the system has no memory or file descriptor left.
    """

    def __init__(self, size_bytes: int) -> None:
        self.number = next(_numbers)
        self.descriptor = os.memfd_create("datasvc-decode", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self._mapped = mmap.mmap(self.descriptor, size_bytes)
            # Sealed after mapping: the seal forbids new writable mappings and leaves this one.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.descriptor)
            raise
        self.size_bytes = size_bytes

    def write(self, parts: Sequence[Part]) -> list[Span]:
        """Write byte arrays one after the other, aligned; return the offset and length of each."""
        spans = lay_out(parts)
        content = np.frombuffer(self._mapped, np.uint8)
        for part, (offset, length) in zip(parts, spans, strict=True):
            np.copyto(content[offset : offset + length], part)
        return spans

    def close(self) -> None:
        """Unmap and close the buffer; mappings of readers stay valid."""
        self._mapped.close()
        os.close(self.descriptor)


def lay_out(parts: Sequence[Part]) -> list[Span]:
    """Return the offset and length of byte arrays stored one after the other, each aligned for any dtype."""
    spans, offset = [], 0
    for part in parts:
        spans.append((offset, part.size))
        offset = -(-(offset + part.size) // _ALIGNMENT) * _ALIGNMENT
    return spans


def write_batch(batch: object, spare: SharedBuffer | None) -> tuple[SharedBuffer, list[Span]]:
    """Write a batch into `spare` if it fits, otherwise into a new buffer.

    Returns:
        The buffer, and the offset and length in bytes of each part of the batch.
    """
    parts = pack(batch)
    offset, length = lay_out(parts)[-1]
    memory = spare if spare is not None and spare.size_bytes >= offset + length else SharedBuffer(offset + length)
    return memory, memory.write(parts)
