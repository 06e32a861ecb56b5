"""Parts of large blobs: what is read is verified, by few requests; what is not read is not."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import CorruptDataError
from datasvc.shards.format import parts as parts_module
from datasvc.shards.format.partial_reader import PartialShard
from datasvc.shards.format.parts import PartedBlob, ReadPlan, digest_parts
from datasvc.shards.format.sample_index import SampleIndex
from tests.shards.format.test_partial_reader import Content, open_both, write

KIB, SIZE = 1 << 10, 4 << 10  # the unit, and the size of a part
RAW = np.random.default_rng(0).integers(0, 256, 64 * KIB + 5, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    for name, value in {"PART_BYTES": SIZE, "MIN_PARTED_BYTES": 16 * KIB, "_GAP_BYTES": SIZE}.items():
        monkeypatch.setattr(parts_module, name, value)
    monkeypatch.setattr(parts_module, "_MIN_AHEAD_BYTES", 2 * SIZE)
    monkeypatch.setattr("datasvc.shards.format.writer.MIN_PARTED_BYTES", 16 * KIB)


def sample(key, image=None, mask=None):
    return {"key": key, "image": image, "score": 1, "flag": True, "mask": mask, "words": ["x"]}


def open_blob(*spans, tail=1 << 20, flipped=None):
    """Return RAW as a blob that is read by parts, a function that reads a range of it, and what counts its reads."""
    batch = pa.RecordBatch.from_pydict({"image": pa.array([RAW], pa.large_binary())})
    (parts,) = digest_parts(batch, [0], 0)
    content, view = Content(RAW, flipped), np.zeros(len(RAW), np.uint8)
    blob = PartedBlob(view, parts, lambda *span: content.read_range("", *span), "x", ReadPlan(spans, tail))

    def read(start, stop):
        return blob.read(view[start:stop], np.empty(len(view[start:stop]), np.uint8)).tobytes()

    return blob, read, content


def test_ranges_that_are_planned_take_a_request_each_and_near_ones_one():
    _, read, content = open_blob((0, 10), (2 * SIZE + 1, 2 * SIZE + 9), (9 * SIZE, 11 * SIZE), (64 * KIB, 65 * KIB))
    assert content.num_reads == 3
    assert content.read_bytes == 3 * SIZE + 2 * SIZE + 5
    for start, stop in ((5, 3 * SIZE), (9 * SIZE + 7, 11 * SIZE), (64 * KIB, len(RAW)), (70, 70)):
        assert read(start, stop) == RAW[start:stop]
    assert content.num_reads == 3


def test_reads_that_are_not_planned_grow_up_to_what_is_held():
    _, read, content = open_blob((14 * SIZE, 15 * SIZE))
    for start in range(0, len(RAW), 100):
        assert read(start, start + 100) == RAW[start : start + 100]
    assert content.num_reads == 1 + 4  # parts 0-1, 2-5, 6-13 and 15-16
    assert content.read_bytes == len(RAW)


def test_the_end_of_a_blob_takes_one_request_from_its_tail_on():
    _, read, content = open_blob((0, 10), tail=4 * SIZE)
    assert read(6 * SIZE, 6 * SIZE + 10) == RAW[6 * SIZE : 6 * SIZE + 10]
    assert (content.num_reads, content.read_bytes) == (2, SIZE + len(RAW) - 6 * SIZE)


def test_memory_for_parts_is_bounded(monkeypatch):
    monkeypatch.setattr(parts_module, "_MAX_HELD_BYTES", 4 * SIZE)
    monkeypatch.setattr(parts_module, "_MAX_AHEAD_BYTES", 2 * SIZE)
    blob, read, _ = open_blob()
    for start in range(0, len(RAW), SIZE):
        assert read(start, start + 9) == RAW[start : start + 9]
        assert len(blob._held) <= 6


def test_a_changed_byte_of_a_part_that_is_read_is_found_and_another_one_is_not():
    for flipped, stop in ((5 * SIZE, 10 * SIZE), (0, 1)):
        with pytest.raises(CorruptDataError, match=rf"x: bytes {flipped} to {flipped + SIZE} are corrupt; restore"):
            open_blob((0, stop), flipped=flipped)
    _, read, _ = open_blob((0, 5 * SIZE), flipped=12 * SIZE)
    assert read(0, 5 * SIZE) == RAW[: 5 * SIZE]
    with pytest.raises(CorruptDataError, match="bytes 49152 to 53248 are corrupt"):
        read(12 * SIZE + 50, 12 * SIZE + 60)


def test_a_bit_that_changes_on_the_way_is_read_again():
    _, read, content = open_blob(flipped=3)
    read_range = content.read_range

    def flip_once(*span):
        found = read_range(*span)
        content.flipped = None
        return found

    content.read_range = flip_once
    assert read(0, 9) == RAW[:9]
    assert content.num_reads == 2


def test_a_large_blob_that_is_alone_in_its_sample_has_parts():
    samples = [
        sample("small", RAW[:900]),
        sample("large", RAW),
        sample("both", RAW, b"m"),
        sample("mask", None, RAW[: 16 * KIB]),
        sample("empty", b"", RAW),
    ]
    for batch_bytes in (1, 1 << 20):
        index = write(samples, share=1, batch_bytes=batch_bytes)[1]
        assert [(each.sample, each.num_parts) for each in index.layout.parts] == [(1, 17), (3, 4), (4, 17)]
        assert SampleIndex.decode(index.encode(), "x").layout.parts == index.layout.parts
    whole, part, content = open_both(samples, share=1, batch_bytes=1)
    part.read_in_parts(content)
    assert part.fetch(content, np.arange(5)) == 900 + len(RAW) + 1
    for row, column in ((1, "image"), (3, "mask"), (4, "mask"), (0, "image")):
        (view,), (expected,) = part.blobs(column, np.array([row])), whole.blobs(column, np.array([row]))
        read = part.reader(column, row, ReadPlan([(0, 1)], len(view)))
        assert read(view[10:], np.empty(len(view) - 10, np.uint8)).tobytes() == expected[10:].tobytes()
    with pytest.raises(IndexError, match="is not readable yet"):
        part.sample(1)


def test_a_blob_with_parts_is_read_as_a_whole_by_those_who_do_not_ask_for_parts():
    _, part, content = open_both([sample("a", RAW)], share=1)
    with pytest.raises(IndexError, match="is not readable yet"):
        part.blobs("image", np.array([0]))
    assert part.fetch(content, np.array([0])) == len(RAW)
    assert part.sample(0)["image"] == RAW


@pytest.mark.parametrize(
    "changes", [{"sample": 2}, {"sample": -1}, {"sample": 1}, {"part_bytes": 2 * SIZE}, {"digests": b"d" * 16}]
)
def test_digests_of_other_parts_than_a_shard_has_are_refused(changes):
    raw, index = write([sample("a", RAW), sample("b", b"small")], share=1)
    wrong = dataclasses.replace(index.layout.parts[0], **changes)
    index = dataclasses.replace(index, layout=dataclasses.replace(index.layout, parts=(wrong,)))
    index = SampleIndex.decode(index.encode(), "x")
    with pytest.raises(CorruptDataError, match="has digests of other parts than sample"):
        PartialShard(dataclasses.replace(open_both([sample("a")])[1].info, size_bytes=len(raw)), index, "part")


@pytest.mark.parametrize("changes", [{"part_bytes": 0}, {"part_bytes": -5}, {"digests": b"d" * 15}])
def test_digests_that_are_none_are_refused(changes):
    index = write([sample("a", RAW)], share=1)[1]
    wrong = dataclasses.replace(index.layout.parts[0], **changes)
    index = dataclasses.replace(index, layout=dataclasses.replace(index.layout, parts=(wrong,)))
    with pytest.raises(CorruptDataError, match="x has invalid digests of the parts of blobs"):
        SampleIndex.decode(index.encode(), "x")
