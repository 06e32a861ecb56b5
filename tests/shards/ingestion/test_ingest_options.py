"""What the options of an ingest do, on listed and on streamed sources."""

import dataclasses
import io
import itertools
import json
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from PIL import Image

import datasvc
from datasvc.errors import BadSampleError, ConfigError, ConflictError, NotFoundError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.ingestion import dry_run
from datasvc.shards.ingestion.build_streamed import value_bytes
from datasvc.shards.ingestion.dry_run import dry_run_ingest
from datasvc.shards.ingestion.plan import is_held_out
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.choose import open_source
from datasvc.shards.sources.python_samples import PythonSource
from datasvc.testing import check_source
from tests.samples import class_sorted, jpeg, write_folder, write_tars


def keys(repository, ref, split="train"):
    return [sample["key"] for sample in open_dataset(repository, ref)[split]]


@pytest.fixture
def tars(tmp_path):
    return write_tars(tmp_path / "tars", class_sorted(60, 4), per_tar=20)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_samples_that_hold_the_same_are_reported_dropped_or_refused(repository, folder):
    original = folder / "train" / "a" / "00000.jpg"
    shutil.copy(original, folder / "train" / "c" / "copy.jpg")
    shutil.copy(original, folder / "train" / "c" / "second.jpg")
    kept = ingest(repository, str(folder), "pets")
    assert kept.num_samples["train"] == 22
    assert len(kept.duplicates["train"]) == 2
    alike = {"a/00000.jpg", "c/copy.jpg", "c/second.jpg"}
    named = {repeat.key for repeat in kept.duplicates["train"]} | {kept.duplicates["train"][0].first_key}
    assert named == alike
    dropped = ingest(repository, str(folder), "pets", duplicates="drop")
    assert dropped.num_samples["train"] == 20
    assert len(alike & set(keys(repository, "pets@2"))) == 1
    assert ingest(repository, str(folder), "pets", duplicates="drop", workers=3, shard_bytes=3000).num_samples == {
        "train": 20,
        "val": 6,
    }
    with pytest.raises(BadSampleError, match=r"2 samples .* are duplicates.* has the same content as"):
        ingest(repository, str(folder), "pets", duplicates="fail")
    assert len(repository.entries("datasets", "pets")) == 3


def test_equal_images_with_other_labels_are_duplicates_and_nearly_equal_ones_are_not(repository, tmp_path):
    contents = {
        "1.jpg": jpeg(seed=1),
        "1.cls": b"0",
        "2.jpg": jpeg(seed=1),
        "2.cls": b"1",
        "3.jpg": jpeg(seed=2),
        "3.cls": b"0",
    }
    source = write_tars(tmp_path / "tars", contents, per_tar=6)
    report = ingest(repository, str(source), "pets")
    assert [{repeat.key, repeat.first_key} for repeat in report.duplicates["train"]] == [{"1", "2"}]


@pytest.mark.parametrize("on_bad", ["fail", "skip"])
def test_a_key_that_comes_twice_is_a_bad_sample(repository, tmp_path, on_bad):
    files = class_sorted(10, 2)
    source = write_tars(tmp_path / "tars", files, per_tar=20)
    shutil.copy(source / "train-000000.tar", source / "train-000001.tar")
    if on_bad == "fail":
        with pytest.raises(BadSampleError, match=r"10 of 20 samples .*another sample of its split has this key"):
            ingest(repository, str(source), "pets")
        return
    report = ingest(repository, str(source), "pets", on_bad="skip")
    assert report.num_samples == {"train": 10}
    assert len(report.bad) == 10
    assert sorted(keys(repository, "pets")) == [f"{number:05d}" for number in range(10)]


