"""SQL sees the samples that are live, and nothing else of the world; it reads the columns that it uses."""

import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import Digest, Repository
from datasvc.shards import open_dataset
from datasvc.shards.format.ipc_reader import ObjectFiles
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.query.query import query
from datasvc.shards.query.scan import LiveSamples
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.deletions import Deletions, delete_samples
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.shards.written_versions import LABELLED_SCHEMA, describe_table, write_shard, write_table, write_version
from tests.support.confined_sql import check_refused

KEY = pa.field("key", pa.string(), nullable=False)


def samples(start, stop):
    return [{"key": f"k{number:03}", "blob": b"x" * number, "label": number % 3} for number in range(start, stop)]


def write_pets(repository, **options):
    splits = {"train": [samples(0, 10), samples(10, 20)], "val": [samples(0, 4)]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, ("cat", "dog", "eel"), **options)
    return repository


def commit(repository, name, tables):
    entry = {
        "splits": {split: describe_table(repository.objects, table) for split, table in tables.items()},
        "message": "",
        "skipped": 0,
    }
    repository.versions("datasets", name).append(lambda _head: entry)


def ask(repository, sql, ref="pets"):
    return [tuple(row.values()) for row in query(repository, ref, sql).to_pylist()]


@pytest.fixture
def pets(repository):
    return write_pets(repository)


def test_splits_are_tables_and_samples_are_all_of_them_on_any_store(url):  # noqa: F811
    pets = write_pets(Repository.create(url))
    assert ask(pets, "select count(*), min(key), max(key), sum(octet_length(blob)) from train") == [
        (20, "k000", "k019", sum(range(20)))
    ]
    assert ask(pets, "select split, count(*) from samples group by split order by split") == [
        ("train", 20),
        ("val", 4),
    ]
    names = "select name, count(*) from val join classes using (label) group by name order by name"
    assert ask(pets, names) == [("cat", 2), ("dog", 1), ("eel", 1)]
    assert ask(pets, "select blob from val where key = 'k003'") == [(b"xxx",)]


def test_a_deleted_sample_is_not_seen_and_old_versions_still_see_it(url):  # noqa: F811
    pets = write_pets(Repository.create(url))
    delete(pets, "pets", keys=["k003", "k004"], split="train")
    delete(pets, "pets", keys=["k003"], split="val")
    assert ask(pets, "select count(*), sum(octet_length(blob)) from train") == [(18, sum(range(20)) - 7)]
    assert ask(pets, "select split, key from samples where key in ('k002', 'k003', 'k004') order by all") == [
        ("train", "k002"),
        ("val", "k002"),
    ]
    assert ask(pets, "select count(*) from samples", "pets@1") == [(24,)]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_key_that_was_deleted_and_is_there_again_is_seen_once(repository, indexed):
    """In another shard after an append, and in the same one where a duplicate was dropped."""
    repeated = [{**sample, "blob": b"again"} for sample in samples(0, 3)]
    table = write_table(repository.objects, [samples(0, 5) + repeated, repeated], LABELLED_SCHEMA, indexed=indexed)
    dropped = delete_samples(repository.objects, table, {0: np.array([0, 1, 6]), 1: np.array([1])})
    commit(repository, "pets", {"train": dropped})
    expected = sorted((sample["key"], sample["blob"]) for sample in open_dataset(repository, "pets")["train"])
    assert len(expected) == 7
    assert ask(repository, "select key, blob from train order by all") == expected


