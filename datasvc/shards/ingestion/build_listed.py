"""Builds one unit of a listed source: reads, checks and digests each file, and appends it to the shard of the unit.

Each file of a listed source is one image or sound. A local file is read directly into the writer's buffer, so that it
is not copied unless it is encoded again. Remote files are read ahead into separate memory, up to a bounded number of
bytes, and then copied to the buffer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import BadSampleError, SourceChangedError
from datasvc.progress import Progress
from datasvc.repository import Repository
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.digests import digest_blob, digest_samples, encode_array
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, added_columns, is_blob
from datasvc.shards.images.header import ImageHeader
from datasvc.shards.ingestion.build import IngestWork, ShardFinisher, ShardOutput, UnitResult
from datasvc.shards.ingestion.media_check import CheckedMedia, check_media
from datasvc.shards.ingestion.plan import IngestUnit
from datasvc.shards.sources.common.file_checks import HEAD_BYTES, foreign_content
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.source import BadSample, ListedFile, ListedSource, printable

_MAX_READS_AHEAD: Final = 16
_MAX_BYTES_AHEAD: Final = 32 << 20
_REPORT_BYTES: Final = 4 << 20  # progress is reported after this many bytes

Content = bytes | memoryview
"""The bytes of a file."""
AllocateBuffer = Callable[[int], memoryview]
"""Returns a buffer of the given number of bytes; the next call may return the same memory again."""


def build_listed(work: IngestWork, unit: IngestUnit, repository: Repository, progress: Progress) -> UnitResult:
    """Store the shard of `unit` and return the result.

    Raises:
        SourceChangedError: a file differs from the listing.
        NotFoundError, UnavailableError: the source or the repository failed.
    """
    bad: list[BadSample] = []
    with ShardFinisher(work, unit, repository) as finisher:
        output = finisher.open()
        appender = _FileAppender(work, output)
        size_bytes = num_samples = 0  # since the last report of progress
        allocate = partial(output.writer.blob_buffer, appender.media.name)
        for file, content in _read_files(work.source.url, unit.files, allocate):
            try:
                appender.add(file, content)
            except BadSampleError as error:
                bad.append(BadSample(unit.split, printable(file.key), str(error)))
            size_bytes += file.size_bytes
            num_samples += 1
            if size_bytes >= _REPORT_BYTES:
                progress.advance(size_bytes, num_samples=num_samples)
                size_bytes = num_samples = 0
        if appender.num_samples:
            appender.close()
            finisher.add(unit.split, 0, output)
        result = finisher.finish(bad)
    progress.advance(size_bytes, num_samples=num_samples, num_shards=len(result.shards))
    return result


class _FileAppender:
    """Checks images or sounds and appends them to a shard.

    All steps for a file run directly after each other, while the file is in the CPU cache. Other columns are written
    once per record batch, and the sample index once per shard.
    """

    def __init__(self, work: IngestWork, output: ShardOutput) -> None:
        assert isinstance(work.source, ListedSource)
        self._complete = work.source.complete
        self._output = output
        self._writer = output.writer
        self._schema = work.schema
        self.media = work.source.media
        self._decode_check = work.options.decode_check
        self._reencoding = work.options.reencoding
        self._has_label = LABEL in work.source.schema.names
        extra_columns = [name for name in work.source.schema.names if name not in {KEY, LABEL, self.media.name}]
        # Position of each extra column in `ListedFile.values`.
        self._value_positions = {name: position for position, name in enumerate(extra_columns)}
        self._blob_sources = _blob_sources(work.schema, self.media.name, self._value_positions)
        self._files: list[ListedFile] = []
        self._checked: list[CheckedMedia] = []
        self._digests: list[bytes] = []
        self._num_written = 0  # number of files in complete record batches

    @property
    def num_samples(self) -> int:
        """Number of appended files."""
        return len(self._files)

    def add(self, file: ListedFile, content: Content) -> None:
        """Append one file. Raise BadSampleError if it is damaged, or its file name is not UTF-8."""
        # `printable` changes only a name that is not UTF-8. The test for ASCII is faster.
        if not file.key.isascii() and printable(file.key) != file.key:
            raise BadSampleError("its file name is not UTF-8: rename the file")
        try:
            checked = check_media(self.media, content, self._reencoding, decode=self._decode_check)
        except BadSampleError as error:
            reason = foreign_content(bytes(content[:HEAD_BYTES]))
            raise BadSampleError(f"is {reason}" if reason else str(error)) from error
        if self.media.name == IMAGE:
            width, height = map(int, checked.measured)
            file = self._complete(file, ImageHeader(checked.kind, width, height))
        content = checked.encoded or content  # `encoded` is None if the file stays unchanged
        blobs = (content,) if self._blob_sources is None else self._blobs(file, content)
        digest = digest_blob(content)
        is_batch_full = self._writer.append_blobs(*blobs)
        self._files.append(file)
        self._checked.append(checked)
        self._digests.append(digest)
        if is_batch_full:
            self._end_batch()

    def close(self) -> None:
        """Write the last record batch, and pass keys, digests and image kinds to the output."""
        self._end_batch()
        values = {
            name: encode_array(pa.array(column, self._schema.field(name).type))
            for name, column in self._values(self._files).items()
            if name != KEY
        }
        self._output.samples, self._output.payloads = digest_samples(
            len(self._files), {self.media.name: self._digests}, values
        )
        self._output.keys = [file.key for file in self._files]
        if self.media.name == IMAGE:
            self._output.image_kinds.update([checked.kind for checked in self._checked])

    def _end_batch(self) -> None:
        """Write a record batch of the files that were appended since the last one."""
        start, self._num_written = self._num_written, len(self._files)
        rows = zip(*(checked.measured for checked in self._checked[start:]), strict=True)
        measured = dict(zip(added_columns(self.media), map(list, rows), strict=False))
        self._writer.end_batch({**self._values(self._files[start:]), **measured})

    def _values(self, files: Sequence[ListedFile]) -> dict[str, list[Any]]:
        """Return the values that the source lists for the files, by column."""
        values: dict[str, list[Any]] = {KEY: [file.key for file in files]}
        if self._has_label:
            values[LABEL] = [file.label for file in files]
        return values | {
            name: [file.values[position] for file in files] for name, position in self._value_positions.items()
        }

    def _blobs(self, file: ListedFile, content: Content) -> tuple[Content | None, ...]:
        """Return the blobs of a file in the order of the columns: its content, and values that the source lists."""
        assert self._blob_sources is not None
        return tuple(content if position is None else file.values[position] for position in self._blob_sources)


def _blob_sources(schema: pa.Schema, media: str, value_positions: Mapping[str, int]) -> tuple[int | None, ...] | None:
    """Return each blob column's position in `ListedFile.values`; None for `media`, and if it is the only blob."""
    columns = [field.name for field in schema if is_blob(field.type)]
    if columns == [media]:
        return None
    return tuple(value_positions.get(name) for name in columns)  # `media` has no position


