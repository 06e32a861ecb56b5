"""What `Storage` does on every store; each kind of store is a subclass of `StoreLaws` of a few lines."""

import pickle
import secrets
import threading
import time
from datetime import UTC, datetime

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datasvc.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import ObjectInfo, Objects, Storage
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.file_age import REWRITE_S
from datasvc.repository.store.obstore_loop import CancellationToken

HOUR = 3600
ODD_NAMES = ("%41", "a b", "a+b", "ключ", "x" * 200, "é#1?", "~", "[1]", "{a,b}")


def another_client(storage):
    """Return a storage of the same URL whose client has cached nothing, as that of another process."""
    if storage.client != "obstore":  # whose clients have no cache
        fsspec.core.url_to_fs(storage.url)[0].clear_instance_cache()
    return Storage(storage.url)


def cache_listings(driver, folder):
    """Have a driver list and look up all that it may answer from later."""
    for folder_or_above in (folder.rpartition("/")[0], folder):
        driver.ls(folder_or_above, detail=True)
    driver.find(folder)
    driver.info(f"{folder}/1")


def make_memory_file_old(storage, path, age_s):
    """Set the time of the last change of a file in memory back."""
    _, name = fsspec.core.url_to_fs(f"{storage.url}/{path}")
    MemoryFileSystem.store[name].created = datetime.fromtimestamp(time.time() - age_s, UTC)


