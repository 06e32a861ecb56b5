"""What a writer wrote, a reader reads: properties over generated samples."""

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.shards import Shard, ShardWriter, image_schema
from datasvc.shards.format.schema import shard_schema

SCHEMA = image_schema(labelled=True)

samples = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.text(st.characters(exclude_categories=["Cs"])),
            "image": st.binary(max_size=300),
            "width": st.integers(1, 5000),
            "height": st.integers(1, 5000),
            "label": st.integers(0, 1000),
        }
    ),
    max_size=40,
)


def write(given_samples, schema=SCHEMA):
    sink = io.BytesIO()
    with ShardWriter(sink, schema) as writer:
        for sample in given_samples:
            writer.append(sample)
    return sink.getvalue(), writer.statistics


@given(samples, st.sampled_from([200, 4 << 20]))
def test_a_shard_reads_back_what_was_written(given_samples, batch_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.BATCH_BYTES", batch_bytes)  # several record batches, or one
        raw, statistics = write(given_samples)
    shard = Shard.from_bytes(raw, "test")
    assert shard.num_samples == statistics.num_samples == len(given_samples)
    assert [shard.sample(row) for row in range(shard.num_samples)] == given_samples
    rows = np.arange(len(given_samples))[::-1]
    assert [view.tobytes() for view in shard.blobs("image", rows)] == [each["image"] for each in given_samples[::-1]]
    assert shard.values("label").tolist() == [each["label"] for each in given_samples]


@given(samples)
def test_equal_samples_give_equal_bytes(given_samples):
    assert write(given_samples) == write(given_samples)


def test_blobs_are_views_of_the_file_and_outlive_its_name(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(write([{"key": "a", "image": b"pixels", "width": 1, "height": 1, "label": 0}])[0])
    shard = Shard.map(path)
    (view,) = shard.blobs("image", np.array([0]))
    path.unlink()
    del shard
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert view.tobytes() == b"pixels"


def test_other_tools_open_a_shard_unaided():
    raw, _ = write([{"key": "a", "image": b"x", "width": 1, "height": 2, "label": 3}])
    table = pa.ipc.open_file(raw).read_all()
    assert table.to_pylist() == [{"key": "a", "image": b"x", "width": 1, "height": 2, "label": 3}]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"key": "a"}, r"sample has the columns \['key'\]; expected"),
        (
            {"key": "a", "image": b"", "width": "wide", "height": 1, "label": 0},
            "'width' has values that are not int32",
        ),
        (
            {"key": "a", "image": b"", "width": 1, "height": 1, "label": 2**40},
            "'label' has values that are not int32",
        ),
    ],
)
def test_samples_that_do_not_fit_the_schema_are_refused_by_column(sample, message):
    with pytest.raises(ConfigError, match=message):
        write([sample])


def test_a_schema_needs_a_key_and_unique_names():
    with pytest.raises(ConfigError, match="needs a column 'key'"):
        shard_schema([pa.field("image", pa.large_binary())])
    with pytest.raises(ConfigError, match="must be unique"):
        shard_schema([pa.field("key", pa.string()), pa.field("key", pa.string())])


@pytest.mark.parametrize("raw", [b"", b"no arrow", b"ARROW1\0\0" + b"\0" * 50])
def test_what_is_no_arrow_file_is_corrupt(raw):
    with pytest.raises(CorruptDataError, match="is not an Arrow IPC file"):
        Shard.from_bytes(raw, "test")


def test_a_later_or_foreign_shard_format_is_refused():
    for metadata in ({"datasvc.shard.format": "3"}, {}):
        sink = io.BytesIO()
        schema = pa.schema([pa.field("key", pa.string())], metadata=metadata)
        with pa.ipc.new_file(sink, schema):
            pass
        with pytest.raises(ConfigError, match="this datasvc reads up to 2"):
            Shard.from_bytes(sink.getvalue(), "test")


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(NotFoundError):
        Shard.map(tmp_path / "missing")


