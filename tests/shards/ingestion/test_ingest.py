import os
import shutil
from dataclasses import replace

import pytest

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources import ImageFolderSource
from datasvc.shards.versions.describe import describe_spread
from datasvc.shards.versions.labels import class_spread
from tests.samples import jpeg, write_folder


def contents(split):
    return {sample["key"]: sample["image"] for sample in split}


def on_disk(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_an_image_folder_becomes_a_version_with_every_file_verbatim(repository, folder):
    report = ingest(repository, str(folder), "pets", shard_bytes=2000, message="first")
    assert (str(report.version), report.num_samples) == ("pets@1", {"train": 20, "val": 6})
    dataset = open_dataset(repository, "pets@1")
    assert list(dataset) == ["train", "val"]
    for name, split in dataset.items():
        assert contents(split) == on_disk(folder / name)
        assert split.classes == ("a", "b", "c")
        assert split.table.num_shards > 1
        for sample in split:
            assert split.classes[sample["label"]] == sample["key"].split("/")[0]
    assert dataset.entry.content["message"] == "first"


def test_a_second_ingest_appends_a_version_and_the_first_stays(repository, folder):
    ingest(repository, str(folder), "pets")
    before = contents(open_dataset(repository, "pets@1")["train"])
    (folder / "train" / "a" / "new.jpg").write_bytes(jpeg(seed=99))
    assert str(ingest(repository, str(folder), "pets").version) == "pets@2"
    assert contents(open_dataset(repository, "pets@1")["train"]) == before
    assert contents(open_dataset(repository, "pets@2")["train"]).keys() == before.keys() | {"a/new.jpg"}
    assert [entry.number for entry in repository.entries("datasets", "pets")] == [1, 2]


def test_the_same_source_and_options_give_the_same_digests_anywhere(tmp_path, folder):
    digests = []
    for number in range(2):
        copy = shutil.copytree(folder, tmp_path / f"copy{number}")
        repository = Repository.create(str(tmp_path / f"repo{number}"))
        ingest(repository, str(copy), "pets", shard_bytes=4000)
        digests.append({name: split.digest for name, split in open_dataset(repository, "pets").items()})
    assert digests[0] == digests[1]


def test_a_class_sorted_source_is_mixed_over_the_shards(repository, tmp_path):
    source = write_folder(tmp_path / "sorted", {"train": dict.fromkeys("abcdef", 12)})
    ingest(repository, str(source), "sorted", shard_bytes=15_000)
    split = open_dataset(repository, "sorted")["train"]
    assert split.table.num_shards >= 4
    for number in range(split.table.num_shards):
        labels = split.origin.open_shard(split.table.shard(number)).values("label")
        assert len(labels) < 12 or len(set(labels.tolist())) >= 3


@pytest.mark.parametrize(("keep_order", "words"), [(False, "shards are alike"), (True, "shards differ")])
def test_the_spread_of_the_classes_over_the_shards_is_measured(repository, tmp_path, keep_order, words):
    source = write_folder(tmp_path / "sorted", {"train": dict.fromkeys("abcdef", 24), "val": {"a": 4}})
    report = ingest(repository, str(source), "sorted", shard_bytes=15_000, keep_order=keep_order)
    (spread,) = report.class_spread.values()  # "val" has one class
    assert open_dataset(repository, "sorted").entry.content["class_spread"] == {"train": spread}
    assert words in describe_spread(spread)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([{0: 50, 1: 50}, {0: 50, 1: 50}], 0.0),
        ([{0: 500}, {1: 500}], 1.0),
        # By hand: a chi-square of 36 for 100 samples; (0.36 - 1/99) / (2 - 1/99 - 1) is V squared.
        ([{0: 40, 1: 10}, {0: 10, 1: 40}], 0.5945),
        ([{0: 10, 1: 5}], None),
        ([{0: 10}, {0: 5}, {}], None),
        ([], None),
    ],
)
def test_the_spread_is_cramers_v(counts, expected):
    found = class_spread(counts)
    assert found == (expected if expected is None else pytest.approx(expected, abs=1e-4))


