"""A sample is in one split: appends keep it there, and what two splits share is refused, dropped or said."""

import json

import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import ConfigError, ConflictError
from datasvc.repository.logs.log import Log
from datasvc.shards import ingest, open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.sources import SourceOptions
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.split_overlap import settle_overlaps
from datasvc.shards.versions.verify import verify
from datasvc.shards.versions.version_entry import describe_tables
from tests.samples import jpeg, write_folder
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


@pytest.fixture
def photos(tmp_path):
    return write_folder(tmp_path / "photos", {".": {"cat": 30, "dog": 30}})


def keys(repository, ref):
    return {name: {sample["key"] for sample in split} for name, split in open_dataset(repository, ref).items()}


def entry(repository, ref):
    return open_dataset(repository, ref).entry.content


def write_images(folder, images):
    """Write images by path, each drawn from its seed."""
    for path, seed in images.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(jpeg(seed=seed))
    return str(folder)


def ingest_keyed(repository, folder, images, name, **options):
    """Ingest images by path, whose keys a manifest gives: the path without its split."""
    source = write_images(folder, images)
    lines = [f"{path},{path.partition('/')[2]},{path.split('/')[1]}" for path in images]
    manifest = folder.parent / f"{folder.name}.csv"
    manifest.write_text("\n".join(["file,key,label", *lines]))
    return ingest(repository, source, name, source_options=SourceOptions(manifest=str(manifest)), **options)


def blob(key, content=b"", label=0):
    return {"key": key, "blob": content or key.encode(), "label": label}


@pytest.mark.parametrize("on_common", ["drop", "keep", "replace"])
def test_an_append_keeps_the_fraction_of_the_data_set_and_the_split_of_every_key(repository, photos, on_common):
    ingest(repository, str(photos), "pets", val_fraction=0.2)
    before = keys(repository, "pets")
    write_folder(photos, {".": {"cat": 20}}, start=100)
    ingest(repository, str(photos), "pets", append=True, on_common=on_common)
    after = keys(repository, "pets")
    assert len(after["train"]) + len(after["val"]) == 80
    assert not after["train"] & after["val"]
    assert all(before[split] <= after[split] for split in before)
    assert len(after["val"]) > len(before["val"])
    assert entry(repository, "pets")["val_fraction"] == 0.2


def test_the_fraction_survives_a_delete_and_a_merge(repository, photos, tmp_path):
    ingest(repository, str(photos), "pets", val_fraction=0.2)
    ingest(repository, str(write_folder(tmp_path / "more", {".": {"eel": 3}}, start=200)), "more")
    delete(repository, "pets", where="label = 1")
    merge(repository, ["pets", "more"], "pets")
    assert entry(repository, "pets")["val_fraction"] == 0.2
    with pytest.raises(ConfigError, match=r"pets@3 holds out 0\.2 .* got --val-fraction 0\.1; leave out"):
        ingest(repository, str(photos), "pets", append=True, val_fraction=0.1)


def test_the_fraction_of_old_versions_is_that_of_their_first_ingest(repository, photos):
    ingest(repository, str(photos), "pets", val_fraction=0.2)
    before = keys(repository, "pets")
    old = {name: value for name, value in entry(repository, "pets").items() if name != "val_fraction"}
    old["parent"], old["change"] = "pets@1", {"kind": "append"}
    log = repository.versions("datasets", "old")
    first = {name: value for name, value in old.items() if name not in ("parent", "change")}
    log.append(lambda _head: first)
    log.append(lambda _head: {**old, "parent": "old@1", "source": {"kind": "version", "options": {}}})
    ingest(repository, str(photos), "old", append=True, on_common="drop")
    assert keys(repository, "old") == before


