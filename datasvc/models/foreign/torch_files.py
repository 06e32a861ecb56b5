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
from datasvc.models.foreign.state import ForeignState, ForeignTensor, check_tensor_name
from datasvc.models.loading import spec_of
from datasvc.models.pieces import Shape, plan_pieces, slices
from datasvc.models.tree import flatten

if TYPE_CHECKING:
    import torch

CHECKPOINT_FILE: Final = "checkpoint.pt"
ZIP: Final = b"PK\x03\x04"
# What torch says of a class that it will not make, in any of its ways.
_REFUSED = re.compile(r"GLOBAL (\S+)|Trying to (?:call reduce|instantiate) \S* ?\S* ?(\S+)|module (\S+) is blocked")
_HASH_BYTES: Final = 1 << 20


def read_torch_file(path: Path) -> ForeignState:
    """Return the state in a file of `torch.save`.

    Tensors are mapped, so that a file larger than the memory can be read; those of the format before torch 1.6 are
    loaded at once.

    Raises:
        ConfigError: it holds something else than tensors and plain values; names the class. Or a TorchScript program.
        CorruptDataError: no such file, damaged, or it claims more than it has.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        is_zip = file.read(len(ZIP)) == ZIP
    if is_zip:
        check_archive(path)
    value = load_plain(path, str(path), mapped=is_zip)
    import torch

    if isinstance(value, torch.Tensor):
        value = {"tensor": value}
    skeleton, tensors = flatten(value)
    _check_sizes(tensors, path)
    foreign = [of_tensor(check_tensor_name(name, str(path)), tensor) for name, tensor in tensors.items()]
    is_bare = isinstance(value, Mapping) and all(isinstance(each, torch.Tensor) for each in value.values())
    return ForeignState("torch", foreign, None if is_bare else skeleton)


def load_plain(source: Path | bytes, location: str, *, mapped: bool = False) -> Any:
    """Return what torch.save wrote, if it can be had without running any code.

    Args:
        source: a file, or its bytes.
        location: for messages.
        mapped: leave tensors in the file; it must not change while they are used.

    Raises:
        ConfigError: it holds what only code could make again; names the class.
        CorruptDataError: it cannot be read.
    """
    import torch

    file: Any = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes may make torch raise anything
        raise _translated(error, location) from None


def check_archive(path: Path) -> None:
    """Look at the zip archive around a state: every checksum, and that nothing in it unpacks to more than it takes.

    Raises:
        CorruptDataError: changed, cut off, or a bomb.
        ConfigError: a TorchScript program.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.filename.endswith("/constants.pkl") for entry in entries):
                raise ConfigError(
                    f"{path} is a TorchScript program; save its tensors: torch.save(model.state_dict())"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CorruptDataError(f"{path} is a compressed archive, which torch.save never writes")
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise CorruptDataError(f"{path} claims to hold more bytes than it has")
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_HASH_BYTES):
                        pass
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, UnicodeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptDataError(f"{path} is damaged: {error}; get another copy") from error


def write_torch_file(path: Path, state: Any) -> None:
    """Write a state tree as torch.save does; the file is there, whole, once this returns. Raises OSError."""
    with durable.replacing(path) as file:
        save_to(file, state)


def save_to(file: BinaryIO, state: Any) -> None:
    """Write a state tree as torch.save does, into an open file. Raises OSError."""
    import torch

    sink = _Sink(file)
    try:
        torch.save(state, cast("IO[bytes]", sink))
    except RuntimeError:
        # torch reports what its archive lacks after a failed write, not why the write failed.
        if sink.failure is not None:
            raise sink.failure from None
        raise


class _Sink(io.RawIOBase):
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
        return ConfigError(
            f"{location} holds {name.strip('`.,')}, and making one would run code from the file: that is never done. "
            "Save plain values, such as model.state_dict(), and import that"
        )
    if "TorchScript" in text:
        return ConfigError(f"{location} is a TorchScript program; save its tensors: torch.save(model.state_dict())")
    first = text.strip().splitlines()[-1][:200] if text.strip() else type(error).__name__
    return CorruptDataError(f"{location} is no file of torch.save, or damaged: {first}")


def of_tensor(name: str, tensor: torch.Tensor) -> ForeignTensor:
    """Return a tensor in memory, or mapped, as one that is read block by block."""
    spec = spec_of(tensor)
    return ForeignTensor(name, spec.dtype, spec.shape, _reader(tensor))


def _reader(tensor: torch.Tensor) -> Callable[[], Iterator[tuple[Shape, torch.Tensor]]]:
    def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
        whole = tensor.detach()
        for box in plan_pieces(tuple(whole.shape), whole.itemsize):
            yield box[0], whole[slices(box)]

    return blocks


def _check_sizes(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise where tensors have more elements than their file has bytes for: a few bytes could claim all memory."""
    import torch

    storages: dict[int, int] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantised" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise ConfigError(f"{path}: tensor {name!r} is {kind}; only dense tensors can be stored, save it as one")
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.itemsize > max(storage.nbytes(), 1 << 20):
            raise ConfigError(
                f"{path}: tensor {name!r} repeats few values over {list(tensor.shape)}; save it as .contiguous()"
            )
    if sum(storages.values()) > path.stat().st_size:
        raise CorruptDataError(f"{path}: its tensors take {sum(storages.values())} bytes, more than the file has")
