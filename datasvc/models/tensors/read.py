"""Reads tensors: every chunk verified against its digest, in parallel, and only the chunks that are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVarTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunk_reader import ChunkReader, ChunkSource, check_reaches, is_near
from datasvc.models.tensors.chunks import Shape, flat_offset, intersect, slices
from datasvc.models.tensors.codec import Bytes, Decoders
from datasvc.models.tensors.dtypes import bytes_of, tensor_of
from datasvc.models.tensors.tensor_table import ITEM_BYTES, Chunk, TensorRecord
from datasvc.processors import count_processors
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.sizes import format_size
from datasvc.threads import run_in_threads

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkSource", "load_chunk", "load_tensors", "load_window"]

_Arguments = TypeVarTuple("_Arguments")

# Remote stores need many parallel requests. Local reads are fast: one thread more than there are processors reads
# while the others decode; further threads would only compete for caches and the interpreter lock.
_THREADS: Final = max(16, min(32, count_processors()))
_NEAR_THREADS: Final = min(32, count_processors() + 1)
_SMALL_BYTES: Final = 1 << 20


def load_tensors(
    source: ChunkSource,
    records: Iterable[TensorRecord],
    *,
    progress: Progress = NO_PROGRESS,
) -> dict[str, torch.Tensor]:
    """Return tensors by name, in the order of `records`, every byte verified.

    Args:
        source: source of the bytes.
        records: records of the tensors to load, from `read_table`.
        progress: counts the bytes of each chunk that was loaded.

    Returns:
        Tensors on the CPU, owned by the caller.

    Raises:
        ConfigError: there is not enough memory.
        CorruptDataError: no copy of a chunk matches its digest; the message names the tensor.
        NotFoundError: an object is missing; the message names the tensor.
        UnavailableError: the store did not answer.
    """
    requested = list(records)
    for record in requested:
        for chunk in record.chunks:
            check_reaches(source, record.name, chunk)
    reader = ChunkReader(source, [chunk for record in requested for chunk in record.chunks])
    tensors = {record.name: _allocate(record.name, record.dtype, record.shape) for record in requested}

    def load_one(record: TensorRecord, chunk: Chunk, size_bytes: int) -> None:
        tensor, offset = tensors[record.name], flat_offset(record.shape, chunk.box)
        # A contiguous chunk is read straight into the tensor, any other one through a buffer.
        if offset is not None:
            out = bytes_of(tensor)[offset * ITEM_BYTES[record.dtype] :][:size_bytes]
            reader.read(record.name, chunk, out)
        else:
            content: Bytes = np.empty(size_bytes, np.uint8)
            reader.read(record.name, chunk, content)
            tensor[slices(chunk.box)] = tensor_of(content, record.dtype, chunk.shape)
        progress.advance(size_bytes)

    # Large tensors first, so that none is left for a single thread at the end; small ones in the order of objects.
    in_order = sorted(requested, key=lambda record: -record.nbytes if record.nbytes > _SMALL_BYTES else 0)
    chunks = [(record, chunk, record.chunk_bytes(chunk)) for record in in_order for chunk in record.chunks]
    read_in_threads(source, load_one, chunks, [size_bytes for _, _, size_bytes in chunks])
    return tensors


def load_chunk(
    source: ChunkSource, dtype: str, chunk: Chunk, *, name: str = "", decoders: Decoders | None = None
) -> torch.Tensor:
    """Return one chunk as a new tensor of its shape, verified.

    `name` is the name of the tensor, for messages; `decoders` can be shared by the calls for many chunks. Raises as
    `load_tensors`.
    """
    check_reaches(source, name, chunk)
    content = np.empty(_count(chunk.shape) * ITEM_BYTES[dtype], np.uint8)
    ChunkReader(source, [chunk], decoders).read(name, chunk, content)
    return tensor_of(content, dtype, chunk.shape)


def load_window(source: ChunkSource, record: TensorRecord, start: Sequence[int], shape: Shape) -> torch.Tensor:
    """Return a block of a tensor as a new tensor; reads only the chunks that overlap it, verified.

    Args:
        source: source of the bytes.
        record: record of the whole tensor.
        start: index of the block's first element.
        shape: size of the block per dimension.

    Raises:
        ConfigError: the block is not inside of the tensor.
        CorruptDataError, NotFoundError, UnavailableError: see `load_tensors`.
    """
    window = (tuple(start), tuple(shape))
    if not len(start) == len(shape) == len(record.shape) or any(
        s < 0 or n < 0 or s + n > size for s, n, size in zip(*window, record.shape, strict=True)
    ):
        raise ConfigError(f"tensor {record.name!r} of shape {record.shape} has no block {shape} at {tuple(start)}")
    block = _allocate(record.name, record.dtype, window[1])
    shared = [(chunk, overlap) for chunk in record.chunks if (overlap := intersect(chunk.box, window)) is not None]
    reader = ChunkReader(source, [chunk for chunk, _ in shared])

    def load_one(chunk: Chunk, overlap: tuple[Shape, Shape]) -> None:
        check_reaches(source, record.name, chunk)
        content = np.empty(record.chunk_bytes(chunk), np.uint8)
        reader.read(record.name, chunk, content)
        loaded = tensor_of(content, record.dtype, chunk.shape)
        block[slices(overlap, origin=window[0])] = loaded[slices(overlap, origin=chunk.start)]

    read_in_threads(source, load_one, shared, [record.chunk_bytes(chunk) for chunk, _ in shared])
    return block


def read_in_threads(
    source: ChunkSource,
    read: Callable[[*_Arguments], None],
    arguments: Sequence[tuple[*_Arguments]],
    sizes: Sequence[int],
) -> None:
    """Call `read` with each of `arguments`, in a number of threads that suits the source.

    Args:
        source: source that `read` uses.
        read: reads one chunk.
        arguments: arguments of each call.
        sizes: sizes of the chunks in bytes.
    """
    if is_near(source):
        run_in_threads(read, arguments, _NEAR_THREADS, sizes=sizes)
    else:
        run_in_threads(read, arguments, _THREADS)


def _allocate(name: str, dtype: str, shape: Shape) -> torch.Tensor:
    import torch

    try:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    except (RuntimeError, MemoryError) as error:
        size = format_size(_count(shape) * ITEM_BYTES[dtype])
        raise ConfigError(
            f"tensor {name!r} of shape {shape} needs {size}, which this machine cannot allocate ({error}); restore "
            "a part of it, or use a machine with more memory"
        ) from error


def _count(shape: Shape) -> int:
    return int(np.prod(shape, dtype=object))
