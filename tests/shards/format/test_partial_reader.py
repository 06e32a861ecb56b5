"""A shard of which some samples are there: what can be read is what the whole shard has, and nothing else can."""

import dataclasses
import io
import secrets
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.shards import Shard, ShardWriter, ingest, open_dataset
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.partial_reader import PartialShard, open_partial
from datasvc.shards.format.sample_index import ByteRange, SampleIndex, ShardLayout
from datasvc.shards.format.schema import image_schema, shard_schema, with_compression
from tests.shards.written_versions import write_shard

SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("score", pa.int32()),
        pa.field("flag", pa.bool_(), nullable=False),
        pa.field("mask", pa.large_binary()),
        pa.field("words", pa.list_(pa.string())),
    ]
)
blob = (
    st.none()
    | st.binary(max_size=5)
    | st.tuples(st.integers(1, 3000), st.binary(min_size=1, max_size=1)).map(lambda drawn: drawn[1] * drawn[0])
)
samples = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.text("ab", max_size=3),
            "image": blob,
            "score": st.none() | st.integers(0, 9),
            "flag": st.booleans(),
            "mask": blob,
            "words": st.none() | st.lists(st.text("xyz", max_size=3), max_size=3),
        }
    ),
    min_size=1,
    max_size=25,
)
# Shares at which every record batch has a frame, some have, and only those of large blobs have.
shares = st.sampled_from([1, 2, 32])
schemas = st.sampled_from([SCHEMA, with_compression(SCHEMA, compressed=True)])


class Content:
    """An object in memory that counts what is read of it, and flips a bit of what lies at `flipped`."""

    def __init__(self, raw, flipped=None):
        self.raw = raw
        self.flipped = flipped
        self.read_bytes = 0
        self.num_reads = 0

    def read_range(self, _digest, offset, length):
        content = bytearray(self.raw[offset : offset + length])
        assert len(content) == length
        self.read_bytes += length
        self.num_reads += 1
        if self.flipped is not None and offset <= self.flipped < offset + length:
            content[self.flipped - offset] ^= 4
        return bytes(content)


def write(given_samples, share=32, schema=SCHEMA, batch_bytes=2000, batch_samples=100):
    """Return the bytes of a shard, and its index as a reader gets it."""
    sink = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.BATCH_BYTES", batch_bytes)
        patch.setattr("datasvc.shards.format.writer.BATCH_SAMPLES", batch_samples)
        patch.setattr("datasvc.shards.format.writer._MIN_MESSAGE_PER_FRAME", share)
        patch.setattr("datasvc.shards.format.compressed_batches._MIN_RATIO", 0)
        with ShardWriter(sink, schema) as writer:
            for sample in given_samples:
                writer.append(sample)
    digests = digest_batch(pa.RecordBatch.from_pylist(given_samples, schema))
    index = SampleIndex.build([sample["key"] for sample in given_samples], *digests, writer.layout)
    return sink.getvalue(), SampleIndex.decode(index.encode(), "index")


def open_both(given_samples, share=32, **options):
    """Return the shard as a whole, in parts, and where the parts are read."""
    raw, index = write(given_samples, share, **options)
    info = ObjectInfo(Digest("ab" * 32), len(raw))
    return Shard.from_bytes(raw, "whole"), PartialShard(info, index, "part"), Content(raw)


def check_equal(part, whole, rows):
    """Hold the samples of `rows` against those of the whole shard."""
    assert part.schema.equals(whole.schema, check_metadata=True)
    assert part.num_samples == whole.num_samples
    for column in (*(field.name for field in whole.schema if pa.types.is_large_binary(field.type)), "nothing"):
        found, expected = part.blobs(column, rows), whole.blobs(column, rows)
        assert [view.tobytes() for view in found] == [view.tobytes() for view in expected]
        assert not any(view.flags.writeable and view.size for view in found)
    for field in whole.schema:
        assert part.is_valid(field.name, rows) == whole.is_valid(field.name, rows)
        if pa.types.is_primitive(field.type) and whole.is_valid(field.name, rows):
            found, expected = part.values(field.name)[rows], whole.values(field.name)[rows]
            assert found.tolist() == expected.tolist()
            assert found.dtype == expected.dtype
    assert [part.sample(row) for row in rows.tolist()] == [whole.sample(row) for row in rows.tolist()]