def test_a_key_that_the_source_has_in_another_split_stays_where_it_is(repository, tmp_path):
    images = {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2, "val/cat/3.jpg": 3}
    ingest_keyed(repository, tmp_path / "a", images, "pets")
    moved = tmp_path / "b", {"train/cat/3.jpg": 30, "train/cat/4.jpg": 4, "val/cat/2.jpg": 20}
    with pytest.raises(ConflictError, match=r"'val' of the data set, in 'train' of the added data"):
        ingest_keyed(repository, *moved, "pets", append=True)
    with pytest.raises(ConflictError, match="different samples"):
        ingest_keyed(repository, *moved, "pets", append=True, on_common="drop")
    ingest_keyed(repository, *moved, "pets", append=True, on_common="replace")
    found = open_dataset(repository, "pets")
    assert keys(repository, "pets") == {"train": {f"cat/{n}.jpg" for n in (1, 2, 4)}, "val": {"cat/3.jpg"}}
    assert found["val"][0]["image"] == jpeg(seed=30)
    assert {split.name: dict(split.table.label_counts) for split in found.values()} == {
        "train": {0: 3},
        "val": {0: 1},
    }


def test_keys_and_equal_images_in_two_splits_are_refused_with_a_way_out(repository, tmp_path):
    source = tmp_path / "a", {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2, "train/cat/9.jpg": 3, "val/cat/1.jpg": 10,
                              "val/cat/3.jpg": 3}  # fmt: skip
    with pytest.raises(ConflictError) as raised:
        ingest_keyed(repository, *source, "pets")
    assert "by keys: 'cat/1.jpg'" in str(raised.value)
    assert "'cat/9.jpg' (as 'cat/3.jpg')" in str(raised.value)
    assert "--on-split-overlap drop" in str(raised.value)
    assert not repository.versions("datasets", "pets").head()

    done = ingest_keyed(repository, *source, "dropped", on_split_overlap="drop")
    assert keys(repository, "dropped") == {"train": {"cat/2.jpg"}, "val": {"cat/1.jpg", "cat/3.jpg"}}
    assert [(each.kind, each.split, len(each.samples)) for each in done.overlaps] == [
        ("key", "train", 1),
        ("payload", "train", 1),
    ]
    assert entry(repository, "dropped")["split_overlap"] == {}

    ingest_keyed(repository, *source, "kept", on_split_overlap="keep")
    assert entry(repository, "kept")["split_overlap"] == {"key": 1, "payload": 1}
    found = verify(repository, "kept")
    assert not found.overlaps
    assert found.accepted == {"key": 1, "payload": 1}


def test_an_accepted_overlap_stays_accepted_and_others_are_refused(repository, tmp_path):
    images = {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2, "train/cat/9.jpg": 3, "val/cat/1.jpg": 10,
              "val/cat/3.jpg": 3}  # fmt: skip
    ingest_keyed(repository, tmp_path / "a", images, "pets", on_split_overlap="keep")
    ingest_keyed(repository, tmp_path / "b", {"train/cat/7.jpg": 7}, "pets", append=True)
    assert entry(repository, "pets")["split_overlap"] == {"key": 1, "payload": 1}
    with pytest.raises(ConflictError, match=r"'cat/2\.jpg'"):
        ingest_keyed(repository, tmp_path / "c", {"val/cat/2.jpg": 20}, "pets", append=True)
    leak = write_images(tmp_path / "d", {"train/cat/5.jpg": 10})
    with pytest.raises(ConflictError, match="equal images"):
        ingest(repository, leak, "pets", append=True)
    ingest(repository, leak, "leak")
    with pytest.raises(ConflictError, match=r"1 sample .* equal images or other blobs: 'cat/5\.jpg'"):
        merge(repository, ["pets", "leak"], "all")
    ingest(repository, write_images(tmp_path / "e", {"train/cat/8.jpg": 8}), "more")
    merge(repository, ["pets", "more"], "all")
    assert entry(repository, "all")["split_overlap"] == {"key": 1, "payload": 1}
    assert not verify(repository, "all").overlaps


def test_what_an_entry_does_not_accept_in_number_is_found(repository, tmp_path):
    source = write_images(tmp_path / "a", {"train/cat/1.jpg": 1, "val/cat/1.jpg": 10})
    ingest(repository, source, "pets", on_split_overlap="keep")
    own = {"format", "commit", "created", "checksum"}
    content = {name: value for name, value in entry(repository, "pets").items() if name not in own}
    repository.versions("datasets", "pets").append(lambda _head: {**content, "split_overlap": {"payload": 1}})
    assert [each.kind for each in verify(repository, "pets").overlaps] == ["key"]