@pytest.mark.slow
@given(st.data())
def test_sql_sees_exactly_the_samples_that_iterating_gives(tmp_path_factory, data):
    repository = Repository.create(str(tmp_path_factory.mktemp("query") / "repo"))
    shards = data.draw(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6), min_size=1, max_size=3))
    samples = [
        [{"key": key, "blob": b"%d" % row, "label": number} for row, key in enumerate(shard)]
        for number, shard in enumerate(shards)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.BATCH_SAMPLES", 2)
        table = write_table(repository.objects, samples, LABELLED_SCHEMA)
    deleted = {
        number: np.array(data.draw(st.lists(st.integers(0, len(shard) - 1), max_size=len(shard) - 1)), np.int64)
        for number, shard in enumerate(shards)
    }
    commit(repository, "pets", {"train": delete_samples(repository.objects, table, deleted)})
    expected = sorted(
        (each["key"], each["blob"], each["label"]) for each in open_dataset(repository, "pets")["train"]
    )
    assert ask(repository, "select key, blob, label from train order by all") == expected


def test_a_column_that_a_shard_lacks_is_null(repository):
    wide = shard_schema([KEY, pa.field("text", pa.string())])
    narrow = shard_schema([KEY])
    rows = [
        write_shard(repository.objects, [{"key": "a"}], narrow),
        write_shard(repository.objects, [{"key": "b", "text": "B"}], wide),
    ]
    commit(repository, "pets", {"train": ShardTable.build(rows, wide)})
    assert ask(repository, "select * from train order by key") == [("a", None), ("b", "B")]


def test_types_that_sql_lacks_are_given_as_the_nearest(repository):
    kinds = {"half": pa.float16(), "wide": pa.decimal256(50, 2), "tags": pa.list_(pa.string())}
    schema = shard_schema([KEY, *(pa.field(name, kind) for name, kind in kinds.items())])
    from decimal import Decimal

    held = [{"key": "a", "half": np.float16(0.5), "wide": Decimal("1.25"), "tags": ["x", "y"]}]
    write_version(repository, "pets", {"train": [held]}, schema)
    assert ask(repository, "select half, wide, tags from train") == [(0.5, "1.25", ["x", "y"])]


class Counting:
    """Counts the bytes that a storage hands out."""

    def __init__(self, storage, monkeypatch):
        self.read_bytes = 0
        real = storage.read_range

        def read_range(path, offset, length):
            content = real(path, offset, length)
            self.read_bytes += len(content)
            return content

        monkeypatch.setattr(storage, "read_range", read_range)


@pytest.mark.parametrize("with_deletions", [False, True])
def test_a_blob_column_that_a_query_does_not_use_is_not_read(monkeypatch, with_deletions):
    repository = Repository.create("memory://query-ranges-" + str(with_deletions))
    blobs = [{"key": f"k{number}", "blob": b"x" * 100_000, "label": number} for number in range(20)]
    write_version(repository, "pets", {"train": [blobs]}, LABELLED_SCHEMA)
    if with_deletions:
        delete(repository, "pets", keys=["k3"])
    counting = Counting(repository.storage, monkeypatch)
    gone = 3 if with_deletions else 0
    # Arrow alone reads everything where columns that are both wanted and filtered by add up to the shard's.
    filtered = "select sum(label), max(key) from train where key <> 'x'"
    assert ask(repository, filtered) == [(sum(range(20)) - gone, "k9")]
    small = counting.read_bytes
    assert small < 50_000
    ask(repository, "select max(blob) from train")
    assert counting.read_bytes - small > 1_900_000


def test_local_shards_are_mapped_and_never_read(pets, monkeypatch):
    def refusing(*_arguments):
        raise AssertionError

    monkeypatch.setattr(
        pets.storage, "read_range", lambda path, *rest: refusing() if path in shards else real(path, *rest)
    )
    real, shards = type(pets.storage).read_range.__get__(pets.storage), set()
    shards |= {pets.objects.path(info.digest) for info in open_dataset(pets, "pets")["train"].table.shards()}
    assert ask(pets, "select count(*), max(blob) from train") == [(20, b"x" * 19)]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{file}')",
        "select * from '{file}'",
        "select * from read_csv('https://example.org/x.csv')",
        "select * from glob('/*')",
        "copy (select 1) to '{file}'",
        "copy train to '{file}'",
        "attach '{file}'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "create table mine (x int)",
        "insert into train values ('x')",
        "drop view train",
        "pragma database_list",
        "select * from secret_of_this_program",
        "select 1; select 2",
        "",
        "-- nothing",
    ],
)
def test_a_query_reaches_nothing_but_the_samples_and_changes_nothing(pets, tmp_path, sql):
    check_refused(lambda statement: query(pets, "pets", statement), sql, tmp_path)


@pytest.mark.parametrize(
    "sql", ["explain select * from train", "pivot train on label using count(*)", "describe train", "from val"]
)
def test_everything_that_only_asks_is_a_query(pets, sql):
    assert query(pets, "pets", sql).num_rows


def test_an_error_in_the_query_has_the_message_of_duckdb(pets):
    with pytest.raises(ConfigError, match=r"pets@1.*labl.*not found"):
        query(pets, "pets", "select labl from train")
    with pytest.raises(ConfigError, match=r"Could not convert string 'k0"):
        query(pets, "pets", "select key::int from train order by key")