def test_what_was_left_out_is_kept_with_the_version(repository, folder):
    (folder / "train" / "b" / "bad.jpg").write_bytes(b"no image")
    (folder / "val" / "a" / "bad.jpg").write_bytes(b"")
    ingest(repository, str(folder), "pets", on_bad="skip")
    entry = open_dataset(repository, "pets").entry.content
    lines = repository.objects.read(entry["quarantine"]).decode().splitlines()
    assert [(each["split"], each["key"]) for each in map(json.loads, lines)] == [
        ("train", "b/bad.jpg"),
        ("val", "a/bad.jpg"),
    ]
    assert json.loads(lines[1])["reason"] == "empty file"
    assert entry["skipped"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("kind", ["listed", pytest.param("streamed", marks=pytest.mark.slow)])
def test_a_held_out_share_is_a_function_of_the_keys(repository, tmp_path, tars, kind):
    source = (
        tars if kind == "streamed" else write_folder(tmp_path / "source", {"a": {"": 0}, "train": {"x": 40, "y": 30}})
    )
    ingest(repository, str(source), "whole")
    ingest(repository, str(source), "split", val_fraction=0.3, shard_bytes=5000, workers=2)
    held_out = {key for key in keys(repository, "whole") if is_held_out(key, 0.3)}
    assert 5 < len(held_out) < 40
    assert set(keys(repository, "split", "val")) == held_out
    assert set(keys(repository, "split", "train")) == set(keys(repository, "whole")) - held_out


def test_only_training_samples_of_a_streamed_source_are_held_out(repository, tmp_path):
    (tmp_path / "tables").mkdir()
    for split in ("train", "test"):
        table = pa.table({"key": [f"{number}" for number in range(100)], "value": range(100)})
        pq.write_table(table, tmp_path / "tables" / f"{split}-0.parquet")
    ingest(repository, str(tmp_path / "tables"), "tables", val_fraction=0.2, on_split_overlap="keep")
    assert len(open_dataset(repository, "tables")["test"]) == 100
    assert sorted(keys(repository, "tables", "train") + keys(repository, "tables", "val")) == sorted(
        map(str, range(100))
    )


def test_a_limit_counts_samples_of_the_source_before_a_share_is_held_out(repository, tmp_path, tars):
    source = write_folder(tmp_path / "source", {"train": {"x": 40, "y": 30}})
    for where in (source, tars):
        report = ingest(repository, str(where), "limited", limit=30, val_fraction=0.5)
        assert sum(report.num_samples.values()) == 30


def test_what_is_bad_behind_a_limit_is_not_looked_at(repository, tmp_path):
    contents = {f"{number:03d}.jpg": jpeg(seed=number) if number < 10 else b"bad" for number in range(20)}
    source = write_tars(tmp_path / "tars", contents, per_tar=20)
    ingest(repository, str(source), "limited", limit=10)
    assert sorted(keys(repository, "limited")) == [f"{number:03d}" for number in range(10)]


def test_nothing_is_lost_when_a_dropped_key_holds_what_another_sample_holds(repository):
    samples = [{"key": "1", "b": b"X"}, {"key": "1", "b": b"Y"}, {"key": "2", "b": b"Y"}]
    ingest(repository, samples, "made", on_bad="skip", duplicates="drop", keep_order=True)
    assert {sample["key"]: sample["b"] for sample in open_dataset(repository, "made")["train"]} == {
        "1": b"X",
        "2": b"Y",
    }


def test_columns_called_width_are_the_user_s_own_without_an_image(repository):
    ingest(repository, [{"width": "12px", "height": None}, {"width": "x", "height": "y"}], "made")
    assert open_dataset(repository, "made")["train"].table.largest("max_width") == 0


@pytest.mark.slow
def test_large_lists_are_cut_into_batches_and_shards_like_blobs(repository):
    samples = [{"vector": [float(number)] * 20_000} for number in range(100)]
    ingest(repository, samples, "vectors", shard_bytes=4 << 20)
    split = open_dataset(repository, "vectors")["train"]
    assert split.table.num_shards == 4
    assert max(batch.nbytes for batch in split.origin.open_shard(split.table.shard(0)).batches) < 5 << 20
    maps = pa.table({"m": pa.array([[("a", "x" * 100_000)]] * 100, pa.map_(pa.string(), pa.string()))})
    assert value_bytes(maps.column("m").chunk(0)).tolist() == [100_001] * 100


@pytest.mark.parametrize("split", ["../x", "a/b", "", ".hidden", "a@b", "Train", "x" * 300])
def test_a_split_that_could_not_be_named_is_refused(split):
    with pytest.raises(ConfigError, match="is not a valid name of a split"):
        SourceOptions(split=split)


@pytest.mark.parametrize("key", [None, "id"])
def test_a_later_sample_of_an_iterable_without_key_or_image_is_a_bad_sample(repository, key):
    name = key or "key"
    samples = [{name: f"k{number}", "image": jpeg(seed=number)} for number in range(120)]
    del samples[110][name], samples[111]["image"]
    samples[112]["image"] = None
    report = ingest(repository, samples, "made", source_options=SourceOptions(key=key), on_bad="skip")
    assert report.num_samples == {"train": 117}
    assert [(bad.key, bad.reason) for bad in report.bad] == [
        ("sample 110", f"has no {name}"), ("k111", "has no image"), ("k112", "has no image"),
    ]  # fmt: skip
    with pytest.raises(BadSampleError, match="3 of 120 samples"):
        ingest(repository, samples, "made", source_options=SourceOptions(key=key))


def test_an_iterable_that_raises_half_way_commits_nothing_and_leaves_nothing(repository):
    def samples():
        yield from ({"value": number} for number in range(500))
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        ingest(repository, samples(), "made", shard_bytes=1000)
    assert repository.names("datasets") == []
    assert not list(Path(repository.url).rglob(".tmp-*"))


def test_mending_a_bad_python_sample_moves_no_key(repository):
    samples = [{"value": number} for number in range(200)]
    ingest(repository, samples, "whole")
    ingest(repository, [*samples[:150], {"value": "odd"}, *samples[151:]], "odd", on_bad="skip")
    whole = {sample["key"]: sample["value"] for sample in open_dataset(repository, "whole")["train"]}
    odd = {sample["key"]: sample["value"] for sample in open_dataset(repository, "odd")["train"]}
    assert odd.items() <= whole.items()
    assert len(odd) == 199


def test_nothing_is_held_out_of_a_source_with_a_val_of_its_own(repository, folder):
    with pytest.raises(ConfigError, match="--val-fraction"):
        ingest(repository, str(folder), "pets", val_fraction=0.1)


@pytest.mark.usefixtures("warm_workers")
def test_a_limit_takes_the_first_samples_of_each_split(repository, folder, tars):
    assert ingest(repository, str(folder), "pets", limit=4).num_samples == {"train": 4, "val": 4}
    assert sorted(keys(repository, "pets")) == sorted(keys(repository, "pets"))[:4]
    for workers in (1, 2):
        report = ingest(repository, str(tars), "tars", limit=25, workers=workers, shard_bytes=3000)
        assert report.num_samples == {"train": 25}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_keep_order_keeps_the_order_of_the_source(repository, folder, tars):
    ingest(repository, str(folder), "pets", keep_order=True, shard_bytes=4000, workers=2)
    assert keys(repository, "pets") == sorted(keys(repository, "pets"))
    ingest(repository, str(tars), "tars", keep_order=True, shard_bytes=4000, workers=2)
    assert keys(repository, "tars") == [f"{number:05d}" for number in range(60)]
    ingest(repository, str(tars), "mixed", shard_bytes=4000)
    assert sorted(keys(repository, "mixed")) == keys(repository, "tars") != keys(repository, "mixed")


@pytest.mark.parametrize("kind", ["listed", "streamed"])
def test_max_side_and_quality_make_images_smaller(repository, tmp_path, kind):
    wide, small = jpeg(300, 100, seed=1), jpeg(60, 40, seed=2)
    if kind == "listed":
        source = tmp_path / "source"
        source.mkdir()
        (source / "wide.jpg").write_bytes(wide)
        (source / "small.jpg").write_bytes(small)
    else:
        source = write_tars(tmp_path / "tars", {"wide.jpg": wide, "small.jpg": small}, per_tar=2)
    ingest(repository, str(source), "smaller", max_side=150, quality=80)
    found = {sample["key"].removesuffix(".jpg"): sample for sample in open_dataset(repository, "smaller")["train"]}
    assert found["small"]["image"] == small
    assert (found["wide"]["width"], found["wide"]["height"]) == (150, 50)
    with Image.open(io.BytesIO(found["wide"]["image"])) as image:
        assert (image.format, image.size) == ("JPEG", (150, 50))
    ingest(repository, str(source), "again", quality=30)
    again = {sample["key"].removesuffix(".jpg"): sample for sample in open_dataset(repository, "again")["train"]}
    assert (again["wide"]["width"], again["wide"]["height"]) == (300, 100)
    assert len(again["wide"]["image"]) < len(wide)


def test_an_image_that_is_made_smaller_is_upright_afterwards(repository, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "turned.jpg").write_bytes(jpeg(300, 100, exif=exif))
    ingest(repository, str(tmp_path / "source"), "turned", max_side=150)
    sample = open_dataset(repository, "turned")["train"][0]
    assert (sample["width"], sample["height"]) == (50, 150)
    with Image.open(io.BytesIO(sample["image"])) as image:
        assert image.size == (50, 150)
        assert 0x0112 not in image.getexif()


def test_append_adds_to_the_newest_version_and_shares_its_shards(repository, folder, tmp_path):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    more = write_folder(tmp_path / "more", {"train": {"b": 3, "new": 2}, "test": {"a": 1}}, start=500)
    report = ingest(repository, str(more), "pets", append=True)
    assert str(report.version) == "pets@2"
    assert report.num_samples == {"train": 25, "val": 6, "test": 1}
    assert report.num_added == {"train": 5, "test": 1}
    before, after = (open_dataset(repository, f"pets@{version}")["train"] for version in (1, 2))
    assert after.table.shards()[: before.table.num_shards] == before.table.shards()
    assert after.classes == ("a", "b", "c", "new")
    for sample in after:
        assert after.classes[sample["label"]] == sample["key"].split("/")[0]
    assert len(before) == 20
    entry = open_dataset(repository, "pets@2").entry.content
    assert (entry["parent"], entry["change"]["kind"]) == ("pets@1", "append")


def test_append_to_nothing_is_the_first_version(repository, folder):
    assert str(ingest(repository, str(folder), "pets", append=True).version) == "pets@1"


def test_append_refuses_keys_of_the_data_set_without_on_common(repository, folder):
    ingest(repository, str(folder), "pets")
    with pytest.raises(ConflictError, match=r"20 keys are on both sides"):
        ingest(repository, str(folder), "pets", append=True)
    changed = folder / "train" / "a" / "00000.jpg"
    changed.write_bytes(jpeg(seed=99))
    (folder / "train" / "a" / "new.jpg").write_bytes(jpeg(seed=98))
    report = ingest(repository, str(folder), "pets", append=True, on_common="replace")
    assert report.num_samples == {"train": 21, "val": 6}
    found = {sample["key"]: sample["image"] for sample in open_dataset(repository, "pets")["train"]}
    assert found["a/00000.jpg"] == changed.read_bytes()


def test_sources_with_equal_keys_fit_by_a_key_prefix(repository, folder, tmp_path):
    ingest(repository, str(folder), "pets")
    before = {sample["key"]: sample["image"] for sample in open_dataset(repository, "pets")["train"]}
    more = SourceOptions(key_prefix="more/")
    report = ingest(repository, str(folder), "pets", source_options=more, append=True, on_split_overlap="keep")
    assert report.num_added == {"train": 20, "val": 6}
    after = {sample["key"]: sample["image"] for sample in open_dataset(repository, "pets")["train"]}
    assert after == before | {f"more/{key}": image for key, image in before.items()}
    options = open_dataset(repository, "pets").entry.content["source"]["options"]
    assert options["key_prefix"] == "more/"

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"key": "a", "n": 1}\n{"key": "b", "n": 2}\n')
    ingest(repository, str(rows), "rows")
    ingest(repository, str(rows), "rows", source_options=SourceOptions(key_prefix="x-"), append=True)
    ingest(repository, [{"key": "a", "n": 5}], "rows", source_options=SourceOptions(key_prefix="y-"), append=True)
    found = [(sample["key"], sample["n"]) for sample in open_dataset(repository, "rows")["train"]]
    assert sorted(found) == [("a", 1), ("b", 2), ("x-a", 1), ("x-b", 2), ("y-a", 5)]


