"""Writes tensors in threads: splits them into chunks, stores each distinct chunk once, in its smallest encoding.

`store_tensors` stores whole tensors. `store_chunks` stores blocks of tensors, such as those that one rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunk_writer import CODECS, MIN_ENCODED_BYTES, ChunkWriter, Codec, TensorBlock
from datasvc.models.tensors.chunks import CHUNK_BYTES, plan_chunks, slices
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.tensor_classes import is_plain
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Objects
from datasvc.repository.objects.batch import ObjectBatch
from datasvc.sizes import group_by_size
from datasvc.threads import collection_paused, count_processors, run_in_threads

if TYPE_CHECKING:
    import torch

__all__ = ["CODECS", "Codec", "StoredState", "TensorBlock", "store_chunks", "store_tensors", "whole_blocks"]

# Every thread holds several copies of a chunk, so more threads would only compete for caches and memory. Local files
# are written to the page cache and synced by other threads. For a remote store, some threads upload while others
# encode.
_NEAR_THREADS: Final = min(16, count_processors() + 1)
_REMOTE_THREADS: Final = max(8, min(16, count_processors()))
_JOINED: Final = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class StoredChunks:
    """Result of `store_chunks`.

    Attributes:
        chunks: pairs of tensor name and chunk, sorted by name and start; see `tensor_table.join_chunks`.
        new_bytes: bytes that were not in the repository before.
        num_nonfinite: number of NaN and infinite elements by tensor; tensors without any are left out.
    """

    chunks: list[tuple[str, Chunk]]
    new_bytes: int
    num_nonfinite: Mapping[str, int]


@dataclass(frozen=True)
class StoredState:
    """A state whose tensors are stored, by one process or by all ranks of a job.

    Attributes:
        records: records of all its tensors.
        skeleton: skeleton of its tree, from `state_tree.flatten`; None: the caller adds it before the commit.
        new_bytes: bytes that were not in the repository before.
        num_nonfinite: number of NaN and infinite elements by tensor; tensors without any are left out.
    """

    records: Sequence[TensorRecord]
    skeleton: Any
    new_bytes: int
    num_nonfinite: Mapping[str, int] = field(default_factory=dict)


def store_tensors(
    objects: Objects,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: Sequence[TensorRecord] = (),
    codec: Codec = "delta",
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress = NO_PROGRESS,
) -> StoredState:
    """Store every tensor. Equal chunks of any versions of any models are stored only once.

    Args:
        objects: objects of the repository.
        tensors: dense tensors by name, on any device; they must not change during the call.
        base: records of an earlier version; "delta" stores chunks as differences to its chunks.
        codec: "none" stores raw bytes, "planes" byte planes if these are smaller, "delta" also differences to `base`.
        chunk_bytes: largest size of a chunk in bytes.
        progress: counts the bytes of each chunk that was stored.

    Returns:
        The stored tensors, sorted by name; the caller adds the skeleton and commits.

    Raises:
        ConfigError: a tensor is not dense, such as a sparse, quantized or meta tensor (the message names it); or the
            codec is unknown.
        UnavailableError: the store failed.
    """
    stored = store_chunks(
        objects,
        whole_blocks(tensors),
        base=base,
        codec=codec,
        chunk_bytes=chunk_bytes,
        progress=progress,
    )
    with collection_paused():
        chunks = {
            name: tuple(chunk for _, chunk in pairs) for name, pairs in groupby(stored.chunks, lambda pair: pair[0])
        }
        # `join_chunks` is not needed: the chunks of one process are sorted and tile the tensor.
        records = [
            TensorRecord(name, dtype_name(tensor), tuple(tensor.shape), chunks.get(name, ()))
            for name, tensor in sorted(tensors.items())
        ]
    return StoredState(records, None, stored.new_bytes, stored.num_nonfinite)


def store_chunks(
    objects: Objects,
    blocks: Sequence[TensorBlock],
    *,
    base: Sequence[TensorRecord] = (),
    base_tensors: Sequence[TensorBlock] = (),
    codec: Codec = "delta",
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress = NO_PROGRESS,
) -> StoredChunks:
    """Store blocks of tensors, as one rank of a sharded save does; large blocks are split into chunks.

    For arguments and errors see `store_tensors`. `base_tensors` are blocks in memory that may equal those of `base`:
    where their digests match, the chunks of `base` are not read. The caller joins the chunks of all ranks with
    `tensor_table.join_chunks`, because only the caller has the shapes of whole tensors. A block without elements
    gives no chunk.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec is {codec!r}; expected one of {', '.join(CODECS)}")
    with collection_paused():
        for block in blocks:
            check_storable(block.name, block.tensor)
        # Sort, so that packs of small chunks do not depend on the order of the state.
        parts = sorted(_split(blocks, chunk_bytes), key=attrgetter("name", "start"))
        base_blocks = {part.key: part for part in _split(base_tensors, chunk_bytes)} if base else {}
        # Tiny tensors are stored together: for each of them alone, the calls of torch take longer than all else.
        groups = [
            group
            for _, alike in groupby(parts, _group_key)
            for group in group_by_size(alike, lambda part: part.tensor.nbytes, chunk_bytes)
        ]
    with ObjectBatch(objects) as batch:
        writer = ChunkWriter(objects, batch, base, base_blocks, codec, progress)
        arguments = [(group,) for group in groups]
        if objects.is_near:
            sizes = [sum(part.tensor.nbytes for part in group) for group in groups]
            stored = run_in_threads(writer.store, arguments, _NEAR_THREADS, sizes=sizes)
        else:
            # Pass no sizes: calls that wait for a remote store must not run in one thread, one after the other.
            stored = run_in_threads(writer.store, arguments, _REMOTE_THREADS)
        digests = list(chain.from_iterable(stored))
        chains = writer.finish(digests)
    with collection_paused():
        chunks = [
            (part.name, Chunk(part.start, tuple(part.tensor.shape), digest, chains[digest]))
            for part, digest in zip(parts, digests, strict=True)
        ]
    num_nonfinite = {name: count for name, count in sorted(writer.num_nonfinite.items()) if count}
    return StoredChunks(chunks, writer.new_bytes, num_nonfinite)


def whole_blocks(tensors: Mapping[str, torch.Tensor]) -> list[TensorBlock]:
    """Return one block for each tensor, with all its elements."""
    return [TensorBlock(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()]


def _split(blocks: Iterable[TensorBlock], chunk_bytes: int) -> Iterator[TensorBlock]:
    """Yield the blocks split into parts of at most `chunk_bytes`, as views."""
    for block in blocks:
        if 0 < block.tensor.nbytes <= chunk_bytes:  # most tensors
            yield block
            continue
        tensor = block.tensor.detach()
        for box in plan_chunks(tuple(tensor.shape), tensor.itemsize, chunk_bytes=chunk_bytes):
            start = tuple(map(add, block.start, box[0]))
            yield TensorBlock(block.name, start, tensor[slices(box)])


def _group_key(part: TensorBlock) -> object:
    """Return a key that is equal for parts which `ChunkWriter.store` takes together."""
    tensor = part.tensor
    # Only dtypes that torch concatenates, and classes that do not replace its functions.
    is_tiny = tensor.nbytes < MIN_ENCODED_BYTES and is_plain(tensor) and dtype_name(tensor) in _JOINED
    return (tensor.dtype, tensor.device) if is_tiny else id(part)