def test_a_missing_or_truncated_shard_is_no_error_of_the_query(url):  # noqa: F811
    pets = write_pets(Repository.create(url))
    table = open_dataset(pets, "pets")["train"].table
    path = pets.objects.path(table.shard(1).digest)
    content = pets.storage.read(path)
    pets.storage.put_bytes(path, content[:-100])
    with pytest.raises(
        CorruptDataError, match=f"{table.shard(1).digest} is corrupt: it has {len(content) - 100} bytes"
    ):
        query(pets, "pets", "select max(key) from train")
    assert pets.storage.delete_if_older(path, float("inf"))
    with pytest.raises(NotFoundError, match=f"{table.shard(1).digest} is missing"):
        query(pets, "pets", "select max(key) from train")
    assert ask(pets, "select count(key) from val") == [(4,)]


def test_a_damaged_offset_is_corrupt_data_and_no_crash(pets):
    path = pets.objects.local_path(open_dataset(pets, "pets")["train"].table.shard(1).digest)
    content = bytearray(path.read_bytes())
    place = content.index(np.arange(0, 44, 4, dtype=np.int32).tobytes())  # of the keys
    content[place + 8 : place + 12] = np.int32(2**31 - 8).tobytes()
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"pets@1/train is corrupt.*verify --deep"):
        query(pets, "pets", "select max(key) from train")
    assert ask(pets, "select count(label) from train") == [(20,)]


def test_a_store_that_fails_half_way_is_unavailable(monkeypatch):
    pets = write_pets(Repository.create("memory://query-failing"))
    table = open_dataset(pets, "pets")["train"].table
    path, real = pets.objects.path(table.shard(0).digest), pets.storage.read_range

    def failing(asked, offset, length):
        if asked == path:
            raise UnavailableError("503")
        return real(asked, offset, length)

    monkeypatch.setattr(pets.storage, "read_range", failing)
    with pytest.raises(UnavailableError, match="503"):
        query(pets, "pets", "select max(key) from train")


@pytest.mark.parametrize("split", ['we"ird', "drop view x; --", "it's", "select", "Train-1"])
def test_a_split_of_any_name_can_be_queried(repository, split):
    write_version(repository, "pets", {split: [[{"key": "a", "text": "b"}]]})
    quoted = '"' + split.replace('"', '""') + '"'
    assert ask(repository, f"select key from {quoted}") == [("a",)]
    assert ask(repository, "select split, key from samples") == [(split, "a")]


def test_a_split_that_is_called_like_a_view_of_ours_is_what_its_name_means(repository):
    write_version(
        repository, "pets", {"samples": [[{"key": "a", "text": "x"}]], "classes": [[{"key": "b", "text": "y"}]]}
    )
    assert ask(repository, "select key from samples union all select key from classes order by all") == [
        ("a",),
        ("b",),
    ]


def test_a_column_called_split_keeps_its_name(repository):
    schema = shard_schema([KEY, pa.field("split", pa.string())])
    write_version(repository, "pets", {"train": [[{"key": "a", "split": "mine"}]]}, schema)
    assert ask(repository, "select split_name, split from samples") == [("train", "mine")]


def test_names_that_differ_in_case_alone_are_refused(repository):
    schema = shard_schema([KEY, pa.field("Key", pa.string())])
    write_version(repository, "pets", {"train": [[{"key": "a", "Key": "b"}]]}, schema)
    write_version(repository, "cats", {"A": [[{"key": "a", "text": "b"}]], "a": [[{"key": "a", "text": "b"}]]})
    for ref in ("pets", "cats"):
        with pytest.raises(ConfigError, match="differ in case only"):
            query(repository, ref, "select 1")


def test_a_version_without_labels_has_no_classes(repository):
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "b"}]]})
    assert ask(repository, "select count(*) from classes") == [(0,)]


def test_a_scan_of_no_column_still_counts_the_live_samples(pets):
    delete(pets, "pets", keys=["k003"], split="train")
    train = open_dataset(pets, "pets")["train"]
    sizes = {shard.digest: shard.size_bytes for shard in train.table.shards()}
    samples = LiveSamples.of(train, ObjectFiles(pets.storage, sizes))
    assert sum(batch.num_rows for batch in samples.scanner(columns=[]).to_reader()) == 19
    assert samples.scanner().to_reader().read_all().column("key").to_pylist() == [sample["key"] for sample in train]


def test_objects_behave_as_files(monkeypatch):
    repository = Repository.create("memory://object-files")
    info = repository.objects.put(b"0123456789")
    files = ObjectFiles(repository.storage, {info.digest: 10})
    with files.open(info.digest) as file:
        python = io.BytesIO(b"0123456789")
        for offset, whence, length in ((3, 0, 4), (-2, 2, 5), (0, 0, 10), (8, 0, None)):
            assert file.seek(offset, whence) == python.seek(offset, whence)
            assert file.read(length) == python.read(length)
            assert file.tell() == python.tell()
        assert file.size() == 10
    with pytest.raises(NotFoundError):
        ObjectFiles(repository.storage, {Digest("0" * 64): 1}).open(Digest("0" * 64))


