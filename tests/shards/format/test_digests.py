"""Digests of samples: equal for equal samples, different for all others."""

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from datasvc.shards.format.digests import digest_batch, digest_blob, digest_sample, digest_samples, encode_array

FIELDS = {
    "key": pa.field("key", pa.string()),
    "text": pa.field("text", pa.string()),
    "number": pa.field("number", pa.int64()),
    "share": pa.field("share", pa.float64()),
    "flag": pa.field("flag", pa.bool_()),
    "one": pa.field("one", pa.large_binary()),
    "two": pa.field("two", pa.large_binary()),
    "boxes": pa.field("boxes", pa.list_(pa.struct([("x", pa.int32()), ("name", pa.string())]))),
    "when": pa.field("when", pa.timestamp("us", "UTC")),
}
values = st.fixed_dictionaries(
    {
        "text": st.none() | st.text("ab", max_size=2),
        "number": st.none() | st.integers(0, 2),
        "share": st.none() | st.sampled_from([0.0, 1.0, 0.5]),
        "flag": st.none() | st.booleans(),
        "one": st.none() | st.binary(max_size=1),
        "two": st.none() | st.binary(max_size=1),
        "boxes": st.none()
        | st.lists(
            st.fixed_dictionaries({"x": st.none() | st.integers(0, 1), "name": st.none() | st.just("n")}), max_size=2
        ),
        "when": st.none() | st.sampled_from([dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (2020, 2021)]),
    }
)  # fmt: skip


def digests(samples, names=tuple(FIELDS)):
    schema = pa.schema([FIELDS[name] for name in names])
    listed = [{"key": str(place), **sample} for place, sample in enumerate(samples)]
    return digest_batch(pa.RecordBatch.from_pylist([{name: each[name] for name in names} for each in listed], schema))


def encode(name, column):
    return encode_array(pa.array(column, FIELDS[name].type))


@given(st.lists(values, min_size=2, max_size=6), st.permutations(list(FIELDS)))
def test_digests_are_equal_exactly_where_the_samples_are_whatever_the_order_of_columns(samples, names):
    found, payloads = digests(samples)
    assert (found, payloads) == digests(samples, names)
    for a, sample in enumerate(samples):
        for b, other in enumerate(samples):
            assert (found[a] == found[b]) == (sample == other)
            mine, theirs = ([each["one"], each["two"]] for each in (sample, other))
            if mine != [None, None] and theirs != [None, None] and None not in (*mine, *theirs):
                assert (payloads[a] == payloads[b]) == (mine == theirs)


@given(st.lists(values, min_size=1, max_size=4))
def test_a_column_that_is_null_is_as_good_as_none(samples):
    for name in FIELDS.keys() - {"key"}:
        rest = [each for each in FIELDS if each != name]
        assert digests([{**sample, name: None} for sample in samples]) == digests(samples, rest)


@given(st.lists(values, max_size=5), st.integers(0, 3))
def test_a_slice_of_a_batch_has_the_digests_of_its_samples(samples, start):
    schema = pa.schema(list(FIELDS.values()))
    batch = pa.RecordBatch.from_pylist([{"key": "", **sample} for sample in samples], schema)
    whole = digest_batch(batch)
    assert digest_batch(batch.slice(start)) == (whole[0][start:], whole[1][start:])


@given(values)
def test_one_sample_at_a_time_gives_what_a_batch_gives(sample):
    blobs = {name: digest_blob(sample[name]) for name in ("one", "two") if sample[name] is not None}
    others = {name: encode(name, [value])[0] for name, value in sample.items() if name not in ("one", "two")}
    found = digests([sample])
    assert digest_sample(blobs, others) == (found[0][0], found[1][0])


@given(st.lists(values, max_size=5))
def test_samples_given_column_by_column_have_the_digests_of_their_batch(samples):
    columns = {name: [sample[name] for sample in samples] for name in FIELDS.keys() - {"key"}}
    blobs = {
        name: [None if each is None else digest_blob(each) for each in columns.pop(name)] for name in ("one", "two")
    }
    others = {name: encode(name, column) for name, column in columns.items()}
    assert digest_samples(len(samples), blobs, others) == digests(samples)


def test_neither_keys_nor_what_is_measured_of_an_image_count():
    fields = [("key", pa.string()), ("image", pa.large_binary()), ("width", pa.int32()), ("height", pa.int32())]

    def digest(sample, columns):
        return digest_batch(pa.RecordBatch.from_pylist([sample], pa.schema(columns)))

    whole = digest({"key": "a", "image": b"x", "width": 3, "height": 4}, fields)
    assert whole == digest({"key": "b", "image": b"x", "width": 9, "height": 9}, fields)
    assert whole == digest({"key": "a", "image": b"x"}, fields[:2])
    assert whole != digest({"key": "a", "image": b"y"}, fields[:2])
    sized = [fields[0], fields[2]]
    assert digest({"key": "a", "width": 3}, sized) != digest({"key": "a", "width": 4}, sized)


def test_the_payload_is_the_blob_where_there_is_one_and_the_sample_where_there_is_none():
    samples, payloads = digests([{**dict.fromkeys(FIELDS), "key": "a", "one": b"x", "number": 1}])
    assert payloads == [xxh3_128(b"x").digest()]
    samples, payloads = digests([{**dict.fromkeys(FIELDS), "key": "a", "number": 1}])
    assert payloads == samples


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), ("1", 1), ("a", b"a"), ([1, 2], [[1], [2]]), (["ab"], ["a", "b"]), ([None], []),
        ({"a": 1}, [{"a": 1}]),
    ],
)  # fmt: skip
def test_values_of_different_types_and_shapes_differ(one, other):
    assert encode_array(pa.array([one])) != encode_array(pa.array([other]))


def test_pairs_below_a_null_map_count_for_no_sample():
    kind = pa.map_(pa.string(), pa.int64())
    full = pa.array([[("a", 1)], [("b", 2)], [("c", 3)]], kind)
    fields = [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.int64())]
    pairs = pa.StructArray.from_arrays([full.keys, full.items], fields=fields)
    hidden = pa.Array.from_buffers(kind, 3, [pa.py_buffer(b"\5"), full.buffers()[1]], children=[pairs])
    assert hidden.to_pylist() == [[("a", 1)], None, [("c", 3)]]
    assert encode_array(hidden) == encode_array(pa.array(hidden.to_pylist(), kind))