def _read_files(
    url: str, files: Sequence[ListedFile], allocate: AllocateBuffer
) -> Iterator[tuple[ListedFile, Content]]:
    """Yield every file with its content, in order. Each content is valid until the next file is requested."""
    reader = FileReader(url)
    if reader.is_local:
        for file in files:
            yield file, _read_local(file, allocate)
        return
    with ThreadPoolExecutor(_MAX_READS_AHEAD, thread_name_prefix="datasvc-read") as pool:
        pending: deque[tuple[ListedFile, Future[bytes]]] = deque()
        ahead_bytes = 0
        for file in files:
            # Both limits bound memory. A file that is larger than `_MAX_BYTES_AHEAD` is read alone.
            while pending and (len(pending) >= _MAX_READS_AHEAD or ahead_bytes + file.size_bytes > _MAX_BYTES_AHEAD):
                ahead_bytes -= pending[0][0].size_bytes
                yield _wait_for_read(*pending.popleft())
            pending.append((file, pool.submit(reader.read, file.path)))
            ahead_bytes += file.size_bytes
        while pending:
            yield _wait_for_read(*pending.popleft())


def _wait_for_read(file: ListedFile, future: Future[bytes]) -> tuple[ListedFile, Content]:
    """Return a remote file and its content. Raise SourceChangedError if its size differs from the listing."""
    # A change that keeps the size is found by a new listing at the end of the ingest.
    content = future.result()
    if len(content) != file.size_bytes:
        raise _changed(file, f"it had {file.size_bytes} bytes and now has {len(content)}")
    return file, content


def _read_local(file: ListedFile, allocate: AllocateBuffer) -> memoryview:
    """Read a file into the buffer of its blob. Raise SourceChangedError if it differs from the listing."""
    target = allocate(file.size_bytes)
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Check the open descriptor, not the path: another file may take the path before the read.
            status = os.fstat(descriptor)
            if status.st_size != file.size_bytes:
                raise _changed(
                    file, f"it had {file.size_bytes} bytes when it was listed and now has {status.st_size}"
                )
            if file.stamp and str(status.st_mtime_ns) != file.stamp:
                raise _changed(file, "its modification time changed after it was listed")
            read_bytes = os.readv(descriptor, [target])
            while read_bytes < file.size_bytes:
                more_bytes = os.readv(descriptor, [target[read_bytes:]])
                if not more_bytes:
                    raise _changed(file, f"it ends after {read_bytes} of {file.size_bytes} bytes")
                read_bytes += more_bytes
        finally:
            os.close(descriptor)
    except OSError:
        # Raise the error again inside `map_exceptions`, which translates it.
        with map_exceptions("read", printable(file.path)):
            raise
    return target


def _changed(file: ListedFile, detail: str) -> SourceChangedError:
    return SourceChangedError(
        f"{printable(file.path)} changed while it was ingested: {detail}; run the same command again when no process "
        "writes to the source any more"
    )