def draw_rows(data, num_samples):
    return np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=12)), np.int64)


@given(samples, shares, schemas, st.data())
def test_what_was_fetched_reads_as_of_the_whole_shard_however_it_came_together(given_samples, share, schema, data):
    whole, part, content = open_both(given_samples, share, schema=schema)
    rows = np.empty(0, np.int64)
    for _ in range(3):
        rows = np.concatenate([rows, draw_rows(data, whole.num_samples)])
        part.fetch(content, rows)
        assert part.has(rows)
        check_equal(part, whole, rows)
        assert part.plan(rows) == []


@given(samples, shares, st.data())
def test_what_is_not_there_is_refused(given_samples, share, data):
    whole, part, content = open_both(given_samples, share)
    part.fetch(content, draw_rows(data, whole.num_samples))
    for row in range(whole.num_samples):
        rows = np.array([row])
        if part.has(rows):
            check_equal(part, whole, rows)
            continue
        for read in (
            lambda rows=rows: part.blobs("image", rows),
            lambda rows=rows: part.is_valid("score", rows),
            lambda row=row: part.sample(row),
        ):
            with pytest.raises(IndexError, match=f"sample {row} of shard part is not readable yet"):
                read()


@given(samples, shares, st.integers(0, 4000), st.data())
def test_plans_read_each_byte_once_and_join_what_is_close(given_samples, share, gap_bytes, data):
    whole, part, content = open_both(given_samples, share)
    rows = draw_rows(data, whole.num_samples)
    reads = part.plan(rows, gap_bytes=gap_bytes)
    spans = sorted((span.offset, span.length) for read in reads for span in read.spans if span.length)
    assert all(start + length <= following for (start, length), (following, _) in pairwise(spans))
    exact = part.plan(rows, gap_bytes=0)
    assert len(reads) <= len(exact)
    for read in reads:
        part.add(read, [content.read_range("", span.offset, span.length) for span in read.spans])
    assert content.read_bytes == sum(read.size_bytes for read in reads)
    check_equal(part, whole, rows)


@given(samples, shares, schemas, st.data())
def test_a_flipped_bit_in_transit_is_found_before_anything_is_readable(given_samples, share, schema, data):
    whole, part, content = open_both(given_samples, share, schema=schema)
    rows = np.arange(whole.num_samples)
    reads = part.plan(rows)
    read = data.draw(st.sampled_from(reads)) if reads else None
    spans = [span for span in read.spans if span.length] if read else []
    if not spans:
        return
    span = data.draw(st.sampled_from(spans))
    content.flipped = data.draw(st.integers(span.offset, span.offset + span.length - 1))
    contents = [content.read_range("", each.offset, each.length) for each in read.spans]
    with pytest.raises(CorruptDataError, match=f"record batch {read.batch} of shard part"):
        part.add(read, contents)
    assert part.plan(rows) == reads
    content.flipped = None
    part.fetch(content, rows)
    check_equal(part, whole, rows)


IMAGES = [
    {"key": f"{n}.jpg", "image": bytes([n]) * (100_000 + n), "width": n + 1, "height": 2, "label": n % 3}
    for n in range(40)
]


def open_images(**options):
    return open_both(IMAGES, schema=image_schema(labelled=True), batch_bytes=1_000_000, **options)


def test_images_cost_their_own_bytes_and_everything_else_is_there_from_the_start():
    whole, part, content = open_images()
    assert part.values("label").tolist() == whole.values("label").tolist()
    rows = np.array([17, 3, 38])
    assert part.fetch(content, rows) == content.read_bytes == sum(100_000 + row for row in rows)
    assert content.num_reads == 3
    check_equal(part, whole, rows)
    assert not part.has(np.array([17, 18]))


