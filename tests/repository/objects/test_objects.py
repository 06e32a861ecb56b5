import io
import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import Objects, Storage
from datasvc.repository.objects.objects import digest_of, parse_digest
from datasvc.repository.store.obstore_loop import CancellationToken
from tests.cluster.store import FileStore
from tests.progress import RecordedProgress


@pytest.fixture
def objects(url):
    return Objects(Storage(url))


def test_equal_bytes_are_one_object_however_they_were_written(objects):
    info = objects.put(b"hello")
    with objects.writing() as sink:
        sink.write(b"hel")
        sink.write(memoryview(b"lo"))
    assert sink.info == info
    assert objects.read(info.digest) == b"hello"


def test_an_object_of_many_ranges_arrives_in_order(objects, monkeypatch):
    monkeypatch.setattr("datasvc.repository.objects.objects.RANGE_BYTES", 1000)
    content = os.urandom(12_345)
    info = objects.put(content)
    sink, progress = io.BytesIO(), RecordedProgress()
    objects.fetch(info.digest, info.size_bytes, sink, progress=progress)
    assert sink.getvalue() == content
    assert progress.total == len(content)


def test_a_writer_that_fails_leaves_no_object_and_no_temporary_file(tmp_path):
    objects = Objects(Storage(str(tmp_path)))
    with pytest.raises(RuntimeError), objects.writing() as sink:
        sink.write(b"half")
        raise RuntimeError
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_changed_byte_anywhere_is_an_error_and_never_data(tmp_path):
    objects = Objects(Storage(str(tmp_path)))
    content = os.urandom(100)
    info = objects.put(content)
    path = objects.local_path(info.digest)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(CorruptDataError, match="is corrupt"):
            objects.read(info.digest)
        with pytest.raises(CorruptDataError):
            objects.fetch(info.digest, info.size_bytes, io.BytesIO())


def test_a_truncated_object_is_corrupt_and_is_mended_by_the_next_put(tmp_path):
    objects = Objects(Storage(str(tmp_path)))
    info = objects.put(b"0123456789")
    objects.local_path(info.digest).write_bytes(b"01234")
    with pytest.raises(CorruptDataError):
        objects.fetch(info.digest, info.size_bytes, io.BytesIO())
    objects.put(b"0123456789")
    assert objects.read(info.digest) == b"0123456789"


@given(st.text(max_size=70).filter(lambda text: len(text) != 64))
def test_what_is_no_digest_is_refused_before_it_becomes_a_path(text):
    with pytest.raises(CorruptDataError, match="is not a digest"):
        parse_digest(text)


@pytest.mark.parametrize(
    "text",
    ["../" * 21 + "x", "A" * 64, "g" * 64, "0" * 63 + "\n", *("0" * 64 + tail for tail in ("/../../x", "0", "\n"))],
)
def test_names_of_other_characters_or_with_more_behind_a_digest_are_refused(text):
    with pytest.raises(CorruptDataError, match="is not a digest"):
        parse_digest(text)


@pytest.mark.parametrize("left", [0, 5, 2500])
def test_an_object_cut_short_in_any_store_is_corrupt_and_not_unavailable(objects, left, monkeypatch):
    monkeypatch.setattr("datasvc.repository.objects.objects.RANGE_BYTES", 1000)
    info = objects.put(os.urandom(5000))
    objects.storage.put_bytes(objects.path(info.digest), b"x" * left)
    with pytest.raises(CorruptDataError):
        objects.fetch(info.digest, info.size_bytes, io.BytesIO())
    with pytest.raises(CorruptDataError):
        objects.read(info.digest)


def test_a_store_that_fails_while_the_object_is_whole_is_unavailable_and_not_corrupt(objects, monkeypatch):
    info = objects.put(b"whole")

    def failing(*_arguments):
        raise UnavailableError("503")

    monkeypatch.setattr(objects.storage, "read_range", failing)
    with pytest.raises(UnavailableError, match="503"):
        objects.fetch(info.digest, info.size_bytes, io.BytesIO())


