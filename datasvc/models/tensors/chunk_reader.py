"""Reads chunks of tensors, for `read`, and verifies the decoded bytes of each chunk against its digest.

A chunk is stored as a chain of links. A link is a range of an object. The first link encodes a whole chunk, and each
further link a difference to the result so far. Links that are close together in an object are read in one request.
Objects are not verified at first: the digest of the chunk shows whether its decoded bytes are right. If they are not,
the links are read again, from copies of the objects that are verified as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeGuard, runtime_checkable

import numpy as np

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.tensors.codec import Bytes, Decoders
from datasvc.models.tensors.tensor_table import MAX_ENCODED_CHUNK_BYTES, ChainLink, Chunk
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of

_MAX_BYTES_AT_ONCE: Final = 8 << 20  # largest range of a request
# Largest gap between two links of one request. To read the gap costs less than another request.
_GAP_BYTES: Final = 64 << 10


class ChunkSource(Protocol):
    """A source of stored bytes: a repository's `Objects`, the node's cache, or several repositories with failover.

    Safe for threads. The bytes may be unverified: the caller verifies them, and calls `copies` if they are wrong.
    """

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes of an object from `offset`.

        Raises:
            NotFoundError: there is no copy of the object.
            CorruptDataError: the object ends before `offset + length`.
            UnavailableError: no copy can be read now.
        """

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """Yield the same range of every good copy, nearest first.

        A reader calls this after it has found damage. A copy is good if the whole object matches its digest.
        """

    def location(self, digest: Digest) -> str:
        """Return the location of the object, for messages."""