def test_statistics_and_batches_cover_the_whole_shard_whatever_its_number_of_batches(monkeypatch):
    monkeypatch.setattr("datasvc.shards.format.writer.BATCH_BYTES", 200)
    sample = {"key": "a", "image": b"1" * 150, "width": 3, "height": 4, "label": 0}
    largest = {**sample, "image": b"1" * 500, "width": 50, "height": 60}
    raw, statistics = write([largest, *[sample] * 7])
    assert (statistics.num_samples, statistics.max_width, statistics.max_height) == (8, 50, 60)
    assert statistics.max_sample_bytes == 500
    assert pa.ipc.open_file(raw).num_record_batches == 5  # one, then two at a time


NULLABLE = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("score", pa.int32()),
        pa.field("flag", pa.bool_()),
    ]
)


def test_blobs_that_are_null_are_empty_views_and_none_as_samples():
    images = [b"one", None, b"", b"four"]
    given_samples = [{"key": "", "image": image, "score": None, "flag": None} for image in images]
    shard = Shard.from_bytes(write(given_samples, NULLABLE)[0], "test")
    views = shard.blobs("image", np.array([3, 1, 0, 2, 1]))
    assert [view.tobytes() for view in views] == [b"four", b"", b"one", b"", b""]
    assert [shard.sample(row)["image"] for row in range(4)] == images


def test_bytes_below_a_null_are_not_shown():
    offsets, content = pa.py_buffer(np.array([0, 3, 6], np.int64)), pa.py_buffer(b"abcdef")
    images = pa.Array.from_buffers(pa.large_binary(), 2, [pa.py_buffer(b"\x02"), offsets, content])
    batch = pa.record_batch(
        [pa.array(["a", "b"]), images, pa.nulls(2, pa.int32()), pa.nulls(2, pa.bool_())], NULLABLE
    )
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, NULLABLE) as file:
        file.write_batch(batch)
    shard = Shard.from_bytes(sink.getvalue(), "test")
    assert [view.tobytes() for view in shard.blobs("image", np.arange(2))] == [b"", b"def"]


def test_a_blob_column_that_a_shard_lacks_is_null_throughout():
    shard = Shard.from_bytes(write([{"key": "a", "image": b"1", "score": 1, "flag": True}], NULLABLE)[0], "test")
    assert [view.tobytes() for view in shard.blobs("thumbnail", np.array([0, 0]))] == [b"", b""]


def test_values_keep_their_type_beside_nulls(monkeypatch):
    monkeypatch.setattr("datasvc.shards.format.writer.BATCH_BYTES", 5)  # several record batches
    scores, flags = [7, None, 9, 4], [True, False, None, True]
    given_samples = [
        {"key": "", "image": b"1234", "score": score, "flag": flag} for score, flag in zip(scores, flags, strict=True)
    ]
    shard = Shard.from_bytes(write(given_samples, NULLABLE)[0], "test")
    assert len(shard.batches) == 2
    assert shard.values("score").dtype == np.int32
    assert shard.values("score")[[0, 2, 3]].tolist() == [7, 9, 4]
    assert shard.values("flag").dtype == np.bool_
    assert shard.values("flag")[[0, 1, 3]].tolist() == [True, False, True]
    assert shard.is_valid("score", np.array([3, 0, 2]))
    assert not shard.is_valid("score", np.array([0, 1]))
    assert not shard.is_valid("nothing", np.array([0]))
    assert shard.column("score").to_pylist() == scores


@given(
    samples=st.lists(
        st.tuples(st.none() | st.binary(max_size=60), st.text("ab", max_size=3), st.none() | st.binary())
    ),
    batch_bytes=st.integers(1, 100),
)
def test_blobs_first_and_values_by_record_batch_give_the_shard_that_whole_samples_give(samples, batch_bytes):
    fields = [pa.field("blob", pa.large_binary()), pa.field("key", pa.string()), pa.field("mask", pa.large_binary())]
    schema = shard_schema(fields)
    whole, parted = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.BATCH_BYTES", batch_bytes)
        with ShardWriter(whole, schema) as writer:
            for sample in samples:
                writer.append(dict(zip(schema.names, sample, strict=True)))
        keys = []
        with ShardWriter(parted, schema) as writer:
            for blob, key, mask in samples:
                keys.append(key)
                if writer.append_blobs(blob, mask):
                    writer.end_batch({"key": keys})
                    keys = []
            writer.end_batch({"key": keys})
    assert parted.getvalue() == whole.getvalue()
