"""A store that does not answer is asked again, where asking again harms nobody."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datasvc.errors import CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.retries import ATTEMPTS, with_retries
from tests.cluster.store import FileStore
from tools.bench.origin import CUT, FLIP, REFUSE, UNAVAILABLE, Fault, Origin

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def origin(tmp_path):
    """The origin of a folder with one file, which breaks what a test tells it to."""
    folder = tmp_path / "files"
    (folder / "objects").mkdir(parents=True)
    (folder / "objects" / "one").write_bytes(CONTENT)
    with FileStore(folder) as store, Origin(store.url) as origin:
        yield origin


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr("datasvc.repository.store.retries.FIRST_PAUSE_S", 0.001)


def break_first(origin, faults):
    """Let the first exchanges with an origin go wrong, and no more."""
    left = list(faults)
    origin.choose = lambda _exchange: left.pop(0) if left else None
    origin.forget()


@pytest.mark.parametrize("fault", [Fault(UNAVAILABLE), Fault(CUT, offset=1000), Fault(REFUSE)], ids=lambda f: f.kind)
def test_a_reading_call_outlives_faults_that_pass(origin, fault):
    storage = Storage(origin.url)
    break_first(origin, [fault] * (ATTEMPTS - 1))
    assert storage.read("objects/one") == CONTENT
    break_first(origin, [fault] * (ATTEMPTS - 1))
    assert storage.read_range("objects/one", 5, 10_000) == CONTENT[5:10_005]
    assert len(origin.exchanges()) == ATTEMPTS


def test_a_lasting_fault_is_an_error_after_a_few_attempts(origin):
    storage = Storage(origin.url)
    break_first(origin, [Fault(UNAVAILABLE)] * 100)
    with pytest.raises(UnavailableError, match=r"cannot read .*objects/one"):
        storage.read("objects/one")
    assert len(origin.exchanges()) == ATTEMPTS


def test_a_missing_file_is_requested_once(origin):
    storage = Storage(origin.url)
    origin.forget()
    with pytest.raises(NotFoundError):
        storage.read("objects/two")
    assert len(origin.exchanges()) == 1


def test_stores_that_ask_again_by_themselves_are_called_once():
    calls = []

    def question():
        calls.append(None)
        raise OSError("gone")

    with pytest.raises(UnavailableError, match="cannot look at here: gone"):
        with_retries(MemoryFileSystem(), "look at", "here", question)
    assert len(calls) == 1


@pytest.fixture
def stored(tmp_path):
    """A repository with an object and an entry, behind an origin."""
    local = Repository.create(str(tmp_path / "repo"))
    info = local.objects.put(CONTENT)
    local.versions("datasets", "pets").append(lambda _head: {"about": "cats"})
    with FileStore(tmp_path / "repo") as store, Origin(store.url) as origin:
        yield origin, Repository.open(origin.url), info


def test_a_file_with_a_bit_flipped_in_transfer_is_read_again(stored):
    origin, repository, info = stored
    break_once(origin, "/objects/")
    assert repository.objects.read(info.digest) == CONTENT
    break_once(origin, "/versions/")
    assert repository.versions("datasets", "pets").read(1).content["about"] == "cats"


def test_a_bit_that_flipped_in_the_store_is_damage(stored):
    origin, repository, info = stored
    origin.choose = lambda exchange: Fault(FLIP) if exchange.method == "GET" else None
    with pytest.raises(CorruptDataError, match="hash to"):
        repository.objects.read(info.digest)
    with pytest.raises(CorruptDataError):
        repository.versions("datasets", "pets").read(1)


def break_once(origin, part):
    """Flip a byte of the next file whose path has this part."""
    left = [Fault(FLIP, offset=20)]

    def choose(exchange):
        is_file = exchange.method == "GET" and part in exchange.path and not exchange.path.endswith("/")
        return left.pop() if left and is_file else None

    origin.choose = choose
