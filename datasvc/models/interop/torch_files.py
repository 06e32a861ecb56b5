"""Files of `torch.save`, read without ever running what is in them: tensors and plain values, nothing else."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, cast

from datasvc import durable
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.pickle.plain_pickle import MAX_PICKLE_BYTES
from datasvc.models.interop.pickle.torch_pickle import check_legacy_pickles, check_pickle, refusal
from datasvc.models.interop.state import ForeignState, ForeignTensor, check_tensor_name
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.tensors.chunks import Shape, plan_chunks, slices
from datasvc.models.tensors.state_tree import flatten

if TYPE_CHECKING:
    import torch

CHECKPOINT_FILE: Final = "checkpoint.pt"
ZIP: Final = b"PK\x03\x04"
# torch's magic number, pickled in protocol 2: how files began before torch 1.6.
LEGACY: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
# What torch says of a class that it will not make, in any of its ways.
_REFUSED = re.compile(r"GLOBAL (\S+)|Trying to (?:call reduce|instantiate) \S* ?\S* ?(\S+)|module (\S+) is blocked")
_SCRIPT: Final = "{} is a TorchScript program; save its tensors: torch.save(model.state_dict())"
_HASH_BYTES: Final = 1 << 20
# Tied tensors have several names; nobody ties that many.
_MAX_SHARED: Final = 16
_MAX_REPEATED_BYTES: Final = 1 << 20
MAX_NODES: Final = 1 << 20
"""Values of a state that is not known to be honest: lists may hold one list very often."""


def read_torch_file(path: Path) -> ForeignState:
    """Return the state in a file of `torch.save`.

    Tensors are mapped, so that a file larger than the memory can be read; those of the format before torch 1.6 are
    loaded at once.

    Raises:
        ConfigError: it holds something else than tensors and plain values; names the class. Or a TorchScript program.
        CorruptDataError: no such file, damaged, or it claims more than it has.
        OSError: it cannot be read.
    """
    value = load_plain(path, str(path))
    import torch

    if isinstance(value, torch.Tensor):
        value = {"tensor": value}
    skeleton, tensors = flatten(value, max_nodes=MAX_NODES)
    check_tensors(tensors, path.stat().st_size, str(path))
    foreign = [of_tensor(check_tensor_name(name, str(path)), tensor) for name, tensor in tensors.items()]
    is_bare = isinstance(value, Mapping) and all(isinstance(each, torch.Tensor) for each in value.values())
    return ForeignState("torch", foreign, None if is_bare else skeleton)


def load_plain(source: Path | bytes, location: str) -> Any:
    """Return what torch.save wrote, if it can be had without running any code and is not damaged.

    Args:
        source: a file, the tensors of which are left in it where the format allows: it must not change while they are
            used. Or the bytes of one, of torch 1.6 or later.
        location: for messages.

    Raises:
        ConfigError: it holds what only code could make again, or what cannot be stored; names it.
        CorruptDataError: damaged, or it claims more than it has.
        OSError: it cannot be read.
    """
    import torch

    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as opened:
        head = opened.read(len(LEGACY))
        size_bytes = opened.seek(0, io.SEEK_END)
        opened.seek(0)
        is_zip = head.startswith(ZIP)
        if is_zip:
            _check_archive(opened, size_bytes, location)
        elif head == LEGACY and isinstance(source, Path):
            check_legacy_pickles(opened.read(MAX_PICKLE_BYTES), size_bytes, location)
        else:
            raise CorruptDataError(
                f"{location} is no file of torch.save, or damaged: it begins with {head[:8].hex()}"
            )
    file: Any = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and isinstance(source, Path))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes may make torch raise anything
        raise _translated(error, location) from None


def _check_archive(file: IO[bytes], size_bytes: int, location: str) -> None:
    """Look at the archive around a state: checksums, that nothing unpacks to more than it takes, and its pickle.

    torch itself does not look at the checksums of a file that it maps.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if any(name.endswith("/constants.pkl") for name in names):
                raise ConfigError(_SCRIPT.format(location))
            if len(set(names)) != len(names) or sum(name.endswith("/data.pkl") for name in names) != 1:
                raise CorruptDataError(f"{location} is no archive of torch.save: it has not one data.pkl")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CorruptDataError(f"{location} is a compressed archive, which torch.save never writes")
            if sum(entry.file_size for entry in entries) > size_bytes:
                raise CorruptDataError(f"{location} claims to hold more bytes than it has")
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_HASH_BYTES):
                        pass
            (pickled,) = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            with archive.open(pickled) as content:
                raw = content.read(MAX_PICKLE_BYTES + 1)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, UnicodeError) as error:
        if isinstance(error, (ConfigError, CorruptDataError)):
            raise
        raise CorruptDataError(f"{location} is damaged: {error}; get another copy") from error
    check_pickle(raw, size_bytes, location)


