"""RecordIO files of an independent writer, and what can be wrong with them."""

import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.records import mxnet, recordio
from datasvc.shards.sources.records.mxnet import MxnetSource
from tests.samples import jpeg
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws
from tools.example_sources.recordio import image_record, part

IMAGES = [jpeg(seed=number) for number in range(4)]
MAGIC = recordio.MAGIC


class TestMxnetSource(StreamedSourceLaws):
    source = MxnetSource
    column, key = "label", None

    def write(self, folder, numbers):
        records = [part(0, image_record(number, number, jpeg(seed=number))) for number in numbers]
        (folder / "a.rec").write_bytes(b"".join(records))
        (folder / "a.idx").write_text("0\t0\n")


def read_file(folder, content, **options):
    """Return the columns of a file, its samples, and place and reason of the bad ones."""
    (folder / "a.rec").write_bytes(content)
    source = MxnetSource.list(str(folder), SourceOptions(**options))
    table, bad = reading.read_all(source)
    return source.schema, table.to_pylist(), {each.key: each.reason for each in bad}


def whole(*records):
    return b"".join(part(0, record) for record in records)


@pytest.mark.parametrize(
    ("labels", "label_type"),
    [
        ([3.0, -1.0, 2.0**24], pa.int32()), ([0.5, 1.0, 3.0], pa.float32()),
        ([[2.0, 5.0, 0.25], [2.0, 5.0], [1.0]], pa.list_(pa.float32())),
        ([[1.0], [7.0], 2.0], pa.list_(pa.float32())),
    ],
)  # fmt: skip
def test_labels_are_integers_floats_or_lists_as_the_first_ones_are(tmp_path, labels, label_type):
    records = [image_record(5 + n, label, IMAGES[n]) for n, label in enumerate(labels)]
    schema, samples, bad = read_file(tmp_path, whole(*records))
    expected = [[each] if pa.types.is_list(label_type) and each == 2.0 else each for each in labels]
    assert samples == [{"key": str(5 + n), "image": IMAGES[n], "label": expected[n]} for n in range(len(labels))]
    assert (bad, schema.field("label").type, is_image(schema.field("image"))) == ({}, label_type, True)


def test_a_later_label_of_another_kind_is_a_bad_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(mxnet, "_FIRST_RECORDS", 1)
    odd = [(0, 1.0), (1, 0.5), (2, [1.0, 2.0]), (3, float("nan")), (4, 2.0**40)]
    _, samples, bad = read_file(tmp_path, whole(*(image_record(n, label, IMAGES[0]) for n, label in odd)))
    assert [sample["label"] for sample in samples] == [1]
    reasons = [reason[:18] for reason in bad.values()]
    assert reasons == ["its label is 0.5; ", "its label is [1.0,", "its label is nan; ", "does not fit the c"]


def test_records_about_groups_of_images_are_bad_samples(tmp_path):
    """The first record of face data sets has the number of images, and the last ones the images of each person."""
    groups = (image_record(number, [3.0, 4.0], b"") for number in (0, 2))
    _, samples, bad = read_file(tmp_path, whole(*groups, image_record(1, 6.0, IMAGES[0])))
    assert samples == [{"key": "1", "image": IMAGES[0], "label": 6}]
    assert len(bad) == 2
    assert all("labels but no image" in reason for reason in bad.values())


def test_numbers_that_repeat_are_no_keys_and_files_of_a_split_have_their_names_in_keys(tmp_path):
    def keys(*ids):
        content = whole(*(image_record(number, 1, IMAGES[row]) for row, number in enumerate(ids)))
        return [sample["key"] for sample in read_file(tmp_path, content)[1]]

    assert keys(0, 0) == ["a.rec#0", f"a.rec#{len(part(0, image_record(0, 1, IMAGES[0])))}"]
    wide = A[:16] + (1).to_bytes(8, "little") + A[24:]
    assert read_file(tmp_path, whole(wide))[1][0]["key"] == str(2**64)
    (tmp_path / "b.rec").write_bytes(whole(image_record(0, 1, IMAGES[0])))
    assert keys(0, 7) == ["a.rec#0", "a.rec#7", "b.rec#0"]