def test_an_interrupted_ingest_is_not_continued_with_another_key_prefix(folder):
    plain, prefixed = (open_source(str(folder), SourceOptions(key_prefix=prefix)) for prefix in ("", "x/"))
    assert plain.fingerprint() != prefixed.fingerprint()
    assert plain.fingerprint() == open_source(str(folder)).fingerprint()
    with pytest.raises(ConfigError, match=r"the key prefix .* is not UTF-8"):
        SourceOptions(key_prefix="\udcff")


def test_append_refuses_other_columns_of_the_same_name(repository, folder, tmp_path):
    samples = [{"key": str(number), "image": jpeg(seed=number), "label": "text"} for number in range(3)]
    ingest(repository, str(folder), "pets")
    with pytest.raises(ConfigError, match="label"):
        ingest(repository, samples, "pets", append=True)


def append_samples(url, number, barrier):
    repository = Repository.open(url)
    samples = [
        {"key": f"{number}-{each}", "value": each, **({"own2": 2} if number == 2 else {})} for each in range(10)
    ]
    barrier.wait(timeout=60)
    ingest(repository, samples, "raced", append=True)


@pytest.mark.slow
def test_appends_at_once_all_land(repository):
    ingest(repository, [{"key": "first", "value": -1}], "raced")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    racers = [context.Process(target=append_samples, args=(repository.url, number, barrier)) for number in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    expected = {"first", *(f"{number}-{each}" for number in range(3) for each in range(10))}
    assert set(keys(repository, "raced")) == expected
    assert len(keys(repository, "raced")) == 31
    assert len(repository.entries("datasets", "raced")) == 4
    samples = {sample["key"]: sample for sample in open_dataset(repository, "raced")["train"]}
    assert samples["2-3"]["own2"] == 2
    assert samples["1-3"]["own2"] is samples["first"]["own2"] is None


@pytest.mark.usefixtures("warm_workers")
def test_python_samples_become_columns(tmp_path):
    samples = (
        {"image": jpeg(seed=number), "label": number % 3, "words": ["a"] * number, "box": {"x": number, "y": 0.5}}
        for number in range(40)
    )
    report = datasvc.ingest(samples, "made", repo=str(tmp_path / "repo"), shard_bytes=4000, workers=4)
    assert report.num_samples == {"train": 40}
    split = datasvc.open(str(tmp_path / "repo")).dataset("made")["train"]
    found = {sample["key"]: sample for sample in split}
    assert found["000000007"]["words"] == ["a"] * 7
    assert found["000000007"]["box"] == {"x": 7, "y": 0.5}
    assert (found["000000007"]["label"], found["000000007"]["width"]) == (1, 40)
    assert found["000000007"]["image"] == jpeg(seed=7)


def test_python_samples_keep_the_promises_of_sources():
    given = ({"number": number, "image": jpeg(seed=number)} for number in range(200))
    samples = check_source(PythonSource(given), is_read_once=True)
    assert samples.table.column("number").to_pylist() == list(range(200))
    assert samples.bad == []


def test_python_samples_that_do_not_fit_are_named(repository):
    samples = [{"key": str(number), "value": number} for number in range(150)]
    samples += [{"key": "odd", "value": "text"}, {"key": "more", "value": 1, "extra": 2}, {"key": "fine", "value": 3}]
    with pytest.raises(
        BadSampleError, match=r"2 of 153 .* train/more: has unknown columns .* train/odd: does not fit"
    ):
        ingest(repository, samples, "made")
    report = ingest(repository, samples, "made", on_bad="skip")
    assert report.num_samples == {"train": 151}


@pytest.mark.parametrize(
    ("samples", "error"), [([], NotFoundError), ([1, 2], ConfigError), ([{"a": 1}, {"a": "x"}], ConfigError)]
)
def test_python_samples_of_no_or_mixed_types_are_refused(repository, samples, error):
    with pytest.raises(error):
        ingest(repository, samples, "made")
    assert repository.names("datasets") == []


def test_statistics_count_labels_kinds_and_sizes(repository, folder):
    image = Image.new("RGB", (70, 50))
    image.save(folder / "train" / "a" / "extra.png")
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    table = open_dataset(repository, "pets")["train"].table
    assert table.label_counts == {0: 8, 1: 5, 2: 8}
    assert table.image_kinds == {"JPEG": 20, "PNG": 1}
    assert (table.largest("max_width"), table.largest("max_height")) == (70, 50)
    assert sum(table.label_counts.values()) == table.num_samples


def test_a_dry_run_estimates_the_time_of_what_an_ingest_reads(tmp_path, monkeypatch):
    """The whole source is read within one second by this clock, whatever its compression."""
    ticks = itertools.count()
    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: float(next(ticks)))
    path = tmp_path / "rows.jsonl.zst"
    rows = "".join(json.dumps({"key": str(number), "text": "word " * 400}) + "\n" for number in range(100))
    path.write_bytes(zstandard.compress(rows.encode()))
    plan = dry_run_ingest(None, open_source(str(path)), "texts")
    assert plan.seconds == pytest.approx(1.0)
    assert (plan.num_samples, plan.is_estimate, plan.has_estimated_shards) == ({"train": 100}, True, True)
    assert plan.size_bytes * 10 < len(rows)
    limited = dry_run_ingest(None, open_source(str(path)), "texts", limit=25)
    assert limited.num_samples == {"train": 25}
    assert limited.seconds == pytest.approx(0.25)


