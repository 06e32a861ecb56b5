"""Restoring through a node's cache, from its peers, and from second copies: real caches, real sockets."""

import pytest
import torch

import datasvc
from datasvc.cache import Cache
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models import describe_model
from datasvc.models.restoring.restore import restore
from datasvc.models.versions.signing import load_private_key, make_key, sign
from tests.cache.peer_server import PeerServer, Strangers
from tests.models.every_kind import copy_of, equal, flip, links_of, save_every_kind, state_of
from tests.progress import RecordedProgress


@pytest.fixture
def stored(repository):
    save_every_kind(repository)
    return repository


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "cache", budget="50MB") as opened:
        yield opened


def contents(repository, ref="m@2"):
    """Return the objects that hold the tensors of a version."""
    return {link.object: repository.objects.read(link.object) for link in links_of(repository, ref)}


def size_of(objects):
    return sum(map(len, objects.values()))


def test_the_origin_is_read_once_and_then_all_is_resident(stored, cache):
    total = size_of(contents(stored))
    first = datasvc.open(stored.url).models.restore("m@2", cache=cache)
    assert equal(first.state, state_of(1))
    assert first.report.came_bytes == {"origin": total}
    assert first.report.seconds > 0
    assert first.report.size_bytes == sum(tensor.nbytes for tensor in first.state["model"].values())
    again = datasvc.open(stored.url).models.restore("m@2", cache=cache.folder)
    assert equal(again.state, state_of(1))
    assert again.report.came_bytes == {"resident": total}
    assert cache.status().held_bytes == 0


def test_restored_tensors_are_the_callers_own(stored, cache):
    state = restore(stored, "m@2", cache=cache).state
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert f"{cache.folder}/objects" not in maps.read()
    for tensor in state["model"].values():
        tensor.zero_()
    assert cache.scrub().corrupt == ()
    assert equal(restore(stored, "m@2", cache=cache).state, state_of(1))