def test_an_object_that_is_there_is_not_written_again(objects, monkeypatch):
    info = objects.put(b"once")

    def refusing(*_arguments):
        raise AssertionError

    monkeypatch.setattr(objects.storage, "put_bytes", refusing)
    assert objects.put(b"once") == info


def test_a_range_is_exactly_the_bytes_that_were_requested(objects, monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.ranges._BLOCK_BYTES", 300)
    content = os.urandom(1000)
    info = objects.put(content)
    for offset, length in [(0, 1000), (0, 1), (17, 300), (999, 1), (500, 0)]:
        expected = content[offset : offset + length]
        assert objects.read_range(info.digest, offset, length) == expected
        assert stream(objects, info.digest, offset, length) == expected


@pytest.mark.parametrize("read", ["range", "stream"])
@pytest.mark.parametrize(("offset", "length"), [(0, 11), (9, 2), (10, 1), (5000, 4)])
def test_a_range_that_the_object_ends_before_is_corrupt(objects, read, offset, length, monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 0.001)
    info = objects.put(b"0123456789")
    with pytest.raises(CorruptDataError, match="is corrupt: 10 bytes long"):
        (objects.read_range if read == "range" else partial(stream, objects))(info.digest, offset, length)


def test_a_missing_object_is_not_found(objects):
    missing = digest_of(b"missing")
    for read in (
        lambda: objects.read(missing),
        lambda: objects.read_range(missing, 0, 10),
        lambda: stream(objects, missing, 0, 10),
    ):
        with pytest.raises(NotFoundError):
            read()


def test_a_range_is_read_into_memory_of_the_callers_and_one_that_is_not_there_is_damage(objects):
    content = os.urandom(1000)
    info = objects.put(content)
    assert objects.is_near == objects.storage.is_local
    out = bytearray(1002)
    objects.read_into(info.digest, 300, memoryview(out)[1:501])
    assert bytes(out) == b"\0" + content[300:800] + bytes(501)
    objects.read_into(info.digest, 1000, memoryview(out)[:0])
    with pytest.raises(CorruptDataError, match="1000 bytes long, expected at least 1002"):
        objects.read_into(info.digest, 0, memoryview(out))
    with pytest.raises(NotFoundError):
        objects.read_into(digest_of(b"missing"), 0, memoryview(out))


def test_an_answer_cut_short_while_the_object_is_whole_is_unavailable_and_not_corrupt(objects, monkeypatch):
    info = objects.put(b"0123456789")
    monkeypatch.setattr(objects.storage, "read_range", lambda _path, _offset, _length: b"01")
    with pytest.raises(UnavailableError, match="received 2 of 5 bytes"):
        objects.read_range(info.digest, 0, 5)


def stream(objects, digest, offset, length, interrupt=None):
    """Return what a stream of a range hands on."""
    pieces = bytearray()
    objects.stream_range(digest, offset, length, pieces.extend, interrupt or CancellationToken())
    return pieces


def test_a_stream_that_was_interrupted_is_unavailable(objects):
    info, interrupt = objects.put(b"0123456789"), CancellationToken()
    interrupt.set()
    with pytest.raises(UnavailableError, match="the read was cancelled"):
        stream(objects, info.digest, 0, 10, interrupt)


@pytest.mark.slow
def test_an_object_behind_a_web_server_streams_and_one_that_is_cut_short_there_is_corrupt(tmp_path):
    local = Objects(Storage(str(tmp_path)))
    content = os.urandom(100_000)
    info = local.put(content)
    with FileStore(tmp_path) as store:
        objects = Objects(Storage(store.url))
        assert objects.can_stream
        assert not local.can_stream
        assert stream(objects, info.digest, 10, 50_000) == content[10:50_010]
        local.local_path(info.digest).write_bytes(content[:20_000])
        for offset in (10, 20_000):
            with pytest.raises(CorruptDataError, match="is corrupt: 20000 bytes long"):
                stream(objects, info.digest, offset, 50_000)
        with pytest.raises(NotFoundError):
            stream(objects, digest_of(b"missing"), 0, 10)