@runtime_checkable
class NearSource(ChunkSource, Protocol):
    """A source that may read from this machine's disks; `is_near` tells whether it does."""

    @property
    def is_near(self) -> bool:
        """Whether objects are on this machine. If so, a few threads read them into reused memory."""

    def read_into(self, digest: Digest, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of an object from `offset`. For errors see `read_range`."""


@dataclass
class _SharedRange:
    """The range `offset` to `stop` of an object, which contains one or several links, and is read in one request.

    `content` stays in memory from the first read of a link to the last. `num_left`: reads of links still to come.
    """

    object: Digest
    offset: int
    stop: int
    num_left: int = 0
    content: memoryview | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ChunkReader:
    """Reads a set of chunks that is given in advance. Safe for threads.

    Args:
        source: source of the bytes.
        chunks: chunks that will be read, once each.
        decoders: decoders shared with other readers; default: new ones.
    """

    def __init__(self, source: ChunkSource, chunks: Iterable[Chunk], decoders: Decoders | None = None) -> None:
        self._source = source
        self._near = source if is_near(source) else None
        self._shared_ranges = plan_shared_ranges(chunks)
        self._decoders = decoders or Decoders()

    def read(self, name: str, chunk: Chunk, out: Bytes) -> None:
        """Fill `out` with the verified bytes of a chunk.

        Args:
            name: name of the tensor, for messages.
            chunk: one of the reader's chunks.
            out: C-contiguous memory of the chunk's size, aligned to its elements; after an error it is invalid.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: see `read.load_tensors`.
        """
        try:
            self._fill(chunk, out)
        except NotFoundError as error:
            raise NotFoundError(f"tensor {name!r} is missing: {error}") from error
        except CorruptDataError:
            # Try the other copies below, as for bytes that do not match the digest.
            pass
        else:
            if digest_of(out.data) == chunk.digest:
                return
        self._fill_from_other_copies(name, chunk, out)

    def _fill(self, chunk: Chunk, out: Bytes) -> None:
        """Read and decode the links of a chunk into `out`, without verifying the result."""
        first, *differences = chunk.chain
        near = self._near
        if not differences and first.encoding == "raw" and first.is_whole_object:
            self._fill_raw(first, out)
        elif near is not None:
            stored: bytes | memoryview
            with self._decoders.borrow() as decoder:
                # Read a link only after the links before it are decoded, so that all use the same memory.
                for link in chunk.chain:
                    if link.is_whole_object:
                        stored = memory = decoder.memory(link.length).data
                        near.read_into(link.object, link.offset, memory)
                    else:
                        stored = self._read_link(link)
                    decoder.decode([(link.encoding, stored)], out)
        else:
            # Fetch all links first, so that no decoder is occupied during requests.
            links_read = [(link.encoding, self._read_link(link)) for link in chunk.chain]
            with self._decoders.borrow() as decoder:
                decoder.decode(links_read, out)

    def _fill_raw(self, link: ChainLink, out: Bytes) -> None:
        """Fill `out` with the bytes of a raw link: directly, or by requests of parts, which need little memory."""
        if self._near is not None:
            self._near.read_into(link.object, link.offset, out.data)
            return
        for offset in range(0, link.length, _MAX_BYTES_AT_ONCE):
            length = min(_MAX_BYTES_AT_ONCE, link.length - offset)
            content = self._source.read_range(link.object, link.offset + offset, length)
            out[offset : offset + length] = np.frombuffer(content, np.uint8)

    def _read_link(self, link: ChainLink) -> bytes | memoryview:
        """Return the bytes of a link, by a request of its own or from its shared range."""
        shared = self._shared_ranges.get((link.object, link.offset, link.length))
        if shared is None:
            return self._source.read_range(link.object, link.offset, link.length)
        with shared.lock:
            # Read the range for its first link, and free it after its last one, so that few ranges are in memory.
            if shared.content is None:
                length = shared.stop - shared.offset
                shared.content = memoryview(self._source.read_range(shared.object, shared.offset, length))
            content = shared.content
            shared.num_left -= 1
            if shared.num_left <= 0:
                shared.content = None
        return content[link.offset - shared.offset :][: link.length]

    def _fill_from_other_copies(self, name: str, chunk: Chunk, out: Bytes) -> None:
        """Fill `out` from good copies, until the result matches the chunk's digest. Raises CorruptDataError."""
        for links in self._good_copies(name, chunk):
            # If these links do not decode, try the next copies.
            with suppress(CorruptDataError), self._decoders.borrow() as decoder:
                decoder.decode(links, out)
                if digest_of(out.data) == chunk.digest:
                    return
        raise CorruptDataError(
            f"tensor {name!r} is corrupt: its objects match their digests, but do not decode to the bytes in its "
            "tensor table; restore another version"
        )

    def _good_copies(self, name: str, chunk: Chunk) -> Iterator[list[tuple[str, bytes | memoryview]]]:
        """Yield all links of a chunk, as pairs of encoding and bytes, once from each good copy of their objects.

        Begin with the first copy of every object. An object with fewer copies than others uses its last one again.
        """
        copies = [iter(self._source.copies(link.object, link.offset, link.length)) for link in chunk.chain]
        contents: list[bytes | memoryview] = []
        for link, copy in zip(chunk.chain, copies, strict=True):
            content = next(copy, None)
            if content is None:
                raise CorruptDataError(
                    f"tensor {name!r} is corrupt: the bytes in {self._source.location(link.object)} do not match "
                    "their digest; restore that object from another copy, or restore another version"
                )
            contents.append(content)
        while True:
            yield [(link.encoding, content) for link, content in zip(chunk.chain, contents, strict=True)]
            next_contents = [next(copy, None) for copy in copies]
            if all(content is None for content in next_contents):
                return
            contents = [old if new is None else new for old, new in zip(contents, next_contents, strict=True)]


def plan_shared_ranges(chunks: Iterable[Chunk]) -> dict[tuple[Digest, int, int], _SharedRange]:
    """Return the range to read for each link, by object, offset and length of the link.

    Links that are close together share one range. Links that are whole objects, or too long for a request, have none.
    """
    # Several chunks may have the same link, such as equal chunks of two tensors.
    num_links: dict[tuple[Digest, int, int], int] = {}
    for chunk in chunks:
        for link in chunk.chain:
            if not link.is_whole_object and link.length <= _MAX_BYTES_AT_ONCE:
                key = (link.object, link.offset, link.length)
                num_links[key] = num_links.get(key, 0) + 1
    shared_ranges: dict[tuple[Digest, int, int], _SharedRange] = {}
    shared: _SharedRange | None = None
    for key in sorted(num_links):
        digest, offset, length = key
        stop = offset + length
        # Begin a new range at another object, after a large gap, and where the range would become too long.
        if (
            shared is None
            or shared.object != digest
            or offset > shared.stop + _GAP_BYTES
            or stop > shared.offset + _MAX_BYTES_AT_ONCE
        ):
            shared = _SharedRange(digest, offset, stop)
        shared.stop = max(shared.stop, stop)
        shared.num_left += num_links[key]
        shared_ranges[key] = shared
    return shared_ranges


def is_near(source: ChunkSource) -> TypeGuard[NearSource]:
    """Return whether `source` reads from this machine's disks, so that `read_into` is fast."""
    return isinstance(source, NearSource) and source.is_near


def check_reaches(source: ChunkSource, name: str, chunk: Chunk) -> None:
    """Raise CorruptDataError if a large raw chunk extends beyond its object. For other errors see `read_range`.

    Call this before allocating memory of the size that a table claims. Chunks of at most `MAX_ENCODED_CHUNK_BYTES`
    cannot claim much memory and need no check; all encoded chunks are that small.
    """
    for link in chunk.chain:
        if link.length > MAX_ENCODED_CHUNK_BYTES:
            try:
                # The last byte exists only if the object has all bytes.
                source.read_range(link.object, link.offset + link.length - 1, 1)
            except NotFoundError as error:
                raise NotFoundError(f"tensor {name!r} is missing: {error}") from error
            except CorruptDataError as error:
                raise CorruptDataError(f"tensor {name!r} is corrupt: {error}") from error