def test_the_shards_of_a_source_with_a_number_of_samples_are_an_estimate(tmp_path):
    pq.write_table(pa.table({"key": ["a", "b"], "text": ["x", "y"]}), tmp_path / "rows.parquet")
    plan = dry_run_ingest(None, open_source(str(tmp_path / "rows.parquet")), "texts")
    assert (plan.num_samples, plan.is_estimate, plan.has_estimated_shards) == ({"train": 2}, False, True)


@pytest.mark.parametrize("kind", ["listed", "streamed"])
def test_a_dry_run_predicts_the_result_of_the_ingest(repository, folder, tars, kind):
    source = open_source(str(folder if kind == "listed" else tars))
    plan = dry_run_ingest(None, source, "pets", shard_bytes=4000)
    report = ingest(repository, source, "pets", shard_bytes=4000)
    assert plan.schema == open_dataset(repository, "pets")["train"].table.sample_schema
    assert plan.size_bytes == source.size_bytes
    assert plan.seconds > 0
    if kind == "listed":
        assert (plan.num_samples, plan.num_shards) == (report.num_samples, sum(report.num_shards.values()))
    else:
        assert plan.is_estimate
        assert plan.has_estimated_shards
        assert plan.num_samples == report.num_samples  # it is small, so all of it was read
        assert plan.num_shards == pytest.approx(sum(report.num_shards.values()), abs=3)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_bytes": 0}, {"on_bad": "ignore"}, {"duplicates": "no"}, {"engine": "spark"}, {"max_side": 0},
        {"quality": 0}, {"quality": 101}, {"val_fraction": 1.0}, {"val_fraction": -0.1}, {"limit": 0}, {"workers": 0},
        {"seed": -1}, {"name": "Pets"}, {"on_common": "x", "append": True},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(repository, folder, options):
    ingest(repository, str(folder), "pets")
    with pytest.raises(ConfigError):
        ingest(repository, str(folder), **{"name": "pets", **options})
    assert len(repository.entries("datasets", "pets")) == 1