def test_flat_folders_have_no_labels_and_all_is_train(repository, tmp_path):
    for number in range(3):
        (tmp_path / "flat").mkdir(exist_ok=True)
        (tmp_path / "flat" / f"{number}.jpg").write_bytes(jpeg(seed=number))
    ingest(repository, str(tmp_path / "flat"), "flat")
    dataset = open_dataset(repository, "flat")
    assert list(dataset) == ["train"]
    assert dataset["train"].classes == ()
    assert sorted(dataset["train"][0]) == ["height", "image", "key", "width"]


def test_a_source_in_memory_is_ingested_like_one_on_disk(repository, folder):
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*.jpg"):
        memory.pipe_file(f"/ingest-source/{path.relative_to(folder)}", path.read_bytes())
    ingest(repository, "memory://ingest-source", "remote", shard_bytes=5000)
    ingest(repository, str(folder), "local", shard_bytes=5000)
    remote, local = (open_dataset(repository, name) for name in ("remote", "local"))
    assert [split.digest for split in remote.values()] == [split.digest for split in local.values()]


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", jpeg()[:-20]])
def test_bad_images_are_named_and_nothing_is_committed(repository, folder, content):
    (folder / "train" / "b" / "bad.jpg").write_bytes(content)
    (folder / "val" / "a" / "worse.jpg").write_bytes(content)
    with pytest.raises(
        BadSampleError, match=r"2 of 28 samples .* train/b/bad.jpg: .* val/a/worse.jpg: .* --on-bad skip"
    ):
        ingest(repository, str(folder), "pets")
    assert repository.names("datasets") == []


def test_on_bad_skip_leaves_bad_images_out_and_reports_them(repository, folder):
    (folder / "train" / "b" / "bad.jpg").write_bytes(b"")
    report = ingest(repository, str(folder), "pets", on_bad="skip")
    assert [(bad.split, bad.key, bad.reason) for bad in report.bad] == [("train", "b/bad.jpg", "empty file")]
    dataset = open_dataset(repository, "pets")
    assert len(dataset["train"]) == 20
    assert dataset.entry.content["skipped"] == 1


