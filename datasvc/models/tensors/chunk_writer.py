"""Writing pieces: looked for before they are stored, then encoded in whichever way is smallest.

A piece is found where the version before, a raw object or a pointer has its bytes. Encoded pieces of
`OWN_OBJECT_BYTES` or more are objects of their own, the others of one save lie packed in few.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.tensors import codec as planes
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.codec import Bytes, Decoders
from datasvc.models.tensors.dedup_index import find_chain, write_pointer
from datasvc.models.tensors.dtypes import bytes_of, count_nonfinite, dtype_name
from datasvc.models.tensors.read import load_piece
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord
from datasvc.models.tensors.threads import run_in_threads
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.objects.batch import ObjectBatch
from datasvc.repository.objects.objects import digest_of

if TYPE_CHECKING:
    import torch

Codec = Literal["none", "planes", "delta"]
CODECS: Final[tuple[Codec, ...]] = ("none", "planes", "delta")
OWN_OBJECT_BYTES: Final = 64 << 10

# What a piece costs whoever restores it, over its bytes in memory: those that it reads, and for each encoded link the
# time in which half a piece is read. Of weights a full piece and one difference fit into it; with more of them a
# restore took four times as long as one of raw bytes.
_MAX_COST: Final = 2.7
_LINK_COST: Final = 0.5
# A difference lengthens the chain that a reader follows: it shall save this share of the piece.
_SAVED_BY_DIFFERENCE: Final = 0.1
_PACK_BYTES: Final = 8 << 20
_POINTERS_AT_ONCE: Final = 8


@dataclass(frozen=True)
class TensorSlice:
    """A piece of a tensor in memory, small enough to be stored as one.

    Attributes:
        name: of the tensor.
        start: first element of the piece in it.
        tensor: the piece.
    """

    name: str
    start: Shape
    tensor: torch.Tensor

    @property
    def shape(self) -> Shape:
        """Sizes of the piece."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def place(self) -> tuple[str, Shape, Shape, str]:
        """What a piece of another version has equal when this one is a change of it."""
        return self.name, self.start, self.shape, dtype_name(self.tensor)


