"""Values are stored as they are, or named as bad samples; labels that are no integers are not trained on."""

# ruff: noqa: DTZ001 - times without a zone are among the cases

import datetime as dt
import zoneinfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import ImageLoader
from datasvc.repository import Repository
from datasvc.shards.ingestion.ingest import ingest
from datasvc.shards.sources import SourceOptions
from tests.samples import jpeg

UTC = dt.UTC
# By name: a value that the first samples have, and a value of a later sample that its column cannot hold.
LATE = {
    "fraction": (1, 1.5),
    "whole float": (1, 2.0),
    "in a list": ([1], [2.5]),
    "in an array": ([1], np.array([2.5])),
    "in a struct": ({"a": 1}, {"a": 1.5}),
    "new field": ({"a": 1}, {"a": 1, "b": 2}),
    "new field in a list": ([{"a": 1}], [{"a": 1, "b": 2}]),
    "too large": (1, 2**63),
    "too large for the array's type": (np.array([1], np.int8), np.array([1000])),
    "time of a date": (dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 12, 30)),
    "zone": (dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=UTC)),
    "no zone": (dt.datetime(2020, 1, 1, tzinfo=UTC), dt.datetime(2020, 1, 1)),
    "zone of a time": (dt.time(1, 2), dt.time(1, 2, tzinfo=UTC)),
    "nanoseconds": (dt.datetime(2020, 1, 1), pd.Timestamp("2020-01-01T00:00:00.000000001")),
    "nanoseconds of a duration": (dt.timedelta(1), pd.Timedelta(1, "ns")),
    "digits of a float": (np.float32(0.5), 0.1),
    "digits of an integer": (0.5, 2**53 + 1),
    "bool as float": (0.5, True),
    "text as bytes": (b"a", "a"),
    "bytes as text": ("a", b"a"),
    "masked": ([1, 2], np.ma.masked_array([1, 2], [True, False])),
    "complex": (0.5, 1j),
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_value_that_its_column_cannot_hold_is_a_bad_sample(tmp_path, name):
    """apache/arrow#35584, pola-rs/polars#29330: values that do not fit are cut or dropped without an error."""
    usual, late = LATE[name]
    rows = [{"key": str(number), "x": usual} for number in range(100)] + [{"key": "late", "x": late}]
    with pytest.raises(BadSampleError, match=r"1 of 101 samples.*late.*'x'"):
        datasvc.ingest(iter(rows), "late", repo=str(tmp_path))


def test_values_of_two_types_among_the_first_samples_are_refused(tmp_path):
    """apache/arrow#40910: a half-precision float beside an integer gives an integer column."""
    for first, second in [(np.float16(0.5), 1), (dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 1)), ("a", b"a")]:
        with pytest.raises(ConfigError, match="column 'x' holds values that no column can store"):
            datasvc.ingest(iter([{"x": first}, {"x": second}]), "mixed", repo=str(tmp_path))


def test_values_that_fit_are_stored_as_they_are(tmp_path):
    """The other side of the same rule: what a wider column holds exactly is no bad sample."""
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    pairs = {
        "int": (1, np.int8(2)), "float": (0.5, 3), "nan": (0.5, float("nan")), "small": (np.float32(1), 0.25),
        "list": ([1], np.array([2], np.int16)), "tuple": ([0.5], (1, None)),
        "struct": ({"a": 1, "b": None}, {"a": 2}),
        "when": (dt.datetime(2020, 1, 1, tzinfo=UTC), dt.datetime(2020, 6, 1, tzinfo=zone)), "id": (2**63, 2**64 - 1),
        "matrix": (np.eye(2, dtype=np.float32), np.ones((1, 2), np.float32)), "big": (np.array([1], ">i4"), [2]),
    }  # fmt: skip
    rows = [{"key": str(row), **{name: pair[row] for name, pair in pairs.items()}} for row in range(2)]
    report = datasvc.ingest(iter(rows), "fits", repo=str(tmp_path))
    assert not report.bad
    split = datasvc.open(str(tmp_path)).dataset("fits")["train"]
    second = {split[row]["key"]: split[row] for row in range(2)}["1"]
    assert second["int"] == 2
    assert (second["float"], second["small"], second["id"], second["big"]) == (3.0, 0.25, 2**64 - 1, [2])
    assert second["matrix"] == [[1.0, 1.0]]
    assert second["when"] == dt.datetime(2020, 6, 1, tzinfo=zone)
    assert second["nan"] != second["nan"]


