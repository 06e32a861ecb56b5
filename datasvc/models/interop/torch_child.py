"""Child process of `torch_reader`: reads pickles of other programs with limited memory and processor time.

`TorchReader` starts this program. It executes no code from a file: torch reads with `weights_only=True`, and
`pickled_values` makes or replaces what else a file names, without its code. A hostile file can still crash or block
its reader, so the reader is a separate process.
"""

from __future__ import annotations

import bisect
import errno
import io
import json
import os
import pickle  # messages from the parent
import re
import resource
import signal
import sys
import time
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.pickled_values import describe_metadata, foreign_globals, placeholder, stored_form
from datasvc.models.interop.torch_reader import LEGACY, MAX_REPEATED_BYTES, ZIP, Extent, ReadRequest
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.tensors.chunks import slices
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, flatten
from datasvc.sizes import format_size

# Limit of the JSON that describes DCP metadata: enough for about 200,000 tensors. To parse it, the parent needs up to
# 25 times its size in memory.
_MAX_METADATA_BYTES: Final = 32 << 20
# A read has `_MIN_CPU_S` seconds of processor time, and one more for each `_MIN_BYTES_PER_CPU_S` bytes of its extent
# (a file or a part of it). Without a limit, a hostile value, such as a nested tuple as a dict key, takes any time.
_MIN_CPU_S: Final = 120
_MIN_BYTES_PER_CPU_S: Final = 16 << 20
_MAX_MESSAGE_CHARS: Final = 2000

# torch has no exception type for its refusal to create a class, so match the text of the message. One of the groups
# then has the name of the class.
_REFUSED = re.compile(
    r"GLOBAL (\S+)|Trying to (?:call reduce|instantiate) \S* ?\S* ?(\S+)|module (\S+) is blocked|``(\S+)`` must be"
)
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not")
_MAX_CLASSES: Final = 1000  # a file with more is hostile: each one needs another read
_NO_MEMORY = re.compile("allocate memory|bad_alloc|bad allocation")
_SCRIPT_MESSAGE: Final = "{} is a TorchScript program; save its tensors: torch.save(model.state_dict())"


