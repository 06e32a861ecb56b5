"""A unit of a listed source to its shard: read each file into the writer's buffer, check it there, digest it there.

Nothing is allocated per sample: a local file is read straight to where the shard is being put together. Remote files
are read ahead, a bounded number of bytes at once.
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
from datasvc.repository import Repository
from datasvc.repository.logs.journal import Journal
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.digests import digest_blob, digest_samples, encode_value
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, is_blob
from datasvc.shards.images.header import ImageHeader, read_header, reencode
from datasvc.shards.ingestion.build import IngestProgress, IngestWork, Report, ShardFinisher, ShardOutput, UnitResult
from datasvc.shards.ingestion.plan import IngestUnit
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.source import BadSample, ImageFile, printable

_READS_AHEAD: Final = 16
_BYTES_AHEAD: Final = 32 << 20
_REPORT_BYTES: Final = 4 << 20
_GIVEN: Final = frozenset({KEY, IMAGE, LABEL})

Content = bytes | memoryview
Room = Callable[[int], memoryview]


def build_listed(
    work: IngestWork, unit: IngestUnit, repository: Repository, journal: Journal, report: Report
) -> UnitResult:
    """Store the shard of `unit`; returns what came of it.

    Raises:
        SourceChangedError: a file is not what the listing said.
        NotFoundError, UnavailableError: the source or the repository failed.
    """
    bad: list[BadSample] = []
    with ShardFinisher(work, unit.number, repository, journal, records_shards=False) as finisher:
        output = finisher.open()
        adder = _SampleAdder(work, output)
        size_bytes = num_samples = 0
        room = partial(output.writer.blob_room, IMAGE)
        for file, content in _read_files(work.source.url, unit.files, room):
            try:
                adder.add(file, content)
            except BadSampleError as error:
                bad.append(BadSample(unit.split, printable(file.key), str(error)))
            size_bytes += file.size_bytes
            num_samples += 1
            if size_bytes >= _REPORT_BYTES:
                report(IngestProgress(num_samples, size_bytes))
                size_bytes = num_samples = 0
        if adder.num_samples:
            adder.close()
            finisher.add(unit.split, 0, output)
        result = finisher.finish(bad)
    report(IngestProgress(num_samples, size_bytes, len(result.shards)))
    return result


class _SampleAdder:
    """Checks the images of a shard and appends them to it.

    What need not be done while an image is in the processor's caches is done for all of a record batch at once, or
    of the shard.
    """

    def __init__(self, work: IngestWork, output: ShardOutput) -> None:
        self._output = output
        self._writer = output.writer
        self._decode = work.options.decode_check
        self._reencoding = work.options.reencoding if work.options.reencoding.is_asked else None
        self._has_label = LABEL in work.source.schema.names
        self._extra = {
            name: number
            for number, name in enumerate(name for name in work.source.schema.names if name not in _GIVEN)
        }
        self._other_blobs = _other_blobs(work.schema, self._extra)
        self._files: list[ImageFile] = []
        self._headers: list[ImageHeader] = []
        self._digests: list[bytes] = []
        self._num_written = 0

    @property
    def num_samples(self) -> int:
        """Images that were appended."""
        return len(self._files)

    def add(self, file: ImageFile, content: Content) -> None:
        """Append one image. Raises BadSampleError."""
        if not file.key.isascii() and printable(file.key) != file.key:
            raise BadSampleError("its name is not UTF-8: rename it")
        if self._reencoding is not None:
            content = reencode(content, self._reencoding) or content
        header = read_header(content, decode=self._decode)
        blobs = (content,) if self._other_blobs is None else self._blobs(file, content)
        digest = digest_blob(content)
        is_full = self._writer.append_blobs(*blobs)
        self._files.append(file)
        self._headers.append(header)
        self._digests.append(digest)
        if is_full:
            self._end_batch()

    def close(self) -> None:
        """Write what is left, and say in the output what its index holds of the samples."""
        self._end_batch()
        values = {
            name: [encode_value(value) for value in column]
            for name, column in self._values(self._files).items()
            if name != KEY
        }
        self._output.samples, self._output.payloads = digest_samples(len(self._files), {IMAGE: self._digests}, values)
        self._output.keys = [file.key for file in self._files]
        self._output.image_kinds.update([header.kind for header in self._headers])

    def _end_batch(self) -> None:
        start, self._num_written = self._num_written, len(self._files)
        headers = self._headers[start:]
        measured = {WIDTH: [header.width for header in headers], HEIGHT: [header.height for header in headers]}
        self._writer.end_batch({**self._values(self._files[start:]), **measured})

    def _values(self, files: Sequence[ImageFile]) -> dict[str, list[Any]]:
        """Return what the source says of files: column by column."""
        values: dict[str, list[Any]] = {KEY: [file.key for file in files]}
        if self._has_label:
            values[LABEL] = [file.label for file in files]
        return values | {name: [file.values[number] for file in files] for name, number in self._extra.items()}

    def _blobs(self, file: ImageFile, content: Content) -> tuple[Content | None, ...]:
        assert self._other_blobs is not None
        return tuple(content if number is None else file.values[number] for number in self._other_blobs)


def _other_blobs(schema: pa.Schema, extra: Mapping[str, int]) -> tuple[int | None, ...] | None:
    """Return which extra value each blob column holds, None for the image; None where that is the only one."""
    columns = [field.name for field in schema if is_blob(field.type)]
    return None if columns == [IMAGE] else tuple(extra.get(name) for name in columns)


def _read_files(url: str, files: Sequence[ImageFile], room: Room) -> Iterator[tuple[ImageFile, Content]]:
    """Yield every file with its content, in order; a content is valid until the next one is asked for."""
    reader = FileReader(url)
    if reader.is_local:
        for file in files:
            yield file, _read_local(file, room)
        return
    with ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="datasvc-read") as pool:
        under_way: deque[tuple[ImageFile, Future[bytes]]] = deque()
        ahead_bytes = 0
        for file in files:
            while under_way and (len(under_way) >= _READS_AHEAD or ahead_bytes + file.size_bytes > _BYTES_AHEAD):
                ahead_bytes -= under_way[0][0].size_bytes
                yield _checked(*under_way.popleft())
            under_way.append((file, pool.submit(reader.read, file.path)))
            ahead_bytes += file.size_bytes
        while under_way:
            yield _checked(*under_way.popleft())


def _checked(file: ImageFile, future: Future[bytes]) -> tuple[ImageFile, Content]:
    content = future.result()
    if len(content) != file.size_bytes:
        raise _changed(file, f"it had {file.size_bytes} bytes and has {len(content)} now")
    return file, content


def _read_local(file: ImageFile, room: Room) -> memoryview:
    """Read a file to where its blob will lie, and see that it is the one that was listed."""
    target = room(file.size_bytes)
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_size != file.size_bytes or (file.stamp and str(status.st_mtime_ns) != file.stamp):
                raise _changed(
                    file, f"it had {file.size_bytes} bytes when it was listed and has {status.st_size} now"
                )
            count = os.readv(descriptor, [target])
            while count < file.size_bytes:
                read = os.readv(descriptor, [target[count:]])
                if not read:
                    raise _changed(file, f"it ends after {count} of {file.size_bytes} bytes")
                count += read
        finally:
            os.close(descriptor)
    except OSError:
        with map_exceptions("read", printable(file.path)):
            raise
    return target


def _changed(file: ImageFile, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{printable(file.path)} changed while it was ingested: {how}; run the same command again once nothing "
        "writes to the source any more"
    )