def images(labels, key="label"):
    return [{"key": str(row), "image": jpeg(seed=row), key: label} for row, label in enumerate(labels)]


def labels_of(repo, name, **options):
    with ImageLoader(
        datasvc.open(str(repo)).dataset(name)["train"], batch_size=4, size=8, training=False, **options
    ) as loader:
        batch = next(iter(loader))
    return batch.labels.tolist() if batch.labels is not None else batch.columns["label"]


@pytest.mark.parametrize("labels", [[0.25, 0.75, 1.5, 2.5], ["cat", "dog", "cat", "dog"], [True, False, True, False]])
def test_labels_that_are_no_integers_are_refused_by_the_loader_or_delivered_as_they_are(tmp_path, labels):
    """pandas-dev/pandas#56135: a column of another type is cast to integers, so that 0.75 trains as class 0."""
    datasvc.ingest(iter(images(labels)), "data", repo=str(tmp_path), keep_order=True)
    with pytest.raises(ConfigError, match=r"'label'.*is (double|string|bool); labels are integers.*columns="):
        labels_of(tmp_path, "data")
    assert list(labels_of(tmp_path, "data", columns=["label"])) == labels


def test_labels_that_pandas_made_floats_are_integers_again_and_its_nan_is_no_label(tmp_path):
    """pandas-dev/pandas#56135: integers beside a missing value come as floats, with NaN for the missing one."""
    datasvc.ingest(iter(images([2.0, 1.0, 0.0, 1.0])), "whole", repo=str(tmp_path), keep_order=True)
    assert labels_of(tmp_path, "whole") == [2, 1, 0, 1]
    datasvc.ingest(iter(images([2.0, float("nan"), 0.0, 1.0])), "missing", repo=str(tmp_path), keep_order=True)
    with pytest.raises(ConfigError, match="'label' of missing@1/train is null for 1 sample of a batch, such as '1'"):
        labels_of(tmp_path, "missing")
    rows = [{"key": str(row), "label": label} for row, label in enumerate([*[1.0] * 100, 0.5])]
    with pytest.raises(BadSampleError, match=r"train/100.*0\.500000 was truncated"):
        datasvc.ingest(iter(rows), "later", repo=str(tmp_path))
    kept = SourceOptions(as_text=("label",))
    ingest(Repository.create(str(tmp_path)), iter(rows), "kept", source_options=kept, keep_order=True)
    assert datasvc.open(str(tmp_path)).dataset("kept")["train"][100]["label"] == 0.5


@pytest.mark.parametrize("extension", ["csv", "parquet"])
def test_sorted_targets_of_a_regression_are_no_classes_though_the_first_are_whole(tmp_path, extension):
    """pandas-dev/pandas#56135, the other way round: the first batch of a file does not show what a column holds."""
    frame = pd.DataFrame({"label": [*[1.0] * 5000, 1.5]})
    path = tmp_path / f"a.{extension}"
    frame.to_parquet(path) if extension == "parquet" else frame.to_csv(path, index=False)
    repository = Repository.create(str(tmp_path / "repo"))
    ingest(repository, str(path), "ratings", keep_order=True)
    assert datasvc.open(repository.url).dataset("ratings")["train"][5000]["label"] == 1.5