class StoreLaws:
    """The laws of stores. A subclass gives a fixture `url`, an empty folder, and says what its store lacks."""

    # The fixture of a bucket in which `url` is a folder, unless a subclass has a fixture `url` of its own.
    place = ""
    is_shared_with_processes = True
    odd_names = ODD_NAMES
    # Whether its driver, as fsspec opens it, answers from listings that it has cached.
    caches_listings = False
    # Whether a driver of fsspec reaches the store too.
    has_driver = True
    # What `Storage.client` says; None: it does not matter.
    client = None
    # Sets the time of a file's last change back: (storage, path, age_s). None: nobody can, as on S3.
    make_old = None

    @pytest.fixture
    def url(self, request):
        return f"{request.getfixturevalue(self.place)}/{secrets.token_hex(8)}"

    @pytest.fixture
    def storage(self, url):
        return Storage(url)

    def test_the_store_is_reached_by_the_client_that_is_meant(self, storage):
        if self.client is not None:
            assert storage.client == self.client

    def test_what_was_put_is_read_whole_and_in_ranges(self, storage):
        storage.put_bytes("a/b", b"0123456789")
        assert storage.read("a/b") == b"0123456789"
        assert storage.read_range("a/b", 3, 4) == b"3456"
        assert storage.read_range("a/b", 8, 10) == b"89"
        assert storage.size("a/b") == 10

    def test_a_put_replaces_the_file_and_an_empty_one_is_there(self, storage):
        for content in (b"longer than the next", b"short", b""):
            storage.put_bytes("a", content)
            assert (storage.read("a"), storage.size("a"), storage.list("")) == (content, len(content), ["a"])

    def test_a_large_file_comes_back_in_any_pieces(self, storage, monkeypatch):
        monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 0.001)
        content = bytes(range(251)) * 30_000
        storage.put_bytes("large", content)
        assert storage.read_range("large", len(content) - 5, 5) == content[-5:]
        received = bytearray()
        storage.stream_range("large", 7, len(content) - 7, received.extend, CancellationToken())
        assert received == content[7:]
        with pytest.raises(UnavailableError):
            storage.stream_range("large", 7, len(content), received.extend, CancellationToken())

    def test_what_is_not_there_is_not_found_and_has_no_size(self, storage):
        with pytest.raises(NotFoundError, match="it does not exist"):
            storage.read("missing")
        with pytest.raises(NotFoundError):
            storage.read_range("missing", 0, 1)
        assert storage.size("missing") is None
        assert storage.list("missing") == list(storage.walk("missing")) == []
        storage.delete_folder("missing")

    def test_a_file_above_the_size_that_is_allowed_is_not_read(self, storage):
        for content in (b"", b"0123456789"):
            storage.put_bytes("a", content)
            assert storage.read("a", max_bytes=10) == content
        with pytest.raises(CorruptDataError, match="more than the 9 bytes"):
            storage.read("a", max_bytes=9)

    def test_lists_are_sorted_names_and_see_what_was_just_written(self, storage):
        for name in ("b", "a", "c", ".tmp-unfinished"):
            storage.put_bytes(f"folder/{name}", b"x")
        storage.put_bytes("folder/sub/deep", b"x")
        assert storage.list("folder") == ["a", "b", "c", "sub"]
        storage.put_bytes("folder/d", b"x")
        assert storage.list("folder") == ["a", "b", "c", "d", "sub"]

    def test_all_files_below_a_folder_are_found_with_their_paths_below_it(self, storage):
        for path in ("a/b/c", "a/d", "ab/e", "a/b/f"):
            storage.put_bytes(path, b"x")
        assert sorted(storage.find("a")) == ["b/c", "b/f", "d"]
        assert storage.find("missing") == []
        storage.put_bytes("a/b/late", b"x")
        assert sorted(storage.find("a")) == ["b/c", "b/f", "b/late", "d"]

    def test_a_child_named_like_its_folder_is_listed(self, storage):
        storage.put_bytes("tags/tags/1", b"x")
        assert storage.list("tags") == ["tags"]
        assert storage.list("tags/tags") == ["1"]

    def test_names_are_taken_as_they_are(self, storage):
        for name in self.odd_names:
            storage.create(f"odd/{name}", name.encode())
        assert storage.list("odd") == sorted(self.odd_names)
        assert tuple(storage.read(f"odd/{name}").decode() for name in self.odd_names) == self.odd_names
        assert {storage.size(f"odd/{name}") for name in self.odd_names} == {len(n.encode()) for n in self.odd_names}

    def test_a_create_writes_once_and_a_second_one_is_a_conflict(self, storage):
        storage.create("log/1", b"first")
        with pytest.raises(ConflictError, match="exists already"):
            storage.create("log/1", b"second")
        assert storage.read("log/1") == b"first"

    def test_of_racing_creators_exactly_one_wins(self, storage):
        clients, start, winners = [storage, another_client(storage)], threading.Barrier(6), []

        def create(number):
            start.wait()
            try:
                clients[number % 2].create("log/1", b"%d" % number)
                winners.append(b"%d" % number)
            except ConflictError:
                pass

        threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert winners == [storage.read("log/1")]

    def test_what_another_client_writes_is_seen_at_once(self, storage):
        """Clients cache listings, and s3fs answers for sizes from them."""
        storage.put_bytes("log/1", b"x")
        assert (storage.list("log"), storage.size("log/1"), len(list(storage.walk("log")))) == (["1"], 1, 1)
        other = another_client(storage)
        other.put_bytes("log/1", b"longer")
        assert storage.size("log/1") == 6
        other.put_bytes("log/2", b"x")
        assert (storage.list("log"), len(list(storage.walk("log")))) == (["1", "2"], 2)

    def test_an_entry_that_another_client_commits_after_a_listing_is_seen(self, storage):
        """Each answer comes first after the commit, whatever the client that this storage uses has cached before."""
        storage.create("log/1", b"x")
        for number, see in enumerate(
            (
                lambda path: path.rpartition("/")[2] in storage.list("log"),
                lambda path: storage.size(path) == 5,
                lambda path: storage.refresh(path, 5),
                lambda path: path.removeprefix("log/") in storage.find("log"),
                lambda path: path in {file.path for file in storage.walk("log")},
            ),
            start=2,
        ):
            if self.has_driver:
                cache_listings(storage._fs, f"{storage._opened()[2]}/log")
            another_client(storage).create(f"log/{number}", b"entry")
            assert see(f"log/{number}"), number

    def test_its_driver_alone_hides_what_another_client_commits_if_it_caches_listings(self, storage):
        """Without this, the law above would say nothing."""
        if not self.has_driver:
            pytest.skip("no driver of fsspec reaches this store")
        storage.create("log/1", b"x")
        driver, folder = fsspec.core.url_to_fs(f"{storage.url}/log")
        cache_listings(driver, folder)
        another_client(storage).create("log/2", b"x")
        names = {name.rpartition("/")[2] for name in driver.ls(folder, detail=False)}
        assert names == ({"1"} if self.caches_listings else {"1", "2"})

    def test_a_finished_file_is_adopted_and_gone(self, storage, tmp_path):
        finished = tmp_path / "finished"
        finished.write_bytes(b"x" * 100_000)
        storage.adopt("objects/x", finished)
        assert storage.read("objects/x") == b"x" * 100_000
        assert not finished.exists()

    def test_a_folder_is_deleted_with_all_its_files(self, storage):
        for path in ("a/b", "a/c/d", "ab"):
            storage.put_bytes(path, b"x")
        storage.delete_folder("a")
        assert [file.path for file in storage.walk("")] == ["ab"]

    def test_a_storage_travels_to_another_process_as_its_url(self, storage):
        storage.put_bytes("a", b"x")
        pickled = pickle.dumps(storage)
        assert b"test" not in pickled.replace(storage.url.encode(), b"")  # no credentials
        if self.is_shared_with_processes:
            assert pickle.loads(pickled).read("a") == b"x"

    def test_a_walk_finds_every_file_with_its_size_and_age_and_unfinished_ones_too(self, storage):
        for path in ("a", "b/c", "b/d/e", "b/.tmp-1"):
            storage.put_bytes(path, path.encode())
        found = {file.path: file for file in storage.walk("")}
        assert sorted(found) == ["a", "b/.tmp-1", "b/c", "b/d/e"]
        assert {file.path for file in storage.walk("b")} == {"b/.tmp-1", "b/c", "b/d/e"}
        assert found["b/d/e"].size_bytes == 5
        assert abs(found["a"].modified_s - time.time()) < HOUR

    def test_only_what_is_older_is_deleted(self, storage):
        storage.put_bytes("a", b"x")
        assert not storage.delete_if_older("a", time.time() - HOUR)
        assert storage.read("a") == b"x"
        assert storage.delete_if_older("a", time.time() + HOUR)
        assert storage.size("a") is None
        assert not storage.delete_if_older("a", time.time() + HOUR)

    def test_a_refresh_returns_false_for_what_must_be_written_again(self, storage):
        storage.put_bytes("a", b"123")
        assert storage.refresh("a", 3)
        assert not storage.refresh("a", 4)
        assert not storage.refresh("missing", 3)

    def test_the_time_of_a_store_is_that_of_a_file_which_is_gone_afterwards(self, storage):
        storage.put_bytes("a", b"x")
        assert abs(storage.now_s() - time.time()) < HOUR
        assert [file.path for file in storage.walk("")] == ["a"]

    def test_an_old_object_that_a_writer_finds_is_young_afterwards(self, storage):
        if self.make_old is None:
            pytest.skip("nobody can set the clock of this store")
        objects = Objects(storage)
        info = objects.put(b"content")
        self.make_old(storage, objects.path(info.digest), REWRITE_S + HOUR)
        assert objects.put(b"content") == info
        assert not storage.delete_if_older(objects.path(info.digest), time.time() - HOUR)
        self.make_old(storage, objects.path(info.digest), REWRITE_S + HOUR)
        with objects.writing() as sink:
            sink.write(b"content")
        assert not storage.delete_if_older(objects.path(info.digest), time.time() - HOUR)
        assert objects.read(info.digest) == b"content"

    def test_a_reusable_object_is_whole(self, storage):
        objects = Objects(storage)
        info = objects.put(b"content")
        assert objects.reuse(info)
        assert not objects.reuse(ObjectInfo(info.digest, info.size_bytes + 1))
        assert not objects.reuse(ObjectInfo(digest_of(b"missing"), 7))
