"""torch.distributed.checkpoint through a node's cache, its peers and second copies: real caches, real sockets."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from datasvc.cache import Cache
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models import describe_model
from datasvc.models.dcp import DcpReader
from datasvc.models.restoring.copies import StoredCopies
from tests.cache.peer_server import PeerServer, Strangers
from tests.models.as_ranks import load_as_ranks, rows, save_as_ranks
from tests.models.every_kind import copy_of, flip, links_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

WHOLE = torch.randn(48, 4000, generator=torch.Generator().manual_seed(3))
PAIR = (torch.arange(5_000.0), "a tuple is one value to planners")


@pytest.fixture
def stored(repository):
    """A version that four ranks saved: a sharded tensor, a small one, a tensor inside a value."""
    states = [{"w": rows(WHOLE, rank, 4), "b": torch.arange(9.0), "pair": PAIR, "step": 7} for rank in range(4)]
    save_as_ranks(repository.url, states, name="m", codec="none")
    return repository


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "cache", budget="50MB") as opened:
        yield opened


def empty(rank=0, num_ranks=1):
    block = torch.zeros(48, 4000) if num_ranks == 1 else rows(torch.zeros(48, 4000), rank, num_ranks)
    return {"w": block, "b": torch.zeros(9), "pair": None, "step": None}


def load(repository, **options):
    """Load all as one rank; returns the reader, whatever was loaded being what was saved."""
    state, reader = empty(), DcpReader(repository.url, ref="m@1", **options)
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"], WHOLE)
    assert torch.equal(state["b"], torch.arange(9.0))
    assert torch.equal(state["pair"][0], PAIR[0])
    assert state["pair"][1] == PAIR[1]
    assert state["step"] == 7
    return reader


def contents(repository):
    return {link.object: repository.objects.read(link.object) for link in links_of(repository, "m@1")}


def size_of(objects):
    return sum(map(len, objects.values()))


def test_bad_and_missing_objects_come_from_the_other_repository_and_are_logged(stored, tmp_path, caplog):
    copy = copy_of(stored, tmp_path / "copy")
    objects = contents(stored)
    gone, *bad = objects
    stored.objects.local_path(gone).unlink()
    for digest in bad:
        flip(stored.objects.local_path(digest), 11)
    with caplog.at_level(logging.WARNING, logger="datasvc.models.dcp.reader"):
        report = load(stored, fallback=[copy.url]).report
    assert {each.digest for each in report.bad_copies} == set(objects)
    assert all(stored.url in each.location for each in report.bad_copies)
    assert {name for each in report.bad_copies for name in each.tensors} == {"w", "b", "pair.0"}
    assert len(caplog.records) == len(objects)
    assert all("m@1" in record.getMessage() for record in caplog.records)
    with pytest.raises(CheckpointException) as caught:
        load(stored)
    ((error, _),) = caught.value.failures.values()
    assert "is missing" in str(error) or isinstance(error, CorruptDataError)


@pytest.mark.slow
def test_table_state_and_sharding_come_from_the_other_repository_too(stored, tmp_path):
    copy = copy_of(stored, tmp_path / "copy")
    entry = describe_model(stored, "m@1").entry
    for role in ("tensors", "state", "sharding"):
        flip(stored.objects.local_path(entry[role]), 40)
    report = load(stored, fallback=["http://127.0.0.1:9/repo", copy]).report
    assert {each.digest for each in report.bad_copies} >= {entry["tensors"], entry["state"], entry["sharding"]}


def test_the_origin_is_read_once_for_all_ranks_of_a_node_and_then_all_is_resident(stored, cache):
    total = size_of(contents(stored))
    readers = [DcpReader(stored.url, name="m", cache=cache) for _ in range(3)]
    states = [empty(rank, 3) for rank in range(3)]
    load_as_ranks(readers, states)
    assert torch.equal(torch.cat([state["w"].as_subclass(torch.Tensor) for state in states]), WHOLE)
    assert sum(reader.report.came_bytes.get("origin", 0) for reader in readers) == total
    assert all(reader.report.came_bytes.keys() <= {"origin", "resident"} for reader in readers)
    report = load(stored, cache=cache.folder).report
    assert report.came_bytes == {"resident": total}
    assert report.size_bytes == WHOLE.nbytes + 36 + PAIR[0].nbytes
    assert cache.status().held_bytes == 0


def test_a_rank_brings_only_what_its_plan_meets(stored, cache):
    reader = DcpReader(stored.url, name="m", cache=cache)
    dcp.load({"b": torch.zeros(9)}, storage_reader=reader)
    (record,) = [each for each in links_of(stored, "m@1") if each.length == 36]
    assert reader.report.came_bytes == {"origin": record.object_bytes}
    assert reader.report.size_bytes == 36


def test_a_copy_that_changed_in_the_cache_is_fetched_again_and_reported(stored, cache):
    load(stored, cache=cache)
    (link, *_) = sorted(links_of(stored, "m@1"), key=lambda each: -each.length)
    path = cache.acquire(link.info, stored).path
    cache.release(link.object)
    flip(path, 99)
    (bad,) = load(stored, cache=cache).report.bad_copies
    assert (bad.digest, bad.tensors) == (link.object, ("w",))
    assert str(cache.folder) in bad.location
    assert load(stored, cache=cache).report.bad_copies == ()


def test_peers_give_what_the_origin_would(stored, tmp_path):
    objects = contents(stored)
    Cache(tmp_path / "cache", budget="50MB").close()
    with PeerServer(objects) as peer:
        peers = Peers(Strangers(peer.url), PeerSettings())
        report = load(stored, cache=tmp_path / "cache", peers=peers).report
        assert peer.requests
    assert report.came_bytes["peer"] >= size_of(objects) // 2


def test_what_finds_no_room_in_the_cache_is_read_past_it(stored, tmp_path):
    with Cache(tmp_path / "small", budget=100_000) as cache:
        report = load(stored, cache=cache).report
        assert report.came_bytes["direct"] > 0
        assert report.bad_copies == ()
        assert cache.status().held_bytes == 0


def test_peers_without_the_folder_of_a_cache_are_refused_with_what_to_do(stored, cache):
    for given in (None, cache):
        with pytest.raises(ConfigError, match="peers need a node's cache"):
            StoredCopies(stored, cache=given, peers=Peers(Strangers("http://a:1")))
