"""Immutable objects, each named by the BLAKE3 digest of its content.

Equal bytes are stored once. An object is complete before its name exists, so a reader finds a whole object or none.
A read of a whole object is verified against the digest: changed bytes raise CorruptDataError, and are not returned.
A read of a range cannot be verified by this digest: the caller must check the bytes.

An object that was attached is not stored: `size`, `read`, `fetch` and `build` find its recipe (`in_place`), and build
it from a file of its source. Ranges of it cannot be read.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NewType

from blake3 import blake3

from datasvc import durable
from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository.objects.in_place import build_object, read_recipes
from datasvc.repository.objects.intact import is_damage, is_known_intact, mark_intact, report_damage
from datasvc.repository.store.file_age import refresh_local
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import Take
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import Storage, too_large

Digest = NewType("Digest", str)
"""64 lower-case hex digits: the BLAKE3-256 of an object's bytes."""

_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
# Size of the parts of an object. They are requested in parallel: one request to a store transfers only 35-90 MB/s.
RANGE_BYTES = 8 << 20
# `read` first requests this many bytes, before the size is known. Only a larger object needs a request for its size.
_START_BYTES = 1 << 20
_MAX_PARALLEL_RANGES = 8
_WRITEBACK_BYTES = 8 << 20  # written bytes after which `ObjectWriter` starts their writeback to the disk
_HASH_BYTES = 1 << 20  # bytes of a file that are read and hashed at once


@dataclass(frozen=True)
class ObjectInfo:
    """Digest and size of an object."""

    digest: Digest
    size_bytes: int


def parse_digest(text: str) -> Digest:
    """Return `text` as a digest. Raise CorruptDataError: it is none, so it must not become part of a path."""
    if not _DIGEST_PATTERN.fullmatch(text):
        raise CorruptDataError(f"{text!r} is not a digest: expected 64 lower-case hex digits")
    return Digest(text)


def digest_of(content: bytes | memoryview) -> Digest:
    """Return the digest of `content`."""
    return Digest(blake3(content).hexdigest())


def digest_of_file(path: Path) -> Digest:
    """Return the digest of a local file's content. Raise OSError if it cannot be read."""
    hasher, buffer = blake3(), memoryview(bytearray(_HASH_BYTES))
    # Read instead of mmap: a failing disk then raises OSError, instead of ending the process by a bus error.
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            hasher.update(buffer[:length])
    return Digest(hasher.hexdigest())


