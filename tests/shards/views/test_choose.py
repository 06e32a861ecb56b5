"""Views have exactly the samples that DuckDB and Hugging Face's `datasets` choose from the same data."""

import pickle
from collections import Counter

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.versions.delete import delete
from tests.shards.written_versions import read_samples, write_version

SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("label", pa.int32()),
        pa.field("width", pa.int64(), nullable=False),
        pa.field("patient", pa.string()),
        pa.field("score", pa.float64()),
    ]
)
CLASSES = ("cat", "dog", "owl")


def sample(number):
    return {
        "key": f"k{number:04d}",
        "label": None if number == 17 else number % 3,
        "width": number * 7 % 100,
        "patient": f"p{number // 5}",
        "score": None if number % 11 == 0 else number / 3,
    }


@pytest.fixture
def pets(repository):
    shards = [[sample(number) for number in range(start, start + 50)] for start in range(0, 300, 50)]
    write_version(repository, "pets", {"train": shards, "val": [shards[0][:5]]}, SCHEMA, classes=CLASSES)
    delete(repository, "pets", where="width = 21", split="train")
    return repository


@pytest.fixture
def split(pets):
    return open_dataset(pets, "pets")["train"]


def keys_of(split):
    return split.to_arrow(["key"]).column("key").to_pylist()


def stored(split):
    return read_samples(split.repository.objects, split.table)


CONDITIONS = [
    "label in (0, 2) and width >= 64",
    "width < 10 or score is null -- a comment",
    "patient = 'p3'",
    "key like '%7' and not (score > 20)",
    "label <> 1",
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_view_has_the_samples_that_duckdb_and_hugging_face_choose_from_a_parquet_file(split, tmp_path, condition):
    path = tmp_path / "all.parquet"
    pq.write_table(split.to_arrow(), path)
    chosen = duckdb.sql(f"SELECT key FROM '{path}' WHERE ({condition}\n) ORDER BY key").fetchall()
    view = split.where(condition)
    assert keys_of(view) == [key for (key,) in chosen]
    assert [each["key"] for each in stored(view)] == keys_of(view)
    assert 0 < len(view) < len(split)
    labels = Counter(each["label"] for each in stored(view) if each["label"] is not None)
    assert view.table.label_counts == dict(sorted(labels.items()))


def test_a_view_has_the_samples_of_a_filter_of_datasets(split, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "all.parquet"
    pq.write_table(split.to_arrow(), path)
    data = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    chosen = data.filter(lambda row: row["width"] >= 64 and row["label"] in {0, 2})
    assert keys_of(split.where("width >= 64 and label in (0, 2)")) == chosen["key"][:]


def test_purged_samples_are_searched_for_only_after_a_purge(split, monkeypatch):
    monkeypatch.delattr("datasvc.shards.views.derive._purged_numbers")  # it adds up the samples of all shards
    assert len(split.where("label = 1")) > 0


def test_names_of_classes_may_be_compared_with_label_and_with_class(split):
    assert keys_of(split.where("label != 'cat'")) == keys_of(split.where("label != 0"))
    assert keys_of(split.where("label in ('cat', 'owl')")) == keys_of(split.where("class in ('cat', 'owl')"))
    assert keys_of(split.where("label between '1' and '2'")) == keys_of(split.where("label between 1 and 2"))


def test_views_can_be_views_of_views_and_say_how_they_were_made(split):
    view = split.where("label !=  'cat'  -- no cats").where("width>50")
    assert keys_of(view) == keys_of(split.where("label != 'cat' and width > 50"))
    assert repr(view).startswith("Split(pets@2/train[(\"label\" != 'cat'); (width > 50)], ")
    assert (view.table.view.table, view.table.view.dataset, view.table.view.split) == (
        split.digest,
        "pets@2",
        "train",
    )
    assert split.table.view is None


def test_equal_conditions_give_one_view_whatever_their_spaces_and_comments(split):
    assert split.where("width>=64").digest == split.where("  width  >= 64 -- wide").digest


def test_a_view_can_be_pickled_and_opened_by_digest(pets, split):
    view = split.where("width > 50")
    assert keys_of(pickle.loads(pickle.dumps(view))) == keys_of(view)
    opened = datasvc.open(pets.url).dataset(f"pets@2[{view.digest}]")
    assert keys_of(opened["train"]) == keys_of(view)
    assert opened["val"].digest == open_dataset(pets, "pets")["val"].digest
    other = open_dataset(pets, "pets@1")["train"].where("width > 50")
    with pytest.raises(NotFoundError, match="pets@2 has no view with the table"):
        datasvc.open(pets.url).dataset(f"pets@2[{other.digest}]")


def test_a_condition_in_a_reference_applies_to_each_split(pets):
    opened = datasvc.open(pets.url).dataset("pets@2[label != 'cat']")
    assert {name: len(split) for name, split in opened.items()} == {
        name: len(split.where("label <> 0")) for name, split in open_dataset(pets, "pets").items()
    }
    assert "pets@2[label != 'cat']" in repr(opened)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("colour = 'red'", "(?s)colour.*the columns are key, label, width, patient, score, class"),
        ("label != 'cow'", "no class 'cow'; its classes are 'cat', 'dog', 'owl'"),
        ("class in ('cat', 'cow')", "no class 'cow'; its classes are 'cat', 'dog', 'owl'"),
        ("width > 1000", r"\(width > 1000\) selects no sample of pets@2/train"),
        ("width", "has the type BIGINT, expected BOOLEAN"),
        ("width >", "cannot be parsed"),
        ("width > 3) from (select 1", "is not one expression"),
        ("width > 3, true", "expected BOOLEAN"),
        ("width = (select max(width) from samples)", "has a query of its own"),
        ("width = ?", "is not one expression"),
        ("patient::int > 3", "cannot be evaluated"),
    ],
)
def test_a_condition_that_is_not_valid_is_refused(split, condition, message):
    with pytest.raises(ConfigError, match=message):
        split.where(condition)


