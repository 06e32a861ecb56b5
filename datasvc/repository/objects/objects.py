"""Immutable objects named by the BLAKE3 digest of their content.

Equal bytes are one object. An object is complete before its name exists, so a reader sees all of it or nothing;
every read is checked against the name, so changed bytes are an error and never data.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NewType

from blake3 import blake3

from datasvc import durable
from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository.objects.intact import is_damage, is_known_intact, mark_intact, report_rot
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_stream import Take
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import Storage, check_size

Digest = NewType("Digest", str)
"""64 lower-case hex digits: the BLAKE3-256 of an object's bytes."""

_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
# One request to an object store gives some 35-90 MB/s: ask for parts side by side.
_RANGE_BYTES = 8 << 20
_RANGES_AT_ONCE = 8
_WRITEBACK_BYTES = 8 << 20
_HASH_BYTES = 1 << 20


@dataclass(frozen=True)
class ObjectInfo:
    """Name and size of an object."""

    digest: Digest
    size_bytes: int


def parse_digest(text: str) -> Digest:
    """Return `text` as a digest. Raises CorruptDataError when it is none: it may name a path."""
    if not _DIGEST_PATTERN.fullmatch(text):
        raise CorruptDataError(f"{text!r} is not a digest: expected 64 lower-case hex digits")
    return Digest(text)


def digest_of(content: bytes | memoryview) -> Digest:
    """Return the digest of `content`."""
    return Digest(blake3(content).hexdigest())


def digest_of_file(path: Path) -> Digest:
    """Return the digest of a local file's content. Raises OSError."""
    running, buffer = blake3(), memoryview(bytearray(_HASH_BYTES))
    # Read, not mapped: a disk that fails is an error then, and not the end of the process by a bus error.
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            running.update(buffer[:length])
    return Digest(running.hexdigest())


class ObjectWriter:
    """A growing object: a binary sink that hashes what passes through. Made by `Objects.writing` and `begin`.

    Args:
        path: the file that it grows in, which is not there yet.
        stays_here: the file will be renamed to the object; otherwise it is uploaded and removed.
    """

    def __init__(self, path: Path, *, stays_here: bool) -> None:
        self.path = path
        self._stays_here = stays_here
        self._started_bytes = 0
        self._file = path.open("xb", buffering=0)
        self._hash = blake3()
        self._size_bytes = 0

    def write(self, content: bytes | memoryview) -> int:
        """Append `content`; returns its length in bytes. Raises UnavailableError."""
        view = memoryview(content)
        self._hash.update(view)
        left = view.cast("B")
        with map_exceptions("write", str(self.path)):
            while left:
                left = left[self._file.write(left) :]
        self._size_bytes += view.nbytes
        if self._stays_here and self._size_bytes - self._started_bytes >= _WRITEBACK_BYTES:
            durable.start_writeback(self._file.fileno(), self._started_bytes, self._size_bytes - self._started_bytes)
            self._started_bytes = self._size_bytes
        return view.nbytes

    def sync(self) -> None:
        """Make what was written survive a power cut, and close the file. Raises OSError."""
        with self._file:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    @property
    def info(self) -> ObjectInfo:
        """Name and size of what was written so far."""
        return ObjectInfo(Digest(self._hash.hexdigest()), self._size_bytes)


