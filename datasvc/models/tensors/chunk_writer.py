"""Writes the chunks of a save, for `write`: each in its smallest encoding, unless an equal chunk is stored already.

An equal chunk may be stored in the base (the version to which a save stores differences), as a raw object, or as
an encoded chunk. The deduplication index has pointers to encoded chunks. The chain of a chunk lists the stored bytes
that restore it: a full encoding, then differences. Encoded chunks below `OWN_OBJECT_BYTES` share a few objects.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.tensors import codec as chunk_codec
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.codec import Bytes, Decoders
from datasvc.models.tensors.dtypes import bytes_of, count_nonfinite, dtype_name
from datasvc.models.tensors.read import load_chunk
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord, fault_of_chain
from datasvc.progress import Progress
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, decode_entry, encode_entry
from datasvc.repository.objects.batch import ObjectBatch
from datasvc.repository.objects.objects import digest_of
from datasvc.threads import run_in_threads

if TYPE_CHECKING:
    import torch


Codec = Literal["none", "planes", "delta"]
CODECS: Final[tuple[Codec, ...]] = ("none", "planes", "delta")
OWN_OBJECT_BYTES: Final = 64 << 10
MAX_CHAIN_LENGTH: Final = 8
"""Largest number of links that a save writes for a chunk; a chunk that would need more is stored without the base."""

# Largest cost of restoring a chunk, in units of the time to read its raw bytes. A link costs its stored bytes divided
# by the raw bytes, and an encoded link costs `_LINK_COST` more. For weights, the limit allows a full chunk and one
# difference. With more differences, a restore took four times as long as one of raw bytes.
_MAX_COST: Final = 2.7
_LINK_COST: Final = 0.5
# A difference makes the chain longer for every reader, so it must save at least this share of the raw bytes.
_MIN_SAVED_BY_DIFFERENCE: Final = 0.1
MIN_ENCODED_BYTES: Final = 1 << 10
"""Smaller chunks are stored raw."""
_PACK_BYTES: Final = 8 << 20  # largest size of an object that contains several small chunks
_POINTERS_AT_ONCE: Final = 8

BlockKey = tuple[str, Shape, Shape, str]
"""Name, start, shape and dtype of a block."""


POINTERS: Final = "tensors"
POINTER_FORMAT: Final = 1
_PATH: Final = re.compile(r"tensors/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor in memory: all that one rank holds of the tensor, or a part that becomes one chunk.

    Attributes:
        name: name of the tensor, its dotted path in the state tree.
        start: index of the block's first element in the tensor.
        tensor: elements of the block.
    """

    name: str
    start: Shape
    tensor: torch.Tensor

    @property
    def key(self) -> BlockKey:
        """Key of the block; a block can be stored as a difference to the base block that has the same key."""
        return self.name, self.start, tuple(self.tensor.shape), dtype_name(self.tensor)


class _Encoded(NamedTuple):
    """Encoded bytes of a chunk, before they have a place in an object."""

    base_chain: tuple[ChainLink, ...]  # chain of the base chunk, if the bytes are a difference to it; else ()
    encoding: str
    stored: bytes | memoryview


