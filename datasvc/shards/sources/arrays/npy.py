"""Reads numpy arrays in `.npy` files and `.npz` archives. Pickles are refused, because reading one can run code."""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.lib import format as npy_format

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.file_checks import HEAD_BYTES, check_head
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile
from datasvc.shards.sources.common.streams import skip

# Upper bound of an array's header.
_HEADER_BYTES: Final = 1 << 16
# An archive over both limits is refused as a zip bomb: deflate reaches 1000:1 on zeros, real data does not.
_MAX_RATIO: Final = 200
_ALWAYS_ALLOWED_BYTES: Final = 1 << 30
# `zipfile` raises NotImplementedError for an unknown compression, RuntimeError for an encrypted member.
_ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    zlib.error,
)


@dataclass(frozen=True)
class NpyArray:
    """Description of an array in a file. The samples are along its first axis.

    Attributes:
        member: member of an `.npz` archive; None for an `.npy` file.
        offset: offset of the first value in bytes from the start of the file or member.
        dtype: numpy type string, such as "<f4".
        shape: shape of the whole array.
    """

    path: str
    member: str | None
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    @property
    def sample_bytes(self) -> int:
        """Size of one sample in bytes."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def stop(self) -> int:
        """Offset in bytes after the last value, from the start of the file or member."""
        return self.offset + self.num_samples * self.sample_bytes


def read_npy_header(reader: FileReader, file: SourceFile) -> NpyArray:
    """Read the header of an `.npy` file.

    Raises:
        ConfigError: the array does not hold samples, or it cannot be read without pickle.
        CorruptDataError: the file is shorter than its header declares.
    """
    content = reader.read_range(file.path, 0, _HEADER_BYTES)
    check_head(file.name, content[:HEAD_BYTES])
    array = _parse_header(content, file.path, None, file.name)
    if array.stop > file.size_bytes:
        raise CorruptDataError(
            f"{file.name} is truncated: it has {file.size_bytes} of {array.stop} bytes; restore another copy"
        )
    return array


def read_npz_headers(reader: FileReader, file: SourceFile) -> dict[str, NpyArray]:
    """Read the headers of an `.npz` archive, by the names of its arrays.

    Raises:
        ConfigError: see `read_npy_header`; or the archive declares too large a content for its size.
        CorruptDataError: the file is not a readable archive or is truncated, or an array's header and the archive
            declare different sizes.
    """
    arrays = {}
    with _archive(reader, file.path, file.name) as archive:
        infos = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        declared_bytes = sum(info.file_size for info in infos)
        if declared_bytes > max(_ALWAYS_ALLOWED_BYTES, _MAX_RATIO * file.size_bytes):
            raise ConfigError(
                f"{file.name} declares {declared_bytes} bytes in {file.size_bytes}: refused as a zip bomb; "
                "save the arrays with numpy.savez"
            )
        for info in infos:
            name = f"{file.name}:{info.filename}"
            with archive.open(info) as member:
                array = _parse_header(member.read(_HEADER_BYTES), file.path, info.filename, name)
            # The header declares the size of the values, the archive the size of the member: the two must match.
            if array.stop != info.file_size:
                raise CorruptDataError(
                    f"{name} has {info.file_size} bytes, but its header declares {array.stop}; restore another copy"
                )
            arrays[info.filename.removesuffix(".npy")] = array
    return arrays


@contextmanager
def open_array(reader: FileReader, array: NpyArray, start: int, stop: int) -> Iterator[BinaryIO]:
    """Open a stream of values that starts at sample `start` and contains at least all samples before `stop`."""
    if array.member is None:
        first = array.offset + start * array.sample_bytes
        with reader.open(array.path, start=first, stop=array.offset + stop * array.sample_bytes) as stream:
            yield stream
        return
    with _archive(reader, array.path, array.path) as archive, archive.open(array.member) as stream:
        skip(stream, array.offset + start * array.sample_bytes)  # type: ignore[arg-type]
        yield stream  # type: ignore[misc]


def check_member(reader: FileReader, array: NpyArray) -> None:
    """Verify the checksum of an array in an archive by reading the array to its end, where zipfile verifies it."""
    if array.member is not None:
        with _archive(reader, array.path, array.path) as archive, archive.open(array.member) as stream:
            # One byte more than the array has, because zipfile verifies the checksum at the end of the member.
            skip(stream, array.stop + 1)  # type: ignore[arg-type]


@contextmanager
def _archive(reader: FileReader, path: str, name: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive. Raise CorruptDataError if the archive, or a member that the caller reads, is damaged."""
    with map_exceptions("read", reader.location(path)):
        try:
            with reader.file_system.open(path, "rb") as opened, zipfile.ZipFile(opened) as archive:
                yield archive
        except _ZIP_ERRORS as error:
            raise CorruptDataError(f"{os.path.basename(name)} cannot be decompressed: {error}") from error


def _parse_header(content: bytes, path: str, member: str | None, name: str) -> NpyArray:
    """Return the array of a file or member that starts with `content`; `name` is for messages."""
    head = io.BytesIO(content)
    try:
        version = npy_format.read_magic(head)
        if version == (1, 0):
            shape, is_fortran, dtype = npy_format.read_array_header_1_0(head)
        elif version == (2, 0):
            shape, is_fortran, dtype = npy_format.read_array_header_2_0(head)
        else:
            raise ConfigError(f"{name} has the npy version {version}; datasvc reads 1.0 and 2.0: save it again")
    except (ValueError, SyntaxError, TypeError, tokenize.TokenError) as error:
        if isinstance(error, ConfigError):  # raised above; it is a ValueError too
            raise
        raise CorruptDataError(f"{name} is not a numpy array: {error}") from error
    _check_array(name, dtype, shape, is_fortran=is_fortran)
    return NpyArray(path, member, head.tell(), dtype.str, tuple(map(int, shape)))


def _check_array(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, is_fortran: bool) -> None:
    """Raise an error unless the array holds samples along its first axis, of a type that datasvc reads."""
    if dtype.hasobject:
        raise ConfigError(
            f"{name} holds Python objects, which numpy stores as pickles; pickles run code when they are read, so "
            "datasvc never reads them; save it with a type of numbers or text"
        )
    if dtype.kind not in "biufUS" or not dtype.itemsize:
        raise ConfigError(f"{name} holds {dtype}; expected bool, integers, floats or text")
    if not shape:
        raise ConfigError(f"{name} is a single value; expected an array with the samples along the first axis")
    if any(size < 0 for size in shape):
        raise CorruptDataError(f"{name} has the shape {list(shape)}; expected no negative dimension")
    if is_fortran and len(shape) > 1:
        raise ConfigError(f"{name} is in Fortran order, with samples interleaved; save numpy.ascontiguousarray of it")
    if dtype.kind in "US" and math.prod(shape[1:]) != 1:
        raise ConfigError(f"{name} has several texts per sample, shape {list(shape)}; expected one")
