"""Writing tensors: cut into pieces, each stored once, in whichever encoding is smallest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunk_reader import ChunkSource, is_near
from datasvc.models.tensors.chunk_writer import CODECS, Codec, PieceWriter, TensorSlice
from datasvc.models.tensors.chunks import PIECE_BYTES, Shape, plan_pieces, slices
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, join_pieces
from datasvc.models.tensors.threads import run_in_threads
from datasvc.processors import count_processors
from datasvc.repository import Digest, Objects
from datasvc.repository.objects.batch import ObjectBatch

if TYPE_CHECKING:
    import torch

__all__ = [
    "CODECS",
    "MAX_CHAIN_LENGTH",
    "Codec",
    "StoredPieces",
    "StoredTensors",
    "TensorPiece",
    "check_storable",
    "store_pieces",
    "store_tensors",
]

MAX_CHAIN_LENGTH: Final = 8
# Each holds a piece several times, so many only take the caches and the memory from each other. Files are written to
# memory, and the disk is waited for by other threads; to a remote store some upload while others encode.
_NEAR_THREADS: Final = min(16, count_processors() + 1)
_THREADS: Final = max(8, min(16, count_processors()))


@dataclass(frozen=True)
class TensorPiece:
    """A block of a tensor in memory: what one rank holds of it, or all.

    Attributes:
        name: of the whole tensor, its dotted path in the state tree.
        start: first element of the block in the whole tensor.
        tensor: the block.
    """

    name: str
    start: Shape
    tensor: torch.Tensor


@dataclass(frozen=True)
class StoredPieces:
    """What a save wrote.

    Attributes:
        pieces: names of tensors and pieces of them, by name and start; see `tensor_table.join_pieces`.
        new_bytes: that were not in the repository before.
        num_nonfinite: NaN and infinities, by tensor; those that have none are left out.
    """

    pieces: list[tuple[str, Chunk]]
    new_bytes: int
    num_nonfinite: Mapping[str, int]


@dataclass(frozen=True)
class StoredTensors:
    """What a save of whole tensors wrote.

    Attributes:
        records: of the tensors, by name.
        new_bytes: that were not in the repository before.
        num_nonfinite: NaN and infinities, by tensor; those that have none are left out.
    """

    records: tuple[TensorRecord, ...]
    new_bytes: int
    num_nonfinite: Mapping[str, int]


def store_tensors(
    objects: Objects,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: Sequence[TensorRecord] = (),
    held: Mapping[str, torch.Tensor] | None = None,
    codec: Codec = "delta",
    source: ChunkSource | None = None,
    longest_chain: int = MAX_CHAIN_LENGTH,
    piece_bytes: int = PIECE_BYTES,
    report: Callable[[int], None] | None = None,
) -> StoredTensors:
    """Store every tensor. Equal pieces are stored once, over all versions of all models.

    Args:
        objects: where to.
        tensors: by name, dense, of any device; they must not change meanwhile.
        base: records of the version before, to whose pieces the new ones are stored as differences.
        held: tensors that may be those of `base`: where their bytes have its digests, it is not read.
        codec: "none" stores raw bytes, "planes" byte planes where these are smaller, "delta" also differences.
        source: where the base is read from, default `objects`.
        longest_chain: links of a piece; the next one is stored in full again.
        piece_bytes: largest piece.
        report: called with the bytes of each piece once it is stored, from any thread.

    Returns:
        The records; the caller stores their table and commits.

    Raises:
        ConfigError: a tensor has no raw bytes (sparse, quantised, meta), or there is no such codec; names it.
        UnavailableError: the store failed.
    """
    stored = store_pieces(
        objects,
        [TensorPiece(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()],
        base=base,
        held=[TensorPiece(name, (0,) * tensor.dim(), tensor) for name, tensor in (held or {}).items()],
        codec=codec,
        source=source,
        longest_chain=longest_chain,
        piece_bytes=piece_bytes,
        report=report,
    )
    pieces: dict[str, list[Chunk]] = {name: [] for name in sorted(tensors)}
    for name, piece in stored.pieces:
        pieces[name].append(piece)
    records = tuple(
        join_pieces(name, dtype_name(tensors[name]), tuple(tensors[name].shape), found)
        for name, found in pieces.items()
    )
    return StoredTensors(records, stored.new_bytes, stored.num_nonfinite)


def store_pieces(
    objects: Objects,
    pieces: Sequence[TensorPiece],
    *,
    base: Sequence[TensorRecord] = (),
    held: Sequence[TensorPiece] = (),
    codec: Codec = "delta",
    source: ChunkSource | None = None,
    longest_chain: int = MAX_CHAIN_LENGTH,
    piece_bytes: int = PIECE_BYTES,
    report: Callable[[int], None] | None = None,
) -> StoredPieces:
    """Store blocks of tensors, as one rank of a sharded save does; large ones are cut further.

    Arguments and errors are those of `store_tensors`. The shapes of whole tensors are the caller's to know: it joins
    the pieces of all ranks by `tensor_table.join_pieces`. A block without elements gives no piece.
    """
    if codec not in CODECS:
        raise ConfigError(f"there is no codec {codec!r}; there are {', '.join(CODECS)}")
    for piece in pieces:
        check_storable(piece.name, piece.tensor)
    cuts = sorted(_cut(pieces, piece_bytes), key=lambda cut: cut.place)
    own = {cut.place: cut for cut in _cut(held, piece_bytes)} if base else {}
    with ObjectBatch(objects) as batch:
        writer = PieceWriter(objects, batch, base, own, codec, source or objects, longest_chain)

        def store_one(cut: TensorSlice) -> Digest:
            digest = writer.store(cut)
            if report is not None:
                report(cut.nbytes)
            return digest

        arguments = [(cut,) for cut in cuts]
        if objects.is_near and (source is None or is_near(source)):
            digests = run_in_threads(store_one, arguments, _NEAR_THREADS, sizes=[cut.nbytes for cut in cuts])
        else:
            digests = run_in_threads(store_one, arguments, _THREADS)
        chains = writer.finish(digests)
    found = [
        (cut.name, Chunk(cut.start, cut.shape, digest, chains[digest]))
        for cut, digest in zip(cuts, digests, strict=True)
    ]
    return StoredPieces(found, writer.new_bytes, {name: n for name, n in sorted(writer.num_nonfinite.items()) if n})


def _cut(pieces: Sequence[TensorPiece], piece_bytes: int) -> list[TensorSlice]:
    """Return the pieces that blocks are stored as, views of them."""
    cuts = []
    for piece in pieces:
        for box in plan_pieces(tuple(piece.tensor.shape), piece.tensor.itemsize, piece_bytes=piece_bytes):
            start = tuple(a + b for a, b in zip(piece.start, box[0], strict=True))
            cuts.append(TensorSlice(piece.name, start, piece.tensor.detach()[slices(box)]))
    return cuts