class ChunkWriter:
    """Stores the chunks of one save: call `store` for each, from any thread, then `finish`.

    Args:
        objects: objects of the repository.
        batch: batch that writes new objects to `objects`; `finish` finishes the batch.
        base: records of the base; () for none.
        base_tensors: blocks in memory that may equal chunks of the base, by key.
        codec: see `write.store_tensors`.
        progress: counts the bytes of each chunk that was stored.

    Attributes:
        new_bytes: bytes of the objects that were not stored before.
        num_nonfinite: number of NaN and infinite elements by tensor.
    """

    def __init__(
        self,
        objects: Objects,
        batch: ObjectBatch,
        base: Sequence[TensorRecord],
        base_tensors: Mapping[BlockKey, TensorBlock],
        codec: Codec,
        progress: Progress,
    ) -> None:
        self._objects, self._batch, self._base_tensors = objects, batch, base_tensors
        self._codec = codec
        self._base_chunks: dict[BlockKey, Chunk] = {
            (record.name, chunk.start, chunk.shape, record.dtype): chunk for record in base for chunk in record.chunks
        }
        # Chains of the base chunks by digest: a chunk may equal a base chunk of another tensor or at another place.
        self._base_chains = {chunk.digest: chunk.chain for chunk in self._base_chunks.values()}
        self._decoders, self._progress = Decoders(), progress
        self._lock = threading.Lock()  # guards `_seen`, `_stored` and the public attributes
        # Digests of the chunks that a thread stores or has stored, and of those that `finish` writes pointers to.
        self._seen: set[Digest] = set()
        self._indexed: set[Digest] = set()
        # By the digest of the chunk: its chain, or its encoded bytes until `finish` packs them. These dicts need no
        # lock, because one thread alone stores a chunk.
        self._chains: dict[Digest, tuple[ChainLink, ...]] = {}
        self._small: dict[Digest, _Encoded] = {}
        self._stored: set[Digest] = set()  # digests of objects that this save stores or has stored
        self._reused: dict[Digest, bool] = {}  # results of `Objects.reuse`, by object
        self.new_bytes = 0
        self.num_nonfinite: Counter[str] = Counter()

    def store(self, blocks: Sequence[TensorBlock]) -> list[Digest]:
        """Store each block as one chunk, unless an equal one was stored or is being stored; return their digests.

        Several blocks have one dtype and device, and each is smaller than `MIN_ENCODED_BYTES`.
        """
        dtype = dtype_name(blocks[0].tensor)
        joined = _bytes_of_all(blocks)
        stops = list(accumulate(block.tensor.nbytes for block in blocks))
        contents = [joined[start:stop] for start, stop in pairwise((0, *stops))]
        digests = [digest_of(content.data) for content in contents]
        counts = [count_nonfinite(joined, dtype)]
        if counts[0] and len(blocks) > 1:
            counts = [count_nonfinite(content, dtype) for content in contents]
        with self._lock:
            # Count in every tensor, also if another tensor has stored an equal chunk.
            for block, count in zip(blocks, counts, strict=False):
                self.num_nonfinite[block.name] += count
            # Mark the chunks before storing them, so that no other thread stores them too.
            new = {digest: index for index, digest in enumerate(digests) if digest not in self._seen}
            self._seen.update(new)
        for digest, index in new.items():
            chain = self._find_stored(digest, contents[index].size)
            if chain is not None:
                self._chains[digest] = chain
            else:
                self._write(digest, self._encode(blocks[index], dtype, contents[index]))
        self._progress.advance(joined.size)
        return digests

    def finish(self, order: Sequence[Digest]) -> Mapping[Digest, tuple[ChainLink, ...]]:
        """Store the small chunks, packed in `order`, and finish the batch; return the chains of all chunks.

        `order` has the results of `store`; a digest may occur several times.
        """
        packs: list[list[Digest]] = []
        pack_bytes = _PACK_BYTES  # as if a pack were full, so that the first chunk begins a new one
        for digest in dict.fromkeys(order):
            if digest in self._small:
                length = len(self._small[digest].stored)
                if pack_bytes + length > _PACK_BYTES:
                    packs.append([])
                    pack_bytes = 0
                packs[-1].append(digest)
                pack_bytes += length
        for pack in packs:
            self._write_pack(pack)
        self._batch.finish()
        # Write pointers after the batch: the index must never name an object that is not stored.
        indexed = [(digest, chain) for digest, chain in self._chains.items() if digest in self._indexed]
        run_in_threads(lambda digest, chain: write_pointer(self._objects, digest, chain), indexed, _POINTERS_AT_ONCE)
        return self._chains

    def _find_stored(self, digest: Digest, size: int) -> tuple[ChainLink, ...] | None:
        """Return the chain of an equal chunk that is stored in the base or for any model; None if there is none."""
        chain = self._base_chains.get(digest)
        if chain is not None and self._is_reusable(chain):
            return chain
        # Smaller chunks are packed: they have neither an object of their own nor a pointer.
        if size < OWN_OBJECT_BYTES:
            return None
        # A raw chunk is an object that has the digest of the chunk.
        if self._objects.reuse(ObjectInfo(digest, size)):
            self._batch.reuse(digest)
            return (ChainLink(digest, size, 0, size, "raw"),)
        return find_chain(self._objects, digest, size)

    def _encode(self, block: TensorBlock, dtype: str, content: Bytes) -> _Encoded:
        """Encode a block, whose bytes are `content`, as a difference to the base, as planes or raw."""
        # Encodings have headers, and trials cost more than the write: thousands of small tensors share objects.
        if self._codec == "none" or content.size < MIN_ENCODED_BYTES:
            return _Encoded((), "raw", content.data)
        word = chunk_codec.word_bytes(dtype)
        base = self._base_of(block, dtype, content.size) if self._codec == "delta" and self._base_chunks else None
        trials = chunk_codec.try_encodings(content, word, base[1] if base else None)
        if base:
            chunk, base_content = base
            encoding = min(("xor", "difference"), key=lambda name: trials[name].share)
            # A share is encoded bytes per raw byte. A difference must be smaller than the planes and the raw bytes by
            # a margin, and must keep the chain cheap to restore.
            max_worthwhile = min(trials["planes"].share, 1) - _MIN_SAVED_BY_DIFFERENCE
            max_restorable = _MAX_COST - _restore_cost(chunk, content.size) - _LINK_COST
            max_share = min(max_worthwhile, max_restorable)
            if trials[encoding].share <= max_share:
                stored = trials[encoding].stored or chunk_codec.encode(content, word, encoding, base_content)
                # The share was estimated from a sample: check it for the whole block.
                if len(stored) <= max_share * content.size:
                    return _Encoded(chunk.chain, encoding, stored)
        if chunk_codec.is_worthwhile(trials["planes"].share):
            stored = trials["planes"].stored or chunk_codec.encode(content, word, "planes")
            if chunk_codec.is_worthwhile(len(stored) / content.size):
                return _Encoded((), "planes", stored)
        return _Encoded((), "raw", content.data)

    def _base_of(self, block: TensorBlock, dtype: str, size: int) -> tuple[Chunk, Bytes] | None:
        """Return the base chunk of a block and its bytes; None if a difference to it cannot be stored."""
        key = block.key
        chunk = self._base_chunks.get(key)
        if chunk is None or len(chunk.chain) >= MAX_CHAIN_LENGTH:
            return None
        if _restore_cost(chunk, size) + _LINK_COST > _MAX_COST:
            return None  # even an empty difference would make the chain too costly to restore
        base_block = self._base_tensors.get(key)
        if base_block is not None and self._is_reusable(chunk.chain):
            # Copy before hashing: during a background save, the next save may overwrite the buffer.
            content = bytes_of(base_block.tensor).copy()
            if digest_of(content.data) == chunk.digest:
                return chunk, content
        try:
            base_chunk = load_chunk(self._objects, dtype, chunk, name=block.name, decoders=self._decoders)
        except (CorruptDataError, NotFoundError):
            return None  # damage of the base must not spread: this chunk is stored without it
        return chunk, bytes_of(base_chunk)

    def _is_reusable(self, chain: Sequence[ChainLink]) -> bool:
        """Return whether this save may name the objects of a chain of the base again."""
        # Check the objects of a local base, so that lost ones are stored again. A remote base needs no check: its
        # version must exist when the save begins, and `gc` keeps its objects for longer than a save takes.
        return not self._objects.storage.is_local or all(self._reuse(link.object, link.info) for link in chain)

    def _reuse(self, digest: Digest, info: ObjectInfo) -> bool:
        if digest not in self._reused:  # once: a pack has thousands of chunks
            self._reused[digest] = self._objects.reuse(info)
        return self._reused[digest]

    def _write(self, digest: Digest, encoded: _Encoded) -> None:
        """Write a chunk as an object of its own, or keep it for a pack if it is small."""
        chain, encoding, stored = encoded
        if len(stored) < OWN_OBJECT_BYTES:
            self._small[digest] = _Encoded(chain, encoding, bytes(stored))
            return
        info = ObjectInfo(digest if encoding == "raw" else digest_of(stored), len(stored))
        self._put(info, stored)
        self._chains[digest] = (*chain, ChainLink(info.digest, info.size_bytes, 0, info.size_bytes, encoding))
        if encoding != "raw":
            self._indexed.add(digest)

    def _write_pack(self, digests: Sequence[Digest]) -> None:
        content = b"".join([self._small[digest].stored for digest in digests])
        info = ObjectInfo(digest_of(content), len(content))
        self._put(info, content)
        offset = 0
        for digest in digests:
            chain, encoding, stored = self._small[digest]
            self._chains[digest] = (*chain, ChainLink(info.digest, info.size_bytes, offset, len(stored), encoding))
            offset += len(stored)

    def _put(self, info: ObjectInfo, content: bytes | memoryview) -> None:
        """Store an object, unless it is stored already or another thread stores it."""
        with self._lock:
            # Different chunks may have the same encoded bytes.
            if info.digest in self._stored:
                return
            self._stored.add(info.digest)
        if self._objects.reuse(info):
            self._batch.reuse(info.digest)
            return
        self._batch.write(info, content)
        with self._lock:
            self.new_bytes += info.size_bytes