def test_keys_made_of_file_and_row_are_accepted_and_those_of_a_column_are_not(repository, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "source" / split).mkdir(parents=True)
        np.savez(tmp_path / "source" / split / "part.npz", x=np.arange(3), name=np.array(list("abc")))
    arrays = {f"{name}_{split}": np.arange(3) for name in ("x", "y") for split in ("train", "test")}
    np.savez(tmp_path / "made.npz", **arrays)
    ingest(repository, str(tmp_path / "made.npz"), "made")
    assert entry(repository, "made")["split_overlap"] == {"key": 3}, keys(repository, "made")
    assert verify(repository, "made").accepted == {"key": 3}
    with pytest.raises(ConflictError, match=r"3 samples .* by keys"):
        ingest(repository, str(tmp_path / "source"), "given", source_options=SourceOptions(key="name"))


def test_a_deleted_sample_that_is_there_again_is_compared(repository, tmp_path):
    train = {"train/cat/1.jpg": 1, "train/cat/2.jpg": 2}
    ingest(repository, write_images(tmp_path / "a", train), "pets")
    delete(repository, "pets", keys=["cat/1.jpg"])
    ingest(repository, write_images(tmp_path / "b", {"val/cat/3.jpg": 1}), "pets", append=True)
    with pytest.raises(ConflictError, match="equal images"):
        ingest(repository, str(tmp_path / "a"), "pets", append=True, on_common="replace")


def test_a_merge_refuses_what_its_splits_would_share(repository, photos):
    ingest(repository, str(photos), "held", val_fraction=0.2)
    ingest(repository, str(photos), "whole")
    held = keys(repository, "held")
    with pytest.raises(
        ConflictError, match=f"{len(held['val'])} samples of 'train' are in 'val' too, by equal images"
    ):
        merge(repository, ["held", "whole"], "all", on_common="first")
    merge(repository, ["held", "whole"], "all", on_common="first", on_split_overlap="drop")
    assert keys(repository, "all") == held


def test_verify_finds_what_splits_of_old_versions_share(repository):
    splits = {
        "train": [[blob("a"), blob("b")], [blob("c", b"same")]],
        "val": [[blob("b", b"other"), blob("d", b"same")]],
    }
    write_version(repository, "pets", splits, LABELLED_SCHEMA)
    write_version(repository, "bare", splits, LABELLED_SCHEMA, indexed=False)
    found = verify(repository, "pets")
    assert [str(each) for each in found.overlaps] == [
        "1 sample of 'train' is in 'val' too, by keys: 'b'",
        "1 sample of 'train' is in 'val' too, by equal images or other blobs: 'c' (as 'd')",
    ]
    assert found.num_unchecked == 0
    bare = verify(repository, "bare")
    assert [each.kind for each in bare.overlaps] == ["key"]
    assert bare.num_unchecked == 5
    delete(repository, "pets", keys=["b", "c"], split="train")
    assert not verify(repository, "pets").overlaps


def test_an_append_to_a_version_with_an_overlap_needs_a_rule_for_it(repository, tmp_path):
    source = {"train": [[blob("a"), blob("b")]], "val": [[blob("b")]]}
    write_version(repository, "pets", source, LABELLED_SCHEMA)
    new = [{"key": "n", "blob": b"n", "label": 0}]
    with pytest.raises(ConflictError, match="'b'"):
        ingest(repository, new, "pets", append=True)
    done = ingest(repository, new, "pets", append=True, on_split_overlap="drop")
    assert keys(repository, "pets") == {"train": {"a", "n"}, "val": {"b"}}
    assert (done.num_added, done.num_left_out) == ({"train": 1}, {"train": 1})


