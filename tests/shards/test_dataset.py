import pickle
import shutil

import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset


@pytest.fixture
def split(repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
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


def test_an_unknown_split_says_which_there_are(split):
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
    remote = open_dataset(Repository.open("memory://copied-repository"), "pets")["train"]
    assert len({sample["key"] for sample in remote}) == 20


def test_a_log_is_asked_for_by_name_alone(split):
    assert [entry.number for entry in split.repository.entries("datasets", "pets")] == [1]
    with pytest.raises(ConfigError, match="give the name alone: pets"):
        split.repository.entries("datasets", "pets@1")


def test_random_access_reads_what_was_written(digits):
    sample = digits["train"][5]
    assert sorted(sample) == ["height", "image", "key", "label", "width"]
    assert (sample["width"], sample["height"]) == (64, 64)
    assert sample["key"].startswith(f"{digits['train'].classes[sample['label']]}/")


def test_a_changed_shard_is_refused_however_often_it_is_asked_for(split):
    path = split.repository.objects.local_path(split.table.shard(0).digest)
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="is corrupt"):
            split[0]


def test_a_changed_shard_of_a_remote_repository_is_never_served(split):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(split.repository.url, "/damaged-repository", recursive=True)
    remote = open_dataset(Repository.open("memory://damaged-repository"), "pets")["train"]
    digest = remote.table.shard(0).digest
    path = f"/damaged-repository/{remote.repository.objects.path(digest)}"
    raw = bytearray(memory.cat_file(path))
    raw[raw.index(b"\xff\xd8") + 30] ^= 1
    memory.pipe_file(path, bytes(raw))
    with pytest.raises(CorruptDataError, match="is corrupt"):
        remote[0]


def test_random_access_keeps_a_few_shards_open_and_no_more(repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=1)
    split = open_dataset(repository, "pets")["train"]
    assert len({sample["key"] for sample in split}) == split.table.num_shards == 20
    assert len(split._open) == 4