class ObjectWriter:
    """Writes a new object to the temporary file `path`, and hashes it; see `Objects.writing` and `Objects.begin`.

    `is_local`: the file will be renamed to the object; otherwise it will be uploaded and removed.
    """

    def __init__(self, path: Path, *, is_local: bool) -> None:
        self.path = path
        self._is_local = is_local
        self._writeback_bytes = 0  # number of bytes, from the start of the file, whose writeback was started
        self._file = path.open("xb", buffering=0)
        self._hash = blake3()
        self._size_bytes = 0

    def write(self, content: bytes | memoryview) -> int:
        """Append `content` and return its length in bytes. Raises UnavailableError if the file cannot be written."""
        view = memoryview(content)
        self._hash.update(view)
        remaining = view.cast("B")
        with map_exceptions("write", str(self.path)):
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        self._size_bytes += view.nbytes
        new_bytes = self._size_bytes - self._writeback_bytes
        # Start writeback early, so that `sync` finds most bytes on the disk.
        if self._is_local and new_bytes >= _WRITEBACK_BYTES:
            durable.start_writeback(self._file.fileno(), self._writeback_bytes, new_bytes)
            self._writeback_bytes = self._size_bytes
        return view.nbytes

    def sync(self) -> None:
        """Sync the written bytes to the disk, and close the file. Raise OSError on failure."""
        with self._file:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file without a sync."""
        self._file.close()

    @property
    def info(self) -> ObjectInfo:
        """Digest and size of the bytes written so far."""
        return ObjectInfo(Digest(self._hash.hexdigest()), self._size_bytes)


class Objects:
    """Objects of one repository.

    Attributes:
        storage: file tree of the repository.
        is_near: whether the objects are on this machine, so that `read_into` needs no extra memory; part of the
            interface `NearSource` of `datasvc.models`.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.is_near = storage.is_local

    @staticmethod
    def path(digest: Digest) -> str:
        """Return the path of an object below the repository's root."""
        if not _DIGEST_PATTERN.fullmatch(digest):
            parse_digest(digest)  # raises: other text must not become part of a path
        return f"objects/{digest[:2]}/{digest}"

    def location(self, digest: Digest) -> str:
        """Return the full URL or local path of an object, for messages."""
        return self.storage.location(self.path(digest))

    def local_path(self, digest: Digest) -> Path | None:
        """Return the file of an object, or None if the repository is not local."""
        return self.storage.local_path(self.path(digest))

    def size(self, digest: Digest) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist. Raises UnavailableError."""
        size_bytes = self.storage.size(self.path(digest))
        recipes = read_recipes(self.storage, digest) if size_bytes is None else ()
        return int(recipes[0]["size_bytes"]) if recipes else size_bytes

    def build(self, digest: Digest, file: BinaryIO | None) -> bool:
        """Write an attached object to `file`, or check its file; False: it has no recipe. See `build_object`."""
        return build_object(self, digest, file)

    def reuse(self, info: ObjectInfo) -> bool:
        """Reset the age of an intact copy of the object, and return True; False: the caller must write the object.

        The new age keeps `gc` from deleting the object before the caller commits the entry that references it. The
        age of a remote object older than a day can be reset only by writing it again, so the result is False.

        The size is always compared. A local object that this process has not written is also hashed, once. A damaged
        or unreadable object is moved to `quarantine`, with a warning; the result is False. Raises UnavailableError.
        """
        path = self.local_path(info.digest)
        if path is None:
            return self.refresh(info)
        # Check this before the age is reset: only the old age shows whether the file was replaced.
        is_known = is_known_intact(path)
        if not refresh_local(path, info.size_bytes):
            return False
        if is_known:
            return True
        failure: OSError | None = None
        try:
            with map_exceptions("read", str(path)):
                try:
                    is_intact = digest_of_file(path) == info.digest
                except OSError as error:
                    if not is_damage(error):
                        raise
                    is_intact, failure = False, error
        except NotFoundError:  # another process has deleted the object since its age was reset
            return False
        if is_intact:
            mark_intact(path)
        else:
            repository_root = path.parents[2]  # `path` is ROOT/objects/ab/DIGEST
            report_damage(repository_root, path, failure)
        return is_intact

    def refresh(self, info: ObjectInfo) -> bool:
        """Like `reuse`, but compare only the size, for callers that cannot replace a damaged object."""
        return self.storage.refresh(self.path(info.digest), info.size_bytes)

    def put(self, content: bytes | memoryview) -> ObjectInfo:
        """Store `content`, unless an intact copy exists.

        Raises ConfigError (see `Storage.check_writable`) or UnavailableError.
        """
        view = memoryview(content)
        info = ObjectInfo(digest_of(view), view.nbytes)
        # A damaged copy is not reused: it is written again.
        if self.reuse(info):
            self._sync_name(info.digest)
        else:
            self.write(info, view)
        return info

    def write(self, info: ObjectInfo, content: bytes | memoryview) -> None:
        """Store an object that `reuse` has not found; `info` describes `content`. For errors, see `put`."""
        self.storage.check_writable()
        self.storage.put_bytes(self.path(info.digest), content)
        self.mark_intact(info.digest)

    def mark_intact(self, digest: Digest) -> None:
        """Remember that this process has written the object, so that `reuse` does not hash it."""
        path = self.local_path(digest)
        if path is not None:
            mark_intact(path)

    def _sync_name(self, digest: Digest) -> None:
        """Sync the folders of an existing object: another writer may have made its name without a sync yet."""
        path = self.local_path(digest)
        if path is not None:
            with map_exceptions("write", str(path)):
                durable.fsync_folder(path.parent)
                durable.fsync_folder(path.parent.parent)

    @contextmanager
    def writing(self) -> Iterator[ObjectWriter]:
        """Open a new object of any size, which is published under its digest when the block ends without an error.

        The bytes are written to a temporary file. It is then renamed if the repository is local, else uploaded in
        parts. After the block, `writer.info` is the object's digest and size. Raises UnavailableError.
        """
        writer = self.begin()
        try:
            with map_exceptions("write", str(writer.path)):
                yield writer
            self.finish(writer)
        finally:
            self.abandon(writer)

    def begin(self) -> ObjectWriter:
        """Open a new object, as `writing` does; the caller must call `finish`, from any thread, or `abandon`."""
        self.storage.check_writable()
        temporary = self._temporary_path()
        with map_exceptions("write", str(temporary)):
            return ObjectWriter(temporary, is_local=self.storage.is_local)

    def finish(self, writer: ObjectWriter) -> ObjectInfo:
        """Sync the object and publish it under its digest. Raises UnavailableError if the store failed."""
        with map_exceptions("write", str(writer.path)):
            writer.sync()
        info = writer.info
        # Equal bytes may be stored already; then the existing object stays, and the temporary file is removed.
        if self.reuse(info):
            self._sync_name(info.digest)
            writer.path.unlink()
        else:
            self.storage.adopt(self.path(info.digest), writer.path)
            self.mark_intact(info.digest)
        return info

    def abandon(self, writer: ObjectWriter) -> None:
        """Close the object and remove its temporary file; does nothing after `finish`."""
        writer.close()
        writer.path.unlink(missing_ok=True)

    def read(self, digest: Digest, max_bytes: int | None = None) -> bytes:
        """Return the verified bytes of an object; one that is larger than `max_bytes` is not read.

        Raises:
            NotFoundError: the object does not exist.
            CorruptDataError: its bytes do not match the digest, or it is too large.
            SourceChangedError: it was attached, and its file has changed.
            UnavailableError: the store does not respond.
        """
        try:
            return self._read_whole(digest, max_bytes)
        except CorruptDataError:
            if self.storage.is_local:
                raise
            return self._read_whole(digest, max_bytes)  # the transfer may have changed a bit: read once more
        except NotFoundError as error:
            sink = io.BytesIO()
            if self.build(digest, sink):
                return sink.getvalue()
            raise NotFoundError(f"object {self.location(digest)} is missing; restore it from another copy") from error

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of the object from `offset`, unverified: the caller checks the range.

        Raises:
            NotFoundError: the object does not exist.
            CorruptDataError: the object is shorter than `offset + length`.
            UnavailableError: the store does not respond, or returns fewer bytes than the object has.
        """
        assert offset >= 0, offset
        assert length >= 0, length
        if not length:
            return b""
        try:
            content = self.storage.read_range(self.path(digest), offset, length)
        except UnavailableError:
            # A store also reports an error if the range is beyond the end of the object. Then the object is damaged,
            # and another try would not help.
            self._check_reaches(digest, offset + length)
            raise
        if len(content) < length:
            self._check_reaches(digest, offset + length)
            raise UnavailableError(f"{self.location(digest)}: received {len(content)} of {length} bytes; try again")
        return content

    def read_into(self, digest: Digest, offset: int, out: memoryview) -> None:
        """Fill `out` with unverified bytes of the object from `offset`; for errors, see `read_range`."""
        if not self.storage.is_local:
            out[:] = self.read_range(digest, offset, len(out))
        elif self.storage.read_into(self.path(digest), offset, out) < len(out):
            self._check_reaches(digest, offset + len(out))
            raise UnavailableError(
                f"{self.location(digest)}: the file ended before {len(out)} bytes were read; try again"
            )

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[memoryview]:
        """Yield the range from the repository's only copy; nothing if the object is missing, damaged or too short.

        Other sources of objects yield the range from several copies.
        """
        with suppress(NotFoundError, CorruptDataError, UnavailableError):
            content = memoryview(self.read(digest))
            if len(content) >= offset + length:
                yield content[offset : offset + length]

    @property
    def can_stream(self) -> bool:
        """Whether the memory that `stream_range` needs does not depend on the length of the range."""
        return self.storage.can_stream

    def stream_range(
        self, digest: Digest, offset: int, length: int, take: Take, interrupt: CancellationToken
    ) -> None:
        """Pass exactly `length` unverified bytes of the object to `take` as they arrive, see `RangeReader.stream`.

        Raises the errors of `read_range`, and UnavailableError if `interrupt` has cancelled the read.
        """
        try:
            self.storage.stream_range(self.path(digest), offset, length, take, interrupt)
        except UnavailableError:
            # As in `read_range`, the object may be too short. A cancelled read gives no reason to check that.
            if not interrupt.is_set:
                self._check_reaches(digest, offset + length)
            raise

    def fetch(self, digest: Digest, size_bytes: int, file: BinaryIO, *, progress: Progress = NO_PROGRESS) -> None:
        """Copy the object into `file`, from its present position, by parallel ranged reads, and verify its digest.

        Raises:
            NotFoundError: the object does not exist.
            CorruptDataError, SourceChangedError: the bytes are truncated or changed; the caller must discard the
                content of `file`.
            UnavailableError: the store does not respond.
            OSError: `file` cannot be written.
        """
        hasher = blake3()
        try:
            for part in self._parts(digest, size_bytes):
                hasher.update(part)
                file.write(part)
                progress.advance(len(part))
        except UnavailableError:
            self._check_reaches(digest, size_bytes)  # as in `read_range`
            raise
        except NotFoundError:
            if not self.build(digest, file):
                raise
            progress.advance(size_bytes)
            return
        self._check_digest(digest, Digest(hasher.hexdigest()))

    def _read_whole(self, digest: Digest, max_bytes: int | None) -> bytes:
        """Return the verified bytes of an object, by one attempt. For errors, see `read`."""
        path = self.path(digest)
        content = self.storage.read_start(path, _START_BYTES)
        is_whole = len(content) < _START_BYTES
        # `or 0`: the object was deleted after the first request. `fetch` raises, as 0 bytes do not match the digest.
        size_bytes = len(content) if is_whole else self.storage.size(path) or 0
        if max_bytes is not None and size_bytes > max_bytes:
            raise too_large(self.location(digest), max_bytes)
        if is_whole:
            self._check_digest(digest, digest_of(content))
            return content
        sink = io.BytesIO()
        self.fetch(digest, size_bytes, sink)
        return sink.getvalue()

    def _parts(self, digest: Digest, size_bytes: int) -> Iterator[bytes]:
        """Yield the object's parts in order, with a bounded number of parallel requests."""
        path = self.path(digest)
        offsets = range(0, size_bytes, RANGE_BYTES)
        if self.storage.is_local or len(offsets) <= 1:
            for offset in offsets:
                yield self.storage.read_range(path, offset, min(RANGE_BYTES, size_bytes - offset))
            return
        with ThreadPoolExecutor(_MAX_PARALLEL_RANGES, thread_name_prefix="datasvc-range") as pool:
            # At most `_MAX_PARALLEL_RANGES` parts are in memory, however slowly the caller takes them.
            pending: deque[Future[bytes]] = deque()
            for offset in offsets:
                length = min(RANGE_BYTES, size_bytes - offset)
                pending.append(pool.submit(self.storage.read_range, path, offset, length))
                if len(pending) == _MAX_PARALLEL_RANGES:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _check_reaches(self, digest: Digest, size_bytes: int) -> None:
        """Raise CorruptDataError if the object is shorter than `size_bytes`."""
        actual_bytes = self.storage.size(self.path(digest))
        if actual_bytes is not None and actual_bytes < size_bytes:
            raise CorruptDataError(
                f"{self.location(digest)} is corrupt: {actual_bytes} bytes long, expected at least {size_bytes}; "
                "restore it from another copy"
            )

    def _check_digest(self, digest: Digest, actual: Digest) -> None:
        if actual != digest:
            raise CorruptDataError(
                f"{self.location(digest)} is corrupt: its bytes hash to {actual[:12]}..., expected {digest[:12]}...; "
                "restore this object from another copy of the repository"
            )

    def _temporary_path(self) -> Path:
        folder = self.storage.local_path("objects")
        if folder is None:
            folder = Path(tempfile.gettempdir())
        else:
            durable.make_folder(folder)
        return folder / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}"
