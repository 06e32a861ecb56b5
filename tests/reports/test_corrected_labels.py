"""Labels and other columns that are corrected, added and dropped beside data that stays as it is."""

import pyarrow as pa
import pytest

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.history.columns import add_column, compact, drop_column, rename_column, set_column
from datasvc.shards.history.rename import name_classes
from datasvc.shards.query.query import query
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import LABELLED_SCHEMA, labelled, write_version

CLASSES = ["cat", "dog", "eel"]
BLOBS = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("blob", pa.large_binary())])


@pytest.fixture
def pets(repository):
    """pets@1: abc and de in two shards."""
    write_version(
        repository, "pets", {"train": [labelled(a=0, b=1, c=0), labelled(d=1, e=0)]}, LABELLED_SCHEMA, CLASSES
    )
    return repository


def values(repository, column, ref="pets"):
    return {sample["key"]: sample[column] for sample in open_dataset(repository, ref)["train"]}


def column(name, **by_key):
    return pa.table({"key": list(by_key), name: list(by_key.values())})


def csv(folder, text, encoding="utf-8"):
    (folder / "new.csv").write_text(text, encoding=encoding)
    return str(folder / "new.csv")


def test_labels_are_the_same_after_a_column_was_renamed_and_changed(pets):
    """huggingface/datasets#5129: all values of a renamed column became one at the next change of it."""
    delete(pets, "pets", keys=["c"])
    rename_column(pets, "pets", "label", "stars")
    set_column(pets, "pets", "stars", column("stars", b=2))
    rename_column(pets, "pets", "stars", "label")
    set_column(pets, "pets", "label", column("label", d="eel"))
    assert values(pets, "label") == {"a": 0, "b": 2, "d": 2, "e": 0}
    assert open_dataset(pets, "pets")["train"].table.label_counts == {0: 2, 2: 2}
    assert not verify(pets, "pets", deep=True).problems


def test_text_is_not_renamed_to_labels_of_classes(pets):
    """huggingface/datasets#5129: the other way round, the names of another annotator as the column of numbers."""
    add_column(pets, "pets", "bob", column("bob", a="dog", b="dog"))
    rename_column(pets, "pets", "label", "alice")
    with pytest.raises(ConfigError, match="'bob' holds text, and labels are numbers of classes: give them by"):
        rename_column(pets, "pets", "bob", "label")


def test_a_dropped_column_is_not_seen_after_another_is_added(pets):
    """lance-format/lance#2128: the dropped column came back with its values."""
    add_column(pets, "pets", "y", column("y", a=1, b=2, c=3, d=4, e=5))
    drop_column(pets, "pets", "y")
    add_column(pets, "pets", "z", column("z", a=10))
    assert open_dataset(pets, "pets")["train"].table.sample_schema.names == ["key", "blob", "label", "z"]
    add_column(pets, "pets", "y", column("y", e=0))
    assert values(pets, "y") == {"a": None, "b": None, "c": None, "d": None, "e": 0}
    compact(pets, "pets")
    assert query(pets, "pets", "SELECT y, z FROM train WHERE key = 'a'").to_pylist() == [{"y": None, "z": 10}]


@pytest.mark.parametrize("deleted", ["a", "ab", "c", "abc", "bd"])
def test_a_column_is_added_where_the_first_samples_of_a_shard_are_deleted(pets, deleted):
    """lance-format/lance#8612: refused, because a batch of a fragment had no live row to copy."""
    delete(pets, "pets", keys=[*deleted])
    left = [key for key in "abcde" if key not in deleted]
    add_column(pets, "pets", "score", column("score", **{key: ord(key) for key in left}))
    assert values(pets, "score") == {key: ord(key) for key in left}
    assert not open_dataset(pets, "pets")["train"].table.sample_schema.field("score").nullable


def test_whole_numbers_are_added_to_a_part_of_the_samples(pets):
    """lance-format/lance#1214: a merge of a part was refused, because integers could not be null."""
    report = add_column(pets, "pets", "year", column("year", a=2023, e=2024))
    assert (report.changed, report.nulls) == ({"train": 2}, {"train": 3})
    assert values(pets, "year") == {"a": 2023, "b": None, "c": None, "d": None, "e": 2024}


def test_a_source_whose_first_column_is_empty_changes_all_its_samples(pets):
    """lance-format/lance#7251: 0 rows were updated, without a word."""
    given = pa.table({"note": pa.nulls(2), "key": ["b", "d"], "label": ["eel", "eel"]})
    assert set_column(pets, "pets", "label", given).changed == {"train": 2}


