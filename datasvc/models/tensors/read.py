"""Reads tensors, for restores and exports, in threads: only the chunks that are needed, verified by their digests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.models.tensors.chunk_reader import ChunkReader, ChunkSource, check_reaches, is_near
from datasvc.models.tensors.chunks import Box, Shape, intersect, is_inside, slices
from datasvc.models.tensors.codec import Decoders
from datasvc.models.tensors.dtypes import bytes_of, dtype_name, tensor_of
from datasvc.models.tensors.partial_read import PartialReader
from datasvc.models.tensors.tensor_table import ITEM_BYTES, Chunk, TensorRecord
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.sizes import format_size
from datasvc.threads import count_processors, run_in_threads

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkSource", "load_chunk", "load_tensors", "load_window", "plan_reads", "read_chunks"]

# Remote stores need many parallel requests. Local reads are fast: with one thread more than processors, one can read
# while the others decode. Further threads would only compete for caches and the interpreter lock.
_REMOTE_THREADS: Final = max(16, min(32, count_processors()))
_NEAR_THREADS: Final = min(32, count_processors() + 1)
# `load_tensors` sorts larger tensors by size, and keeps the order of the others.
_SMALL_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class ChunkRead:
    """A chunk to read, and the tensors that receive its elements.

    Attributes:
        record: record of the stored tensor.
        chunk: chunk of the stored tensor.
        targets: pairs of a view to fill, and the box of the stored tensor whose elements it receives.
    """

    record: TensorRecord
    chunk: Chunk
    targets: list[tuple[torch.Tensor, Box]] = field(default_factory=list)

    @property
    def direct_target(self) -> torch.Tensor | None:
        """The only target, if it takes the whole chunk and the chunk can be decoded into its memory; else None."""
        (target, box), *others = self.targets
        if others or box[1] != self.chunk.shape or dtype_name(target) != self.record.dtype:
            return None
        # A chunk is decoded in row-major order into CPU memory, so only such a target can receive it directly.
        is_plain = target.device.type == "cpu" and target.is_contiguous()
        return target if is_plain and not (target.is_conj() or target.is_neg()) else None


def load_tensors(
    source: ChunkSource,
    records: Iterable[TensorRecord],
    *,
    progress: Progress = NO_PROGRESS,
    partial: PartialReader | None = None,
) -> dict[str, torch.Tensor]:
    """Return tensors by name, in the order of `records`. Every byte is verified.

    Args:
        source: source of the bytes.
        records: records of the tensors to load, from `read_table`.
        progress: counts the bytes of each chunk that was loaded.
        partial: reader of the high bytes of numbers. What it reads is not verified.

    Returns:
        Tensors on the CPU, owned by the caller.

    Raises:
        ConfigError: there is not enough memory.
        CorruptDataError: no copy of a chunk matches its digest; the message names the tensor.
        NotFoundError: an object is missing; the message names the tensor.
        UnavailableError: the store did not answer.
    """
    with explain_missing("reading tensors"):
        import torch  # noqa: F401 - `_allocate` imports it too
    requested = list(records)
    # Check before the allocation: a table may claim sizes that its objects do not have.
    for record in requested:
        for chunk in record.chunks:
            check_reaches(source, record.name, chunk)
    tensors = {record.name: _allocate(record.name, record.dtype, record.shape) for record in requested}
    # Read large tensors first, so that no thread is left with a large one at the end. Small tensors keep their order,
    # because they were packed into objects in this order.
    ordered = sorted(requested, key=lambda record: -record.nbytes if record.nbytes > _SMALL_BYTES else 0)
    reads = []
    for record in ordered:
        tensor = tensors[record.name]
        for chunk in record.chunks:
            # Most tensors are a single chunk, which needs no view.
            target = tensor if chunk.shape == record.shape else tensor[slices(chunk.box)]
            reads.append(ChunkRead(record, chunk, [(target, chunk.box)]))
    read_chunks(source, reads, progress, partial)
    return tensors


def load_chunk(
    source: ChunkSource, dtype: str, chunk: Chunk, *, name: str = "", decoders: Decoders | None = None
) -> torch.Tensor:
    """Return one chunk, verified, as a new tensor of its shape. For errors see `load_tensors`.

    `name` is the name of the tensor, for messages; `decoders` can be shared by the calls for many chunks.
    """
    check_reaches(source, name, chunk)
    content = np.empty(math.prod(chunk.shape) * ITEM_BYTES[dtype], np.uint8)
    ChunkReader(source, [chunk], decoders).read(name, chunk, content)
    return tensor_of(content, dtype, chunk.shape)


def load_window(source: ChunkSource, record: TensorRecord, start: Sequence[int], shape: Shape) -> torch.Tensor:
    """Return a block of a tensor as a new tensor. Only the chunks that overlap the block are read, and are verified.

    Args:
        source: source of the bytes.
        record: record of the whole tensor.
        start: index of the block's first element.
        shape: size of the block per dimension.

    Raises:
        ConfigError: the block is not inside the tensor.
        CorruptDataError, NotFoundError, UnavailableError: see `load_tensors`.
    """
    window = (tuple(start), tuple(shape))
    if not is_inside(window, record.shape):
        raise ConfigError(f"tensor {record.name!r} of shape {record.shape} has no block {shape} at {tuple(start)}")
    block = _allocate(record.name, record.dtype, window[1])
    read_chunks(source, plan_reads([(record, window, block)]))
    return block


def plan_reads(blocks: Iterable[tuple[TensorRecord, Box, torch.Tensor]]) -> list[ChunkRead]:
    """Plan the reads that fill blocks of tensors: each chunk that overlaps a block is read once.

    Args:
        blocks: triples (record of the tensor, box of the block, target tensor with the shape of the block).
    """
    reads: dict[tuple[str, Shape], ChunkRead] = {}
    for record, box, target in blocks:
        for chunk in record.chunks:
            shared = intersect(box, chunk.box)
            if shared is not None:
                read = reads.setdefault((record.name, chunk.start), ChunkRead(record, chunk))
                read.targets.append((target[slices(shared, origin=box[0])], shared))
    return list(reads.values())


def read_chunks(
    source: ChunkSource,
    reads: Sequence[ChunkRead],
    progress: Progress = NO_PROGRESS,
    partial: PartialReader | None = None,
) -> None:
    """Read chunks into their targets, in a number of threads that suits the source. For errors see `load_tensors`."""
    import torch

    reader = ChunkReader(source, [read.chunk for read in reads])

    def read_one(read: ChunkRead, size_bytes: int) -> None:
        record, chunk = read.record, read.chunk
        target = read.direct_target
        if target is None:
            check_reaches(source, record.name, chunk)
        # Read directly into the target if possible, without a buffer and a copy.
        content = np.empty(size_bytes, np.uint8) if target is None else bytes_of(target)
        if partial is None or not partial.read(record, chunk, content):
            reader.read(record.name, chunk, content)
        if target is None:
            loaded = tensor_of(content, record.dtype, chunk.shape)
            for view, box in read.targets:
                # A tensor from inference mode can be filled in this mode only.
                with torch.inference_mode(mode=view.is_inference()):
                    view.copy_(loaded[slices(box, origin=chunk.start)])
        progress.advance(size_bytes)

    sizes = [read.record.chunk_bytes(read.chunk) for read in reads]
    arguments = list(zip(reads, sizes, strict=True))
    if is_near(source):
        run_in_threads(read_one, arguments, _NEAR_THREADS, sizes=sizes)
    else:
        # Pass no sizes: small reads from a remote store wait for an answer, so several must not share a thread.
        run_in_threads(read_one, arguments, _REMOTE_THREADS)


def _allocate(name: str, dtype: str, shape: Shape) -> torch.Tensor:
    """Return a tensor on the CPU with undefined elements. Raises ConfigError: there is not enough memory."""
    import torch

    try:
        # Other threads fill it, outside the inference mode of this one.
        with torch.inference_mode(mode=False):
            return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    except (RuntimeError, MemoryError) as error:
        size = format_size(math.prod(shape) * ITEM_BYTES[dtype])
        raise ConfigError(
            f"tensor {name!r} of shape {shape} needs {size}, which this machine cannot allocate ({error}); restore "
            "a part of it, or use a machine with more memory"
        ) from error
