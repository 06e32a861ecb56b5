"""A unit of a listed source to its shard: read each file into the writer's buffer, check it there, digest it there.

Nothing is allocated per sample: a local file is read straight to where the shard is being put together. Remote files
are read ahead, a bounded number of bytes at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from datasvc.errors import BadSampleError, SourceChangedError
from datasvc.repository import Repository
from datasvc.repository.asking import translated
from datasvc.repository.journal import Journal
from datasvc.shards.build import Progress, Report, ShardFinisher, ShardOutput, UnitResult, Work
from datasvc.shards.digests import digest_blob, digest_samples, encode_value
from datasvc.shards.images import read_header, reencode
from datasvc.shards.plan import Unit
from datasvc.shards.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH
from datasvc.shards.sources.files import FileReader
from datasvc.shards.sources.source import BadSample, ImageFile, printable

_READS_AHEAD: Final = 16
_BYTES_AHEAD: Final = 32 << 20
_REPORT_BYTES: Final = 4 << 20
_GIVEN: Final = frozenset({KEY, IMAGE, LABEL})

Content = bytes | memoryview
Room = Callable[[int], memoryview]


def build_listed(work: Work, unit: Unit, repository: Repository, journal: Journal, report: Report) -> UnitResult:
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
                report(Progress(num_samples, size_bytes))
                size_bytes = num_samples = 0
        if adder.num_samples:
            adder.close()
            finisher.add(unit.split, 0, output)
        result = finisher.finish(bad)
    report(Progress(num_samples, size_bytes, len(result.shards)))
    return result


class _SampleAdder:
    """Checks the images of a shard and appends them to it.

    What need not be done while an image is in the processor's caches is done for all of them at the end.
    """

    def __init__(self, work: Work, output: ShardOutput) -> None:
        self._output = output
        self._writer = output.writer
        self._decode = work.options.decode_check
        self._reencoding = work.options.reencoding if work.options.reencoding.is_asked else None
        self._has_label = LABEL in work.source.schema.names
        self._extra = [name for name in work.source.schema.names if name not in _GIVEN]
        self._files: list[ImageFile] = []
        self._digests: list[bytes] = []
        self._kinds: list[str] = []

    @property
    def num_samples(self) -> int:
        """Images that were appended."""
        return len(self._files)

    def add(self, file: ImageFile, content: Content) -> None:
        """Append one image. Raises BadSampleError."""
        if printable(file.key) != file.key:
            raise BadSampleError("its name is not UTF-8: rename it")
        if self._reencoding is not None:
            content = reencode(content, self._reencoding) or content
        kind, width, height = read_header(content, decode=self._decode)
        sample: dict[str, Any] = {KEY: file.key, IMAGE: content, WIDTH: width, HEIGHT: height}
        if self._has_label:
            sample[LABEL] = file.label
        if self._extra:
            sample.update(zip(self._extra, file.values, strict=True))
        self._writer.append(sample)
        self._files.append(file)
        self._digests.append(digest_blob(content))
        self._kinds.append(kind)

    def close(self) -> None:
        """Say in the output what its index holds of the samples."""
        files = self._files
        values = {name: [file.values[number] for file in files] for number, name in enumerate(self._extra)}
        if self._has_label:
            values[LABEL] = [file.label for file in files]
        encoded = {name: [encode_value(value) for value in column] for name, column in values.items()}
        self._output.samples, self._output.payloads = digest_samples(len(files), {IMAGE: self._digests}, encoded)
        self._output.keys = [file.key for file in files]
        self._output.image_kinds.update(self._kinds)


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
        with translated("read", printable(file.path)):
            raise
    return target


def _changed(file: ImageFile, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{printable(file.path)} changed while it was ingested: {how}; run the same command again once nothing "
        "writes to the source any more"
    )
