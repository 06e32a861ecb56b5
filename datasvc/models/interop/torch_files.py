"""Reads and writes `torch.save` files, for import and export.

A read executes no code of the file, and accepts only tensors and plain values.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

from datasvc import durable
from datasvc.models.interop.state import ForeignState
from datasvc.models.interop.torch_reader import Extent, TorchReader, check_shared_bytes

CHECKPOINT_FILE: Final = "checkpoint.pt"
ZIP: Final = b"PK\x03\x04"  # first bytes of a zip archive, which torch.save writes since torch 1.6
LEGACY: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # first bytes of a file from before torch 1.6


def read_torch_file(path: Path, memory_bytes: int) -> ForeignState:
    """Return the state in a `torch.save` file.

    Tensors are read block by block, so the file may be larger than memory. But all tensors of a file from before
    torch 1.6 must fit into memory together. For `memory_bytes` see `TorchReader`.

    Raises:
        ConfigError, CorruptDataError, OSError: see `TorchReader.read_state` and `check_shared_bytes`.
    """
    return read_torch_files([path], memory_bytes)[0]


def read_torch_files(paths: Sequence[Path], memory_bytes: int) -> list[ForeignState]:
    """Return the states in several `torch.save` files, all read by one child process; see `read_torch_file`."""
    reader = TorchReader(memory_bytes)
    states = []
    for path in paths:
        extent = Extent(path, 0, path.stat().st_size, str(path))  # the whole file
        state = reader.read_state(extent, in_part=True)
        check_shared_bytes(state.tensors, extent.length, extent.location)
        # The state is bare if it is one tensor or a flat dict of tensors. Then the names alone describe it.
        skeleton = None if state.is_bare else state.skeleton
        states.append(ForeignState("torch", state.tensors, skeleton, refused=state.refused))
    return states


def write_torch_file(path: Path, state: Any) -> None:
    """Write a state tree with torch.save, atomically. Raise OSError if it cannot be written."""
    with durable.replacing(path) as file:
        save_to(file, state)


def save_to(file: BinaryIO, state: Any) -> None:
    """Write a state tree with torch.save to an open file. Raise OSError if it cannot be written."""
    import torch

    sink = _TorchFile(file)
    try:
        torch.save(state, cast("IO[bytes]", sink))
    except RuntimeError:
        # After a failed write, torch reports an incomplete archive, not the reason. Raise the error of the write.
        if sink.failure is not None:
            raise sink.failure from None
        raise


class _TorchFile(io.RawIOBase):
    """File object for torch.save that records the first error of a write in `failure`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return self._file.write(content)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def writable(self) -> bool:
        return True
