"""What is larger than anything that belongs there is not read, on every kind of store."""

import os
import tracemalloc

import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Storage
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, Log


@pytest.fixture
def storage(url):
    return Storage(url)


@pytest.fixture
def tracing():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_as_much_as_may_be_there_is_read_and_a_byte_more_is_refused(storage):
    storage.put_bytes("a", b"0123456789")
    assert storage.read("a", 10) == b"0123456789"
    with pytest.raises(CorruptDataError, match="more than the 9 bytes"):
        storage.read("a", 9)
    storage.put_bytes("empty", b"")
    assert storage.read("empty", 10) == b""
    with pytest.raises(NotFoundError):
        storage.read("missing", 10)


def test_an_entry_that_is_too_large_is_refused_and_takes_little_memory(storage, tracing):
    log = Log(storage, "log")
    log.append(lambda _head: {"a": 1})
    path = storage.local_path(log.path_of(2))
    if path is not None:
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        storage.put_bytes(log.path_of(2), bytes(4 * MAX_ENTRY_BYTES))
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(CorruptDataError, match=rf"00000002\.json has more than the {MAX_ENTRY_BYTES} bytes"):
        log.read(2)
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < 3 * MAX_ENTRY_BYTES
    assert log.read(1).content["a"] == 1


def test_an_entry_that_nobody_would_read_is_not_written(tmp_path):
    log = Log(Storage(str(tmp_path)), "log")
    with pytest.raises(ConfigError, match=f"the limit is {MAX_ENTRY_BYTES}"):
        log.append(lambda _head: {"config": "x" * MAX_ENTRY_BYTES})
    assert log.numbers() == []