@pytest.fixture(scope="module")
def large_pets(tmp_path_factory):
    """Thirty megabytes in eight shards, some with deletions: enough that a LIMIT ends a scan long before its end."""
    repository = Repository.create(str(tmp_path_factory.mktemp("large") / "repo"))
    noise = np.random.default_rng(0)
    shards = [
        [{"key": f"k{shard}-{number}", "blob": noise.bytes(100_000), "label": number % 3} for number in range(40)]
        for shard in range(8)
    ]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA, ("cat", "dog", "eel"))
    delete(repository, "pets", keys=[f"k{shard}-{number}" for shard in (0, 1, 4) for number in range(shard, 40, 7)])
    return repository


_LIMITED = "select * from train limit 5"
_IN_PYTHON = f"import datasvc; assert datasvc.open({{url!r}}).datasets.sql('pets', {_LIMITED!r}).num_rows == 5"
_ON_THE_COMMAND_LINE = (
    "import sys; from datasvc.cli.main import main; "
    f"sys.argv[1:] = ['sql', 'pets', {_LIMITED!r}, '--repo', {{url!r}}]; main()"
)


def run_to_its_end(program, repository):
    program = program.format(url=repository.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("program", [_IN_PYTHON, pytest.param(_ON_THE_COMMAND_LINE, marks=pytest.mark.slow)])
def test_a_process_whose_query_ends_its_scan_early_ends_too(large_pets, program):
    run_to_its_end(program, large_pets)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 7])
def test_six_commands_that_end_a_scan_of_shards_larger_than_what_is_read_ahead_all_end(repository, step):
    noise = np.random.default_rng(0)
    shards = [
        [{"key": f"k{shard}-{number}", "blob": noise.bytes(1 << 20), "label": number % 3} for number in range(17)]
        for shard in range(4)
    ]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA, ("cat", "dog", "eel"))
    if step:
        delete(repository, "pets", keys=[f"k{shard}-{number}" for shard in range(4) for number in range(0, 17, step)])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_to_its_end, [_ON_THE_COMMAND_LINE] * 6, [repository] * 6))


def test_a_query_that_ends_early_reads_no_further_and_leaves_no_thread():
    repository = Repository.create("memory://query-early")
    shards = [[{"key": f"k{shard}", "blob": b"x" * (17 << 20), "label": 0}] for shard in range(6)]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(repository.storage, patch)
        assert ask(repository, "select key from (select * from train) where octet_length(blob) > 0 limit 1") == [
            ("k0",)
        ]
    assert counting.read_bytes < 6 * (17 << 20)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("datasvc-scan")]


def test_the_deletions_of_a_shard_are_expanded_when_it_is_scanned(repository, monkeypatch):
    """A flag is a byte: those of all shards would be a gigabyte for a billion samples, whatever LIMIT says."""
    shards = [samples(start, start + 10) for start in range(0, 100, 10)]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA)
    delete(repository, "pets", keys=[f"k{number:03}" for number in range(0, 100, 10)])
    train = open_dataset(repository, "pets")["train"]
    expanded, real = [], Deletions.flags
    monkeypatch.setattr(Deletions, "flags", lambda self, shard: (expanded.append(shard), real(self, shard))[1])
    sizes = {shard.digest: shard.size_bytes for shard in train.table.shards()}
    live = LiveSamples.of(train, ObjectFiles(repository.storage, sizes))
    assert expanded == []
    assert live.scanner(columns=["key"]).to_reader().read_next_batch().num_rows == 9
    live.close()
    assert 0 in expanded
    assert set(expanded) <= set(range(5)), "those of the shard that was read, and of the few read ahead"


def test_a_scan_that_is_left_half_way_ends_when_its_samples_are_closed(pets):
    train = open_dataset(pets, "pets")["train"]
    sizes = {shard.digest: shard.size_bytes for shard in train.table.shards()}
    samples = LiveSamples.of(train, ObjectFiles(pets.storage, sizes))
    reader = samples.scanner().to_reader()
    assert reader.read_next_batch().num_rows
    assert [thread for thread in threading.enumerate() if thread.name.startswith("datasvc-scan")]
    samples.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("datasvc-scan")]
    with pytest.raises(StopIteration):
        reader.read_next_batch()
