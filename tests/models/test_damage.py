"""Every bit counts: what changes in what is stored is found, named, and read from another copy where there is one."""

import random

import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models import describe_model, restore
from datasvc.models.restoring.failover_source import FailoverSource, join_errors
from datasvc.models.tensors.read import load_tensors
from datasvc.repository.objects.objects import parse_digest
from tests.models.every_kind import copy_of, equal, flip, links_of, records_of, save_every_kind, state_of

PLACES = 12


@pytest.fixture
def version(repository):
    return save_every_kind(repository)


def documents(repository, ref):
    """Return the files of the table and the state of a version."""
    entry = describe_model(repository, ref).entry
    return {role: repository.objects.local_path(parse_digest(entry[role])) for role in ("tensors", "state")}


def places(size):
    chosen = random.Random(7)
    return {0, size - 1, *(chosen.randrange(size) for _ in range(PLACES))}


def test_a_flipped_bit_anywhere_in_the_entry_the_table_or_the_state_is_found(repository, version):
    entry = repository.storage.local_path(f"models/m/versions/{version.version:08d}.json")
    for path in (entry, *documents(repository, "m").values()):
        whole = path.read_bytes()
        step = max(1, len(whole) // 60)
        for place in range(0, len(whole), step):
            flip(path, place, place % 8)
            # A changed format number says that it is a later one.
            with pytest.raises((CorruptDataError, ConfigError), match=r"corrupt|damaged|format"):
                restore(repository, "m@2")
            path.write_bytes(whole)
    assert equal(restore(repository, "m@2").state, state_of(1))


def test_a_flipped_bit_in_any_object_is_found_and_a_tensor_that_it_hits_is_named(repository, version):
    for digest in {link.object for link in links_of(repository, "m@2")}:
        path = repository.objects.local_path(digest)
        whole = path.read_bytes()
        for place in places(len(whole)):
            hit = {
                record.name
                for record in records_of(repository, "m@2")
                for chunk in record.chunks
                for link in chunk.chain
                if link.object == digest and link.offset <= place < link.offset + link.length
            }
            flip(path, place, place % 8)
            with pytest.raises(CorruptDataError, match="tensor '") as caught:
                restore(repository, "m@2")
            assert any(f"tensor '{name}' is corrupt" in str(caught.value) for name in hit)
            path.write_bytes(whole)


def load_from(places, ref="m@2"):
    records = records_of(places[-1], ref)
    source = FailoverSource([place.objects for place in places])
    return load_tensors(source, records), source.bad.listed(records)


def test_a_bad_chunk_comes_from_the_next_copy_and_the_report_says_which_was_bad_where(repository, version, tmp_path):
    copy = copy_of(repository, tmp_path / "copy")
    whole, nothing_bad = load_from([repository, copy])
    assert nothing_bad == ()
    for link in links_of(repository, "m@2"):
        path = repository.objects.local_path(link.object)
        before = flip(path, link.offset + link.length // 2)
        tensors, (bad,) = load_from([repository, copy])
        assert equal(tensors, whole)
        assert (bad.digest, bad.location) == (link.object, str(path))
        assert bad.tensors
        assert set(bad.tensors) == {
            record.name for record in records_of(copy, "m@2") for chunk in record.chunks if link in chunk.chain
        }
        path.write_bytes(before)


@pytest.mark.parametrize("harm", ["missing", "truncated"])
def test_a_missing_or_truncated_object_comes_from_the_next_copy(repository, version, tmp_path, harm):
    copy = copy_of(repository, tmp_path / "copy")
    whole, _ = load_from([copy])
    harmed = {link.object for link in links_of(repository, "m@2")}
    for digest in harmed:
        path = repository.objects.local_path(digest)
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    tensors, bad = load_from([repository, copy])
    assert equal(tensors, whole)
    assert {each.digest for each in bad} == harmed


def test_where_every_copy_is_bad_the_tensor_and_all_places_are_named(repository, version, tmp_path):
    copy = copy_of(repository, tmp_path / "copy")
    (record,) = [record for record in records_of(repository, "m@2") if record.name == "model.noise"]
    (link,) = record.chunks[0].chain
    paths = [each.objects.local_path(link.object) for each in (repository, copy)]
    for path in paths:
        flip(path, 3)
    with pytest.raises(CorruptDataError, match=r"tensor 'model\.noise'") as caught:
        load_from([repository, copy])
    assert all(str(path) in str(caught.value) for path in paths)
    for path in paths:
        path.unlink()
    with pytest.raises(NotFoundError, match=r"tensor 'model\.noise' is missing") as caught:
        load_from([repository, copy])
    assert all(str(path) in str(caught.value) for path in paths)


def test_of_several_failures_damage_counts_most_then_what_may_pass():
    missing, gone, bad = NotFoundError("nothing at a"), UnavailableError("b is silent"), CorruptDataError("c is bad")
    assert type(join_errors([missing, gone, bad])) is CorruptDataError
    assert type(join_errors([missing, gone])) is UnavailableError
    assert type(join_errors([missing, missing])) is NotFoundError
    assert str(join_errors([missing, gone, missing])) == "nothing at a; b is silent"
