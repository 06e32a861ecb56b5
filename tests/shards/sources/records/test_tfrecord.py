"""TFRecord files written by the `tfrecord` package, and what can be wrong with them."""

import gzip
import struct
import subprocess
import sys
import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import BadSampleError, ConfigError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources import BadSample, SourceOptions
from datasvc.shards.sources.common.protobuf import read_fields, read_packed_varints, to_signed
from datasvc.shards.sources.records.tf_example import parse_example
from datasvc.shards.sources.records.tfrecord import TfRecordSource, masked_crc
from tests.samples import jpeg
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws
from tests.support.fuzzing import counts_refusals

tfrecord_writer = pytest.importorskip("tfrecord.writer", reason="the package tfrecord writes the files")
TFRecordWriter = tfrecord_writer.TFRecordWriter


def write(path, examples):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = TFRecordWriter(str(path))
    for example in examples:
        writer.write(example)
    writer.close()
    return str(path)


class TestTfRecordSource(StreamedSourceLaws):
    source = TfRecordSource
    accepts_flips = False  # each record has a checksum
    packed = staticmethod(bytes)

    def write(self, folder, numbers):
        write(folder / "a.tfrecord", [{"number": (number, "int")} for number in numbers])
        (folder / "a.tfrecord").write_bytes(self.packed((folder / "a.tfrecord").read_bytes()))


class TestGzipTfRecordSource(TestTfRecordSource):
    accepts_flips = True  # in the time and the name that a gzip header has
    packed = staticmethod(gzip.compress)


class TestZlibTfRecordSource(TestTfRecordSource):
    packed = staticmethod(zlib.compress)


def test_other_formats_are_ingested_where_the_checksums_of_this_one_are_not_installed():
    code = "import sys; sys.modules['google_crc32c'] = None; import datasvc.shards, datasvc.shards.export"
    subprocess.run([sys.executable, "-c", code], check=True)


def serialized(example):
    return TFRecordWriter.serialize_tf_example(example)


def framed(message):
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", masked_crc(length)) + message + struct.pack("<I", masked_crc(message))


def read_all(source):
    table, bad = reading.read_all(source)
    return table.to_pylist(), bad


def numbers(count, start=0):
    return [{"n": (number, "int")} for number in range(start, start + count)]


def test_features_become_columns_of_their_kind(tmp_path):
    examples = [
        {"text": (f"où {n}".encode(), "byte"), "raw": (b"\xff\0" * n, "byte"), "zeros": (b"\0" * 4, "byte"),
         "n": (-n, "int"), "x": (n / 4, "float"), "many": (list(range(n)), "int"), "words": ([b"a", b"b"], "byte")}
        for n in range(5)
    ]  # fmt: skip
    source = TfRecordSource.list(write(tmp_path / "a.tfrecord", examples))
    samples, bad = read_all(source)
    assert not bad
    assert samples == [
        {"key": f"a.tfrecord#{n}", "text": f"où {n}", "raw": b"\xff\0" * n, "zeros": b"\0" * 4, "n": -n, "x": n / 4,
         "many": list(range(n)), "words": ["a", "b"]}
        for n in range(5)
    ]  # fmt: skip
    types = {each.name: each.type for each in source.schema}
    assert types == {
        "key": pa.string(), "text": pa.string(), "raw": pa.large_binary(), "zeros": pa.large_binary(),
        "n": pa.int64(), "x": pa.float32(), "many": pa.list_(pa.int64()), "words": pa.list_(pa.string()),
    }  # fmt: skip


def test_imagenet_as_everybody_has_it(tmp_path):
    images = [jpeg(seed=number) for number in range(4)]
    for split, chosen in (("train", images[:3]), ("validation", images[3:])):
        examples = [
            {"image/encoded": (image, "byte"), "image/class/label": (7, "int"), "image/class/text": (b"cat", "byte"),
             "image/object/bbox/xmin": ([0.25, 0.5], "float"), "image/height": (30, "int")}
            for image in chosen
        ]  # fmt: skip
        write(tmp_path / f"{split}-00000-of-00128", examples)
    source = TfRecordSource.list(f"{tmp_path}/{{train,validation}}-00000-of-00128")
    samples, bad = read_all(source)
    assert not bad
    assert [part.split for part in source.parts] == ["train", "validation"]
    assert [sample["image"] for sample in samples] == images
    assert samples[0] == {
        "key": "train-00000-of-00128#0", "image": images[0], "label": 7, "image/class/text": "cat",
        "image/object/bbox/xmin": [0.25, 0.5], "image/height": 30,
    }  # fmt: skip
    assert is_image(source.schema.field("image"))
    assert source.schema.field("label").type == pa.int32()