def test_a_source_of_bad_images_only_is_never_a_version(repository, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jpg").write_bytes(b"")
    with pytest.raises(BadSampleError, match="1 of 1"):
        ingest(repository, str(tmp_path / "bad"), "bad", on_bad="skip")
    assert repository.names("datasets") == []


def test_files_that_are_no_images_are_counted(repository, folder):
    (folder / "train" / "a" / "notes.txt").write_text("x")
    (folder / "README").write_text("x")
    assert dict(ingest(repository, str(folder), "pets").ignored) == {".txt": 1, "(none)": 1}


def test_a_missing_or_empty_source_is_refused(repository, tmp_path):
    with pytest.raises(NotFoundError, match="there is no file or folder"):
        ingest(repository, str(tmp_path / "missing"), "pets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="it is empty"):
        ingest(repository, str(tmp_path / "empty"), "pets")


def test_images_beside_class_folders_are_refused_by_name(repository, folder):
    (folder / "train" / "stray.jpg").write_bytes(jpeg())
    with pytest.raises(ConfigError, match=r"such as train/stray\.jpg"):
        ingest(repository, str(folder), "pets")


def test_nothing_unfinished_is_left_behind(repository, folder):
    (folder / "train" / "a" / "bad.jpg").write_bytes(b"")
    with pytest.raises(BadSampleError):
        ingest(repository, str(folder), "pets")
    left = [name for _, _, names in os.walk(repository.url) for name in names if name.startswith(".tmp")]
    assert left == []


@pytest.mark.parametrize("stray", ["cat/1.jpg", "Train/a/1.jpg", "extra.jpg"])
def test_sources_in_which_two_files_could_get_one_key_are_refused(repository, folder, stray):
    (folder / stray).parent.mkdir(parents=True, exist_ok=True)
    (folder / stray).write_bytes(jpeg())
    with pytest.raises(ConfigError, match="mix splits with other folders, or spell one split in two ways"):
        ingest(repository, str(folder), "pets")


def test_a_name_that_is_not_utf8_is_a_bad_sample_and_no_crash(repository, folder):
    with open(os.fsencode(folder) + b"/train/a/\xff\xfe.jpg", "wb") as file:
        file.write(jpeg())
    with pytest.raises(BadSampleError, match=r"train/a/.*udcff.*not UTF-8"):
        ingest(repository, str(folder), "pets")
    assert len(ingest(repository, str(folder), "pets", on_bad="skip").bad) == 1


def test_a_split_that_would_be_empty_is_never_committed(repository, folder):
    for path in (folder / "val").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(BadSampleError, match=r"6 of 26 .* needs a good sample in each split"):
        ingest(repository, str(folder), "pets", on_bad="skip")
    assert repository.names("datasets") == []


def test_a_shard_of_bad_samples_only_is_not_in_the_table(repository, folder):
    (folder / "train" / "b" / "bad.jpg").write_bytes(b"no image")
    ingest(repository, str(folder), "pets", on_bad="skip", shard_bytes=1)
    table = open_dataset(repository, "pets")["train"].table
    assert table.samples_per_shard.tolist() == [1] * 20


def test_another_seed_deals_the_samples_differently(repository, folder):
    for seed in (0, 1):
        ingest(repository, str(folder), "pets", seed=seed)
    first, second = (open_dataset(repository, f"pets@{version}")["train"] for version in (1, 2))
    assert contents(first) == contents(second)
    assert [sample["key"] for sample in first] != [sample["key"] for sample in second]


def test_a_decode_check_finds_what_headers_do_not_show(repository, folder):
    damaged = bytearray(jpeg(seed=1))
    table = damaged.index(b"\xff\xc4")
    damaged[table + 5 : table + 21] = b"\xff" * 16
    (folder / "train" / "b" / "bad.jpg").write_bytes(damaged)
    with pytest.raises(BadSampleError, match=r"train/b/bad\.jpg: does not decode"):
        ingest(repository, str(folder), "pets", decode_check=True)
    assert str(ingest(repository, str(folder), "pets").version) == "pets@1"


@pytest.mark.parametrize("options", [{}, {"max_side": 50}])
def test_a_decode_check_names_the_image_that_decoders_repair(repository, folder, options):
    whole = jpeg(200, 150, seed=1, quality=95)
    damaged = whole[: len(whole) // 2] + bytes(200) + whole[len(whole) // 2 + 200 :]
    (folder / "train" / "b" / "bad.jpg").write_bytes(damaged)
    samples = [{"key": "good", "image": whole}, {"key": "bad", "image": damaged}]
    for source, key in ((str(folder), r"train/b/bad\.jpg"), (samples, "bad")):
        with pytest.raises(BadSampleError, match=rf"{key}: does not decode: Corrupt JPEG data"):
            ingest(repository, source, "pets", decode_check=True, **options)
    assert str(ingest(repository, str(folder), "pets").version) == "pets@1"


def test_extensions_and_split_folders_are_recognised_in_any_case(repository, folder):
    (folder / "train" / "a" / "loud.JPG").write_bytes(jpeg(seed=99))
    (folder / "train").rename(folder / "TRAIN")
    assert ingest(repository, str(folder), "pets").num_samples == {"train": 21, "val": 6}


def test_credentials_of_a_source_never_reach_the_entry(repository, folder):
    source = replace(ImageFolderSource.list(str(folder)), url="file://user:secret@host/pets?sig=secret")
    ingest(repository, source, "pets")
    assert open_dataset(repository, "pets").entry.content["source"]["url"] == "file://host/pets"


@pytest.mark.parametrize("kind", ["images", "tables"])
def test_a_repository_that_lies_in_its_source_is_no_part_of_it(tmp_path, kind):
    source = tmp_path / "source"
    if kind == "images":
        write_folder(source, {"train": {"a": 3}, "val": {"a": 1}})
    else:
        source.mkdir()
        (source / "0.jsonl").write_text('{"a": 1}\n{"a": 2}\n', encoding="utf-8")
    repository = Repository.create(str(source / "repo"))
    first = ingest(repository, str(source), "own")
    assert ingest(repository, str(source), "own").num_samples == first.num_samples