def _bytes_of_all(blocks: Sequence[TensorBlock]) -> Bytes:
    """Return the bytes of the blocks, one after the other."""
    import torch

    if len(blocks) == 1:
        return bytes_of(blocks[0].tensor)
    with torch.no_grad():
        return bytes_of(torch.cat([block.tensor.reshape(-1) for block in blocks]))


def _restore_cost(chunk: Chunk, size: int) -> float:
    """Return the cost of restoring a chunk of `size` bytes, relative to reading as many raw bytes."""
    num_encoded = sum(link.encoding != "raw" for link in chunk.chain)
    return chunk.stored_bytes / size + num_encoded * _LINK_COST


# A raw chunk is an object named by its own digest, so equal bytes are found without an index. Encoded bytes have
# another digest: without an index, another model would store them again. The index has a pointer for each encoded
# chunk that is not packed: a small file `tensors/3f/DIGEST.json`, named by the digest of the raw bytes, with the
# chain of the chunk (see `tensor_table`). No restore needs a pointer: if a pointer is lost or damaged, a later save
# stores a second copy. The objects in a pointer are checked before a tensor table names them again.
#
# Limit: in a remote store the age of an object cannot be reset without writing it again (see `Objects.reuse`), so a
# chain with an object older than a day is not reused. A later save of an equal chunk then stores it again. This takes
# more space only if the first save stored a difference to an earlier chunk: the other encodings give equal objects.


