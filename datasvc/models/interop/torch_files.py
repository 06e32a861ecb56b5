"""Read and write `torch.save` files. Reading accepts only tensors and plain values, and executes no code."""

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
# torch's magic number as a pickle of protocol 2: the first bytes of a file from before torch 1.6.
LEGACY: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
# The forms of torch's error messages for a class that it refuses to create.
_REFUSED = re.compile(r"GLOBAL (\S+)|Trying to (?:call reduce|instantiate) \S* ?\S* ?(\S+)|module (\S+) is blocked")
_SCRIPT: Final = "{} is a TorchScript program; save its tensors: torch.save(model.state_dict())"
_HASH_BYTES: Final = 1 << 20
# Tied tensors share one storage under several names. All tensors together may have this multiple of the file's bytes.
_MAX_SHARED: Final = 16
# Up to this size, a tensor may repeat its values freely.
_MAX_REPEATED_BYTES: Final = 1 << 20
MAX_NODES: Final = 1 << 20
"""Maximum number of values in an untrusted state: a small file can contain the same list very often."""


def read_torch_file(path: Path) -> ForeignState:
    """Return the state in a `torch.save` file.

    Tensors are memory-mapped, so a file larger than memory can be read. The format before torch 1.6 is loaded into
    memory as a whole.

    Raises:
        ConfigError: the file holds something other than tensors and plain values (the message names the class), or
            is a TorchScript program.
        CorruptDataError: the file is not a `torch.save` file, is damaged, or its tensors are larger than the file.
        OSError: the file cannot be read.
    """
    value = load_plain(path, str(path))
    import torch

    if isinstance(value, torch.Tensor):
        value = {"tensor": value}
    skeleton, tensors = flatten(value, max_nodes=MAX_NODES)
    check_tensors(tensors, path.stat().st_size, str(path))
    foreign = [of_tensor(check_tensor_name(name, str(path)), tensor) for name, tensor in tensors.items()]
    is_bare = isinstance(value, Mapping) and all(isinstance(item, torch.Tensor) for item in value.values())
    return ForeignState("torch", foreign, None if is_bare else skeleton)


def load_plain(source: Path | bytes, location: str) -> Any:
    """Load a `torch.save` file without executing any code in it.

    Args:
        source: path of a file, whose tensors are memory-mapped if the format allows; the file must not change while
            they are used. Or the bytes of a file from torch 1.6 or later.
        location: name of the file, for messages.

    Raises:
        ConfigError: the file holds values that only code could create, or that cannot be stored; the message names
            them.
        CorruptDataError: the file is damaged, or its tensors are larger than the file.
        OSError: the file cannot be read.
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
                f"{location} is not a torch.save file, or is damaged: it begins with {head[:8].hex()}"
            )
    file: Any = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and isinstance(source, Path))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - torch may raise any exception for damaged bytes
        raise _map_error(error, location) from None


def _check_archive(file: IO[bytes], size_bytes: int, location: str) -> None:
    """Check the zip archive of a state: its layout, its checksums, and its pickle.

    torch does not check the checksums of a file that it maps.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if any(name.endswith("/constants.pkl") for name in names):
                raise ConfigError(_SCRIPT.format(location))
            if len(set(names)) != len(names) or sum(name.endswith("/data.pkl") for name in names) != 1:
                raise CorruptDataError(
                    f"{location} is not an archive of torch.save: expected distinct names and exactly one data.pkl"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CorruptDataError(f"{location} is a compressed archive, which torch.save never writes")
            if sum(entry.file_size for entry in entries) > size_bytes:
                raise CorruptDataError(f"{location} is damaged: its entries are larger than the file")
            # `zipfile` compares the checksum of an entry when it has read all of it.
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
        # After a failed write, torch reports an incomplete archive and not the reason of the failure.
        if sink.failure is not None:
            raise sink.failure from None
        raise


class _TorchFile(io.RawIOBase):
    """File object for torch.save that records why a write failed.

    Attributes:
        failure: the first error; None if there was none.
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


def _map_error(error: Exception, location: str) -> Exception:
    """Return the error of this module for an error of `torch.load`."""
    text = str(error)
    match = _REFUSED.search(text)
    name = next(filter(None, match.groups()), None) if match else None
    if name is not None:
        return refusal(name.strip("`.,"), location)
    if "TorchScript" in text:
        return ConfigError(_SCRIPT.format(location))
    last_line = text.strip().splitlines()[-1][:200] if text.strip() else type(error).__name__
    return CorruptDataError(f"{location} is not a torch.save file, or is damaged: {last_line}")


def of_tensor(name: str, tensor: torch.Tensor) -> ForeignTensor:
    """Wrap a tensor in memory or in a mapped file as a `ForeignTensor`."""
    spec = spec_of(tensor)
    return ForeignTensor(name, spec.dtype, spec.shape, _reader(tensor))


def _reader(tensor: torch.Tensor) -> Callable[[], Iterator[tuple[Shape, torch.Tensor]]]:
    def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
        values = tensor.detach()
        for box in plan_chunks(tuple(values.shape), values.itemsize):
            yield box[0], values[slices(box)]

    return blocks


def check_tensors(tensors: Mapping[str, torch.Tensor], file_bytes: int, location: str) -> None:
    """Check that tensors are not larger than their file: with strides, a few bytes can describe any amount of memory.

    Args:
        tensors: tensors by name.
        file_bytes: size of the file.
        location: name of the file, for messages.

    Raises:
        ConfigError: a tensor is not dense, or repeats its values, or the tensors share too much memory.
        CorruptDataError: the storages are larger than the file.
    """
    import torch

    storages: dict[int, int] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantised" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise ConfigError(
                f"{location}: tensor {name!r} is {kind}; only dense tensors can be stored: save it as a dense tensor"
            )
        storage = tensor.untyped_storage()
        # By address, so that a storage of tied tensors counts once.
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.itemsize > max(storage.nbytes(), _MAX_REPEATED_BYTES):
            raise ConfigError(
                f"{location}: tensor {name!r} repeats few values over the shape {list(tensor.shape)}; save its "
                ".contiguous() form"
            )
    if sum(storages.values()) > file_bytes:
        raise CorruptDataError(
            f"{location}: its tensors take {sum(storages.values())} bytes, more than the file, which has {file_bytes}"
        )
    total_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total_bytes > _MAX_SHARED * max(file_bytes, _MAX_REPEATED_BYTES):
        raise ConfigError(
            f"{location}: its tensors share so much memory that {file_bytes} bytes would become {total_bytes}; save "
            "each tensor only once"
        )
