import pickle
import shutil

import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.repository import Repository
from datasvc.shards import OriginShards, open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.versions.combine import append_table
from datasvc.shards.versions.delete import delete
from datasvc.testing import FaultyStore, small_dataset
from tests.shards.versions.shard_store_laws import ShardStoreLaws
from tests.shards.written_versions import LABELLED_SCHEMA, describe_table, write_table, write_version

KEY = pa.field("key", pa.string(), nullable=False)


class TestOriginShards(ShardStoreLaws):
    @pytest.fixture
    def store(self, split):
        return OriginShards(split.repository)


class TestRemoteOriginShards(TestOriginShards):
    @pytest.fixture
    def faulty(self):
        with FaultyStore() as store:
            yield store

    @pytest.fixture
    def split(self, faulty):
        return small_dataset(faulty.url, samples=40, shard_bytes=4000)["train"]

    @pytest.fixture(autouse=True)
    def with_faults(self, faulty):
        self.damage = lambda split, info: faulty.damage(split.repository.objects.path(info.digest))

    def test_a_store_that_fails_is_unavailable(self, store, faulty, infos):
        faulty.fail("read", "objects/*", times=1)
        with pytest.raises(UnavailableError, match="injected fault"):
            store.open_shard(infos[0])
        assert store.open_shard(infos[0]).num_samples


def numbered(numbers):
    return [{"key": f"k{number}", "blob": b"blob of %d" % number, "label": number % 3} for number in numbers]


@pytest.fixture
def split(repository):
    """20 training samples in six shards; the split "val" has six."""
    shards = [numbered(range(start, min(start + 4, 20))) for start in range(0, 20, 4)]
    splits = {"train": [shards[0][:1], shards[0][1:], *shards[1:]], "val": [numbered(range(6))]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, ["a", "b", "c"])
    return open_dataset(repository, "pets")["train"]


def test_random_access_gives_each_sample_once_and_numbers_wrap_like_a_list(split):
    keys = [split[number]["key"] for number in range(len(split))]
    assert len(set(keys)) == 20
    assert split[-1]["key"] == keys[-1]
    assert [sample["key"] for sample in split] == keys


@pytest.mark.parametrize("number", [20, -21])
def test_numbers_out_of_range_are_an_index_error(split, number):
    with pytest.raises(IndexError, match=r"outside 0\.\.19"):
        split[number]


def test_the_error_of_an_unknown_split_lists_the_splits(split):
    with pytest.raises(NotFoundError, match="no split 'test'; it has: train, val"):
        open_dataset(split.repository, "pets")["test"]


def test_a_split_travels_as_a_few_strings(split):
    raw = pickle.dumps(split)
    assert len(raw) < 500
    assert pickle.loads(raw)[7] == split[7]


def test_a_changed_shard_is_never_served(split):
    path = split.repository.objects.local_path(split.table.shard(0).digest)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptDataError, match="is corrupt"):
        split[0]


def test_a_missing_shard_is_named(split):
    path = split.repository.objects.local_path(split.table.shard(0).digest)
    path.unlink()
    with pytest.raises(NotFoundError, match=str(path)):
        split[0]


def test_a_remote_repository_is_read_the_same(split, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(split.repository.url, "/copied-repository", recursive=True)
    shutil.rmtree(split.repository.url)
    repository = Repository.open("memory://copied-repository")
    assert len({sample["key"] for sample in open_dataset(repository, "pets")["train"]}) == 20
    delete(repository, "pets", where="label = 1", split="train")
    assert [sample["label"] for sample in open_dataset(repository, "pets")["train"]] == [0, 2] * 6 + [0]


def test_a_log_has_no_version_in_its_name(split):
    assert [entry.number for entry in split.repository.entries("datasets", "pets")] == [1]
    with pytest.raises(ConfigError, match="give the name alone: pets"):
        split.repository.entries("datasets", "pets@1")


def test_random_access_reads_what_was_written(digits):
    sample = digits["train"][5]
    assert sorted(sample) == ["height", "image", "key", "label", "width"]
    assert (sample["width"], sample["height"]) == (64, 64)
    assert sample["key"].startswith(f"{digits['train'].classes[sample['label']]}/")


def test_random_access_keeps_a_few_shards_open_and_no_more(split):
    assert len({sample["key"] for sample in split}) == 20
    assert split.table.num_shards == 6
    assert len(split._open) == 4


def test_deleted_samples_are_not_there(split):
    delete(split.repository, "pets", keys=["k0", "k2", "k3", "k19"], split="train")
    less = open_dataset(split.repository, "pets")["train"]
    assert (len(less), len(split)) == (16, 20)
    expected = [f"k{number}" for number in range(20) if number not in {0, 2, 3, 19}]
    assert [sample["key"] for sample in less] == expected
    assert [less[number]["key"] for number in range(-16, 0)] == expected
    assert [sample["key"] for sample in pickle.loads(pickle.dumps(less))] == expected
    with pytest.raises(IndexError, match=r"outside 0\.\.15"):
        less[16]


def test_rows_are_translated_where_samples_are_deleted_and_passed_on_where_none_is(split):
    delete(split.repository, "pets", keys=["k8", "k10"], split="train")
    less = open_dataset(split.repository, "pets")["train"]
    rows = np.array([1, 0, 1])
    assert less.stored_rows(3, rows).tolist() == [3, 1, 3]
    assert less.stored_rows(2, rows) is rows
    assert split.stored_rows(3, rows) is rows


def test_columns_that_a_shard_lacks_are_none(repository):
    objects = repository.objects
    wide = shard_schema([KEY, pa.field("score", pa.int64()), pa.field("blob", pa.large_binary())])
    head = write_table(objects, [[{"key": "a"}]], shard_schema([KEY]))
    new = write_table(objects, [[{"key": "b", "score": 1, "blob": None}]], wide)
    both = describe_table(objects, append_table(objects, head, new))
    repository.versions("datasets", "mixed").append(lambda _head: {"splits": {"train": both}})
    assert list(open_dataset(repository, "mixed")["train"]) == [
        {"key": "a", "score": None, "blob": None},
        {"key": "b", "score": 1, "blob": None},
    ]


def test_deletions_that_are_missing_or_changed_are_named(split):
    delete(split.repository, "pets", keys=["k1"], split="train")
    less = open_dataset(split.repository, "pets")["train"]
    path = split.repository.objects.local_path(less.table.deletions)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"X")
    with pytest.raises(CorruptDataError, match=f"{path} is corrupt"):
        less[1]
    path.unlink()
    with pytest.raises(NotFoundError, match=str(path)):
        less[1]
    assert less[0]["key"] == "k0"


def test_a_slice_of_a_split_is_a_list_of_its_samples(repository):
    write_version(repository, "texts", {"train": [[{"key": key, "text": key} for key in "abcde"]]})
    split = open_dataset(repository, "texts")["train"]
    assert [sample["key"] for sample in split[1:3]] == ["b", "c"]
    assert [sample["key"] for sample in split[::-2]] == ["e", "c", "a"]
    assert split[7:] == []
