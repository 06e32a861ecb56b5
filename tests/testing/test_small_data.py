"""Small data sets are real ones, and the same ones in each call."""

import io

import pytest
from PIL import Image

import datasvc
from datasvc.repository import Repository
from datasvc.testing import FakeClock, encode_jpeg, small_dataset


def test_a_small_data_set_has_images_labels_and_shards(repository):
    train = small_dataset(repository, samples=60, image_size=48, classes=3)["train"]
    assert len(train) == 60
    assert len(train.table.samples_per_shard) > 1
    assert [train.classes[sample["label"]] for sample in train] == [sample["key"].split("/")[0] for sample in train]
    assert {sample["label"] for sample in train} == {0, 1, 2}
    assert Image.open(io.BytesIO(train[0]["image"])).size == (48, 48)


def test_each_call_makes_the_same_samples(tmp_path):
    sizes = {"train": 10, "val": 3}
    url = str(tmp_path / "repo")
    made = [small_dataset(url, splits=sizes), small_dataset(datasvc.open(url), splits=sizes)]
    made.append(small_dataset(Repository.open(url), "other", splits=sizes))
    assert [str(version.resolved) for version in made] == ["small@1", "small@2", "other@1"]
    assert len({version["train"].digest for version in made}) == len({version["val"].digest for version in made}) == 1


def test_an_image_follows_its_arguments():
    assert encode_jpeg(seed=1) == encode_jpeg(seed=1) != encode_jpeg(seed=2)
    assert Image.open(io.BytesIO(encode_jpeg(9, 7))).size == (9, 7)


def test_a_clock_moves_when_it_is_advanced_and_never_backwards():
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(1.5)
    assert clock() == 6.5
    with pytest.raises(AssertionError):
        clock.advance(-1)
