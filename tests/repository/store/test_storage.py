"""The laws of stores on every kind of store, and what single kinds do beside them."""

import json
import os
import secrets
import time
from pathlib import Path
from typing import ClassVar
from urllib.request import Request, urlopen

import fsspec
import pytest
from fsspec.dircache import DirCache
from fsspec.implementations.memory import MemoryFileSystem

from datasvc.errors import ConfigError, UnavailableError, UnknownOutcomeError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.redaction import redact_url
from datasvc.testing import FaultyStore
from tests.repository.store.store_laws import StoreLaws, make_memory_file_old
from tests.support import gcs_process
from tests.support.moto_process import GOOGLE, MotoServer


class TestLocalStore(StoreLaws):
    odd_names = (*StoreLaws.odd_names, "c:\\x", "*", "new\nline")

    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "store")

    def make_old(self, storage, path, age_s):
        then = time.time() - age_s
        os.utime(storage.local_path(path), (then, then))


class TestMemoryStore(StoreLaws):
    is_shared_with_processes = False
    make_old = staticmethod(make_memory_file_old)

    @pytest.fixture
    def url(self):
        return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def by_fsspec(monkeypatch):
    monkeypatch.setenv("DATASVC_STORE_CLIENT", "fsspec")


class TestS3Store(StoreLaws):
    place = "s3_bucket"
    caches_listings = True
    client = "obstore"


@pytest.mark.usefixtures("by_fsspec")
class TestS3StoreByFsspec(TestS3Store):
    client = "S3FileSystem of fsspec, because DATASVC_STORE_CLIENT is set to fsspec"


class TestAzureStore(StoreLaws):
    place = "azure_container"
    caches_listings = True
    client = "obstore"


@pytest.fixture(scope="session")
def google_xml_bucket(tmp_path_factory):
    """The URL of a bucket on a stand-in for the interface of Google Cloud Storage that obstore uses."""
    server = MotoServer(GOOGLE).start()
    credentials = tmp_path_factory.mktemp("google") / "credentials.json"
    account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    credentials.write_text(json.dumps({"type": "service_account", "gcs_base_url": server.url, **account}))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STORAGE_EMULATOR_HOST", raising=False)
        patch.setitem(fsspec.config.conf, "gs", {})
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(credentials))
        bucket = f"datasvc{secrets.token_hex(4)}"  # without "-", which obstore escapes and moto does not unescape
        urlopen(Request(f"{server.url}/{bucket}", method="PUT"))
        yield f"gs://{bucket}"
    server.close()


class TestGoogleStoreByObstore(StoreLaws):
    place = "google_xml_bucket"
    has_driver = False
    client = "obstore"


@pytest.mark.usefixtures("by_fsspec")
class TestAzureStoreByFsspec(TestAzureStore):
    client = "AzureBlobFileSystem of fsspec, because DATASVC_STORE_CLIENT is set to fsspec"


class TestGoogleStore(StoreLaws):
    place = "google_bucket"
    caches_listings = True


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / "models").write_bytes(b"not a folder")
    with pytest.raises(ConfigError, match="a part of the path is a file"):
        Storage(str(tmp_path)).find("models")


class TestFaultyStoreWithoutFaults(StoreLaws):
    is_shared_with_processes = False

    @pytest.fixture
    def url(self):
        with FaultyStore() as store:
            yield store.url


class ListingCache(MemoryFileSystem):
    """Keeps its files as memory does, and answers from listings that it has cached, as the driver of Azure does.

    It caches them whatever it is asked, unlike the driver of Azure.
    """

    protocol = "listingcache"
    cachable = False
    clients: ClassVar[list[MemoryFileSystem]] = []

    def __init__(self, **options):
        super().__init__(**options)
        self.dircache = {}  # fsspec's own obeys `use_listings_cache`
        self.clients.append(self)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://"))

    def ls(self, path, detail=True, **_options):
        path = self._strip_protocol(path)
        found = self.dircache.get(path)
        if found is None:
            self._ls_from_cache(path)  # raises where the folder above was listed without this one
            found = self.dircache[path] = super().ls(path, detail=True)
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

    def exists(self, path, **_options):
        # Before fsspec 2026.9, `rm` asks this while it deletes, and fails on folders that only a listing has.
        path = self._strip_protocol(path)
        return path in self.store or path in self.pseudo_dirs

    def invalidate_cache(self, path=None):
        if path is None:
            self.dircache.clear()
        else:
            self.dircache.pop(path, None)  # of this folder alone, not of those that it lies in


def test_obstore_gives_nothing_beyond_the_end_of_a_file(s3_bucket):
    storage = Storage(f"{s3_bucket}/{secrets.token_hex(8)}")
    for content in (b"", b"0123456789"):
        storage.put_bytes("a", content)
        assert storage.read_range("a", len(content), 5) == b""


def test_a_google_store_that_ignores_the_condition_of_a_create_is_refused():
    for url in gcs_process.serve(gcs_process.UNCONDITIONAL):
        with pytest.raises(ConfigError, match="overwrite"):
            Repository.create(url)


