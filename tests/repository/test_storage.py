"""One conformance suite for every kind of store."""

import pickle
import threading

import pytest

from datasvc.errors import ConfigError, ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from datasvc.repository import Storage


@pytest.fixture
def storage(url):
    return Storage(url)


def test_what_was_put_is_read_whole_and_in_ranges(storage):
    storage.put_bytes("a/b", b"0123456789")
    assert storage.read("a/b") == b"0123456789"
    assert storage.read_range("a/b", 3, 4) == b"3456"
    assert storage.read_range("a/b", 8, 10) == b"89"
    assert storage.size("a/b") == 10


def test_what_is_not_there_is_not_found_and_has_no_size(storage):
    with pytest.raises(NotFoundError, match="nothing is there"):
        storage.read("missing")
    with pytest.raises(NotFoundError):
        storage.read_range("missing", 0, 1)
    assert storage.size("missing") is None
    assert storage.list("missing") == []


def test_lists_are_sorted_names_and_see_what_was_just_written(storage):
    for name in ("b", "a", "c"):
        storage.put_bytes(f"folder/{name}", b"x")
    storage.put_bytes("folder/sub/deep", b"x")
    assert storage.list("folder") == ["a", "b", "c", "sub"]
    storage.put_bytes("folder/d", b"x")
    assert storage.list("folder") == ["a", "b", "c", "d", "sub"]


def test_a_child_named_like_its_folder_is_listed(storage):
    storage.put_bytes("tags/tags/1", b"x")
    assert storage.list("tags") == ["tags"]
    assert storage.list("tags/tags") == ["1"]


def test_create_writes_once_and_a_second_create_is_a_conflict(storage):
    storage.create("log/1", b"first")
    with pytest.raises(ConflictError, match="exists already"):
        storage.create("log/1", b"second")
    assert storage.read("log/1") == b"first"


def test_of_racing_creators_exactly_one_wins(storage):
    start, winners = threading.Barrier(6), []

    def create(number):
        start.wait()
        try:
            storage.create("log/1", b"%d" % number)
            winners.append(b"%d" % number)
        except ConflictError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert winners == [storage.read("log/1")]


def test_a_finished_file_is_adopted_and_gone(storage, tmp_path):
    finished = tmp_path / "finished"
    finished.write_bytes(b"x" * 100_000)
    storage.adopt("objects/x", finished)
    assert storage.read("objects/x") == b"x" * 100_000
    assert not finished.exists()


def test_a_storage_travels_to_another_process_as_its_url(storage):
    storage.put_bytes("a", b"x")
    if storage.url.startswith("memory"):
        pytest.skip("memory is not shared between processes")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"x"
    assert b"test" not in pickle.dumps(storage).replace(storage.url.encode(), b"")  # no credentials


class FlakyStore:
    """Stands between a Storage and its file system and fails `pipe_file` before or after it wrote."""

    def __init__(self, fs, *, writes, reads=True):
        self._fs, self._writes, self._reads = fs, writes, reads

    def __getattr__(self, name):
        return getattr(self._fs, name)

    def pipe_file(self, path, value, **options):
        if self._writes:
            self._fs.pipe_file(path, value, **options)
        raise OSError("connection reset")

    def cat_file(self, path, **options):
        if not self._reads:
            raise OSError("connection reset")
        return self._fs.cat_file(path, **options)


@pytest.fixture
def remote():
    return Storage("memory://flaky-store")


def test_a_create_whose_answer_was_lost_is_known_to_have_happened(remote):
    remote._fs = FlakyStore(remote._fs, writes=True)
    remote.create("lost-answer", b"mine")


def test_a_create_that_did_not_happen_is_unavailable(remote):
    remote._fs = FlakyStore(remote._fs, writes=False)
    with pytest.raises(UnavailableError, match="connection reset"):
        remote.create("never-written", b"mine")


def test_a_create_that_cannot_be_read_back_has_an_unknown_outcome(remote):
    remote._fs = FlakyStore(remote._fs, writes=True, reads=False)
    with pytest.raises(UnknownOutcomeError, match="look at the log"):
        remote.create("unknown", b"mine")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        Storage("nonsense://x")


def test_unfinished_files_of_a_killed_writer_are_not_listed(tmp_path):
    (tmp_path / ".tmp-0123").write_bytes(b"half")
    assert Storage(str(tmp_path)).list("") == []


def test_a_local_create_whose_last_sync_failed_is_not_reported_as_not_happened(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path / "store"))
    storage.create("log/1", b"first")

    def failing(_folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("datasvc.durable.fsync_folder", failing)
    with pytest.raises(UnknownOutcomeError, match="was created, but may not survive"):
        storage.create("log/2", b"second")
    assert storage.read("log/2") == b"second"