def test_old_training_samples_that_new_ones_hold_out_are_counted_apart_from_what_is_added(repository, tmp_path):
    ingest(repository, write_images(tmp_path / "a", {f"train/cat/{n}.jpg": n for n in range(4)}), "pets")
    new = {"train/dog/7.jpg": 7, "val/cat/8.jpg": 1, "val/cat/9.jpg": 2}
    done = ingest(repository, write_images(tmp_path / "b", new), "pets", append=True, on_split_overlap="drop")
    assert done.num_samples == {"train": 3, "val": 2}
    assert (done.num_added, done.num_left_out) == ({"train": 1, "val": 2}, {"train": 2})
    replaced = write_images(tmp_path / "c", {"train/dog/7.jpg": 70})
    done = ingest(repository, replaced, "pets", append=True, on_common="replace")
    assert (done.num_added, done.num_left_out) == ({"train": 1}, {"train": 1})


def test_a_first_version_is_compared_once_before_the_log_is_read(repository, tmp_path, monkeypatch):
    source = write_images(tmp_path / "a", {"train/cat/1.jpg": 1, "val/cat/2.jpg": 2})
    done = []

    def settle(*args, **options):
        done.append("compare")
        return settle_overlaps(*args, **options)

    def describe(objects, tables):
        done.append("build")
        if done.count("build") == 1:
            write_version(repository, "pets", {"train": [[blob("other")]]}, LABELLED_SCHEMA)
        return describe_tables(objects, tables)

    def find_head(log):
        done.append("look")
        return numbers(log)

    numbers = Log.numbers
    monkeypatch.setattr("datasvc.shards.ingestion.ingest_commit.settle_overlaps", settle)
    monkeypatch.setattr("datasvc.shards.ingestion.ingest_commit.describe_tables", describe)
    monkeypatch.setattr(Log, "numbers", find_head)
    assert str(ingest(repository, source, "pets").version) == "pets@2"
    assert done.count("compare") == 1
    assert done.index("compare") < done.index("look")
    assert done.count("build") == 2


def test_a_key_in_both_splits_of_what_is_appended_replaces_that_of_its_split(repository, tmp_path):
    ingest_keyed(repository, tmp_path / "a", {"train/cat/1.jpg": 1, "val/cat/2.jpg": 2}, "pets")
    both = {"train/cat/2.jpg": 20, "train/cat/3.jpg": 3, "val/cat/2.jpg": 21}
    ingest_keyed(repository, tmp_path / "b", both, "pets", append=True, on_common="replace")
    assert keys(repository, "pets") == {"train": {"cat/1.jpg", "cat/3.jpg"}, "val": {"cat/2.jpg"}}
    assert open_dataset(repository, "pets")["val"][0]["image"] == jpeg(seed=21)


def test_equal_rows_whose_blob_is_null_are_no_leak(repository):
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("blob", pa.large_binary())])
    none = {
        split: [[{"key": split, "blob": None}, {"key": f"{split}2", "blob": b"same"}]] for split in ("train", "val")
    }
    write_version(repository, "pets", none, shard_schema(list(schema)))
    assert [[each.key for each in found.samples] for found in verify(repository, "pets").overlaps] == [["train2"]]


def test_equal_rows_without_blobs_are_no_leak(repository, tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"key": split, "x": 1}) + "\n")
    ingest(repository, str(tmp_path), "rows")
    assert not verify(repository, "rows").overlaps


def test_a_new_split_has_labels_exactly_where_the_data_set_has_them(repository, tmp_path):
    labelled = write_images(tmp_path / "labelled", {"train/cat/1.jpg": 1, "train/dog/2.jpg": 2})
    plain = write_images(tmp_path / "plain", {"train/1.jpg": 3})
    ingest(repository, labelled, "pets")
    with pytest.raises(ConfigError, match=r"'val' has no column 'label'.* give its samples labels"):
        ingest(repository, write_images(tmp_path / "a", {"val/3.jpg": 4}), "pets", append=True)
    ingest(repository, plain, "plain")
    with pytest.raises(ConfigError, match=r"'val' has a column 'label'.* the data set has no labels: ingest it as"):
        ingest(repository, write_images(tmp_path / "b", {"val/cat/3.jpg": 5}), "plain", append=True)
    ingest(repository, write_images(tmp_path / "b", {"val/cat/3.jpg": 5}), "pets", append=True)
    ingest(repository, write_images(tmp_path / "a", {"val/3.jpg": 4}), "plain", append=True)
    assert keys(repository, "pets")["val"] == {"cat/3.jpg"}