class _PickleServer:
    """Answers the requests of the parent. Keeps the tensors of the last described state, to send blocks of them.

    Args:
        memory_bytes: memory that a read may use in addition to the tensors.
        max_nodes: maximum number of values in a state, see `flatten`.
    """

    def __init__(self, memory_bytes: int, max_nodes: int) -> None:
        self._memory_bytes = memory_bytes
        self._max_nodes = max_nodes
        # The kernel limits all mapped memory. torch for GPUs maps many GB at its import: add them to each limit.
        self._baseline_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self._extent: Extent | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def answer(self, request: ReadRequest) -> tuple[bytes, Any]:
        """Return the reply to a request: a line of JSON, and the bytes to send after this line."""
        extent = request.extent
        try:
            if request.kind == "block":
                return _encode(None, 0, extent), self._block(request)
            self._extent, self._tensors = None, {}  # free the previous state before the next one is read
            if request.kind == "metadata":
                self._set_limits(0, extent)
                return _encode(describe_metadata(extent), _MAX_METADATA_BYTES, extent), b""
            return _encode(self._describe_state(extent), MAX_STATE_BYTES, extent), b""
        except Exception as error:  # noqa: BLE001 - hostile bytes may raise any exception
            return json.dumps({"error": _explain(error, extent.location, self._memory_bytes)}).encode() + b"\n", b""

    def _set_limits(self, tensor_bytes: int, extent: Extent) -> None:
        """Limit the memory and the processor time of this process for the read of one extent."""
        memory_bytes = self._baseline_bytes + self._memory_bytes + tensor_bytes
        # The kernel counts from the start of the process, so add the processor time that is used already.
        cpu_s = int(time.process_time()) + _MIN_CPU_S + extent.length // _MIN_BYTES_PER_CPU_S
        for resource_id, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_s)):
            _, hard = resource.getrlimit(resource_id)
            resource.setrlimit(resource_id, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))

    def _describe_state(self, extent: Extent) -> dict[str, Any]:
        """Read a state and keep its tensors; return the fields of `DescribedState` as JSON values."""
        is_whole = extent.path.stat().st_size == extent.length
        # torch can map only a whole file. A part takes its size in memory twice: as bytes and as tensors.
        self._set_limits(extent.length if is_whole else 2 * extent.length, extent)
        value, stored = _load(extent, is_whole=is_whole)
        refused: dict[str, str] = {}
        skeleton, self._tensors = flatten(
            value, max_nodes=self._max_nodes, replace=lambda part, path: stored_form(part, path, refused)
        )
        _check_tensors(self._tensors, stored, extent, refused)
        self._extent = extent
        specs = {name: spec_of(tensor) for name, tensor in self._tensors.items()}
        values = value.values() if isinstance(value, Mapping) else [value]
        return {
            "skeleton": skeleton,
            "tensors": [[name, spec.dtype, spec.shape] for name, spec in specs.items()],
            "refused": refused,
            "is_bare": not refused and all(isinstance(item, torch.Tensor) for item in values),
        }

    def _block(self, request: ReadRequest) -> Any:
        """Return the bytes of one block of a tensor."""
        # Another state may have been described since that of this request; then read this one again.
        if self._extent != request.extent:
            self._describe_state(request.extent)
        assert request.box is not None
        block = self._tensors[request.name].detach()[slices(request.box)].resolve_conj().resolve_neg()
        return block.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _load(extent: Extent, *, is_whole: bool) -> tuple[Any, dict[int, int]]:
    """Return the value that torch.save wrote to an extent, and the size in bytes of each storage, by its address.

    A whole file is mapped into memory, unless it has the old format, from before torch 1.6.
    """
    with extent.path.open("rb") as file:
        file.seek(extent.offset)
        head = file.read(len(LEGACY))
        file.seek(extent.offset)
        content = None if is_whole else io.BytesIO(file.read(extent.length))
    source: Any = content or str(extent.path)  # torch maps a file only by its path
    is_zip = head.startswith(ZIP)
    if is_zip:
        _check_archive(source, extent.location)
        if content is not None:
            content.seek(0)
    elif head != LEGACY or not is_whole:  # a part is in a DCP folder, so it never has the old format
        raise CorruptDataError(
            f"{extent.location} is not a torch.save file, or is damaged: it begins with {head[:8].hex()}"
        )
    stored: dict[int, int] = {}

    def record_storage(storage: Any, _location: str) -> Any:
        if not is_zip:
            # A damaged file may fill only a part of the storage. The rest must not have old memory of this process.
            storage.fill_(0)
        stored[storage.data_ptr()] = storage.nbytes()
        return storage

    known: dict[str, Any] = foreign_globals(stored)
    while True:
        try:
            with torch.serialization.safe_globals([(made, name) for name, made in known.items()]):
                value = torch.load(source, map_location=record_storage, weights_only=True, mmap=is_zip and is_whole)
        except pickle.UnpicklingError as error:
            # torch stops at the first class that it does not know: read again, with a placeholder for this class.
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or unknown[1] in known or len(known) > _MAX_CLASSES:
                raise
            known |= placeholder(unknown[1])
            if content is not None:
                content.seek(0)
        else:
            return value, stored


def _check_archive(source: Any, location: str) -> None:
    """Check the zip archive of a state. torch does not check its checksums if it maps the file into memory."""
    with zipfile.ZipFile(source) as archive:
        # torch.jit.save writes this file, torch.save does not.
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise ConfigError(_SCRIPT_MESSAGE.format(location))
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise CorruptDataError(f"{location} is a compressed archive, which torch.save never writes")
        if damaged := archive.testzip():
            raise CorruptDataError(f"{location} is damaged: wrong checksum of {damaged}; get another copy")


