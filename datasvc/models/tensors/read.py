"""Reading tensors: every piece verified against its digest, in parallel, and only what is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVarTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunk_reader import ChunkSource, PieceReader, check_reaches, is_near
from datasvc.models.tensors.chunks import Shape, flat_offset, intersect, slices
from datasvc.models.tensors.codec import Bytes, Decoders
from datasvc.models.tensors.dtypes import bytes_of, dtype_name, is_plain, tensor_of
from datasvc.models.tensors.tensor_table import ITEM_BYTES, Chunk, TensorRecord
from datasvc.models.tensors.threads import run_in_threads
from datasvc.processors import count_processors
from datasvc.sizes import format_size

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkSource", "load_piece", "load_tensors", "load_window"]

_Arguments = TypeVarTuple("_Arguments")

# Remote stores want many requests at once. What lies on this machine comes fast: one thread more than there are
# processors reads while others decode; many only take the caches, and the interpreter, from each other.
_THREADS: Final = max(16, min(32, count_processors()))
_NEAR_THREADS: Final = min(32, count_processors() + 1)
_SMALL_BYTES: Final = 1 << 20


def load_tensors(
    source: ChunkSource,
    records: Iterable[TensorRecord],
    *,
    into: Mapping[str, torch.Tensor] | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Return tensors by name, in the order of `records`, every byte verified.

    Args:
        source: of their bytes.
        records: of the tensors that are wanted, from `read_table`.
        into: by name, tensors of the same shape and dtype, of any device and layout, to be filled and returned
            instead of new ones. After an error they may be filled in part.
        report: called with the bytes of each piece once it is there, from any thread.

    Returns:
        Tensors on the CPU, owned by the caller; or those of `into`.

    Raises:
        ConfigError: a tensor of `into` has another shape or dtype, or memory does not suffice; names it.
        CorruptDataError: no copy of a piece has the bytes that its digest says; names the tensor.
        NotFoundError: an object is missing; names the tensor.
        UnavailableError: the store did not answer.
    """
    wanted = list(records)
    for record in wanted:
        for piece in record.pieces:
            check_reaches(source, record.name, piece)
    targets = [_Target(record, (into or {}).get(record.name)) for record in wanted]
    reader = PieceReader(source, (piece for record in wanted for piece in record.pieces))

    def load_one(target: _Target, piece: Chunk) -> None:
        target.read(reader, piece)
        if report is not None:
            report(target.record.piece_bytes(piece))

    # Large ones first, so that no thread is left with one at the end; small ones as they lie in shared objects.
    in_order = sorted(targets, key=lambda target: -target.record.nbytes if target.record.nbytes > _SMALL_BYTES else 0)
    pieces = [(target, piece) for target in in_order for piece in target.record.pieces]
    read_in_threads(source, load_one, pieces, [target.record.piece_bytes(piece) for target, piece in pieces])
    return {target.record.name: target.tensor for target in targets}


def load_piece(
    source: ChunkSource, dtype: str, piece: Chunk, *, name: str = "", decoders: Decoders | None = None
) -> torch.Tensor:
    """Return one piece as a new tensor of its shape, verified.

    `name` is the tensor's, for messages; `decoders` are those of other pieces, of which many are loaded one by one.
    Raises as `load_tensors`.
    """
    check_reaches(source, name, piece)
    content = np.empty(_count(piece.shape) * ITEM_BYTES[dtype], np.uint8)
    PieceReader(source, [piece], decoders).read(name, piece, content)
    return tensor_of(content, dtype, piece.shape)