@pytest.mark.parametrize("ref", ["pets@2[", "pets@2[]", "pets@2[width > 3", "pets@2[width > 3]x"])
def test_a_reference_with_an_incomplete_bracket_is_refused(pets, ref):
    with pytest.raises(ConfigError, match="no reference to a view"):
        datasvc.open(pets.url).dataset(ref)


def test_take_gives_about_the_fraction_and_a_larger_fraction_has_the_samples_of_a_smaller_one(split):
    small, large = split.take(0.2, seed=3), split.take(0.5, seed=3)
    assert set(keys_of(small)) < set(keys_of(large)) < set(keys_of(split))
    assert 0.1 < len(small) / len(split) < 0.3
    assert keys_of(split.take(0.2, seed=4)) != keys_of(small)
    assert keys_of(split.take(1.0)) == keys_of(split)


def test_split_divides_the_samples_and_keeps_groups_together(split):
    parts = split.split(0.6, 0.2, 0.2, seed=1)
    assert sorted(key for part in parts for key in keys_of(part)) == keys_of(split)
    by_patient = split.split(0.7, 0.3, by="patient")
    sides = [{each["patient"] for each in stored(part)} for part in by_patient]
    assert not sides[0] & sides[1]
    assert sum(map(len, by_patient)) == len(split)
    half, *_ = split.split(0.5, seed=1)
    assert set(keys_of(parts[0])) > set(keys_of(half))


def test_a_sample_is_on_the_same_side_in_every_version(pets):
    old, new = (open_dataset(pets, ref)["train"].split(0.5, 0.5, seed=9)[0] for ref in ("pets@1", "pets@2"))
    assert set(keys_of(new)) == set(keys_of(old)) & set(keys_of(open_dataset(pets, "pets@2")["train"]))


@pytest.mark.parametrize(
    ("fractions", "options", "message"),
    [
        ((0.9, 0.2), {}, "sum of at most 1"),
        ((0.0, 0.2), {}, "fractions above 0"),
        ((), {}, "fractions above 0"),
        ((0.5, 0.5), {"by": "colour"}, "no column 'colour'; its columns are key, label"),
        ((0.5, 0.5), {"by": "score"}, "have no value in 'score'"),
    ],
)
def test_a_division_that_is_not_valid_is_refused(split, fractions, options, message):
    with pytest.raises(ConfigError, match=message):
        split.split(*fractions, **options)


@pytest.mark.parametrize("condition", ["label not in ('cat', 'dog')", "class not in ('cat', 'dog')"])
def test_classes_are_left_out_by_name(split, condition):
    assert set(split.where(condition).to_arrow(["label"]).column("label").to_pylist()) == {2}
    with pytest.raises(ConfigError, match="catt"):
        split.where(condition.replace("'cat'", "'catt'"))


def test_a_part_of_a_part_is_divided_as_well(split):
    half = split.take(0.5)
    assert 0.15 * len(split) < len(half.take(0.5)) < 0.35 * len(split)
    train, _ = split.split(0.8, 0.2)
    assert 0.02 * len(split) < len(train.split(0.9, 0.1)[1]) < 0.2 * len(split)