def test_a_source_of_nothing_but_nulls_takes_the_labels_away(pets):
    """lance-format/lance#7251: the column itself is empty."""
    report = set_column(pets, "pets", "label", pa.table({"key": ["b", "d"], "label": pa.nulls(2)}))
    assert (report.changed, report.nulls) == ({"train": 2}, {"train": 2})
    assert values(pets, "label") == {"a": 0, "b": None, "c": 0, "d": None, "e": 0}


def test_keys_of_digits_keep_their_zeros(repository, tmp_path):
    """fastai/fastai#1008, incf-nidash/PyNIDM#84: names such as 001 lost their zeros on the way through a CSV."""
    keys = ["001", "01", "1", "1.0", "NA", "null", "2024-01-01"]
    write_version(repository, "pets", {"train": [[{"key": key, "blob": b"x"} for key in keys]]}, BLOBS)
    rows = "".join(f"{key},{number}\n" for number, key in enumerate(keys))
    add_column(repository, "pets", "score", csv(tmp_path, "key,score\n" + rows))
    assert values(repository, "score") == {key: number for number, key in enumerate(keys)}


def test_keys_of_an_integer_column_are_those_that_an_ingest_makes(repository):
    """fastai/fastai#1008: the other way round, keys that are numbers in a Parquet file."""
    write_version(repository, "pets", {"train": [[{"key": key, "blob": b"x"} for key in ("1", "20")]]}, BLOBS)
    given = pa.table({"key": pa.array([20, 1], pa.int32()), "score": [0.5, 1.0]})
    add_column(repository, "pets", "score", given)
    assert values(repository, "score") == {"1": 1.0, "20": 0.5}


@pytest.mark.parametrize("name", ["NA", "nan", "None", "null", "N/A", "true", "1"])
@pytest.mark.parametrize("others", ["", "b,cat\n"])
def test_a_class_that_is_called_like_a_missing_value_is_a_class(repository, tmp_path, name, others):
    """googledatalab/pydatalab#398, chanzuckerberg/cellxgene#1115, huggingface/datasets#4467: became NaN or None."""
    write_version(repository, "pets", {"train": [labelled(a=0, b=2, c=0)]}, LABELLED_SCHEMA, ["cat", name, "eel"])
    report = set_column(repository, "pets", "label", csv(tmp_path, f"key,label\na,{name}\n{others}"))
    assert (values(repository, "label")["a"], report.nulls) == (1, {})


def test_new_labels_of_several_sources_have_the_numbers_of_the_first(repository, tmp_path):
    """huggingface/datasets#3762, #2457: numbers followed the order of each source, and meant other classes."""
    write_version(repository, "pets", {"train": [[{"key": key, "blob": b"x"} for key in "abc"]]}, BLOBS)
    add_column(repository, "pets", "label", column("label", a="potato", b="apple"))
    name_classes(repository, "pets", ["apple", "potato", "orange"])
    set_column(repository, "pets", "label", csv(tmp_path, "key,label\nc,orange\n"))
    assert values(repository, "label") == {"a": 1, "b": 0, "c": 2}
    with pytest.raises(ConfigError, match="already have names"):
        name_classes(repository, "pets", ["orange", "apple", "potato"])


def test_a_diff_shows_the_samples_whose_values_alone_changed(pets):
    """lance-format/lance#6734, lance-format/lance-spark#418: a changed column left no trace in what lists changes."""
    set_column(pets, "pets", "label", column("label", b="eel"))
    add_column(pets, "pets", "score", column("score", c=1))
    changes = diff(pets, "pets@1", "pets@2").splits["train"]
    assert (list(changes.changed), changes.unchanged) == (["b"], 4)
    assert list(diff(pets, "pets@2", "pets").splits["train"].changed) == ["c"]


def test_corrected_labels_are_used_when_their_file_has_the_old_ones_too(pets, tmp_path):
    """Appsilon/mbaza#165: the old labels of the file were taken."""
    text = "key,predicted,label\r\nb,dog,eel\r\nd,dog,cat\r\n"
    set_column(pets, "pets", "label", csv(tmp_path, text, encoding="utf-8-sig"))
    assert values(pets, "label") == {"a": 0, "b": 2, "c": 0, "d": 0, "e": 0}


@pytest.mark.parametrize(("name", "problem"), [("", "no name"), ("a\nb", "no name"), ("Label", "SQL ignores case")])
def test_a_column_that_no_query_could_name_is_not_added(pets, name, problem):
    """lance-format/lance#2128: a table that cannot be read any more after its columns were changed."""
    with pytest.raises(ConfigError, match=problem):
        add_column(pets, "pets", name, pa.table({"key": ["a"], "x": [1]}))
    rename_column(pets, "pets", "label", "label_old")
    with pytest.raises(ConfigError, match=problem):
        rename_column(pets, "pets", "label_old", name.replace("Label", "BLOB"))
    assert query(pets, "pets", "SELECT count(*) AS n FROM train").to_pylist() == [{"n": 5}]