def test_labels_outside_the_classes_are_bad_and_negative_ones_are_none(repository, folder):
    source = open_source(str(folder))
    assert np.isin([file.label for file in source.splits["train"]], [0, 1, 2]).all()
    samples = [{"key": str(number), "label": label} for number, label in enumerate([0, 1, -1, 5])]
    given = PythonSource(samples)
    given.classes = ("a", "b")
    with pytest.raises(BadSampleError, match=r"train/3: its label 5 has no class: expected labels below 2"):
        ingest(repository, given, "made")


def test_two_classes_of_one_name_are_refused(repository, folder):
    source = open_source(str(folder))
    with pytest.raises(ConfigError, match="two classes have the name 'a'"):
        ingest(repository, dataclasses.replace(source, classes=("a", "b", "a")), "pets")


def test_labels_without_names_do_not_get_those_of_another_split(repository, folder):
    ingest(repository, [{"key": "1", "label": 0}], "made")
    ingest(repository, str(folder), "made", append=True, source_options=SourceOptions(split="named"))
    ingest(repository, [{"key": "2", "label": 1}], "made", append=True)
    assert open_dataset(repository, "made")["train"].classes == ()
    assert open_dataset(repository, "made")["named"].classes == ("train", "val")


def test_an_image_without_a_label_in_its_manifest_is_ingested(repository, folder, tmp_path):
    manifest = tmp_path / "labels.csv"
    manifest.write_text("file,label\ntrain/a/00000.jpg,cat\ntrain/a/00001.jpg,\n", encoding="utf-8")
    ingest(repository, str(folder), "pets", source_options=SourceOptions(manifest=str(manifest)))
    split = open_dataset(repository, "pets")["train"]
    assert {sample["key"]: sample["label"] for sample in split} == {"train/a/00000.jpg": 0, "train/a/00001.jpg": None}
    assert split.table.label_counts == {0: 1}


def test_postscript_is_no_image(repository, folder):
    (folder / "train" / "a" / "program.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(BadSampleError, match=r"program\.jpg: not an image"):
        ingest(repository, str(folder), "pets", decode_check=True)


def test_a_report_is_shown_in_short(repository, folder):
    (folder / "train" / "a" / "bad.jpg").write_bytes(b"")
    shown = repr(ingest(repository, str(folder), "pets", on_bad="skip"))
    assert shown.startswith("IngestReport(pets@1, num_samples={'train': 20, 'val': 6}, num_shards=")
    assert shown.endswith("bad=<1>)")
    assert len(shown) < 250