@pytest.mark.parametrize(
    "name",
    ["a.tfrecord", "a.tfrecords", "x/a.tfrecord-00001-of-00001", "val-00000-of-00001", "a.tfrecord.gz", "A.TFRECORD"],
)
def test_files_are_known_by_their_usual_names(tmp_path, name):
    path = tmp_path / "source" / name
    write(path, numbers(3))
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert [sample["n"] for sample in read_all(TfRecordSource.list(str(tmp_path / "source")))[0]] == [0, 1, 2]


@pytest.mark.parametrize(
    "compress", [gzip.compress, zlib.compress, lambda raw: gzip.compress(raw[:50]) + gzip.compress(raw[50:])]
)
def test_compressed_files_are_known_by_their_content(tmp_path, compress):
    path = tmp_path / "a.tfrecord"
    write(path, numbers(500))
    path.write_bytes(compress(path.read_bytes()))
    samples, bad = read_all(TfRecordSource.list(str(path)))
    assert not bad
    assert [sample["n"] for sample in samples] == list(range(500))


def test_keys_come_from_a_feature_where_one_is_named(tmp_path):
    examples = [{"id": (f"k{n}".encode(), "byte"), "n": (n, "int")} for n in range(70)] + [{"n": (70, "int")}]
    url = write(tmp_path / "a.tfrecord", examples)
    samples, bad = read_all(TfRecordSource.list(url, SourceOptions(key="id")))
    assert samples == [{"key": f"k{n}", "n": n} for n in range(70)]
    assert bad == [BadSample("train", "a.tfrecord#70", "it lacks the feature 'id', which holds its key")]
    assert read_all(TfRecordSource.list(url, SourceOptions(key="n")))[0][2] == {"key": "2", "id": "k2"}
    with pytest.raises(ConfigError, match="the key column 'gone' does not exist"):
        TfRecordSource.list(url, SourceOptions(key="gone"))


def test_a_feature_that_is_absent_is_null(tmp_path):
    url = write(tmp_path / "a.tfrecord", [{"n": (1, "int"), "x": (0.5, "float")}, {"n": (2, "int")}])
    assert read_all(TfRecordSource.list(url))[0] == [
        {"key": "a.tfrecord#0", "n": 1, "x": 0.5},
        {"key": "a.tfrecord#1", "n": 2, "x": None},
    ]


def test_a_record_with_a_bad_checksum_is_left_out_and_those_behind_it_are_read(tmp_path):
    url = write(tmp_path / "a.tfrecord", numbers(10))
    content = bytearray((tmp_path / "a.tfrecord").read_bytes())
    size = len(content) // 10
    content[4 * size + 14] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(content)
    samples, bad = read_all(TfRecordSource.list(url))
    assert [sample["key"] for sample in samples] == [f"a.tfrecord#{n}" for n in (0, 1, 2, 3, 5, 6, 7, 8, 9)]
    assert bad == [BadSample("train", "a.tfrecord#4", "its checksum does not match")]