@pytest.mark.parametrize(("records", "column"), [(IMAGES, "image"), ([b"", b"ab", bytes(40)], "value")])
def test_records_without_a_header_are_images_or_values(tmp_path, records, column):
    _, samples, bad = read_file(tmp_path, whole(*records))
    assert ([sample[column] for sample in samples], list(samples[0]), bad) == (list(records), ["key", column], {})


@given(
    st.lists(st.lists(st.sampled_from([MAGIC, b"a", b"\x0a\x23", bytes(3), MAGIC[:2]])).map(b"".join), max_size=6),
    st.integers(1, 9),
)
def test_records_are_read_exactly_once_whatever_the_ranges_and_wherever_magic_numbers_are(records, step):
    content = b"".join(map(recordio.frame, records))
    found = []
    for start in range(0, len(content), 4 * step):
        stream = io.BytesIO(content[start:])
        found += [record for _, record in recordio.read_records(stream, start, start + 4 * step)]
    assert found == records


A, B, C = (image_record(number, number, IMAGES[number]) for number in range(3))


@pytest.mark.parametrize(
    ("damaged", "lost", "reason"),
    [
        (part(2, B), 1, "flag 0 or 1"),  # continues nothing
        (part(1, B), 1, "flag 2 or 3"),  # is not continued
        (part(5, B), 1, "flag 0 or 1"),
        (b"\0" + part(0, B)[1:], 2, "no record starts at its end"),  # of the record before
        (part(0, B)[:4] + (len(B) + 4).to_bytes(4, "little") + part(0, B)[8:], 1, "another part starts inside"),
        (part(0, B)[:4] + ((1 << 29) - 1).to_bytes(4, "little") + part(0, B)[8:], 1, "expected at most"),
        (part(0, B)[:4] + (1 << 20).to_bytes(4, "little") + part(0, B)[8:], 1, "another part starts inside"),
        (part(0, B)[:100], 1, "another part starts inside"),
        (part(0, B)[:4] + (len(B) - 4).to_bytes(4, "little") + part(0, B)[8:], 1, "no record starts at its end"),
        (part(1, b"") + part(2, b"") * (1 << 12) + part(3, b""), 1, "declares"),
        (part(0, (1 << 20).to_bytes(4, "little") + bytes(20)), 1, "declares 1048576 labels"),
        (part(0, b"short"), 1, "it has 5 bytes"),
    ],
)  # fmt: skip
def test_damage_is_named_by_file_and_offset_and_the_records_around_it_are_read(tmp_path, damaged, lost, reason):
    _, samples, bad = read_file(tmp_path, whole(A) + damaged + whole(C))
    ((place, found),) = bad.items()
    assert reason in found
    assert place in (f"a.rec#{len(part(0, A))}", "a.rec#0")
    assert len(samples) == 3 - lost
    assert {sample["image"] for sample in samples} <= {IMAGES[0], IMAGES[2]}


def test_empty_parts_count_toward_the_limit_of_a_record_and_take_no_quadratic_time(monkeypatch):
    monkeypatch.setattr(recordio, "MAX_SAMPLE_BYTES", 1000)
    content = part(1, b"") + part(2, b"") * 1000 + part(3, b"")
    ((_, found),) = recordio.read_records(io.BytesIO(content), 0, len(content))
    assert "it has 1004 bytes; expected at most 1000" in str(found)


@pytest.mark.parametrize("size_bytes", [64, 1024, 4096])
def test_ranges_of_a_damaged_file_lose_and_repeat_nothing(tmp_path, monkeypatch, size_bytes):
    records = [part(0, image_record(number, number, IMAGES[number % 4])) for number in range(60)]
    content = bytearray(b"".join(records))
    for number in (7, 20, 21, 44):
        offset = sum(map(len, records[:number]))
        content[offset + 7] ^= 0x40  # in the flag
    expected = read_file(tmp_path, bytes(content))[1:]
    monkeypatch.setattr(mxnet, "_PART_BYTES", size_bytes)
    monkeypatch.setattr(recordio, "_SCAN_BYTES", 9)  # magic numbers lie across the blocks that are scanned
    assert read_file(tmp_path, bytes(content))[1:] == expected
    assert len(expected[0]) == 56


def test_a_file_of_something_else_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.rec#0: expected the magic number .* at byte 0; .*copy the file again"):
        read_file(tmp_path, b"no record at all")