def test_a_copy_that_changed_in_the_cache_is_fetched_again_and_reported(stored, cache):
    restore(stored, "m@2", cache=cache)
    for link in links_of(stored, "m@2"):
        path = cache.acquire(_info(link), stored).path
        cache.release(link.object)
        flip(path, link.offset + link.length // 2)
        done = restore(stored, "m@2", cache=cache)
        assert equal(done.state, state_of(1))
        (bad,) = done.report.bad_copies
        assert bad.digest == link.object
        assert str(cache.folder) in bad.location
        assert len(bad.tensors) == 1
        assert restore(stored, "m@2", cache=cache).report.bad_copies == ()
    assert cache.status().num_corrupt == len(links_of(stored, "m@2"))


def _info(link):
    from datasvc.repository import ObjectInfo

    return ObjectInfo(link.object, link.object_bytes)


def test_what_finds_no_room_in_the_cache_is_read_past_it(stored, tmp_path):
    with Cache(tmp_path / "small", budget=100_000) as cache:
        done = restore(stored, "m@2", cache=cache)
        assert equal(done.state, state_of(1))
        assert done.report.came_bytes["direct"] > 0
        assert cache.status().held_bytes == 0
        assert done.report.bad_copies == ()


def test_peers_give_what_the_origin_would_and_one_that_lies_is_not_believed(stored, tmp_path):
    objects = contents(stored)
    for fault, came in ((None, "peer"), ("lie", "origin")):
        with (
            PeerServer(objects, fault) as peer,
            Cache(
                tmp_path / f"cache-{fault}", budget="50MB", peers=Peers(Strangers(peer.url), PeerSettings())
            ) as cache,
        ):
            done = restore(stored, "m@2", cache=cache)
            assert equal(done.state, state_of(1))
            assert done.report.came_bytes[came] >= size_of(objects) // 2
            assert peer.requests


def test_bad_objects_of_the_origin_come_from_the_other_repository_into_the_cache(stored, tmp_path, cache):
    copy = copy_of(stored, tmp_path / "copy")
    objects = contents(stored)
    for digest in objects:
        flip(stored.objects.local_path(digest), 11)
    done = restore(stored, "m@2", cache=cache, fallback=[copy.url])
    assert equal(done.state, state_of(1))
    assert {bad.digest for bad in done.report.bad_copies} == set(objects)
    assert restore(stored, "m@2", cache=cache).report.came_bytes == {"resident": size_of(objects)}


def test_table_and_state_come_from_the_other_repository_too(stored, tmp_path):
    copy = copy_of(stored, tmp_path / "copy")
    entry = describe_model(stored, "m@2").entry
    for role in ("tensors", "state"):
        flip(stored.objects.local_path(entry[role]), 40)
    with pytest.raises(CorruptDataError):
        restore(stored, "m@2")
    assert equal(restore(stored, stored.resolve("models", "m@2"), fallback=copy.url).state, state_of(1))
    done = restore(stored, "m@2", fallback=[copy])
    assert equal(done.state, state_of(1))
    assert {bad.digest for bad in done.report.bad_copies} == {entry["tensors"], entry["state"]}


@pytest.mark.slow
def test_an_unreachable_repository_does_no_harm_while_nobody_needs_it(stored):
    fallback = ["http://127.0.0.1:9/repo"]
    assert equal(restore(stored, "m@2", fallback=fallback).state, state_of(1))


def test_a_repository_that_refuses_does_no_harm_while_nobody_needs_it_and_is_passed_over_where_one_does(
    stored, tmp_path, cache
):
    copy = copy_of(stored, tmp_path / "copy")
    (tmp_path / "file").touch()
    refusing = str(tmp_path / "file" / "repo")
    assert equal(restore(stored, "m@2", fallback=[refusing]).state, state_of(1))
    for digest in contents(stored):
        # A part of the path is a file now: refused, as a folder is that may not be looked into.
        folder = stored.objects.local_path(digest).parent
        if folder.is_dir():
            folder.rename(folder.with_suffix(".away"))
            folder.touch()
    for near in (None, cache):
        done = restore(stored, "m@2", cache=near, fallback=[refusing, copy.url])
        assert equal(done.state, state_of(1))
        assert {bad.digest for bad in done.report.bad_copies} >= set(contents(copy))
        if near is not None:
            assert done.report.came_bytes.keys() == {"origin"}
    with pytest.raises((ConfigError, NotFoundError), match=r"a part of the path is a file|is missing"):
        restore(stored, "m@2", fallback=[refusing])


def test_a_part_is_restored_by_way_of_the_cache_and_nothing_else_is_staged(stored, cache):
    done = restore(stored, "m@2", cache=cache, only=["model.noise"], rename={"model": ""})
    assert list(done.state) == ["noise"]
    assert torch.equal(done.state["noise"], state_of(1)["model"]["noise"])
    assert done.report.came_bytes == {"origin": done.state["noise"].nbytes}


def test_progress_counts_every_byte_of_every_tensor(stored, cache):
    progress = RecordedProgress()
    done = restore(stored, "m@2", cache=cache, progress=progress)
    assert progress.totals == [progress.total] == [done.report.size_bytes]


def test_peers_without_a_cache_are_refused(stored, cache):
    with pytest.raises(ConfigError, match="peers need a node's cache"):
        restore(stored, "m@2", peers=Peers(Strangers("http://a:1")))
    with pytest.raises(ConfigError, match="peers need a node's cache"):
        restore(stored, "m@2", cache=cache, peers=Peers(Strangers("http://a:1")))


def test_a_model_that_was_opened_with_a_cache_and_second_copies_comes_back_through_them(stored, tmp_path):
    copy = copy_of(stored, tmp_path / "copy")
    objects = contents(stored)
    for digest in objects:
        stored.objects.local_path(digest).unlink()
    Cache(tmp_path / "cache", budget="50MB").close()
    repo, progress = datasvc.open(stored.url), RecordedProgress()
    with PeerServer({}) as peer:
        peers = Peers(Strangers(peer.url), PeerSettings())
        with repo.models.manager("m", cache=tmp_path / "cache", peers=peers, fallback=[copy.url]) as model:
            first, again = model.restore(progress=progress), model.restore("m@2")
        assert peer.requests, "a peer was asked first"
    assert equal(first.state, state_of(1))
    assert (first.report.came_bytes, progress.total) == ({"origin": size_of(objects)}, first.report.size_bytes)
    assert again.report.came_bytes == {"resident": size_of(objects)}


def test_a_model_believes_no_version_that_the_keys_it_was_opened_with_did_not_sign(stored, tmp_path):
    key = make_key(tmp_path / "key.pem")
    with datasvc.open(stored.url).models.manager("m", trusted_keys=[key.source]) as model:
        with pytest.raises(CorruptDataError, match="m@2 is not trusted"):
            model.restore()
        sign(stored, "m@2", load_private_key(tmp_path / "key.pem"))
        assert str(model.restore().version) == "m@2"
