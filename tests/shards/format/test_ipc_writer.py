"""Where a writer says that its record batches lie: there they are."""

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from datasvc.shards.format.sample_index import ByteRange
from datasvc.shards.format.schema import shard_schema, with_compression
from datasvc.shards.format.writer import IpcWriter, ShardWriter, describe_batch

SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("score", pa.int32()),
        pa.field("mask", pa.large_binary()),
    ]
)
blob = st.none() | st.binary(max_size=5) | st.integers(0, 5000).map(lambda size: b"b" * size)
samples = st.lists(st.tuples(st.text("ab", max_size=3), blob, st.none() | st.integers(0, 9), blob), max_size=30).map(
    lambda rows: [dict(zip(SCHEMA.names, row, strict=True)) for row in rows]
)


def cut_out(message, spans):
    """Return a message without the bytes of `spans`."""
    kept = bytearray()
    place = 0
    for span in sorted(spans, key=lambda span: span.offset):
        if span.length:
            kept += message[place : span.offset]
            place = span.offset + span.length
    return bytes(kept + message[place:])


def check(raw, layout):
    """Hold a layout against the file that it speaks of; returns how many of its batches have a frame."""
    file = pa.ipc.open_file(raw)
    assert layout.schema.equals(file.schema, check_metadata=True)
    assert len(layout.batches) == file.num_record_batches
    for number, batch in enumerate(layout.batches):
        expected = file.get_batch(number)
        message = raw[batch.message.offset : batch.message.offset + batch.message.length]
        found = pa.ipc.read_record_batch(pa.py_buffer(message), file.schema)
        assert found.equals(expected)
        assert batch.num_samples == expected.num_rows
        if batch.frame is None:
            assert batch.digest == xxh3_128_digest(message)
            continue
        assert batch.digest is None
        assert batch.frame == cut_out(message, batch.blobs)
        for name, span in zip(("image", "mask"), batch.blobs, strict=True):
            content = expected.column(name).buffers()[2]
            assert message[span.offset : span.offset + span.length] == (content.to_pybytes() if content else b"")
    return sum(batch.frame is not None for batch in layout.batches)


@given(samples, st.sampled_from([200, 4 << 20]), st.booleans(), st.booleans())
def test_the_layout_has_the_positions_and_contents_of_record_batches(
    given_samples, batch_bytes, by_column, compressed
):
    sink = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.BATCH_BYTES", batch_bytes)
        patch.setattr("datasvc.shards.format.compressed_batches._MIN_RATIO", 0)
        with ShardWriter(sink, with_compression(SCHEMA, compressed=compressed)) as writer:
            if by_column:
                views = {name: [sample[name] for sample in given_samples] for name in ("key", "image", "mask")}
                views["key"] = [key.encode() for key in views["key"]]
                scores = pa.array([sample["score"] for sample in given_samples], pa.int32())
                writer.append_columns(views, pa.record_batch([scores], ["score"]))
            else:
                for sample in given_samples:
                    writer.append(sample)
    check(sink.getvalue(), writer.layout)
    assert writer.layout.num_samples == len(given_samples)
    assert pa.ipc.open_file(sink.getvalue()).read_all().to_pylist() == given_samples


def test_batches_of_large_blobs_have_a_frame_and_those_of_small_ones_a_digest():
    sink = io.BytesIO()
    file = IpcWriter(sink, SCHEMA)
    for size in (10, 100_000, 10, 100_000):
        row = {"key": "a", "image": b"i" * size, "score": 1, "mask": b"m" * size}
        file.write_batch(pa.RecordBatch.from_pylist([row, row], SCHEMA))
    file.close()
    layout = file.layout
    assert check(sink.getvalue(), layout) == 2
    assert [batch.frame is not None for batch in layout.batches] == [False, True, False, True]
    assert max(len(batch.frame) for batch in layout.batches if batch.frame) < 1000


def test_two_columns_that_share_their_memory_have_a_digest():
    """Their bytes could not be told apart by where they lie."""
    shared = pa.array([b"x" * 100_000], pa.large_binary())
    batch = pa.record_batch([pa.array(["a"]), shared, pa.array([1], pa.int32()), shared], SCHEMA)
    sink = io.BytesIO()
    file = IpcWriter(sink, SCHEMA)
    file.write_batch(batch)
    file.close()
    assert check(sink.getvalue(), file.layout) == 0


def test_a_batch_of_which_one_column_of_blobs_is_not_recognised_has_a_digest():
    """Arrow writes a part of the memory of a slice: which one is for Arrow to know."""
    image, mask = pa.array([b"x" * 100_000], pa.large_binary()), pa.array([b"m", b"n"], pa.large_binary()).slice(1, 1)
    sink = io.BytesIO()
    file = IpcWriter(sink, SCHEMA)
    file.write_batch(pa.record_batch([pa.array(["a"]), image, pa.array([1], pa.int32()), mask], SCHEMA))
    file.close()
    assert check(sink.getvalue(), file.layout) == 0


def test_the_layout_of_a_batch_that_is_a_slice_of_larger_arrays_is_right():
    rows = [{"key": str(n), "image": bytes([n]) * 9000, "score": n, "mask": None} for n in range(9)]
    whole = pa.RecordBatch.from_pylist(rows, SCHEMA)
    sink = io.BytesIO()
    file = IpcWriter(sink, SCHEMA)
    for start, length in [(0, 9), (0, 4), (4, 5), (3, 1)]:
        file.write_batch(whole.slice(start, length))
    file.close()
    check(sink.getvalue(), file.layout)


def test_a_description_needs_no_blobs():
    chunks = [b"head", pa.py_buffer(np.arange(3, dtype=np.uint8)), b"tail"]
    described = describe_batch(chunks, 100, [None], 3)
    assert (described.message, described.num_samples) == (ByteRange(100, 11), 3)
    assert described.digest == xxh3_128_digest(b"head\0\1\2tail")
