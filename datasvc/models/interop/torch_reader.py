"""Reads and writes files of `torch.save`; reads metadata of DCP. A child process with limits returns plain values.

The imports of `torch.save` files and of DCP folders use it. Both contain pickles. `torch.load(weights_only=True)`
executes no code of a file, but a hostile file may still take any amount of memory or time, or crash its reader. The
reader is therefore a child process, `torch_child`.
"""

from __future__ import annotations

import io
import json
import signal
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, Literal, cast

from datasvc import durable
from datasvc.child_process import ChildProcess
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.state import ForeignState, ForeignTensor, check_kept, check_tensor_name, read_block
from datasvc.models.tensors.chunks import Box, Shape, plan_chunks
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES
from datasvc.models.tensors.tensor_table import ITEM_BYTES

if TYPE_CHECKING:
    import torch


READER_MEMORY_BYTES: Final = 1 << 30
"""Default memory limit of the child, in addition to the tensors: enough for some millions of other values."""
MAX_NODES: Final = 1 << 20
"""Maximum number of values in a state. A small file can refer to one list many times, which makes a huge state."""
_CHILD: Final = "datasvc.models.interop.torch_child"
_ERRORS: Final[dict[str, type[Exception]]] = {
    "ConfigError": ConfigError, "CorruptDataError": CorruptDataError, "OSError": OSError
}  # fmt: skip
# Several tensors of a file may share one storage, but an import stores the values of each. All tensors together may
# have at most this multiple of the bytes of the file.
_MAX_SHARED_FACTOR: Final = 16
MAX_REPEATED_BYTES: Final = 1 << 20
"""A tensor of up to this size may be larger than its storage, as an expanded tensor is."""
CHECKPOINT_FILE: Final = "checkpoint.pt"
ZIP: Final = b"PK\x03\x04"  # first bytes of a zip archive, which torch.save writes since torch 1.6
LEGACY: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # first bytes of a file from before torch 1.6


@dataclass(frozen=True)
class Extent:
    """Byte range of a file: `length` bytes from `offset`; `location` names it in messages."""

    path: Path
    offset: int
    length: int
    location: str


@dataclass(frozen=True)
class ReadRequest:
    """A request to the child.

    Attributes:
        kind: "state" describes the output of torch.save in the extent, "block" sends a block of one of its tensors,
            "metadata" describes the metadata of a DCP folder.
        extent: bytes to read.
        name: name of the tensor for "block".
        box: the block of this tensor.
    """

    kind: Literal["state", "block", "metadata"]
    extent: Extent
    name: str = ""
    box: Box | None = None


@dataclass(frozen=True)
class DescribedState:
    """A state in a file of torch.save: its skeleton, see `state_tree.flatten`, and its tensors."""

    skeleton: Any
    tensors: Sequence[ForeignTensor]
    is_bare: bool  # whether the state is a single tensor or a flat dict of tensors
    refused: Mapping[str, str] = field(default_factory=dict)  # what cannot be stored, by path, and what it is


class TorchReader:
    """A child process that reads files. It ends when this object is deleted, or when the parent process ends.

    Args:
        memory_bytes: memory that the child may use in addition to the tensors of the file.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._child = ChildProcess(_CHILD, (memory_bytes, MAX_NODES), answers=True)
        weakref.finalize(self, self._child.close)

    def read_state(self, extent: Extent, *, in_part: bool = False) -> DescribedState:
        """Return the state in an extent. Its tensors are read later, so the file must not change until then.

        Raises:
            ConfigError: without `in_part`, the state has values that cannot be stored, such as those that only code
                could create; a module is blocked, such as `os`; or the child needs more memory than its limit.
            CorruptDataError: the extent is damaged, or smaller than its tensors.
            OSError: the file cannot be read.
        """
        reply = self._request(ReadRequest("state", extent))
        if not in_part:
            check_kept(reply["refused"], extent.location)
        tensors = [self._tensor(extent, name, dtype, tuple(shape)) for name, dtype, shape in reply["tensors"]]
        return DescribedState(reply["skeleton"], tensors, reply["is_bare"], reply["refused"])

    def read_dcp_metadata(self, path: Path) -> dict[str, Any]:
        """Return the metadata of a DCP folder as the lists of `pickled_values.describe_metadata`.

        Raises:
            ConfigError: the pickle refers to a class or function that is not part of DCP metadata; it was not called.
                Also raised if the child needs more memory than its limit.
            CorruptDataError: the file is damaged or not DCP metadata.
            OSError: the file cannot be read.
        """
        reply: dict[str, Any] = self._request(
            ReadRequest("metadata", Extent(path, 0, path.stat().st_size, str(path)))
        )
        return reply

    def _tensor(self, extent: Extent, name: str, dtype: str, shape: Shape) -> ForeignTensor:
        """Return a tensor of an extent, whose blocks are requested from the child when they are read."""

        def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
            assert self._child.process.stdout is not None
            for box in plan_chunks(shape, ITEM_BYTES[dtype]):
                self._request(ReadRequest("block", extent, name, box))
                yield box[0], read_block(self._child.process.stdout, dtype, box[1], extent.location)

        return ForeignTensor(check_tensor_name(name, extent.location), dtype, shape, blocks)

    def _request(self, request: ReadRequest) -> Any:
        """Send a request, and return the value of the reply. Raises the error that the child reports."""
        assert self._child.process.stdout is not None
        self._child.send(request)
        # Limit the length: a hostile file may control the child, which may then send anything.
        line = self._child.process.stdout.readline(MAX_STATE_BYTES + 100)
        if not line.endswith(b"\n"):
            raise self._describe_end(request.extent.location)
        reply = json.loads(line)
        if "error" in reply:
            kind, message = reply["error"]
            raise _ERRORS[kind](message)
        return reply["value"]

    def _describe_end(self, location: str) -> CorruptDataError:
        """Return the error for a child that ended without a valid reply."""
        # After a line that was too long, the child is still running.
        self._child.process.kill()
        status = self._child.process.wait()
        if status == -signal.SIGXCPU:
            return CorruptDataError(f"{location} takes too long to read for its size: it is damaged or hostile")
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return CorruptDataError(f"{location} is damaged or was changed: the process that read it ended with {how}")


def check_shared_bytes(tensors: Sequence[ForeignTensor], file_bytes: int, location: str) -> None:
    """Raise ConfigError if tensors that share storages in a file would take far more bytes than the file."""
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    if total_bytes > _MAX_SHARED_FACTOR * max(file_bytes, MAX_REPEATED_BYTES):
        raise ConfigError(
            f"{location}: its tensors share so much memory that {file_bytes} bytes would become {total_bytes}; save "
            "each tensor only once"
        )


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
