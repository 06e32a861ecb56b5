"""Splits put together: columns, classes, keys that both have."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, ConflictError
from datasvc.repository import Objects, Storage
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.schema import image_schema, shard_schema
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.sources.text.tokens import TOKENIZER
from datasvc.shards.versions.combine import append_splits, append_table, combine_schemas, relabel_shards
from datasvc.shards.versions.deletions import delete_samples
from datasvc.shards.versions.keys import SplitKeys, find_common_keys
from datasvc.shards.versions.labels import combine_classes, map_labels, plan_labels
from tests.shards.written_versions import (
    LABELLED_SCHEMA,
    TEXT_SCHEMA,
    labelled,
    read_samples,
    texts,
    write_shard,
    write_table,
)

KEY = pa.field("key", pa.string(), nullable=False)


@pytest.fixture
def objects(tmp_path):
    return Objects(Storage(str(tmp_path / "store")))


def keys_of(objects, table):
    return [sample["key"] for sample in read_samples(objects, table)]


def test_an_append_has_the_samples_of_both_in_order_and_shares_every_shard(objects):
    head = write_table(objects, [texts("abc"), texts("d")], TEXT_SCHEMA)
    new = write_table(objects, [texts("xy")], TEXT_SCHEMA)
    both = append_table(objects, head, new)
    assert read_samples(objects, both) == texts("abcdxy")
    assert both.shards() == head.shards() + new.shards()
    assert [both.index(shard) for shard in range(3)] == [head.index(0), head.index(1), new.index(0)]
    assert ShardTable.decode(both.encode(), "test").encode() == both.encode()


def test_deletions_of_both_sides_stay_with_their_shards(objects):
    head = delete_samples(objects, write_table(objects, [texts("abc"), texts("d")], TEXT_SCHEMA), {0: np.array([1])})
    new = write_table(objects, [texts("x"), texts("yz")], TEXT_SCHEMA)
    both = append_table(objects, head, delete_samples(objects, new, {1: np.array([0])}))
    assert keys_of(objects, both) == list("acdxz")
    assert both.deleted_per_shard.tolist() == [1, 0, 0, 1]


def test_labels_and_kinds_are_summed_where_both_sides_counted_and_left_out_where_one_did_not(objects):
    head = write_table(objects, [labelled(a=0, b=1)], LABELLED_SCHEMA, ["cat", "dog"])
    new = write_table(objects, [labelled(c=1, d=1)], LABELLED_SCHEMA, ["cat", "dog"])
    assert append_table(objects, head, new).label_counts == {0: 1, 1: 3}
    uncounted = dataclasses.replace(head, label_counts={})
    assert append_table(objects, uncounted, new).label_counts == {}
    assert append_table(objects, head, dataclasses.replace(new, label_counts={})).label_counts == {}
    images = write_table(objects, [], image_schema(labelled=True))
    kinds = [dataclasses.replace(images, image_kinds=each) for each in ({"JPEG": 2}, {"PNG": 1, "JPEG": 1})]
    assert append_table(objects, *kinds).image_kinds == {"JPEG": 3, "PNG": 1}


def test_columns_of_one_side_are_null_for_the_samples_of_the_other(objects):
    wide = shard_schema([KEY, pa.field("text", pa.string()), pa.field("score", pa.int64(), nullable=False)])
    narrow = shard_schema([KEY, pa.field("source", pa.string(), nullable=False)])
    head = write_table(objects, [[{"key": "a", "text": "t", "score": 3}]], wide)
    both = append_table(objects, head, write_table(objects, [[{"key": "x", "source": "web"}]], narrow))
    assert both.sample_schema.names == ["key", "text", "score", "source"]
    assert [field.nullable for field in both.sample_schema] == [False, True, True, True]
    assert read_samples(objects, both) == [
        {"key": "a", "text": "t", "score": 3, "source": None},
        {"key": "x", "text": None, "score": None, "source": "web"},
    ]


def test_a_column_of_two_types_is_refused_with_both_types():
    one, other = (shard_schema([KEY, pa.field("score", number)]) for number in (pa.int32(), pa.int64()))
    with pytest.raises(ConfigError, match="column 'score' is int32 in the data set and int64 in the added data"):
        combine_schemas(one, other)


@pytest.mark.parametrize("column", ["image", "label"])
def test_images_and_labels_that_the_data_set_has_may_not_be_missing(column):
    schema = image_schema(labelled=True)
    without = schema.remove(schema.get_field_index(column))
    with pytest.raises(ConfigError, match=f"the added data has no column '{column}'"):
        combine_schemas(schema, without)
    if column == "image":
        assert combine_schemas(without, schema).field(column).nullable
    else:
        with pytest.raises(ConfigError, match="the data set has no labels"):
            combine_schemas(without, schema)


def test_tokens_of_two_tokenizers_are_not_put_together():
    one, other, none = (
        shard_schema([KEY], {TOKENIZER: digest} if digest else None) for digest in (b"a" * 64, b"b" * 64, None)
    )
    with pytest.raises(ConfigError, match=r"tokenizer aaaaaaaaaaaa\.\.\., those of the added data by bbbbbbbbbbbb"):
        combine_schemas(one, other)
    assert combine_schemas(one, one).metadata[TOKENIZER] == b"a" * 64
    combine_schemas(one, none)


def test_classes_that_go_on_where_the_data_set_ends_change_no_shard(objects):
    head = write_table(objects, [labelled(a=0, b=1)], LABELLED_SCHEMA, ["dog", "cat"])
    new = write_table(objects, [labelled(c=2, d=0)], LABELLED_SCHEMA, ["dog", "cat", "ant"])
    both = append_table(objects, head, new)
    assert both.classes == ("dog", "cat", "ant")
    assert both.shards() == head.shards() + new.shards()
    assert append_table(objects, new, head).shards() == new.shards() + head.shards()


def test_labels_of_other_classes_are_renumbered_and_keep_their_names(objects):
    head = write_table(objects, [labelled(a=0, b=1)], LABELLED_SCHEMA, ["dog", "cat"])
    new = write_table(objects, [labelled(c=0, d=1, e=2), labelled(f=2)], LABELLED_SCHEMA, ["bee", "cat", "ant"])
    new = delete_samples(objects, new, {0: np.array([0])})
    both = append_table(objects, head, new)
    assert both.classes == ("dog", "cat", "ant", "bee")
    named = {sample["key"]: both.classes[sample["label"]] for sample in read_samples(objects, both)}
    assert named == {"a": "dog", "b": "cat", "d": "cat", "e": "ant", "f": "ant"}
    assert both.label_counts == {0: 1, 1: 2, 2: 2}


def test_a_relabelled_shard_is_the_one_that_would_have_been_written_with_these_labels(objects, monkeypatch):
    monkeypatch.setattr("datasvc.shards.format.writer.BATCH_BYTES", 30)  # several record batches
    samples = labelled(a=0, b=1, c=0, d=1, e=1, f=0)
    table = write_table(objects, [samples], LABELLED_SCHEMA, ["x", "y"])
    relabelled = relabel_shards(objects, table, {0: 5, 1: 3})
    mapped = [{**sample, "label": {0: 5, 1: 3}[sample["label"]]} for sample in samples]
    expected = write_shard(objects, mapped, LABELLED_SCHEMA)
    assert relabelled.shards() == [expected.shard]
    assert relabelled.index(0) == expected.index
    assert relabelled.label_counts == {3: 3, 5: 3}
    assert len(open_shard(objects, table.shard(0)).batches) > 1


def test_a_relabelled_shard_keeps_nulls_nested_values_and_several_blobs(objects):
    schema = shard_schema(
        [
            KEY,
            pa.field("label", pa.int32()),
            pa.field("one", pa.large_binary()),
            pa.field("two", pa.large_binary()),
            pa.field("boxes", pa.list_(pa.struct([("x", pa.float32()), ("name", pa.string())]))),
        ]
    )
    samples = [
        {"key": "a", "label": 0, "one": b"1", "two": None, "boxes": [{"x": 1.5, "name": "n"}]},
        {"key": "b", "label": None, "one": None, "two": b"22", "boxes": None},
        {"key": "c", "label": -1, "one": b"", "two": b"", "boxes": []},
    ]
    table = relabel_shards(objects, write_table(objects, [samples], schema, ["x"]), {0: 7})
    assert read_samples(objects, table) == [{**samples[0], "label": 7}, *samples[1:]]


def test_shards_whose_labels_stay_are_shared_when_others_are_renumbered(objects):
    table = write_table(objects, [labelled(a=0), labelled(b=1)], LABELLED_SCHEMA, ["x", "y"])
    relabelled = relabel_shards(objects, table, {0: 0, 1: 4})
    assert relabelled.shard(0) == table.shard(0)
    assert relabelled.shard(1) != table.shard(1)


def test_a_label_without_a_name_cannot_be_renumbered(objects):
    table = write_table(objects, [labelled(a=2)], LABELLED_SCHEMA, ["x", "y"])
    with pytest.raises(ConfigError, match="label 2 has no class name: expected labels from 0 to 1"):
        relabel_shards(objects, table, {0: 1, 1: 0})


def test_labels_without_names_are_kept_while_they_fit(objects):
    named = write_table(objects, [labelled(a=0, b=1)], LABELLED_SCHEMA, ["x", "y"])
    numbered = write_table(objects, [labelled(c=1, d=-1)], LABELLED_SCHEMA)
    both = append_table(objects, named, numbered)
    assert [sample["label"] for sample in read_samples(objects, both)] == [0, 1, 1, -1]
    assert both.classes == append_table(objects, numbered, named).classes == ("x", "y")
    beyond = write_table(objects, [labelled(e=2)], LABELLED_SCHEMA)
    message = "the added data has labels without class names up to 2, but there are only 2 class names"
    with pytest.raises(ConfigError, match=message):
        append_table(objects, named, beyond)
    with pytest.raises(ConfigError, match="the data set has labels without class names up to 2"):
        append_table(objects, beyond, named)


def test_a_class_has_one_number_in_all_splits(objects):
    def write(label, classes, key):
        return write_table(objects, [labelled(**{key: label})], LABELLED_SCHEMA, classes)

    head = {"train": write(2, ["a", "b", "c"], "1"), "val": write(1, ["a", "b"], "2")}
    new = {"val": write(1, ["a", "d"], "3"), "test": write(0, ["d"], "4")}
    result = append_splits(objects, head, new)
    assert result["train"] is head["train"]
    assert result["val"].classes == result["test"].classes == ("a", "b", "c", "d")
    assert [sample["label"] for sample in read_samples(objects, result["val"])] == [1, 3]
    assert [sample["label"] for sample in read_samples(objects, result["test"])] == [3]


names = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6)


@given(names, st.lists(names, max_size=3))
def test_class_names_keep_their_number_and_every_label_its_name(head, new):
    combined = combine_classes(head, new)
    assert combined[: len(head)] == tuple(head)
    assert sorted(combined) == sorted({*head, *(name for each in new for name in each)})
    for each in new:
        labels = plan_labels(each, combined)
        if not labels:
            assert combined[: len(each)] == tuple(each)
            continue
        own = pa.array([None, -1, *range(len(each))], pa.int32())
        mapped = map_labels(own, labels)
        assert mapped.type == pa.int32()
        assert mapped.to_pylist()[:2] == [None, -1]
        assert [combined[label] for label in mapped.to_pylist()[2:]] == each


def sides(objects):
    head = write_table(objects, [texts("abc"), texts("d")], TEXT_SCHEMA)
    new = write_table(objects, [[*texts("c"), *texts("d", "another {}"), *texts("e")]], TEXT_SCHEMA)
    return head, new


def test_a_key_on_both_sides_is_a_conflict_that_names_it(objects):
    with pytest.raises(
        ConflictError, match=r"2 keys are on both sides: 'c', 'd'; choose .*--on-common.*--key-prefix"
    ):
        append_table(objects, *sides(objects))
    with pytest.raises(ConflictError, match=r"1 key is on both sides with different samples: 'd'; choose"):
        append_table(objects, *sides(objects), on_common="drop")
    with pytest.raises(ConfigError, match="on_common is 'ignore'; expected one of fail, drop, keep, replace"):
        append_table(objects, *sides(objects), on_common="ignore")


def test_a_conflict_of_many_keys_names_ten_and_counts_the_rest(objects):
    table = write_table(objects, [texts("abcdefghijklm")], TEXT_SCHEMA)
    with pytest.raises(ConflictError, match=r"13 keys are on both sides: 'a', .*'j' and 3 more;"):
        append_table(objects, table, table)


def test_on_common_chooses_the_old_or_the_new_sample_of_a_key(objects):
    head, new = sides(objects)
    kept = append_table(objects, head, new, on_common="keep")
    assert read_samples(objects, kept) == [*texts("abcd"), *texts("e")]
    replaced = append_table(objects, head, new, on_common="replace")
    assert read_samples(objects, replaced) == [*texts("abc")[:2], *texts("c"), *texts("d", "another {}"), *texts("e")]
    equal = write_table(objects, [texts("cx"), texts("d")], TEXT_SCHEMA)
    dropped = append_table(objects, head, equal, on_common="drop")
    assert read_samples(objects, dropped) == texts("abcdx")
    assert dropped.num_shards == 3


def test_samples_are_equal_when_their_labels_mean_the_same_class(objects):
    head = write_table(objects, [labelled(a=0, b=1)], LABELLED_SCHEMA, ["x", "y"])
    same = write_table(objects, [labelled(a=1, b=0)], LABELLED_SCHEMA, ["y", "x"])
    assert keys_of(objects, append_table(objects, head, same, on_common="drop")) == ["a", "b"]
    other = write_table(objects, [labelled(a=0, b=1)], LABELLED_SCHEMA, ["y", "x"])
    with pytest.raises(ConflictError, match="2 keys are on both sides with different samples"):
        append_table(objects, head, other, on_common="drop")


def test_a_deleted_key_is_free_again(objects):
    table = write_table(objects, [texts("ab")], TEXT_SCHEMA)
    less = delete_samples(objects, table, {0: np.array([0])})
    new = write_table(objects, [texts("a", "new {}")], TEXT_SCHEMA)
    assert read_samples(objects, append_table(objects, less, new)) == [*texts("b"), *texts("a", "new {}")]


@given(st.data())
def test_common_keys_are_those_that_both_have_where_they_are_whatever_their_hashes(tmp_path_factory, data):
    objects = Objects(Storage(str(tmp_path_factory.mktemp("store"))))
    alphabet = st.lists(st.text("abä", max_size=3), unique=True, max_size=12)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1))
    tables, places = [], []
    for text in ("{}", data.draw(st.sampled_from(["{}", "other {}"]))):
        keys = data.draw(alphabet)
        shards = np.split(np.array(keys, object), np.cumsum(sizes)[np.cumsum(sizes) < len(keys)])
        table = write_table(
            objects, [texts(shard, text) for shard in shards], TEXT_SCHEMA, indexed=data.draw(st.booleans())
        )
        gone = {
            number: np.array(data.draw(st.lists(st.integers(0, len(shard) - 1), max_size=2)), np.int64)
            for number, shard in enumerate(shards)
            if len(shard)
        }
        tables.append(delete_samples(objects, table, gone))
        live = SplitKeys(objects, tables[-1])
        places.append(
            {
                key: (each.shard, row)
                for each in live
                for key, row in zip(each.keys.to_pylist(), each.rows.tolist(), strict=True)
            }
        )
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(
                "datasvc.shards.versions.keys.hash_values",
                lambda keys: np.array([len(key) for key in keys.to_pylist()], np.int64),
            )
        common = find_common_keys(objects, *tables)
    found = {
        key: (a, b)
        for key, a, b in zip(
            common.keys.to_pylist(),
            zip(common.a.shards.tolist(), common.a.rows.tolist(), strict=True),
            zip(common.b.shards.tolist(), common.b.rows.tolist(), strict=True),
            strict=True,
        )
    }
    assert found == {key: (places[0][key], places[1][key]) for key in set(places[0]) & set(places[1])}
    assert len(common) == len(found)
    samples = [{each["key"]: each for each in read_samples(objects, table)} for table in tables]
    assert dict(zip(common.keys.to_pylist(), common.equal.tolist(), strict=True)) == {
        key: samples[0][key] == samples[1][key] for key in found
    }