class TestStoreWithCachedListings(StoreLaws):
    caches_listings = True
    is_shared_with_processes = False

    @pytest.fixture
    def url(self):
        fsspec.register_implementation("listingcache", ListingCache, clobber=True)
        return f"listingcache://{secrets.token_hex(8)}"


@pytest.fixture
def faulty():
    with FaultyStore() as store:
        yield store, Storage(store.url)


def test_a_create_whose_response_was_lost_succeeds(faulty):
    store, storage = faulty
    store.fail("write", effect="unanswered")
    storage.create("lost-answer", b"mine")


def test_a_create_that_did_not_happen_is_unavailable(faulty):
    store, storage = faulty
    store.fail("write", error=OSError("connection reset"))
    with pytest.raises(UnavailableError, match="connection reset"):
        storage.create("never-written", b"mine")


@pytest.mark.parametrize("error", [OSError("connection reset"), PermissionError("expired")])
def test_a_create_that_cannot_be_read_back_has_an_unknown_outcome(faulty, error):
    store, storage = faulty
    store.fail("write", effect="unanswered")
    store.fail("read", error=error)
    with pytest.raises(UnknownOutcomeError, match=f"{error}.*read the log before you try again"):
        storage.create("unknown", b"mine")


def test_a_create_that_the_store_acknowledged_but_lost_is_unavailable(faulty):
    store, storage = faulty
    store.fail("write", effect="silent")
    with pytest.raises(UnavailableError, match="it does not exist after the write"):
        storage.create("acknowledged-and-lost", b"mine")


def test_a_store_that_refuses_for_lack_of_rights_is_a_matter_of_settings(faulty):
    store, storage = faulty
    store.fail("read", error=PermissionError("AccessDenied"))
    with pytest.raises(ConfigError, match=r"access denied .* check the credentials"):
        storage.read("anything")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        Storage("nonsense://x")


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


def test_a_path_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="a part of the path is a file"):
        Storage(str(tmp_path / "file")).put_bytes("a/b", b"x")


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


def test_a_store_that_lists_the_folder_itself_gives_its_children_only(monkeypatch):
    storage = Storage("memory://marked-store")
    storage.put_bytes("marked/1", b"x")
    real = MemoryFileSystem.ls
    itself = {"name": "/marked-store/marked", "size": 0, "type": "directory"}
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda self, path, **options: [itself, *real(self, path, **options)])
    assert storage.list("marked") == ["1"]


@pytest.fixture
def caching():
    """Two clients of one store, each with listings of its own; the second has its log's folder in its cache."""
    fsspec.register_implementation("listingcache", ListingCache, clobber=True)
    url = f"listingcache://{secrets.token_hex(8)}"
    writer, reader = Repository.create(url), Repository.open(url)
    driver = ListingCache.clients[-1]
    writer.versions("models", "cnn").append(lambda _head: {})
    for folder in ("", "models", "models/cnn", "models/cnn/versions"):
        driver.ls(f"{url}/{folder}")
    return writer, reader, driver


def test_what_is_gone_or_was_never_there_has_no_size_whatever_was_listed(caching):
    _, reader, driver = caching
    assert reader.storage.size("models/cnn/versions/00000009.json") is None
    driver.ls(f"{reader.url}/models/cnn/versions")
    ListingCache().rm_file(f"{reader.url}/models/cnn/versions/00000001.json")
    assert reader.storage.size("models/cnn/versions/00000001.json") is None


class RacingListings(ListingCache):
    """Caches listings in fsspec's way; another thread caches an old one again as soon as it is dropped."""

    protocol = "racinglistings"

    def __init__(self, **options):
        super().__init__(**options)
        self.dircache = DirCache(**options)

    def invalidate_cache(self, path=None):  # noqa: ARG002 - that of fsspec
        for folder, entries in list(self.dircache.items()):
            self.dircache.pop(folder)
            self.dircache[folder] = entries


def test_a_listing_that_another_thread_caches_again_hides_no_commit():
    fsspec.register_implementation("listingcache", ListingCache, clobber=True)
    fsspec.register_implementation("racinglistings", RacingListings, clobber=True)
    place = f"listingcache://{secrets.token_hex(8)}"
    writer, reader = Storage(place), Storage(place.replace("listingcache", "racinglistings"))
    writer.create("log/1", b"x")
    assert reader.list("log") == ["1"]
    writer.create("log/2", b"x")
    assert (reader.list("log"), reader.size("log/2")) == (["1", "2"], 1)


def test_threads_that_forget_one_listing_at_once_do_not_trip_over_each_other(caching, monkeypatch):
    """fsspec's cache of listings looks for a folder and then deletes it: of two threads one finds it gone."""
    _, reader, _ = caching

    def losing(_driver, _path=None):
        raise KeyError("another thread was faster")

    monkeypatch.setattr(ListingCache, "invalidate_cache", losing)
    assert reader.storage.list("models") == ["cnn"]
