"""Reading pieces: the links of their chains fetched, decoded, and checked against the piece's digest.

Links that lie beside each other in one object are read in one request. Where the bytes turn out to be wrong, the
source is asked for good copies of every link.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeGuard, runtime_checkable

import numpy as np

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.tensors.codec import Bytes, ChainDecoder, Decoders
from datasvc.models.tensors.tensor_table import MAX_ENCODED_PIECE_BYTES, ChainLink, Chunk
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of

_MAX_BYTES_AT_ONCE: Final = 8 << 20
# To read over a gap of this size costs less than another request.
_GAP_BYTES: Final = 64 << 10


class ChunkSource(Protocol):
    """Where stored bytes are read: a repository's `Objects`, the node's cache, several repositories in turn.

    Safe for threads. What it gives need not be verified: whoever loads checks it, and asks for other copies.
    """

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes of an object from `offset`.

        Raises:
            NotFoundError: no copy of the object is known.
            CorruptDataError: it ends before.
            UnavailableError: no copy could be read now.
        """

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """Yield the same range of every good copy there is, the nearest first.

        Asked after damage was found: a copy counts where the whole object has the digest that it is named by.
        """

    def location(self, digest: Digest) -> str:
        """Return where the object lies, for messages."""


@runtime_checkable
class NearSource(ChunkSource, Protocol):
    """A source whose bytes may lie on this machine."""

    @property
    def is_near(self) -> bool:
        """Whether they do: then they are read into memory that is used again, a few pieces at once."""

    def read_into(self, digest: Digest, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of an object from `offset`. Raises as `read_range`."""


@dataclass
class _SharedRange:
    """A range of an object that several links share. Kept in memory from its first use to its last."""

    object: Digest
    offset: int
    stop: int
    num_users: int = 0
    content: memoryview | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class PieceReader:
    """Reads pieces, each of which was announced. Safe for threads.

    Args:
        source: of the bytes.
        pieces: those that will be read, once each.
        decoders: that other readers use too; default: its own.
    """

    def __init__(self, source: ChunkSource, pieces: Iterable[Chunk], decoders: Decoders | None = None) -> None:
        self._source = source
        self._near = source if is_near(source) else None
        self._spans = plan_spans(link for piece in pieces for link in piece.chain)
        self._decoders = decoders or Decoders()

    def read(self, name: str, piece: Chunk, out: Bytes) -> None:
        """Fill `out`, which has the piece's size, with its verified bytes.

        Args:
            name: of the tensor, for messages.
            piece: announced before.
            out: C-contiguous, aligned to the elements. After an error it holds bytes not to be used.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: as `read.load_tensors`.
        """
        try:
            self._fill(piece, out)
        except NotFoundError as error:
            raise NotFoundError(f"tensor {name!r} is missing: {error}") from error
        except CorruptDataError:
            pass
        else:
            if digest_of(out.data) == piece.digest:
                return
        self._fill_from_other_copies(name, piece, out)

    def _fill(self, piece: Chunk, out: Bytes) -> None:
        (first, *more), near = piece.chain, self._near
        if not more and first.encoding == "raw" and first.is_whole_object:
            self._fill_raw(first, out)
        elif near is not None:
            with self._decoders.borrow() as decoder:
                links = ((link.encoding, self._read_near(near, link, decoder)) for link in piece.chain)
                decoder.decode(links, out)
        else:
            whole = [(link.encoding, self._read_link(link)) for link in piece.chain]
            with self._decoders.borrow() as decoder:
                decoder.decode(whole, out)

    def _fill_raw(self, link: ChainLink, out: Bytes) -> None:
        """Fill `out` with a raw link's bytes, needing little memory beside."""
        if self._near is not None:
            self._near.read_into(link.object, link.offset, out.data)
            return
        for offset in range(0, link.length, _MAX_BYTES_AT_ONCE):
            length = min(_MAX_BYTES_AT_ONCE, link.length - offset)
            content = self._source.read_range(link.object, link.offset + offset, length)
            out[offset : offset + length] = np.frombuffer(content, np.uint8)

    def _read_near(self, source: NearSource, link: ChainLink, decoder: ChainDecoder) -> bytes | memoryview:
        """Return a link's bytes, in memory of the decoder's where they are an object of their own."""
        if not link.is_whole_object:
            return self._read_link(link)
        content = decoder.memory(link.length)
        source.read_into(link.object, link.offset, content.data)
        return content.data

    def _read_link(self, link: ChainLink) -> bytes | memoryview:
        span = self._spans.get((link.object, link.offset, link.length))
        if span is None:
            return self._source.read_range(link.object, link.offset, link.length)
        with span.lock:
            if span.content is None:
                length = span.stop - span.offset
                span.content = memoryview(self._source.read_range(span.object, span.offset, length))
            content = span.content
            span.num_users -= 1
            if span.num_users <= 0:
                span.content = None
        return content[link.offset - span.offset :][: link.length]

    def _fill_from_other_copies(self, name: str, piece: Chunk, out: Bytes) -> None:
        for links in self._good_copies(name, piece):
            with suppress(CorruptDataError), self._decoders.borrow() as decoder:
                decoder.decode(links, out)
                if digest_of(out.data) == piece.digest:
                    return
        raise CorruptDataError(
            f"tensor {name!r} is corrupt: its objects are as they were stored, but are not what its table says; "
            "restore another version"
        )

    def _good_copies(self, name: str, piece: Chunk) -> Iterator[list[tuple[str, bytes | memoryview]]]:
        """Yield the piece's links from the first good copy of each, then from the next, while any has one."""
        copies = [iter(self._source.copies(link.object, link.offset, link.length)) for link in piece.chain]
        contents: list[bytes | memoryview] = []
        for link, copy in zip(piece.chain, copies, strict=True):
            content = next(copy, None)
            if content is None:
                raise CorruptDataError(
                    f"tensor {name!r} is corrupt: the bytes in {self._source.location(link.object)} do not match "
                    "their digest; restore that object from another copy, or restore another version"
                )
            contents.append(content)
        while True:
            yield [(link.encoding, content) for link, content in zip(piece.chain, contents, strict=True)]
            further = [next(copy, None) for copy in copies]
            if all(content is None for content in further):
                return
            contents = [old if new is None else new for old, new in zip(contents, further, strict=True)]


def plan_spans(links: Iterable[ChainLink]) -> dict[tuple[Digest, int, int], _SharedRange]:
    """Return which range to read for each link that shares its object, by the link's place."""
    places: dict[tuple[Digest, int, int], int] = {}
    for link in links:
        if not link.is_whole_object and link.length <= _MAX_BYTES_AT_ONCE:
            place = (link.object, link.offset, link.length)
            places[place] = places.get(place, 0) + 1
    spans: dict[tuple[Digest, int, int], _SharedRange] = {}
    span: _SharedRange | None = None
    for place in sorted(places):
        digest, offset, length = place
        stop = offset + length
        if (
            span is None
            or span.object != digest
            or offset > span.stop + _GAP_BYTES
            or stop > span.offset + _MAX_BYTES_AT_ONCE
        ):
            span = _SharedRange(digest, offset, stop)
        span.stop = max(span.stop, stop)
        span.num_users += places[place]
        spans[place] = span
    return spans


def is_near(source: ChunkSource) -> TypeGuard[NearSource]:
    """Return whether `read_into` gives what lies on this machine."""
    return isinstance(source, NearSource) and source.is_near


def check_reaches(source: ChunkSource, name: str, piece: Chunk) -> None:
    """Raise CorruptDataError where a piece of a size that only raw ones have is larger than what is stored.

    Asked before memory is allocated by what a table says. Raises NotFoundError, UnavailableError too.
    """
    for link in piece.chain:
        if link.length > MAX_ENCODED_PIECE_BYTES:
            try:
                source.read_range(link.object, link.offset + link.length - 1, 1)
            except NotFoundError as error:
                raise NotFoundError(f"tensor {name!r} is missing: {error}") from error
            except CorruptDataError as error:
                raise CorruptDataError(f"tensor {name!r} is corrupt: {error}") from error
