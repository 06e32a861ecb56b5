"""WebDataset exports, read by the webdataset package."""

import json
import tarfile

import pyarrow as pa
import pytest
import webdataset

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from tests.shards.export.contents import (  # fmt: skip
    KEY_FIELD,
    ODD_KEYS,
    digests,
    exported,
    photo,
    version_digests,
    write_photos,
    write_rich,
)
from tests.shards.export.export_laws import ExportLaws
from tests.shards.written_versions import write_version

TEXT = {"caption"}


def read(folder, split="train"):
    """Return the samples as dicts of our columns, as the package's own reader finds them."""
    shards = sorted(str(path) for path in folder.glob(f"{split}-*.tar"))
    found = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))
    return [sample_of(each) for each in found]


def sample_of(found):
    sample = {"key": found.pop("key.txt", found.pop("__key__").encode()).decode()}
    for extension, content in found.items():
        if extension.startswith("__"):
            continue
        if extension == "cls":
            sample["label"] = int(content)
        elif extension == "json":
            sample |= json.loads(content)
        elif extension in {"jpg", "png"}:
            sample["image"] = content
        else:
            name, _, kind = extension.rpartition(".")
            sample[name] = content.decode() if kind == "txt" else content
    return sample


def check(dataset, folder, split="train"):
    assert digests(read(folder, split), dataset[split].table.sample_schema) == version_digests(dataset[split])


class TestWebDatasetExport(ExportLaws):
    format = "webdataset"

    def read(self, folder, split):
        return read(folder, split.name)


@pytest.mark.parametrize("shards", [1, 5, len(ODD_KEYS)])
def test_names_in_a_tar_never_climb_however_odd_the_keys(repository, tmp_path, shards):
    dataset = write_photos(repository, ODD_KEYS, shards=shards)
    exported(dataset, tmp_path / "out", "webdataset")
    check(dataset, tmp_path / "out")
    for path in (tmp_path / "out").glob("*.tar"):
        with tarfile.open(path) as tar:
            for name in tar.getnames():
                assert not name.startswith("/")
                assert not {"", ".", ".."} & set(name.split("/"))


def test_a_key_equal_to_the_name_is_not_written_again(repository, tmp_path):
    dataset = write_photos(repository, ["000/001", "000/002.jpg"], shards=1)
    exported(dataset, tmp_path / "out", "webdataset", split="train")
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        assert tar.getnames() == ["000/001.jpg", "000/001.cls", "000/002.jpg", "000/002.cls", "000/002.key.txt"]


def test_two_keys_with_one_name_stay_two_samples(repository, tmp_path):
    dataset = write_photos(repository, ["a.jpg", "a", "a.jpeg", "A"], shards=1)
    exported(dataset, tmp_path / "out", "webdataset")
    check(dataset, tmp_path / "out")


def test_a_sample_that_is_all_null_is_not_lost(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("image", pa.large_binary()), pa.field("text", pa.string())])
    samples = [{"key": "a", "image": None, "text": None}, {"key": "b", "image": b"", "text": ""}]
    write_version(repository, "nulls", {"train": [samples]}, schema)
    dataset = open_dataset(repository, "nulls")
    exported(dataset, tmp_path / "out", "webdataset")
    check(dataset, tmp_path / "out")


def test_a_tar_has_no_times_and_owners(repository, tmp_path):
    exported(write_photos(repository), tmp_path / "out", "webdataset")
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        assert {(each.mtime, each.uid, each.gid, each.uname, each.gname, each.mode) for each in tar} == {
            (0, 0, 0, "", "", 0o644)
        }


def test_pictures_beside_the_image_get_their_kind_as_extension(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("depth", pa.large_binary()), pa.field("audio", pa.large_binary())])
    samples = [{"key": "a", "depth": photo("x")["image"], "audio": b"RIFF....AVI "}]
    write_version(repository, "two", {"train": [samples]}, schema)
    exported(open_dataset(repository, "two"), tmp_path / "out", "webdataset")
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        assert tar.getnames() == ["a.depth.jpg", "a.audio.bin"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.field("taken", pa.timestamp("us")), "webdataset cannot hold the column 'taken' of timestamp"),
        (pa.field("parts", pa.list_(pa.binary())), "column 'parts' of list"),
        (pa.field("Mask", pa.large_binary()), "column 'Mask' of large_binary"),
    ],
)
def test_a_column_it_cannot_hold_is_named(repository, tmp_path, column, message):
    write_version(
        repository, "bad", {"train": [[{"key": "a", column.name: None}]]}, shard_schema([KEY_FIELD, column])
    )
    with pytest.raises(ConfigError, match=f"{message}.*formats that can: parquet"):
        exported(open_dataset(repository, "bad"), tmp_path / "out", "webdataset")
    assert not (tmp_path / "out").exists()


def test_nan_is_refused_because_json_has_no_word_for_it(repository, tmp_path):
    dataset = write_rich(repository, weight=float("nan"))
    with pytest.raises(ConfigError, match=r"sample 'r/0' holds NaN.*parquet"):
        exported(dataset, tmp_path / "out", "webdataset")
    assert not (tmp_path / "out" / "datasvc-export.json").exists()