class PieceWriter:
    """Stores the pieces of one save: `store` each, from any thread, then `finish`.

    Args:
        objects: where to.
        batch: of these objects, in which new ones are stored; `finish` finishes it.
        base: records of the version before.
        held: pieces in memory that may be those of the base, by place.
        codec: see `write.store_tensors`.
        source: where the base is read from.
        longest_chain: links of a piece at most.
    """

    def __init__(
        self,
        objects: Objects,
        batch: ObjectBatch,
        base: Sequence[TensorRecord],
        held: Mapping[tuple[str, Shape, Shape, str], TensorSlice],
        codec: Codec,
        source: ChunkSource,
        longest_chain: int,
    ) -> None:
        self._objects, self._batch, self._held = objects, batch, held
        self._codec, self._source, self._longest_chain = codec, source, longest_chain
        self._at_place = {
            (record.name, piece.start, piece.shape, record.dtype): piece for record in base for piece in record.pieces
        }
        self._of_base = {piece.digest: piece.chain for piece in self._at_place.values()}
        self._decoders = Decoders()
        self._lock = threading.Lock()
        self._seen: set[Digest] = set()
        self._chains: dict[Digest, tuple[ChainLink, ...]] = {}
        self._pointed: set[Digest] = set()
        self._stored: set[Digest] = set()
        self._small: dict[Digest, tuple[tuple[ChainLink, ...], str, bytes]] = {}
        self.new_bytes = 0
        self.num_nonfinite: Counter[str] = Counter()

    def store(self, cut: TensorSlice) -> Digest:
        """Store a piece, unless an equal one was or is being stored; returns the digest of its bytes."""
        content = bytes_of(cut.tensor)
        digest = digest_of(content.data)
        num_nonfinite = count_nonfinite(content, dtype_name(cut.tensor))
        with self._lock:
            self.num_nonfinite[cut.name] += num_nonfinite
            if digest in self._seen:
                return digest
            self._seen.add(digest)
        chain = self._find(digest, content.size)
        if chain is not None:
            self._chains[digest] = chain
        else:
            self._write(digest, *self._encode(cut, content))
        return digest

    def finish(self, order: Sequence[Digest]) -> Mapping[Digest, tuple[ChainLink, ...]]:
        """Store the small pieces, packed in the order in which they come; returns the chains of all pieces."""
        packs: list[list[Digest]] = []
        size = _PACK_BYTES
        for digest in dict.fromkeys(order):
            if digest in self._small:
                length = len(self._small[digest][2])
                if size + length > _PACK_BYTES:
                    packs.append([])
                    size = 0
                packs[-1].append(digest)
                size += length
        for pack in packs:
            self._write_pack(pack)
        self._batch.finish()
        # Afterwards: nothing points to an object that is not there.
        pointers = [(digest, chain) for digest, chain in self._chains.items() if digest in self._pointed]
        run_in_threads(lambda digest, chain: write_pointer(self._objects, digest, chain), pointers, _POINTERS_AT_ONCE)
        return self._chains

    def _find(self, digest: Digest, size: int) -> tuple[ChainLink, ...] | None:
        """Return the chain of an equal piece that is stored already, of the base or any model."""
        chain = self._of_base.get(digest)
        if chain is not None and self._is_there(chain):
            return chain
        if size < OWN_OBJECT_BYTES:
            return None
        if self._objects.reuse(ObjectInfo(digest, size)):
            self._batch.reuse(digest)
            return (ChainLink(digest, size, 0, size, "raw"),)
        return find_chain(self._objects, digest, size)

    def _encode(self, cut: TensorSlice, content: Bytes) -> tuple[tuple[ChainLink, ...], str, bytes | memoryview]:
        """Return the links that the piece follows on, its encoding and its encoded bytes: the smallest there is."""
        if self._codec == "none":
            return (), "raw", content.data
        word = planes.word_bytes(dtype_name(cut.tensor))
        base = self._base_of(cut, content.size)
        shares = planes.estimate_shares(content, word, base[1] if base else None)
        if base:
            piece, before = base
            encoding = min(("xor", "difference"), key=lambda each: shares[each])
            most = min(
                min(shares["planes"], 1) - _SAVED_BY_DIFFERENCE,
                _MAX_COST - _restore_cost(piece, content.size) - _LINK_COST,
            )
            if shares[encoding] <= most:
                stored = planes.encode(content, word, encoding, before)
                if len(stored) <= most * content.size:  # the sample may be wrong of the whole
                    return piece.chain, encoding, stored
        if planes.is_worthwhile(shares["planes"]):
            stored = planes.encode(content, word, "planes")
            if planes.is_worthwhile(len(stored) / content.size):
                return (), "planes", stored
        return (), "raw", content.data

    def _base_of(self, cut: TensorSlice, size: int) -> tuple[Chunk, Bytes] | None:
        """Return record and bytes of the piece that this one changes; None where a difference cannot be stored."""
        piece = self._at_place.get(cut.place)
        if self._codec != "delta" or piece is None or len(piece.chain) >= self._longest_chain:
            return None
        if _restore_cost(piece, size) + _LINK_COST > _MAX_COST:
            return None  # however small the difference is
        held = self._held.get(cut.place)
        if held is not None and self._is_there(piece.chain):
            content = bytes_of(held.tensor).copy()  # of a background save the training may overwrite it meanwhile
            if digest_of(content.data) == piece.digest:
                return piece, content
        try:
            dtype = dtype_name(cut.tensor)
            before = load_piece(self._source, dtype, piece, name=cut.name, decoders=self._decoders)
        except (CorruptDataError, NotFoundError):
            return None  # damage of an earlier version is not handed on: this one is stored in full
        return piece, bytes_of(before)

    def _is_there(self, chain: Sequence[ChainLink]) -> bool:
        """Return whether what the base's table names can be named again."""
        # Where the base lies here it is looked at: what was lost of it is stored again. A remote one is believed, so
        # its version must not be removed when the save begins: `gc` leaves it alone for longer than a save takes.
        return not self._objects.storage.is_local or all(self._objects.reuse(link.info) for link in chain)

    def _write(self, digest: Digest, chain: tuple[ChainLink, ...], encoding: str, stored: bytes | memoryview) -> None:
        if len(stored) < OWN_OBJECT_BYTES:
            self._small[digest] = (chain, encoding, bytes(stored))
            return
        info = ObjectInfo(digest if encoding == "raw" else digest_of(stored), len(stored))
        self._put(info, stored)
        self._chains[digest] = (*chain, ChainLink(info.digest, info.size_bytes, 0, info.size_bytes, encoding))
        if encoding != "raw":
            self._pointed.add(digest)

    def _write_pack(self, digests: Sequence[Digest]) -> None:
        content = b"".join(self._small[digest][2] for digest in digests)
        info = ObjectInfo(digest_of(content), len(content))
        self._put(info, content)
        offset = 0
        for digest in digests:
            chain, encoding, stored = self._small[digest]
            self._chains[digest] = (*chain, ChainLink(info.digest, info.size_bytes, offset, len(stored), encoding))
            offset += len(stored)

    def _put(self, info: ObjectInfo, content: bytes | memoryview) -> None:
        with self._lock:
            if info.digest in self._stored:
                return
            self._stored.add(info.digest)
        if self._objects.reuse(info):
            self._batch.reuse(info.digest)
            return
        self._batch.write(info, content)
        with self._lock:
            self.new_bytes += info.size_bytes


def _restore_cost(piece: Chunk, size: int) -> float:
    """Return what it costs to restore a piece of `size` bytes, over what it costs to read as many."""
    num_encoded = sum(link.encoding != "raw" for link in piece.chain)
    return piece.stored_bytes / size + num_encoded * _LINK_COST
