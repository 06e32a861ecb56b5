"""Sample indexes: keys and digests beside a shard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.format.ipc_reader import encode_table
from datasvc.shards.format.sample_index import BatchLayout, ByteRange, SampleIndex, ShardLayout
from datasvc.shards.format.schema import image_schema
from datasvc.shards.versions.deletions import Deletions

digest = st.binary(min_size=16, max_size=16)
indexed = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), digest, digest), max_size=20)


@given(indexed)
def test_an_index_decodes_to_what_was_encoded_and_equal_indexes_give_equal_bytes(samples):
    columns = [list(column) for column in zip(*samples, strict=True)] or [[], [], []]
    raw = SampleIndex.build(*columns).encode()
    decoded = SampleIndex.decode(raw, "test")
    assert decoded.encode() == raw
    assert decoded.num_samples == len(samples)
    assert decoded.keys == columns[0]
    for place, name in enumerate(("sample", "payload"), 1):
        found = decoded.digests(name)
        assert [each.tobytes() for each in found] == columns[place]
        assert np.array_equal(
            found == found[::-1], [a == b for a, b in zip(columns[place], columns[place][::-1], strict=True)]
        )


@pytest.mark.parametrize("raw", [b"", b"no arrow", Deletions.build({}).encode()])
def test_what_is_no_index_is_corrupt(raw):
    with pytest.raises(CorruptDataError, match="is not a sample index"):
        SampleIndex.decode(raw, "test")


def test_an_index_of_a_later_format_is_refused(monkeypatch):
    raw = SampleIndex.build([], [], []).encode()
    monkeypatch.setattr("datasvc.shards.format.sample_index.INDEX_FORMAT", 0)
    with pytest.raises(ConfigError, match="sample index format 2; this datasvc reads up to 0"):
        SampleIndex.decode(raw, "test")


counts = st.integers(0, 1 << 40)
spans = st.builds(ByteRange, counts, counts)
messages = st.builds(BatchLayout, spans, st.integers(0, 9), digest=digest) | st.builds(
    BatchLayout, spans, st.integers(0, 9), frame=st.binary(max_size=100), blobs=st.lists(spans, max_size=3).map(tuple)
)
layouts = st.lists(messages, max_size=5).map(lambda batches: ShardLayout(image_schema(labelled=True), tuple(batches)))


def build(layout):
    count = layout.num_samples
    return SampleIndex.build(
        [str(number) for number in range(count)], [b"s" * 16] * count, [b"p" * 16] * count, layout
    )


@given(layouts)
def test_the_record_batches_of_a_shard_come_back_with_its_index(layout):
    raw = build(layout).encode()
    decoded = SampleIndex.decode(raw, "test")
    assert decoded.encode() == raw == build(layout).encode()
    if not layout.num_samples:
        assert decoded.layout is None
        return
    assert decoded.layout.batches == layout.batches
    assert decoded.layout.schema.equals(layout.schema, check_metadata=True)


def test_an_index_of_other_samples_than_its_record_batches_have_is_corrupt():
    layout = ShardLayout(image_schema(labelled=True), (BatchLayout(ByteRange(0, 10), 3, digest=b"d" * 16),))
    raw = SampleIndex.build(["a"], [b"s" * 16], [b"p" * 16], layout).encode()
    with pytest.raises(CorruptDataError, match="test lists 1 sample, but its record batches have 3"):
        SampleIndex.decode(raw, "test")


@pytest.mark.parametrize("both", [{}, {"digest": b"d" * 16, "frame": b"f"}])
def test_a_record_batch_that_has_neither_or_both_of_digest_and_frame_is_corrupt(both):
    layout = ShardLayout(image_schema(labelled=True), (BatchLayout(ByteRange(0, 10), 1, **both),))
    with pytest.raises(CorruptDataError, match="needs either a digest or a frame"):
        SampleIndex.decode(build(layout).encode(), "test")


def test_a_layout_that_is_none_is_corrupt():
    table = SampleIndex.build(["a"], [b"s" * 16], [b"p" * 16]).table
    raw = encode_table(table, {b"datasvc.index.batches": b"nothing"})
    with pytest.raises(CorruptDataError, match="has an invalid layout of the shard's record batches"):
        SampleIndex.decode(raw, "test")