def _check_tensors(
    tensors: dict[str, torch.Tensor], stored: Mapping[int, int], extent: Extent, refused: dict[str, str]
) -> None:
    """Check that tensors are dense, and that all their values are in the file.

    What cannot be stored is moved from `tensors` to `refused`, with the reason. A small file can describe a huge
    tensor, because strides can repeat the same bytes. `stored` has the size in bytes of each storage that was filled
    from the file, by its address.
    """
    starts = sorted(stored)
    used: dict[int, int] = {}
    for name, tensor in list(tensors.items()):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            kinds = {"quantised": tensor.is_quantized, "meta": tensor.is_meta, "nested": tensor.is_nested}
            kind = next((kind for kind, applies in kinds.items() if applies), str(tensor.layout))
            refused[name] = f"{kind}; only dense tensors can be stored: save it as a dense tensor"
            del tensors[name]
            continue
        storage = tensor.untyped_storage()
        start, length = storage.data_ptr(), storage.nbytes()
        # The storage must be inside a range of memory that was filled from the file. Only the last range that starts
        # at or before the storage can contain it.
        filled_start = starts[bisect.bisect_right(starts, start) - 1] if starts else 0
        filled_stop = filled_start + stored.get(filled_start, 0)
        if length and not filled_start <= start <= start + length <= filled_stop:
            raise CorruptDataError(f"{extent.location}: the values of tensor {name!r} are not in the file")
        # Count by address, because several tensors may share one storage.
        used[start] = max(length, used.get(start, 0))
        if tensor.numel() * tensor.itemsize > max(length, MAX_REPEATED_BYTES):
            raise ConfigError(
                f"{extent.location}: tensor {name!r} repeats few values over the shape {list(tensor.shape)}; save "
                "its .contiguous() form"
            )
    if sum(used.values()) > extent.length:
        raise CorruptDataError(
            f"{extent.location}: its tensors take {sum(used.values())} bytes, more than the file, which has "
            f"{extent.length}"
        )


def _encode(value: Any, max_bytes: int, extent: Extent) -> bytes:
    """Return the reply with `value` as a line of JSON. Raise ConfigError if `value` takes more than `max_bytes`."""
    line = json.dumps({"value": value}).encode()
    if len(line) > max_bytes + 20:  # 20 bytes are enough for `{"value": }`
        raise ConfigError(
            f"{extent.location} has {format_size(len(line))} of values that are not tensors; the limit is "
            f"{format_size(max_bytes)}: save long lists as tensors"
        )
    return line + b"\n"


def _explain(error: Exception, location: str, memory_bytes: int) -> tuple[str, str]:
    """Return the class name and the message of the error that the parent raises for an exception of this process."""
    text = str(error)[:_MAX_MESSAGE_CHARS]
    refused = _REFUSED.search(text)
    refused_class = next(filter(None, refused.groups()), "") if refused else ""
    if isinstance(error, (ConfigError, CorruptDataError)):
        return type(error).__name__, text
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _NO_MEMORY.search(text):
        return "ConfigError", (
            f"{location} needs more memory to read than the limit, {format_size(memory_bytes)} without its tensors: "
            "it is damaged or hostile, or holds millions of values that are not tensors. If you trust it, raise the "
            "limit: --reader-memory, in Python reader_memory_bytes="
        )
    if isinstance(error, OSError):
        return "OSError", text
    if refused_class:
        refused_class = refused_class.strip("`.,").removeprefix("builtins.")
        return "ConfigError", (
            f"{location} holds {refused_class}, and to create one would execute code from the file, so it is "
            "refused. Save plain values, such as model.state_dict(), and import that"
        )
    # Use only the first line of torch's reason: the others are advice, such as to load without `weights_only`.
    lines = text.partition("WeightsUnpickler error:")[2].strip().splitlines() or text.strip().splitlines()
    reason = lines[0][:200] if lines else type(error).__name__
    return "CorruptDataError", f"{location} is damaged, or has another format: {reason}"


def main() -> None:
    """Run the child process: answer each `ReadRequest` on stdin with a line of JSON, then the bytes of a block."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not write a core file as large as the limit
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    warnings.simplefilter("ignore")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries goes to stderr, so that stdout has replies only
    torch.set_num_threads(1)
    messages = sys.stdin.buffer
    server = _PickleServer(*pickle.load(messages))  # noqa: S301 - from our own parent process
    # If the parent has ended, or the mapped file was truncated while its bytes were sent, end without a traceback.
    with suppress(EOFError, OSError):
        while True:
            request: ReadRequest = pickle.load(messages)  # noqa: S301 - from our own parent process
            reply, content = server.answer(request)
            replies.write(reply)
            replies.write(content)
            replies.flush()


if __name__ == "__main__":
    main()