def write_torch_file(path: Path, state: Any) -> None:
    """Write a state tree as torch.save does; the file is there, whole, once this returns. Raises OSError."""
    with durable.replacing(path) as file:
        save_to(file, state)


def save_to(file: BinaryIO, state: Any) -> None:
    """Write a state tree as torch.save does, into an open file. Raises OSError."""
    import torch

    sink = _TorchFile(file)
    try:
        torch.save(state, cast("IO[bytes]", sink))
    except RuntimeError:
        # torch reports what its archive lacks after a failed write, not why the write failed.
        if sink.failure is not None:
            raise sink.failure from None
        raise


class _TorchFile(io.RawIOBase):
    """A file that torch writes to through Python, so that why it cannot be written is known.

    Attributes:
        failure: the first error.
    """

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


def _translated(error: Exception, location: str) -> Exception:
    text = str(error)
    found = _REFUSED.search(text)
    name = next(filter(None, found.groups()), None) if found else None
    if name is not None:
        return refusal(name.strip("`.,"), location)
    if "TorchScript" in text:
        return ConfigError(_SCRIPT.format(location))
    first = text.strip().splitlines()[-1][:200] if text.strip() else type(error).__name__
    return CorruptDataError(f"{location} is no file of torch.save, or damaged: {first}")


def of_tensor(name: str, tensor: torch.Tensor) -> ForeignTensor:
    """Return a tensor in memory, or mapped, as one that is read block by block."""
    spec = spec_of(tensor)
    return ForeignTensor(name, spec.dtype, spec.shape, _reader(tensor))


def _reader(tensor: torch.Tensor) -> Callable[[], Iterator[tuple[Shape, torch.Tensor]]]:
    def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
        whole = tensor.detach()
        for box in plan_chunks(tuple(whole.shape), whole.itemsize):
            yield box[0], whole[slices(box)]

    return blocks


def check_tensors(tensors: Mapping[str, torch.Tensor], most_bytes: int, location: str) -> None:
    """Raise where tensors have more elements than their file has bytes for: a few bytes could claim all memory.

    Args:
        tensors: by name.
        most_bytes: of the file.
        location: of it, for messages.

    Raises:
        ConfigError: a tensor is not dense, or repeats few values, or they all do.
        CorruptDataError: they take more than the file has.
    """
    import torch

    storages: dict[int, int] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantised" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise ConfigError(
                f"{location}: tensor {name!r} is {kind}; only dense tensors can be stored, save it as one"
            )
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.itemsize > max(storage.nbytes(), _MAX_REPEATED_BYTES):
            raise ConfigError(
                f"{location}: tensor {name!r} repeats few values over {list(tensor.shape)}; save it as .contiguous()"
            )
    if sum(storages.values()) > most_bytes:
        raise CorruptDataError(f"{location}: its tensors take {sum(storages.values())} bytes, more than the file has")
    total_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total_bytes > _MAX_SHARED * max(most_bytes, _MAX_REPEATED_BYTES):
        raise ConfigError(
            f"{location}: its tensors share so much memory that {most_bytes} bytes would become {total_bytes}; save "
            "each once"
        )
