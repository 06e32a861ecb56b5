"""What a fetch relies on of every source of objects; each is a subclass of `ObjectSourceLaws` of a few lines."""

import threading

import pytest

from datasvc.cache.sources.origin_source import PART_BYTES
from datasvc.errors import NotFoundError
from datasvc.repository import ObjectInfo
from datasvc.repository.objects.objects import digest_of

CONTENT = bytes(range(251)) * (5 * PART_BYTES // 251)
INFO = ObjectInfo(digest_of(CONTENT), len(CONTENT))
MISSING = ObjectInfo(digest_of(b"missing"), 100)


class Received:
    """A sink: what came, and that each byte came once, and in order inside of each part."""

    def __init__(self):
        self.content = bytearray(len(CONTENT))
        self.spans = []
        self._lock = threading.Lock()

    def __call__(self, offset, view):
        with self._lock:
            self.content[offset : offset + len(view)] = view
            self.spans.append((offset, offset + len(view)))

    def check(self, start, stop):
        assert self.content[start:stop] == CONTENT[start:stop]
        ordered = sorted(self.spans)
        assert [begin for begin, _ in ordered] == [start, *(end for _, end in ordered[:-1])]
        assert ordered[-1][1] == stop
        by_part = {}
        for begin, end in self.spans:
            part = begin // PART_BYTES
            assert by_part.get(part, begin) == begin
            by_part[part] = end


class ObjectSourceLaws:
    """The laws of object sources. A subclass gives the fixture `open_source`: (info) to a source that has `INFO`."""

    kind = "origin"

    def test_all_bytes_come_once_and_parts_in_order(self, open_source):
        received = Received()
        open_source(INFO).stream(INFO, 0, len(CONTENT), received)
        received.check(0, len(CONTENT))

    @pytest.mark.parametrize(
        ("start", "length"), [(10, len(CONTENT) - 10), (0, 7), (PART_BYTES, 5), (PART_BYTES + 10, 3 * PART_BYTES)]
    )
    def test_a_range_brings_that_range(self, open_source, start, length):
        received = Received()
        open_source(INFO).stream(INFO, start, length, received)
        received.check(start, start + length)

    def test_an_object_that_it_lacks_is_not_found(self, open_source):
        received = Received()
        with pytest.raises(NotFoundError):
            open_source(MISSING).stream(MISSING, 0, 100, received)
        assert not received.spans

    def test_what_the_sink_raises_passes_through(self, open_source):
        def full(_offset, _view):
            raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space left"):
            open_source(INFO).stream(INFO, 0, len(CONTENT), full)

    def test_it_has_a_name_and_a_kind_and_outlives_a_wrong_digest(self, open_source):
        source = open_source(INFO)
        assert source.name
        assert source.kind == self.kind
        source.record_integrity(intact=False)
        source.record_integrity(intact=True)
