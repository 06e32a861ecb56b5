"""verify finds every object that is missing, truncated or changed, and says which samples that hits."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.format.salvage import missing_rows, readable_identities
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.verify import verify
from datasvc.shards.views.named import read_views, save_view
from tests.progress import RecordedProgress
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.shards.written_versions import LABELLED_SCHEMA, describe_table, write_table, write_version

STEP = 12


def blob_of(number):
    return b"<blob %03d>" % number * 5


def samples(start, stop):
    return [{"key": f"k{number:03}", "blob": blob_of(number), "label": number % 3} for number in range(start, stop)]


def write_pets(repository, **options):
    splits = {"train": [samples(0, STEP), samples(STEP, 2 * STEP)], "val": [samples(0, 5)]}
    return write_version(repository, "pets", splits, LABELLED_SCHEMA, ("a", "b", "c"), **options)


@pytest.fixture
def pets(repository, monkeypatch):
    """Two shards of 12 samples in batches of 5 in "train", one of 5 samples in "val"."""
    monkeypatch.setattr("datasvc.shards.format.writer.BATCH_SAMPLES", 5)
    write_pets(repository)
    return repository


def table_of(repository, split="train", ref="pets"):
    return open_dataset(repository, ref)[split].table


def shard_path(repository, number, split="train"):
    return repository.objects.local_path(table_of(repository, split).shard(number).digest)


def change(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def one_problem(repository, ref="pets", *, deep):
    (problem,) = verify(repository, ref, deep=deep).problems
    return problem


@pytest.mark.parametrize("deep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_whole_version_has_no_problems_on_any_store(url, deep):  # noqa: F811
    repository = Repository.create(url)
    write_pets(repository)
    delete(repository, "pets", keys=["k001", "k002"])
    for ref, count in (("pets@1", 29), ("pets@2", 25)):
        done = verify(repository, ref, deep=deep)
        assert (done.problems, done.version, done.num_samples, done.num_shards) == ((), ref, count, 3)


@pytest.mark.parametrize("deep", [False, True])
def test_a_missing_shard_is_named_with_the_samples_it_held(pets, deep):
    shard_path(pets, 1).unlink()
    problem = one_problem(pets, deep=deep)
    assert (problem.kind, problem.role, problem.split, problem.shard) == ("missing", "shard", "train", 1)
    assert problem.digest == table_of(pets).shard(1).digest
    assert problem.num_samples == STEP
    assert problem.keys == tuple(f"k{number:03}" for number in range(STEP, STEP + 10))
    assert "train: shard 1" in str(problem)
    assert "12 samples affected: k012, " in str(problem)


def test_a_truncated_shard_is_found_by_its_size_and_its_lost_samples_by_a_deep_check(pets):
    path = shard_path(pets, 0)
    content = path.read_bytes()
    # The cut is inside the second batch of 5.
    path.write_bytes(content[: content.index(blob_of(7))])
    shallow = one_problem(pets, deep=False)
    assert (shallow.kind, shallow.num_samples) == ("truncated", STEP)
    assert f"expected {len(content)}" in shallow.detail
    deep = one_problem(pets, deep=True)
    assert (deep.kind, deep.num_samples) == ("truncated", 7)
    assert deep.keys == tuple(f"k{number:03}" for number in range(5, STEP))


def test_an_empty_and_a_longer_file_are_no_shards_either(pets):
    path = shard_path(pets, 0)
    content = path.read_bytes()
    for deep in (False, True):
        path.write_bytes(b"")
        assert (one_problem(pets, deep=deep).kind, one_problem(pets, deep=deep).num_samples) == ("truncated", STEP)
        path.write_bytes(content + b"more")
        assert one_problem(pets, deep=deep).kind == "changed"


def test_a_changed_value_names_the_very_sample_and_only_deep_sees_it(pets):
    change(shard_path(pets, 1), blob_of(14), blob_of(999))
    assert verify(pets, "pets").problems == ()
    problem = one_problem(pets, deep=True)
    assert (problem.kind, problem.shard, problem.keys, problem.num_samples) == ("changed", 1, ("k014",), 1)


def test_a_changed_key_names_the_sample_that_is_not_there_any_more(pets):
    change(shard_path(pets, 0), b"k003", b"kxxx")
    assert one_problem(pets, deep=True).keys == ("k003",)


def test_a_change_outside_of_all_samples_is_a_problem_without_samples(pets):
    path = shard_path(pets, 0)
    content = bytearray(path.read_bytes())
    assert content[6:8] == b"\0\0"  # padding behind the magic
    content[6] = 1
    path.write_bytes(content)
    problem = one_problem(pets, deep=True)
    assert (problem.kind, problem.num_samples, problem.keys) == ("changed", 0, ())
    assert "every sample in it is intact" in problem.detail


def test_every_problem_is_reported_and_not_the_first_alone(pets):
    table = table_of(pets)
    shard_path(pets, 0).unlink()
    change(shard_path(pets, 1), blob_of(20), blob_of(999))
    pets.objects.local_path(table.index(1)).write_bytes(b"x")
    pets.objects.local_path(open_dataset(pets, "pets")["val"].digest).unlink()
    found = {(each.split, each.role, each.shard, each.kind) for each in verify(pets, "pets", deep=True).problems}
    assert found == {
        ("val", "shard table", None, "missing"),
        ("train", "shard", 0, "missing"),
        ("train", "sample index", 1, "changed"),
        ("train", "shard", 1, "changed"),
    }


def test_a_bad_table_hits_all_samples_of_its_split(pets):
    pets.objects.local_path(open_dataset(pets, "pets")["val"].digest).write_bytes(b"no table")
    problem = one_problem(pets, deep=False)
    assert (problem.role, problem.split, problem.kind, problem.num_samples) == ("shard table", "val", "changed", 5)


def test_bad_deletions_are_found_and_the_shards_are_looked_at_all_the_same(pets):
    delete(pets, "pets", keys=["k000"], split="train")
    pets.objects.local_path(table_of(pets).deletions).unlink()
    shard_path(pets, 1).unlink()
    found = verify(pets, "pets").problems
    assert [(each.role, each.kind, each.num_samples) for each in found] == [
        ("deletions", "missing", 2 * STEP - 1),
        ("shard", "missing", STEP),
    ]


@pytest.mark.parametrize("deep", [False, True])
def test_what_only_a_named_view_has_is_verified_with_its_version(pets, deep):
    split = open_dataset(pets, "pets")["train"]
    save_view(pets, "few", split.where("label = 1"))
    save_view(pets, "heavy", split.where("label <> 1").weighted("label"))
    delete(pets, "pets", keys=["k001"])
    assert verify(pets, "pets@1", deep=deep).problems == ()
    few, heavy = (read_views(pets, "pets")[name] for name in ("few", "heavy"))
    (pack,) = ShardTable.read(pets.objects, heavy.table).weights
    path = pets.objects.local_path(pack.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    pets.objects.local_path(ShardTable.read(pets.objects, few.table).deletions).unlink()
    found = verify(pets, "pets@1", deep=deep).problems
    lost = ("deletions", "missing", "train[few]", 8)
    changed = ("weights", "changed", "train[heavy]", heavy.samples)
    assert [(each.role, each.kind, each.split, each.num_samples) for each in found] == [lost, changed][: 1 + deep]
    path.unlink()
    pets.objects.local_path(few.table).unlink()
    found = verify(pets, "pets@1", deep=deep).problems
    assert [(each.role, each.kind, each.split) for each in found] == [
        ("shard table", "missing", "train[few]"),
        ("weights", "missing", "train[heavy]"),
    ]
    assert verify(pets, "pets@2", deep=deep).problems == ()  # they are views of the first version


def test_deleted_samples_are_not_hit(pets):
    delete(pets, "pets", keys=["k000", "k002"], split="train")
    shard_path(pets, 0).unlink()
    problem = one_problem(pets, deep=False)
    assert problem.num_samples == STEP - 2
    assert problem.keys[:2] == ("k001", "k003")


def test_a_missing_index_is_a_problem_of_its_own_and_its_shard_has_no_keys(pets):
    pets.objects.local_path(table_of(pets).index(0)).unlink()
    problem = one_problem(pets, deep=True)
    assert (problem.role, problem.shard, problem.num_samples) == ("sample index", 0, 0)
    shard_path(pets, 0).unlink()
    _, shard = verify(pets, "pets").problems
    assert (shard.num_samples, shard.keys) == (STEP, ())


def test_shards_of_old_versions_without_an_index_are_verified_by_their_digest(repository):
    write_pets(repository, indexed=False)
    assert verify(repository, "pets", deep=True).problems == ()
    change(shard_path(repository, 1), blob_of(14), blob_of(999))
    problem = one_problem(repository, deep=True)
    assert (problem.kind, problem.num_samples, problem.keys) == ("changed", STEP, ())


def commit_table(repository, table):
    entry = {"splits": {"train": describe_table(repository.objects, table)}, "message": "", "skipped": 0}
    repository.versions("datasets", "odd").append(lambda _head: entry)


def with_column(table, name, values):
    place = table.rows.schema.get_field_index(name)
    rows = table.rows.set_column(
        place, table.rows.schema.field(place), pa.array(values, table.rows.schema.field(place).type)
    )
    return type(table)(rows, table.sample_schema, table.classes, table.label_counts)


def test_an_index_of_other_samples_contradicts_its_shard(pets):
    table = table_of(pets)
    swapped = [bytes.fromhex(table.index(number)) for number in (1, 0)]
    commit_table(pets, with_column(table, "index", swapped))
    assert verify(pets, "odd").problems == ()
    first, second = verify(pets, "odd", deep=True).problems
    assert (first.kind, first.shard, first.num_samples) == ("contradictory", 0, STEP)
    assert (second.kind, second.shard) == ("contradictory", 1)


def test_an_index_of_another_number_of_samples_is_no_index_of_this_shard(pets):
    table, val = table_of(pets), table_of(pets, "val")
    commit_table(pets, with_column(table, "index", [bytes.fromhex(val.index(0)), bytes.fromhex(table.index(1))]))
    problem = one_problem(pets, "odd", deep=False)
    assert (problem.role, problem.shard) == ("sample index", 0)
    assert "lists 5 samples, the shard table 12" in problem.detail


def test_a_damaged_offset_is_not_followed(shard):
    """Arrow reads texts where offsets say; one that points outside of everything would end this process."""
    content, index = bytearray(shard[0]), shard[1]
    offsets = np.arange(0, 24, 4, dtype=np.int32).tobytes()  # of the keys of a batch of 5
    place = content.index(offsets)
    content[place + 8 : place + 12] = np.int32(2**31 - 8).tobytes()
    lost = missing_rows(index, readable_identities(pa.py_buffer(bytes(content)), index))
    assert lost.tolist() == [0, 1, 2, 3, 4]


def test_a_table_that_counts_other_samples_contradicts_its_shard(repository):
    table = write_table(repository.objects, [samples(0, 4)], LABELLED_SCHEMA, indexed=False)
    commit_table(repository, with_column(table, "samples", [5]))
    assert "holds 4 samples, the shard table lists 5" in one_problem(repository, "odd", deep=True).detail


def test_an_object_that_is_no_shard_contradicts_its_table(repository):
    table = write_table(repository.objects, [samples(0, 4)], LABELLED_SCHEMA, indexed=False)
    other = repository.objects.put(b"intact, but no shard")
    table = with_column(table, "digest", [bytes.fromhex(other.digest)])
    commit_table(repository, with_column(table, "bytes", [other.size_bytes]))
    for deep in (False, True):
        assert one_problem(repository, "odd", deep=deep).kind == "contradictory"


@pytest.mark.parametrize("deep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_damage_in_a_remote_store_is_found_like_in_a_local_one(url, deep, monkeypatch):  # noqa: F811
    monkeypatch.setattr("datasvc.shards.format.writer.BATCH_SAMPLES", 5)
    monkeypatch.setattr("datasvc.repository.objects.objects.RANGE_BYTES", 500)
    repository = Repository.create(url)
    write_pets(repository)
    table, val = table_of(repository), table_of(repository, "val")
    first, second = (repository.objects.path(table.shard(number).digest) for number in (0, 1))
    content = repository.storage.read(first)
    repository.storage.put_bytes(first, content.replace(blob_of(3), blob_of(999)))
    content = repository.storage.read(second)
    repository.storage.put_bytes(second, content[: content.index(blob_of(20))])
    assert repository.storage.delete_if_older(repository.objects.path(val.shard(0).digest), float("inf"))
    found = [
        (each.split, each.kind, each.keys[:1], each.num_samples)
        for each in verify(repository, "pets", deep=deep).problems
    ]
    expected = [("train", "truncated", ("k012",), 12), ("val", "missing", ("k000",), 5)]
    if deep:
        expected = [("train", "changed", ("k003",), 1), ("train", "truncated", ("k017",), 7), expected[1]]
    assert found == expected


def test_the_bytes_of_all_shards_are_reported_whatever_is_found(pets):
    shard_path(pets, 0).unlink()
    progress = RecordedProgress()
    done = verify(pets, "pets", progress=progress)
    assert progress.totals == [progress.total] == [done.size_bytes]
    assert len(progress.amounts) == done.num_shards == 3


def test_a_store_that_does_not_answer_is_no_damage(pets, monkeypatch):
    def failing(_path):
        raise UnavailableError("503")

    monkeypatch.setattr(pets.storage, "size", failing)
    with pytest.raises(UnavailableError):
        verify(pets, "pets")


def test_what_cannot_be_resolved_or_is_of_a_later_format_is_an_error_and_no_report(pets):
    with pytest.raises(NotFoundError):
        verify(pets, "cats")
    rows = table_of(pets).rows.replace_schema_metadata(
        {b"datasvc.table": b'{"format": 99}', b"datasvc.sample_schema": LABELLED_SCHEMA.serialize().to_pybytes()}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as file:
        file.write_table(rows)
    later = pets.objects.put(sink.getvalue().to_pybytes()).digest
    entry = {
        "splits": {"train": {"table": later, "samples": 1, "bytes": 1, "shards": 1}},
        "message": "",
        "skipped": 0,
    }
    pets.versions("datasets", "odd").append(lambda _head: entry)
    with pytest.raises(ConfigError, match="reads up to"):
        verify(pets, "odd")


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """The bytes of a shard of several batches, and its index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.BATCH_SAMPLES", 5)
        repository = Repository.create(str(tmp_path_factory.mktemp("damage") / "repo"))
        write_pets(repository)
    table = table_of(repository)
    index = SampleIndex.decode(repository.objects.read(table.index(0)), "index")
    return repository.objects.read(table.shard(0).digest), index


@given(st.data())
def test_whatever_bytes_are_changed_no_sample_with_other_values_counts_as_whole(shard, data):
    """And nothing crashes: damaged offsets are never followed."""
    content, index = bytearray(shard[0]), shard[1]
    places = data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=6))
    for place in places:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content))) :]
    lost = set(missing_rows(index, readable_identities(pa.py_buffer(bytes(content)), index)).tolist())
    for row, number in enumerate(range(STEP)):
        if blob_of(number) not in content or index.keys[row].encode() not in content:
            assert row in lost


def test_a_changed_entry_is_corrupt_and_not_a_problem_of_samples(pets):
    path = pets.storage.local_path("datasets/pets/versions/00000001.json")
    path.write_bytes(path.read_bytes().replace(b'"skipped": 0', b'"skipped": 1'))
    with pytest.raises(CorruptDataError):
        verify(pets, "pets")
