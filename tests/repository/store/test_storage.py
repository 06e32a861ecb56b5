"""One conformance suite for every kind of store."""

import pickle
import secrets
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datasvc.errors import ConfigError, ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.storage import redact_url


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
    with pytest.raises(NotFoundError, match="it does not exist"):
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
    with pytest.raises(UnknownOutcomeError, match="read the log before you try again"):
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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:secret@host/path?sig=secret", "https://host/path"),
        ("simplecache::s3://key:secret@bucket/x", "simplecache::s3://bucket/x"),
        ("zip://a.jpg::https://u:p@host/p.zip?token=secret", "zip://a.jpg::https://host/p.zip"),
        ("abfs://container@account/path", "abfs://container@account/path"),
        ("/plain/path?x", "/plain/path?x"),
    ],
)
def test_secrets_in_a_url_are_never_shown_or_stored(url, shown):
    assert redact_url(url) == shown


def test_a_create_that_may_not_be_read_back_has_an_unknown_outcome(remote):
    remote._fs = FlakyStore(remote._fs, writes=True)
    remote._fs.cat_file = lambda *_arguments, **_options: (_ for _ in ()).throw(PermissionError("expired"))
    with pytest.raises(UnknownOutcomeError, match="expired"):
        remote.create("expired", b"mine")


def test_a_path_below_a_file_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="a part of the path is a file"):
        Storage(str(tmp_path / "file")).put_bytes("a/b", b"x")


def test_a_create_that_the_store_acknowledged_but_lost_is_unavailable(remote, monkeypatch):
    monkeypatch.setattr(type(remote._fs), "pipe_file", lambda *_arguments, **_options: None)
    with pytest.raises(UnavailableError, match="it does not exist after the write"):
        remote.create("acknowledged-and-lost", b"mine")


def test_a_store_that_refuses_for_lack_of_rights_is_a_matter_of_settings(remote, monkeypatch):
    def refusing(*_arguments, **_options):
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(type(remote._fs), "cat_file", refusing)
    with pytest.raises(ConfigError, match=r"access denied .* check the credentials"):
        remote.read("anything")


def test_a_finished_file_of_another_file_system_is_copied_and_gone(tmp_path):
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    finished = shared / f"datasvc-test-{secrets.token_hex(8)}"
    finished.write_bytes(b"x" * 1000)
    try:
        storage = Storage(str(tmp_path))
        storage.adopt("objects/x", finished)
        assert storage.read("objects/x") == b"x" * 1000
        assert not finished.exists()
    finally:
        finished.unlink(missing_ok=True)


def test_what_another_client_writes_is_seen_at_once(storage):
    """Clients cache listings, and s3fs answers for sizes from them."""
    storage.put_bytes("log/1", b"x")
    assert (storage.list("log"), storage.size("log/1")) == (["1"], 1)
    other = Storage(storage.url)
    other._fs = type(storage._fs)(skip_instance_cache=True)
    other.put_bytes("log/1", b"longer")
    assert storage.size("log/1") == 6
    other.put_bytes("log/2", b"x")
    assert storage.list("log") == ["1", "2"]


def test_a_store_that_lists_the_folder_itself_gives_its_children_only(remote, monkeypatch):
    remote.put_bytes("marked/1", b"x")
    real = type(remote._fs).ls
    monkeypatch.setattr(type(remote._fs), "ls", lambda self, path, **options: [path, *real(self, path, **options)])
    assert remote.list("marked") == ["1"]


class ListingCache(MemoryFileSystem):
    """Keeps its files as memory does, and answers from listings that it has cached, as the driver of Azure does."""

    protocol = "listingcache"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("listingcache://", "memory://"))

    def ls(self, path, detail=True, **_options):
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self._ls_from_cache(path)  # raises where the folder above was listed without this one
            self.dircache[path] = super().ls(path, detail=True)
        found = self.dircache[path]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path, **_options):
        path = self._strip_protocol(path)
        cached = self._ls_from_cache(path)
        for entry in cached or ():
            if entry["name"] == path:
                return entry
        if cached is not None:
            return {"name": path, "size": None, "type": "directory"}
        return super().info(path)

    def invalidate_cache(self, path=None):
        if path is None:
            self.dircache.clear()
        else:
            self.dircache.pop(path, None)  # of this folder alone, not of those that it lies in


@pytest.fixture
def caching():
    """Two clients of one store, each with listings of its own; the second has its log's folder in its cache."""
    fsspec.register_implementation("listingcache", ListingCache, clobber=True)
    url = f"listingcache://{secrets.token_hex(8)}"
    writer, reader = Repository.create(url), Repository.open(url)
    assert writer.storage._fs is not reader.storage._fs
    writer.versions("models", "cnn").append(lambda _head: {})
    for folder in ("", "models", "models/cnn", "models/cnn/versions"):
        reader.storage._fs.ls(reader.storage._full(folder))
    return writer, reader


def test_a_driver_that_answers_from_cached_listings_sees_what_another_process_commits(caching):
    writer, reader = caching
    writer.versions("models", "cnn").append(lambda _head: {})
    writer.versions("models", "cnn").append(lambda _head: {})
    assert list(reader.versions("models", "cnn").numbers_after(1)) == [2, 3]
    assert reader.storage.size("models/cnn/versions/00000003.json") > 0
    assert reader.versions("models", "cnn").head() == 3


def test_a_folder_that_another_process_makes_is_seen_though_the_folder_above_was_listed(caching):
    writer, reader = caching
    writer.tag("models", "cnn@1", "prod")
    assert reader.tags("models", "cnn") == {"prod": 1}
    writer.versions("datasets", "pets").append(lambda _head: {})
    assert reader.names("datasets") == ["pets"]


def test_what_is_gone_or_was_never_there_has_no_size_whatever_was_listed(caching):
    writer, reader = caching
    assert reader.storage.size("models/cnn/versions/00000009.json") is None
    reader.storage._fs.ls(reader.storage._full("models/cnn/versions"))
    writer.storage._fs.rm_file(writer.storage._full("models/cnn/versions/00000001.json"))
    assert reader.storage.size("models/cnn/versions/00000001.json") is None


def test_threads_that_forget_one_listing_at_once_do_not_trip_over_each_other(caching, monkeypatch):
    """fsspec's cache of listings looks for a folder and then deletes it: of two threads one finds it gone."""
    _, reader = caching

    def losing(_driver, _path=None):
        raise KeyError("another thread was faster")

    monkeypatch.setattr(ListingCache, "invalidate_cache", losing)
    assert reader.storage.list("models") == ["cnn"]