def test_text_labels_beside_images_become_classes(tmp_path):
    """huggingface/autotrain-advanced#846: class names as text are no classes until the user converts them by hand."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_pylist(images(["dog", "cat", None, "dog"])), tmp_path / "in" / "a.parquet")
    ingest(Repository.create(str(tmp_path)), str(tmp_path / "in" / "a.parquet"), "pets", keep_order=True)
    version = datasvc.open(str(tmp_path)).dataset("pets")
    assert version["train"].classes == ("cat", "dog")
    assert [version["train"][row]["label"] for row in range(4)] == [1, 0, None, 1]


@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet"])
def test_the_column_of_labels_is_an_option(tmp_path, extension):
    """A column that is called otherwise gives the labels; a column called `label` keeps its values."""
    frame = pd.DataFrame({"label": [9, 8, 7], "kind": ["b", "a", "b"], "grade": [3.0, 1.0, 2.0]})
    path = tmp_path / "in" / f"a.{extension}"
    path.parent.mkdir()
    if extension == "parquet":
        frame.to_parquet(path)
    else:
        path.write_text(
            frame.to_csv(index=False) if extension == "csv" else frame.to_json(orient="records", lines=True)
        )
    repository = Repository.create(str(tmp_path))
    for column, stored, classes in [("kind", [1, 0, 1], ("a", "b")), ("grade", [3, 1, 2], ())]:
        ingest(repository, str(path), column, source_options=SourceOptions(label=column), keep_order=True)
        split = datasvc.open(str(tmp_path)).dataset(column)["train"]
        assert split.classes == classes
        assert [split[row]["label"] for row in range(3)] == stored
        assert [split[row]["source_label"] for row in range(3)] == [9, 8, 7]
    with pytest.raises(ConfigError, match="label column 'gone' does not exist"):
        ingest(repository, str(path), "gone", source_options=SourceOptions(label="gone"))


NFC, NFD = "caf\u00e9", "cafe\u0301"


def test_one_class_name_in_two_unicode_forms_is_refused_with_both(tmp_path):
    """uewepuep/FPVTracksideCore#75: names that a Mac wrote look equal to others and are not."""
    for name in (NFC, NFD):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / f"{ascii(name)[:4]}{len(name)}.jpg").write_bytes(jpeg(seed=len(name)))
    with pytest.raises(ConfigError, match=r"'caf\\xe9' and 'cafe\\u0301'|'cafe\\u0301' and 'caf\\xe9'"):
        datasvc.ingest(str(tmp_path / "in"), "names", repo=str(tmp_path / "repo"))
    for number, name in enumerate((NFC, NFD)):
        folder = tmp_path / f"one{number}" / name
        folder.mkdir(parents=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(seed=number))
    datasvc.ingest(str(tmp_path / "one0"), "appended", repo=str(tmp_path / "repo"))
    with pytest.raises(ConfigError, match="two Unicode forms"):
        datasvc.ingest(str(tmp_path / "one1"), "appended", repo=str(tmp_path / "repo"), append=True)


def test_a_manifest_finds_files_whose_names_have_the_other_unicode_form(tmp_path):
    """llmsresearch/paperbanana#240: files from an archive that a Mac unpacked are missing for a list of names."""
    (tmp_path / "in").mkdir()
    for seed, name in enumerate((NFD, "plain")):
        (tmp_path / "in" / f"{name}.jpg").write_bytes(jpeg(seed=seed))
    (tmp_path / "list.csv").write_text(f"file,label\n{NFC}.jpg,cat\nplain.jpg,dog\n")
    options = SourceOptions(manifest=str(tmp_path / "list.csv"))
    ingest(Repository.create(str(tmp_path / "repo")), str(tmp_path / "in"), "listed", source_options=options)
    split = datasvc.open(str(tmp_path / "repo")).dataset("listed")["train"]
    assert {split[row]["key"]: split[row]["label"] for row in range(2)} == {f"{NFD}.jpg": 0, "plain.jpg": 1}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def cycle(container):
    container.append(container) if isinstance(container, list) else container.update(x=container)
    return container


ODD = {
    "deep": {"x": nested(20_000)},
    "two thousand": {"x": nested(2_000)},
    "cycle": {"x": cycle([])},
    "cycle of dicts": {"x": cycle({})},
    "number as name": {1: 2},
    "name that is not UTF-8": {"a\udc80": 1},
    "deep key": {"key": nested(20_000)},
    "object": {"x": object()},
    "set": {"x": {1, 2}},
    "masked array": {"x": np.ma.masked_array([1], [True])},
}


@pytest.mark.parametrize("name", ODD)
def test_values_that_no_column_can_store_are_named(tmp_path, name):
    """pola-rs/polars#17960: a list that contains itself ends the process without a message."""
    with pytest.raises(ConfigError, match=r"column name|no column can store"):
        datasvc.ingest(iter([{"key": "a", **ODD[name]}]), "odd", repo=str(tmp_path))
    rows = [{"key": str(row), "x": [[row]]} for row in range(100)]
    with pytest.raises(BadSampleError, match=r"1 of 101 samples.*(late|a sample): "):
        datasvc.ingest(iter([*rows, {"key": "late", **ODD[name]}]), "odd", repo=str(tmp_path))