def load_window(source: ChunkSource, record: TensorRecord, start: Sequence[int], shape: Shape) -> torch.Tensor:
    """Return a block of a tensor as a new tensor, reading only the pieces that it meets, verified.

    Args:
        source: of the bytes.
        record: of the whole tensor.
        start: first element of the block.
        shape: its sizes.

    Raises:
        ConfigError: the block does not lie in the tensor.
        CorruptDataError, NotFoundError, UnavailableError: as `load_tensors`.
    """
    window = (tuple(start), tuple(shape))
    if not len(start) == len(shape) == len(record.shape) or any(
        s < 0 or n < 0 or s + n > most for s, n, most in zip(*window, record.shape, strict=True)
    ):
        raise ConfigError(f"tensor {record.name!r} of shape {record.shape} has no block {shape} at {tuple(start)}")
    block = _allocate(record.name, record.dtype, window[1])
    shared = [(piece, both) for piece in record.pieces if (both := intersect(piece.box, window)) is not None]
    reader = PieceReader(source, [piece for piece, _ in shared])

    def load_one(piece: Chunk, both: tuple[Shape, Shape]) -> None:
        check_reaches(source, record.name, piece)
        content = np.empty(record.piece_bytes(piece), np.uint8)
        reader.read(record.name, piece, content)
        found = tensor_of(content, record.dtype, piece.shape)
        block[slices(both, origin=window[0])] = found[slices(both, origin=piece.start)]

    read_in_threads(source, load_one, shared, [record.piece_bytes(piece) for piece, _ in shared])
    return block


def read_in_threads(
    source: ChunkSource,
    read: Callable[[*_Arguments], None],
    arguments: Sequence[tuple[*_Arguments]],
    sizes: Sequence[int],
) -> None:
    """Call `read` with each of `arguments`, in as many threads as a source is read best by.

    Args:
        source: that is read.
        read: reads one piece of it.
        arguments: of each call.
        sizes: of the pieces, in bytes.
    """
    if is_near(source):
        run_in_threads(read, arguments, _NEAR_THREADS, sizes=sizes)
    else:
        run_in_threads(read, arguments, _THREADS)


class _Target:
    """A tensor being loaded, its own memory or the caller's."""

    def __init__(self, record: TensorRecord, given: torch.Tensor | None) -> None:
        self.record = record
        if given is not None and (tuple(given.shape), dtype_name(given)) != (record.shape, record.dtype):
            raise ConfigError(
                f"tensor {record.name!r} is {record.dtype} of shape {record.shape}; it cannot be loaded into "
                f"{dtype_name(given)} of shape {tuple(given.shape)}"
            )
        self._given = None if given is None or is_plain(given) else given
        if given is not None and not record.pieces:
            self.tensor = given
        elif given is None or self._given is not None:
            self.tensor = _allocate(record.name, record.dtype, record.shape)
        else:
            self.tensor = given
        self._flat = bytes_of(self.tensor)
        self._num_left = len(record.pieces)
        self._lock = threading.Lock()

    def read(self, reader: PieceReader, piece: Chunk) -> None:
        """Fill the piece's part of the tensor."""
        size, item_bytes = self.record.piece_bytes(piece), ITEM_BYTES[self.record.dtype]
        offset = flat_offset(self.record.shape, piece.box)
        if offset is not None:
            reader.read(self.record.name, piece, self._flat[offset * item_bytes :][:size])
        else:
            content: Bytes = np.empty(size, np.uint8)
            reader.read(self.record.name, piece, content)
            self.tensor.detach()[slices(piece.box)] = tensor_of(content, self.record.dtype, piece.shape)
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last and self._given is not None:
            self._given.detach().copy_(self.tensor)
            self.tensor, self._flat = self._given, np.empty(0, np.uint8)  # what was between is not needed any more


def _allocate(name: str, dtype: str, shape: Shape) -> torch.Tensor:
    import torch

    try:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    except (RuntimeError, MemoryError) as error:
        size = format_size(_count(shape) * ITEM_BYTES[dtype])
        raise ConfigError(
            f"tensor {name!r} of shape {shape} needs {size}, which this machine does not give ({error}); restore a "
            "part of it, or on a larger machine"
        ) from error


def _count(shape: Shape) -> int:
    return int(np.prod(shape, dtype=object))