def test_images_that_lie_side_by_side_are_read_as_one():
    _, part, content = open_images()
    part.fetch(content, np.array([2, 3, 4, 12, 13]))
    assert content.num_reads == 2
    assert content.read_bytes == sum(100_000 + row for row in (2, 3, 4, 12, 13))
    assert part.fetch(content, np.array([2, 4, 13])) == 0
    part.fetch(content, np.array([5, 8]))  # two that nobody asked for are less than a request costs
    assert content.num_reads == 3
    assert part.has(np.arange(2, 9))
    part.fetch(content, np.array([20, 29]))  # eight are more
    assert content.num_reads == 5


@pytest.mark.parametrize("place", [0, 50_000, 100_015])
def test_a_flipped_byte_of_an_image_names_shard_record_batch_and_sample(place):
    _, part, content = open_images()
    row = np.array([16])
    (read,) = part.plan(row)
    content.flipped = read.spans[0].offset + place
    message = "record batch 1 of shard part: the bytes read for its sample 6 are corrupt"
    with pytest.raises(CorruptDataError, match=message):
        part.fetch(content, row)
    assert not part.has(row)
    content.flipped = None
    part.fetch(content, row)
    assert part.sample(16) == IMAGES[16]


TEXTS = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("text", pa.string())])


def test_samples_without_blobs_are_read_by_record_batch_each_by_its_digest():
    rows = [{"key": str(n), "text": "word " * 100} for n in range(300)]
    raw, index = write(rows, schema=TEXTS, batch_samples=4)
    part = PartialShard(ObjectInfo(Digest("ab" * 32), len(raw)), index, "part")
    content = Content(raw, flipped=index.layout.batches[0].message.offset + 700)
    with pytest.raises(CorruptDataError, match="record batch 0 of shard part: the bytes read are corrupt"):
        part.fetch(content, np.array([3]))
    with pytest.raises(IndexError, match="sample 3"):
        part.sample(3)
    content.flipped, content.read_bytes = None, 0
    part.fetch(content, np.array([3, 1]))
    assert content.read_bytes == index.layout.batches[0].message.length < len(raw) / 50
    assert part.sample(3) == rows[3]


def test_views_stay_what_they_were_when_more_arrives_and_outlive_the_shard():
    whole, part, content = open_images()
    part.fetch(content, np.array([1]))
    (view,) = part.blobs("image", np.array([1]))
    part.fetch(content, np.arange(40))
    expected = whole.blobs("image", np.array([1]))[0].tobytes()
    del part
    assert view.tobytes() == expected


@pytest.mark.parametrize("share", [1, 32, 10**9])
def test_threads_that_fetch_and_read_at_once_see_samples_whole(share):
    whole, part, content = open_images(share=share)
    rng = np.random.default_rng(5)
    wanted = [rng.integers(0, 40, 5) for _ in range(40)]

    def fetch_and_read(rows):
        part.fetch(content, rows)
        assert part.values("width")[rows].tolist() == whole.values("width")[rows].tolist()
        check_equal(part, whole, rows)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch_and_read, wanted))


def test_reads_may_run_side_by_side():
    whole, part, content = open_images()
    rows = np.array([1, 11, 21, 31])
    all_under_way = Barrier(4, timeout=60)

    class Waiting:
        def read_range(self, digest, offset, length):
            all_under_way.wait()
            return content.read_range(digest, offset, length)

    with ThreadPoolExecutor(4) as pool:
        part.fetch(Waiting(), rows, pool=pool)
    check_equal(part, whole, rows)


def test_columns_that_were_looked_at_show_what_came_later():
    whole, part, content = open_images(share=10**9)
    for row in range(0, 40, 10):
        part.fetch(content, np.array([row]))
        check_equal(part, whole, np.arange(row + 10))


def store_and_open(objects, samples, schema, **options):
    row = write_shard(objects, samples, schema, **options)
    return row, open_partial(objects, row.shard, row.index)


def test_a_shard_without_an_index_or_with_one_of_format_1_waits_for_the_whole(repository):
    objects = repository.objects
    row, part = store_and_open(objects, IMAGES[:2], image_schema(labelled=True), indexed=False)
    assert part is None
    keys = [sample["key"] for sample in IMAGES[:2]]
    old = objects.put(SampleIndex.build(keys, [b"s" * 16] * 2, [b"p" * 16] * 2).encode())
    assert open_partial(objects, row.shard, old.digest) is None


