"""The origin of a repository with attached shards: one that is not stored is built from its file in place."""

from __future__ import annotations

import io
from typing import Any

from datasvc.cache.sources.origin_source import Kind, OriginSource, Sink
from datasvc.errors import NotFoundError
from datasvc.repository import ObjectInfo, Objects


class BuiltSource:
    """An `ObjectSource` that reads an object from the origin, or builds it if it was attached."""

    kind: Kind = "origin"

    def __init__(self, origin: OriginSource, objects: Objects) -> None:
        self._origin, self._objects = origin, objects
        self.name = origin.name

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """See `ObjectSource.stream`; also raises SourceChangedError, before the last bytes are passed on."""
        try:
            self._origin.stream(info, offset, length, sink)
        except NotFoundError:
            target = _RangeSink(offset, length, sink)
            if not self._objects.build(info.digest, target):
                raise
            target.flush()

    def record_integrity(self, *, intact: bool) -> None:
        """See `ObjectSource.record_integrity`."""
        self._origin.record_integrity(intact=intact)


class _RangeSink(io.BytesIO):
    """A file that passes on a range of what is written, each piece when the next one has come.

    So the last one is passed on only if `flush` is called, after the whole object was verified.
    """

    def __init__(self, offset: int, length: int, sink: Sink) -> None:
        super().__init__()
        self._start, self._stop, self._sink = offset, offset + length, sink
        self._position = 0
        self._held: tuple[int, bytes] | None = None

    def write(self, content: Any, /) -> int:
        view = memoryview(content).cast("B")
        begin = self._position
        self._position += len(view)
        start, stop = max(begin, self._start), min(begin + len(view), self._stop)
        if start < stop:
            self.flush()
            self._held = start, bytes(view[start - begin : stop - begin])
        return len(view)

    def flush(self) -> None:
        if self._held is not None:
            offset, content = self._held
            self._held = None
            self._sink(offset, memoryview(content))