@pytest.mark.parametrize("flipped", range(12))
def test_behind_a_bad_length_the_file_ends(tmp_path, flipped):
    url = write(tmp_path / "a.tfrecord", numbers(10))
    content = bytearray((tmp_path / "a.tfrecord").read_bytes())
    content[4 * (len(content) // 10) + flipped] ^= 0x10
    (tmp_path / "a.tfrecord").write_bytes(content)
    samples, bad = read_all(TfRecordSource.list(url))
    assert [sample["n"] for sample in samples] == [0, 1, 2, 3]
    assert [(each.key, each.reason) for each in bad] == [
        ("a.tfrecord#4", "the rest of the file cannot be read: the checksum of a length does not match")
    ]


def test_a_file_cut_off_anywhere_gives_all_records_before(tmp_path):
    url = write(tmp_path / "a.tfrecord", numbers(4))
    whole = (tmp_path / "a.tfrecord").read_bytes()
    record_bytes = len(whole) // 4
    for length in range(record_bytes, len(whole)):
        (tmp_path / "a.tfrecord").write_bytes(whole[:length])
        samples, bad = read_all(TfRecordSource.list(url))
        assert [sample["n"] for sample in samples] == list(range(length // record_bytes))
        # A cut at the end of a record cannot be noticed.
        assert ["truncated" in each.reason for each in bad] == [True] * (length % record_bytes > 0)


def test_a_truncated_file_with_the_extension_of_gzip_is_an_error(tmp_path):
    write(tmp_path / "a.tfrecord", numbers(2000))
    content = gzip.compress((tmp_path / "a.tfrecord").read_bytes())
    write(tmp_path / "b" / "a.tfrecord", numbers(3))
    (tmp_path / "b" / "b.tfrecord.gz").write_bytes(content[: len(content) // 2])
    samples, bad = read_all(TfRecordSource.list(str(tmp_path / "b")))
    assert len(samples) >= 3
    assert [each.key.partition("#")[0] for each in bad] == ["b.tfrecord.gz"]
    assert "the rest of the file cannot be read" in bad[0].reason


def test_an_absurd_length_with_a_good_checksum_takes_no_memory(tmp_path):
    url = write(tmp_path / "a.tfrecord", numbers(2))
    length = struct.pack("<Q", 1 << 60)
    with open(url, "ab") as opened:
        opened.write(length + struct.pack("<I", masked_crc(length)) + b"x" * 100)
    samples, bad = read_all(TfRecordSource.list(url))
    assert len(samples) == 2
    assert [each.key for each in bad] == ["a.tfrecord#2"]
    assert "truncated in a message of" in bad[0].reason


def test_a_record_over_the_bound_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.records.tfrecord.MAX_SAMPLE_BYTES", 1000)
    url = write(tmp_path / "a.tfrecord", [{"x": (b"a" * size, "byte")} for size in (10, 2000, 20)])
    samples, bad = read_all(TfRecordSource.list(url))
    assert [len(sample["x"]) for sample in samples] == [10, 20]
    assert [each.key for each in bad] == ["a.tfrecord#1"]
    assert "expected at most 1000" in bad[0].reason


def test_samples_unlike_the_first_ones_are_named(tmp_path):
    first = [{"n": (n, "int"), "t": (b"text", "byte"), "l": ([1, 2], "int")} for n in range(64)]
    later = [
        {"n": ([1, 2], "int")}, {"n": (0.5, "float")},
        {"t": (b"\xff", "byte")}, {"new": (1, "int")}, {"n": (64, "int")},
        {"l": (5, "int")},
    ]  # fmt: skip
    samples, bad = read_all(TfRecordSource.list(write(tmp_path / "a.tfrecord", first + later)))
    assert [sample["n"] for sample in samples] == [*range(65), None]
    assert samples[-1]["l"] == [5]
    assert [(each.key, each.reason.partition(":")[0]) for each in bad] == [
        ("a.tfrecord#64", "feature 'n' has 2 values; the first samples have one"),
        ("a.tfrecord#65", "feature 'n' holds float; the first samples have int64"),
        ("a.tfrecord#66", "feature 't' is not UTF-8, unlike in the first samples"),
        ("a.tfrecord#67", "it has features that the first samples do not have"),
    ]


def test_the_first_samples_of_every_split_decide(tmp_path):
    write(tmp_path / "train.tfrecord", [{"n": (1, "int")}])
    write(tmp_path / "val.tfrecord", [{"n": ([1, 2], "int"), "more": (1, "int")}])
    samples, bad = read_all(TfRecordSource.list(str(tmp_path)))
    assert not bad
    assert [(sample["n"], sample["more"]) for sample in samples] == [([1], None), ([1, 2], 1)]


def test_a_usual_name_gives_way_to_a_feature_of_the_name_that_it_would_get(tmp_path):
    url = write(tmp_path / "a.tfrecord", [{"image/class/label": (1, "int"), "label": (2, "int")}])
    assert read_all(TfRecordSource.list(url))[0] == [{"key": "a.tfrecord#0", "image/class/label": 1, "label": 2}]


def test_a_feature_of_two_kinds_in_the_first_samples_is_refused(tmp_path):
    url = write(tmp_path / "a.tfrecord", [{"n": (1, "int")}, {"n": (1.5, "float")}])
    with pytest.raises(ConfigError, match="feature 'n' holds float in some samples and int64 in others"):
        TfRecordSource.list(url)


def test_sequence_examples_are_refused(tmp_path):
    writer = TFRecordWriter(str(tmp_path / "a.tfrecord"))
    writer.write({"n": (1, "int")}, {"steps": ([[1, 2], [3]], "int")})
    writer.close()
    with pytest.raises(ConfigError, match=r"a.tfrecord#0: it is a SequenceExample"):
        TfRecordSource.list(str(tmp_path))


def test_what_is_no_example_is_refused_and_named_among_others(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(framed(b"hello") + framed(b"\xff\xff"))
    with pytest.raises(ConfigError, match=r"no tf.Example in its 1 file: a.tfrecord#1"):
        TfRecordSource.list(str(tmp_path))
    good = framed(serialized({"n": (1, "int")}))
    (tmp_path / "a.tfrecord").write_bytes(framed(b"hello") + good)
    samples, bad = read_all(TfRecordSource.list(str(tmp_path)))
    assert [sample["key"] for sample in samples] == ["a.tfrecord#1"]
    assert [each.key for each in bad] == ["a.tfrecord#0"]


@pytest.mark.parametrize("content", [b"junk", b"junk" * 100, b"\x1f\x8bjunk" * 10, b"\x78" + b"junk" * 10])
def test_junk_is_refused(tmp_path, content):
    (tmp_path / "a.tfrecord").write_bytes(content)
    with pytest.raises(ConfigError, match="the rest of the file cannot be read"):
        TfRecordSource.list(str(tmp_path))


def test_an_empty_shard_among_others_does_no_harm(tmp_path):
    write(tmp_path / "a.tfrecord", [])
    write(tmp_path / "b.tfrecord", numbers(2))
    assert [sample["key"] for sample in read_all(TfRecordSource.list(str(tmp_path)))[0]] == [
        "b.tfrecord#0",
        "b.tfrecord#1",
    ]


features = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.one_of(
        st.lists(st.binary(max_size=9), min_size=1).map(lambda values: (values, "byte")),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1).map(lambda values: (values, "int")),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1).map(lambda values: (values, "float")),
    ),
    max_size=4,
)


@given(features)
def test_an_example_is_parsed_to_what_the_real_writer_wrote(example):
    parsed = parse_example(serialized(example))
    assert {name: list(feature.values) for name, feature in parsed.items()} == {
        name: values for name, (values, _) in example.items()
    }


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20))
def test_unpacked_numbers_are_read_like_packed_ones(values):
    def varint(number):
        number &= (1 << 64) - 1
        raw = bytearray()
        while number > 0x7F:
            raw.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes(raw + bytes([number]))

    packed = b"".join(map(varint, values))
    unpacked = b"".join(b"\x08" + varint(value) for value in values)
    assert read_packed_varints(memoryview(packed)).tolist() == values
    assert [to_signed(value) for _, _, value in read_fields(unpacked)] == values


@counts_refusals(BadSampleError)
@given(st.binary(max_size=80))
def test_any_bytes_are_an_example_or_a_bad_sample(content):
    parse_example(content)
    assert list(read_fields(content)) or not content


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\x80", b"\x80" * 10 + b"\x01"])
def test_numbers_that_are_cut_off_or_too_long_are_bad(packed):
    with pytest.raises(BadSampleError):
        read_packed_varints(memoryview(packed))
    with pytest.raises(BadSampleError):
        list(read_fields(b"\x08" + packed))


@pytest.mark.parametrize("message", [b"\x0a\x05ab", b"\x0d\x01\x02", b"\x0b", b"\x00\x01"])
def test_fields_that_are_cut_off_or_of_no_wire_type_are_bad(message):
    with pytest.raises(BadSampleError):
        list(read_fields(message))