class Objects:
    """The objects of one repository.

    Args:
        storage: the repository's tree.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def storage(self) -> Storage:
        """The repository's tree."""
        return self._storage

    @staticmethod
    def path(digest: Digest) -> str:
        """Return where the object lies below the repository's root."""
        return f"objects/{digest[:2]}/{parse_digest(digest)}"

    def location(self, digest: Digest) -> str:
        """Return the object's full URL or local path, for messages."""
        return self._storage.location(self.path(digest))

    def local_path(self, digest: Digest) -> Path | None:
        """Return the object's file when the repository lies on this machine, else None."""
        return self._storage.local_path(self.path(digest))

    def size(self, digest: Digest) -> int | None:
        """Return the stored size in bytes, None where the repository lacks the object. Raises UnavailableError."""
        return self._storage.size(self.path(digest))

    def reuse(self, info: ObjectInfo) -> bool:
        """Return whether the object is there already, whole, so that an entry may name it without writing it again.

        It then counts as new: `gc` would otherwise remove an old object that nothing names yet in the time until
        the entry that names it is committed. False also where it cannot be made to count as new without writing it
        again, as remote objects that are older than a day. A size that differs is damage: write it again rather
        than trust it. So are other bytes of the same size: a local object that this process has not written is read
        and hashed, once. One that the disk cannot read is damage too. What is bad is kept in the quarantine, with a
        warning.

        Raises UnavailableError.
        """
        path = self.local_path(info.digest)
        if path is None or is_known_intact(path):
            return self.refresh(info)
        if not self.refresh(info):
            return False
        failure: OSError | None = None
        try:
            with map_exceptions("read", str(path)):
                try:
                    is_intact = digest_of_file(path) == info.digest
                except OSError as error:
                    if not is_damage(error):
                        raise
                    is_intact, failure = False, error
        except NotFoundError:
            return False
        if is_intact:
            mark_intact(path)
        else:
            report_rot(path.parents[2], path, failure)
        return is_intact

    def refresh(self, info: ObjectInfo) -> bool:
        """Do the same as `reuse`, and compare the size alone: for those that do not have the right bytes in hand."""
        return self._storage.refresh(self.path(info.digest), info.size_bytes)

    def put(self, content: bytes | memoryview) -> ObjectInfo:
        """Store `content`; an object that exists already is not written again. Raises UnavailableError."""
        view = memoryview(content)
        info = ObjectInfo(digest_of(view), view.nbytes)
        if self.reuse(info):
            self._sync_name(info.digest)
        else:
            self.write(info, view)
        return info

    def write(self, info: ObjectInfo, content: bytes | memoryview) -> None:
        """Store `content`, which has that digest and size and cannot be reused.

        Raises:
            ConfigError: see `Storage.check_writable`.
            UnavailableError: the store failed.
        """
        self._storage.check_writable()
        self._storage.put_bytes(self.path(info.digest), content)
        self.mark_intact(info.digest)

    def mark_intact(self, digest: Digest) -> None:
        """Remember that this process has written the object: `reuse` need not read it."""
        path = self.local_path(digest)
        if path is not None:
            mark_intact(path)

    def _sync_name(self, digest: Digest) -> None:
        """Let the name of an object that is there survive a power cut: another writer may have just renamed it."""
        path = self.local_path(digest)
        if path is not None:
            with map_exceptions("write", str(path)):
                durable.fsync_folder(path.parent)
                durable.fsync_folder(path.parent.parent)

    @contextmanager
    def writing(self) -> Iterator[ObjectWriter]:
        """Open a new object of any size; it exists under its digest once the block ends well.

        Written once: straight into the repository's folder when that is local, else to a temporary file that
        is uploaded in parts. After the block `writer.info` names the object. Raises UnavailableError.
        """
        writer = self.begin()
        try:
            with map_exceptions("write", str(writer.path)):
                yield writer
            self.finish(writer)
        finally:
            self.abandon(writer)

    def begin(self) -> ObjectWriter:
        """Open a new object, as `writing` does; `finish` it from any thread, or `abandon` it."""
        self._storage.check_writable()
        temporary = self._temporary_path()
        with map_exceptions("write", str(temporary)):
            return ObjectWriter(temporary, stays_here=self._storage.is_local)

    def finish(self, writer: ObjectWriter) -> ObjectInfo:
        """Sync the object and let it exist under its digest. Raises UnavailableError."""
        with map_exceptions("write", str(writer.path)):
            writer.sync()
        info = writer.info
        if self.reuse(info):
            self._sync_name(info.digest)
            writer.path.unlink()
        else:
            self._storage.adopt(self.path(info.digest), writer.path)
            self.mark_intact(info.digest)
        return info

    def abandon(self, writer: ObjectWriter) -> None:
        """Close the object and remove what is not finished of it; after `finish` this does nothing."""
        writer.close()
        writer.path.unlink(missing_ok=True)

    def read(self, digest: Digest, most_bytes: int | None = None) -> bytes:
        """Return the object's bytes, verified.

        Args:
            digest: the object.
            most_bytes: that any such object has; None for any number. A larger one is refused before it is read.

        Raises:
            NotFoundError: the repository lacks the object.
            CorruptDataError: its bytes differ from its name, or are too many.
            UnavailableError: the store did not answer.
        """
        size_bytes = self._storage.size(self.path(digest))
        if size_bytes is None:
            raise NotFoundError(f"object {self.location(digest)} is missing; restore it from another copy")
        check_size(self.location(digest), size_bytes, most_bytes)
        try:
            return self._fetch_whole(digest, size_bytes)
        except CorruptDataError:
            if self._storage.is_local:
                raise
            return self._fetch_whole(digest, size_bytes)  # a bit that flipped on the way does not do so twice

    def read_unverified(self, digest: Digest) -> bytes:
        """Return whatever bytes lie under the name: to find out what damage hit, never to use them."""
        return self._storage.read(self.path(digest))

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of the object from `offset`; the caller checks them by a digest of its own.

        Raises:
            NotFoundError: the repository lacks the object.
            CorruptDataError: the object ends before.
            UnavailableError: the store did not answer, or with less than it has.
        """
        assert offset >= 0, offset
        assert length >= 0, length
        if not length:
            return b""
        try:
            content = self._storage.read_range(self.path(digest), offset, length)
        except UnavailableError:
            self._check_reaches(digest, offset + length)
            raise
        if len(content) < length:
            self._check_reaches(digest, offset + length)
            raise UnavailableError(f"{self.location(digest)}: {len(content)} of {length} bytes came; try again")
        return content

    @property
    def is_near(self) -> bool:
        """Whether objects lie on this machine, so that `read_into` costs no memory."""
        return self._storage.is_local

    def read_into(self, digest: Digest, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of the object from `offset`. They are unverified, and it raises, as `read_range`."""
        if not self._storage.is_local:
            out[:] = self.read_range(digest, offset, len(out))
        elif self._storage.read_into(self.path(digest), offset, out) < len(out):
            self._check_reaches(digest, offset + len(out))
            raise UnavailableError(f"{self.location(digest)}: it ended before {len(out)} bytes came; try again")

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[memoryview]:
        """Yield what `read_range` gives, if the whole object is what its name says; nothing where that is not so."""
        with suppress(NotFoundError, CorruptDataError, UnavailableError):
            content = memoryview(self.read(digest))
            if len(content) >= offset + length:
                yield content[offset : offset + length]

    @property
    def can_stream(self) -> bool:
        """Whether `stream_range` needs little memory, however long the range."""
        return self._storage.can_stream

    def stream_range(
        self, digest: Digest, offset: int, length: int, take: Take, interrupt: CancellationToken
    ) -> None:
        """Hand exactly `length` bytes of the object from `offset` to `take` as they arrive, in order, unverified.

        Args:
            digest: the object.
            offset: in it.
            length: in bytes.
            take: called from this thread; its view is valid during the call, and what it raises passes through.
            interrupt: ends it.

        Raises:
            NotFoundError, CorruptDataError: as `read_range`.
            UnavailableError: likewise, and soon after it was interrupted.
        """
        try:
            self._storage.stream_range(self.path(digest), offset, length, take, interrupt)
        except UnavailableError:
            if not interrupt.is_set:
                self._check_reaches(digest, offset + length)
            raise

    def fetch(
        self, digest: Digest, size_bytes: int, file: BinaryIO, *, report: Callable[[int], None] | None = None
    ) -> None:
        """Copy the object into `file` by parallel ranged reads, hashing on the way.

        Args:
            digest: the object.
            size_bytes: its size, as its table says.
            file: open for writing, positioned where the object shall start.
            report: called with the bytes of each part as it is written.

        Raises:
            NotFoundError: the repository lacks the object.
            CorruptDataError: truncated or changed on the way or at rest; `file` holds bytes not to be used.
            UnavailableError: the store did not answer.
            OSError: `file` could not be written.
        """
        running = blake3()
        try:
            for part in self._parts(digest, size_bytes):
                running.update(part)
                file.write(part)
                if report is not None:
                    report(len(part))
        except UnavailableError:
            self._check_reaches(digest, size_bytes)
            raise
        found = Digest(running.hexdigest())
        if found != digest:
            raise CorruptDataError(_mismatch(self.location(digest), digest, found))

    def _fetch_whole(self, digest: Digest, size_bytes: int) -> bytes:
        sink = io.BytesIO()
        self.fetch(digest, size_bytes, sink)
        return sink.getvalue()

    def _parts(self, digest: Digest, size_bytes: int) -> Iterator[bytes]:
        """Yield the object's parts in order, keeping a bounded number of requests under way."""
        path = self.path(digest)
        offsets = range(0, size_bytes, _RANGE_BYTES)
        if self._storage.is_local or len(offsets) <= 1:
            for offset in offsets:
                yield self._storage.read_range(path, offset, min(_RANGE_BYTES, size_bytes - offset))
            return
        with ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix="datasvc-range") as pool:
            under_way: deque[Future[bytes]] = deque()
            for offset in offsets:
                length = min(_RANGE_BYTES, size_bytes - offset)
                under_way.append(pool.submit(self._storage.read_range, path, offset, length))
                if len(under_way) == _RANGES_AT_ONCE:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()

    def _check_reaches(self, digest: Digest, size_bytes: int) -> None:
        """Raise CorruptDataError where the object is shorter: stores answer a range behind the end with an error."""
        stored = self._storage.size(self.path(digest))
        if stored is not None and stored < size_bytes:
            raise CorruptDataError(
                f"{self.location(digest)} is corrupt: {stored} bytes long, expected at least {size_bytes}; restore "
                "it from another copy"
            )

    def _temporary_path(self) -> Path:
        folder = self._storage.local_path("objects")
        if folder is None:
            folder = Path(tempfile.gettempdir())
        else:
            durable.make_folder(folder)
        return folder / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def _mismatch(location: str, expected: Digest, found: Digest) -> str:
    return (
        f"{location} is corrupt: its bytes hash to {found[:12]}..., its name says {expected[:12]}...; "
        "restore this object from another copy of the repository"
    )