def test_a_shard_without_samples_has_nothing_to_read_early(repository):
    assert store_and_open(repository.objects, [], image_schema(labelled=True))[1] is None


def change(index, **changes):
    """Return the index with its first record batch said to be another."""
    first, *others = index.layout.batches
    layout = ShardLayout(index.layout.schema, (dataclasses.replace(first, **changes), *others))
    return dataclasses.replace(index, layout=layout)


def moved(span):
    """Verified bytes would be written over offsets that are checked already."""
    return ByteRange(span.offset + 8, span.length)


@pytest.mark.parametrize(
    ("changes", "share", "message"),
    [
        (
            lambda _: {"frame": b"no frame" * 10},
            32,
            "record batch 0 of shard part: its sample index has an invalid",
        ),
        (lambda _: {"message": ByteRange(1 << 40, 100)}, 32, "record batches beyond its"),
        (lambda _: {"blobs": (ByteRange(0, 1_000_000_000),)}, 32, "has an invalid frame"),
        (lambda _: {"num_samples": 9}, 32, "invalid frame: it has 10 samples; expected 9"),
        (
            lambda found: {"blobs": tuple(map(moved, found[0].blobs))},
            32,
            "lists blobs at other positions than",
        ),
        (lambda found: {"message": found[1].message}, 32, "or that overlap"),
        (lambda _: {"num_samples": 1 << 40}, 10**9, f"lists {1 << 40} samples in"),
    ],
)
def test_an_index_that_contradicts_its_shard_is_corrupt(changes, share, message):
    raw, index = write(IMAGES, share, schema=image_schema(labelled=True), batch_bytes=1_000_000)
    with pytest.raises(CorruptDataError, match=message):
        PartialShard(ObjectInfo(Digest("ab" * 32), len(raw)), change(index, **changes(index.layout.batches)), "part")


def test_a_message_that_is_no_record_batch_is_corrupt_though_its_digest_is_right():
    raw, index = write(IMAGES, share=10**9, schema=image_schema(labelled=True), batch_bytes=1_000_000)
    first = index.layout.batches[0].message
    broken = b"\0" * first.length
    raw = raw[: first.offset] + broken + raw[first.offset + first.length :]
    changed = change(index, digest=xxh3_128_digest(broken))
    part = PartialShard(ObjectInfo(Digest("ab" * 32), len(raw)), changed, "part")
    with pytest.raises(CorruptDataError, match="record batch 0 of shard part is not a valid record batch"):
        part.fetch(Content(raw), np.array([0]))


def test_a_later_shard_format_is_refused():
    raw, index = write(IMAGES[:1], schema=image_schema(labelled=True))
    schema = index.layout.schema.with_metadata({"datasvc.shard.format": "3"})
    later = dataclasses.replace(index, layout=ShardLayout(schema, index.layout.batches))
    with pytest.raises(ConfigError, match="this datasvc reads up to 2"):
        PartialShard(ObjectInfo(Digest("ab" * 32), len(raw)), later, "part")


def test_ingested_images_can_be_read_before_their_shard(digits):
    objects = digits.repository.objects
    table = digits["train"].table
    for number in range(table.num_shards):
        info = table.shard(number)
        part = open_partial(objects, info, table.index(number))
        whole = digits["train"].origin.open_shard(info)
        rows = np.arange(0, whole.num_samples, 7)
        part.fetch(objects, rows)
        check_equal(part, whole, rows)


def test_samples_come_one_by_one_from_s3(s3_bucket, folder):
    repository = Repository.create(f"{s3_bucket}/{secrets.token_hex(8)}")
    ingest(repository, str(folder), "shapes")
    split = open_dataset(repository, "shapes")["train"]
    part = open_partial(repository.objects, split.table.shard(0), split.table.index(0))
    rows = np.array([19, 0, 5])
    with ThreadPoolExecutor(4) as pool:
        part.fetch(repository.objects, rows, pool=pool)
    check_equal(part, split.origin.open_shard(split.table.shard(0)), rows)
