"""Splits whose files have equal names, as in nearly every published data set."""

import io
import tarfile

import pytest

from datasvc.errors import ConflictError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources import SourceOptions
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from tests.samples import jpeg


def content(repository, ref="pets"):
    """Return the images by split and key."""
    dataset = open_dataset(repository, ref)
    return {name: {sample["key"]: sample["image"] for sample in split} for name, split in dataset.items()}


def write(folder, seeds):
    """Write images by path, each drawn from its seed; returns the folder."""
    for path, seed in seeds.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(jpeg(seed=seed))
    return str(folder)


def test_a_folder_with_equal_file_names_in_train_and_val_is_ingested(repository, tmp_path):
    """the-database/traiNNer-redux#63: `train/cat/1.jpg` beside `val/cat/1.jpg` are two pictures."""
    source = write(
        tmp_path / "a", {"train/cat/1.jpg": 1, "train/dog/1.jpg": 2, "val/cat/1.jpg": 3, "val/dog/1.jpg": 4}
    )
    ingest(repository, source, "pets")
    both = {"cat/1.jpg", "dog/1.jpg"}
    assert {split: set(images) for split, images in content(repository).items()} == {"train": both, "val": both}
    assert content(repository)["val"]["cat/1.jpg"] == jpeg(seed=3)
    assert not verify(repository, "pets").overlaps


def test_a_later_append_adds_new_pictures_of_known_names_and_no_copies(repository, tmp_path):
    """the-database/traiNNer-redux#63: the second half of the data comes with an append, under the same names."""
    ingest(repository, write(tmp_path / "a", {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2}), "pets")
    ingest(repository, write(tmp_path / "b", {"val/cat/1.jpg": 3}), "pets", append=True)
    assert {split: sorted(images) for split, images in content(repository).items()} == {
        "train": ["cat/1.jpg", "cat/2.jpg"],
        "val": ["cat/1.jpg"],
    }
    moved = write(tmp_path / "c", {"val/cat/2.jpg": 2})
    with pytest.raises(ConflictError, match=r"'cat/2\.jpg'"):
        ingest(repository, moved, "pets", append=True)
    ingest(repository, moved, "pets", append=True, on_common="drop")
    assert "cat/2.jpg" not in content(repository)["val"]


def test_splits_that_are_ingested_one_after_the_other_may_have_equal_names(repository, tmp_path):
    """the-database/traiNNer-redux#63: one command for each split, with `--split`."""
    for split, seed, append in (("train", 1, False), ("val", 2, True)):
        source = write(tmp_path / split, {"cat/1.jpg": seed})
        ingest(repository, source, "pets", source_options=SourceOptions(split=split), append=append)
    assert content(repository) == {"train": {"cat/1.jpg": jpeg(seed=1)}, "val": {"cat/1.jpg": jpeg(seed=2)}}


def test_the_same_picture_in_train_and_val_is_still_refused(repository, tmp_path):
    """wujixiu/helmet-detection#29: copies of training pictures in the validation set flatter the result."""
    source = write(tmp_path / "a", {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2, "val/cat/1.jpg": 1})
    with pytest.raises(ConflictError, match=r"1 sample of 'train' is in 'val' too, by equal images.*'cat/1\.jpg'"):
        ingest(repository, source, "pets")


def test_tars_of_two_splits_count_their_samples_from_zero(repository, tmp_path):
    """NRCan/geo-deep-learning#516: every split starts at 000000 again."""
    for split, seed in (("train", 0), ("val", 100)):
        with tarfile.open(tmp_path / f"{split}-000000.tar", "w") as tar:
            for number in range(3):
                image = jpeg(seed=seed + number)
                member = tarfile.TarInfo(f"{number:06d}.jpg")
                member.size = len(image)
                tar.addfile(member, io.BytesIO(image))
    done = ingest(repository, str(tmp_path / "{train,val}-000000.tar"), "pets")
    assert done.num_samples == {"train": 3, "val": 3}


def test_tables_of_one_name_are_appended_as_two_splits(repository, tmp_path):
    """NRCan/geo-deep-learning#516: both folders have a `data.csv`, so rows have equal keys."""
    for split, first, append in (("train", 0, False), ("val", 5, True)):
        (tmp_path / split).mkdir()
        (tmp_path / split / "data.csv").write_text("x\n" + "\n".join(map(str, range(first, first + 5))))
        source = str(tmp_path / split / "data.csv")
        ingest(repository, source, "rows", source_options=SourceOptions(split=split), append=append)
    rows = {name: sorted(sample["x"] for sample in split) for name, split in open_dataset(repository, "rows").items()}
    assert rows == {"train": [0, 1, 2, 3, 4], "val": [5, 6, 7, 8, 9]}


def test_keys_that_a_column_gives_are_still_identities(repository):
    """An id that the user gave names one sample, whatever else differs."""
    ingest(repository, [{"key": "a", "x": 1}], "rows")
    with pytest.raises(ConflictError, match="'a'"):
        ingest(repository, [{"key": "a", "x": 2}], "rows", source_options=SourceOptions(split="val"), append=True)


def test_a_merge_takes_equal_names_of_two_splits_as_two_pictures(repository, tmp_path):
    """open-edge-platform/datumaro#59, open-edge-platform/datumaro#853: both data sets name their pictures alike."""
    ingest(repository, write(tmp_path / "a", {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2}), "a")
    ingest(repository, write(tmp_path / "b", {"val/cat/1.jpg": 3}), "b")
    delete(repository, "a", keys=["cat/2.jpg"])
    done = merge(repository, ["a", "b"], "both")
    assert content(repository, "both") == {"train": {"cat/1.jpg": jpeg(seed=1)}, "val": {"cat/1.jpg": jpeg(seed=3)}}
    assert not done.overlaps
    ingest(repository, write(tmp_path / "c", {"test/cat/1.jpg": 3}), "c")
    with pytest.raises(ConflictError, match="by equal images"):
        merge(repository, ["both", "c"], "all")


def test_a_merge_still_refuses_equal_keys_that_a_column_gives(repository):
    """open-edge-platform/datumaro#59: an id names one sample, in whichever split."""
    for name, x, split in (("a", 1, "train"), ("b", 2, "val")):
        ingest(repository, [{"key": "k", "x": x}], name, source_options=SourceOptions(split=split))
    with pytest.raises(ConflictError, match="by keys"):
        merge(repository, ["a", "b"], "both")