def pointer_path(digest: Digest) -> str:
    """Return the path of a chunk's pointer below the root of the repository."""
    return f"{POINTERS}/{digest[:2]}/{digest}.json"


def pointed_digest(path: str) -> Digest | None:
    """Return the digest of the chunk whose pointer has this path, None if this is not a path of a pointer."""
    match = _PATH.fullmatch(path)
    return Digest(match[2]) if match else None


def write_pointer(objects: Objects, digest: Digest, chain: tuple[ChainLink, ...]) -> None:
    """Write the pointer of a chunk whose objects are stored. Raises UnavailableError: the store failed."""
    chunk = Chunk((), (), digest, chain).to_json()  # the position in a tensor, () here, is not part of a pointer
    content = encode_entry({"format": POINTER_FORMAT, "digest": digest, "chain": chunk["chain"]})
    # Not synced: a pointer that a power cut damages fails its checksum and is ignored.
    objects.storage.put_bytes(pointer_path(digest), content, synced=False)


def find_chain(objects: Objects, digest: Digest, chunk_bytes: int) -> tuple[ChainLink, ...] | None:
    """Return the chain of a stored chunk with this digest, None if there is none.

    All objects of the chain exist, and `gc` keeps them at least as long as new ones (see `Objects.reuse`).
    Raises UnavailableError: the store failed.
    """
    path = pointer_path(digest)
    try:
        pointer = decode_entry(objects.storage.read(path, MAX_ENTRY_BYTES), objects.storage.location(path))
        chunk = Chunk.from_json({"start": (), "shape": (), "digest": pointer["digest"], "chain": pointer["chain"]})
    except (NotFoundError, CorruptDataError, ConfigError, KeyError):
        return None
    if chunk.digest != digest:
        return None
    try:
        fault = fault_of_chain(chunk.chain, chunk_bytes)
    except TypeError:
        # A pointer is not trusted: a value in it may have a wrong type. Such a pointer is ignored.
        return None
    if fault or not all(objects.reuse(link.info) for link in chunk.chain):
        return None
    return chunk.chain
