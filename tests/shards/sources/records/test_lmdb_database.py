"""LMDB written by the real library: Caffe's Datums, plain values, and what is no database."""

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import lmdb
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.records.caffe import is_datum, parse_datum
from datasvc.shards.sources.records.lmdb_database import LmdbSource, read_pairs
from tests.samples import jpeg
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws
from tests.support.fuzzing import changed_bytes, counts_refusals


def varint(number):
    number &= (1 << 64) - 1
    raw = bytearray()
    while number > 0x7F:
        raw.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(raw + bytes([number]))


def datum(*, shape=None, data=None, label=None, floats=None, encoded=None, packed=False):
    """Return a Datum as protobuf writes it."""
    raw = b""
    for number, size in zip((1, 2, 3), shape or (), strict=False):
        raw += varint(number << 3) + varint(size)
    if data is not None:
        raw += varint(4 << 3 | 2) + varint(len(data)) + data
    if label is not None:
        raw += varint(5 << 3) + varint(label)
    if floats is not None:
        content = np.asarray(floats, "<f4").tobytes()
        pieces = [content[at : at + 4] for at in range(0, len(content), 4)]
        raw += (
            varint(6 << 3 | 2) + varint(len(content)) + content
            if packed
            else b"".join(b"\x35" + each for each in pieces)
        )
    if encoded is not None:
        raw += varint(7 << 3) + varint(encoded)
    return raw


def write(path, values, *, subdir=True, **options):
    os.makedirs(path if subdir else path.parent, exist_ok=True)
    with lmdb.open(str(path), map_size=1 << 28, subdir=subdir, **options) as env, env.begin(write=True) as txn:
        for key, value in values.items():
            txn.put(key, value)
    return str(path)


def read_all(source):
    table, bad = reading.read_all(source)
    return table.to_pylist(), bad


def pixels(sample):
    return np.asarray(Image.open(io.BytesIO(sample["image"])))


class TestLmdbSource(StreamedSourceLaws):
    source = LmdbSource
    column, key = "value", None  # a database has keys of its own
    is_remote = False  # it is mapped
    ignored = {}  # noqa: RUF012 - never changed

    def write(self, folder, numbers):
        write(folder, {b"%05d" % number: b"%d" % number for number in numbers})
        (folder / "lock.mdb").unlink()


def test_encoded_datums_keep_their_bytes(tmp_path):
    images = {b"%08d" % number: jpeg(seed=number) for number in range(5)}
    url = write(tmp_path / "db", {key: datum(data=image, label=-3, encoded=1) for key, image in images.items()})
    source = LmdbSource.list(url)
    samples, bad = read_all(source)
    assert not bad
    assert samples == [{"key": key.decode(), "image": image, "label": -3} for key, image in images.items()]
    assert is_image(source.schema.field("image"))
    assert source.schema.names == ["key", "image", "label"]


def test_pixels_become_png_without_loss_and_blue_first_becomes_red_first(tmp_path):
    planes = np.random.default_rng(0).integers(0, 256, (3, 5, 7), np.uint8)
    url = write(tmp_path / "db", {
        b"colour": datum(shape=planes.shape, data=planes.tobytes(), label=4),
        b"grey": datum(shape=(1, 5, 7), data=planes[0].tobytes()),
    })  # fmt: skip
    samples, bad = read_all(LmdbSource.list(url))
    assert not bad
    assert np.array_equal(pixels(samples[0]), planes[::-1].transpose(1, 2, 0))
    assert np.array_equal(pixels(samples[1]), planes[0])
    assert [sample["label"] for sample in samples] == [4, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_floats_are_a_tensor_with_its_shape(tmp_path, packed):
    values = np.arange(24, dtype=np.float32)
    good = datum(shape=(2, 3, 4), floats=values, label=1, packed=packed)
    other = datum(shape=(2, 4, 3), floats=values, label=1, packed=packed)
    source = LmdbSource.list(write(tmp_path / "db", {b"a": good, b"b": other, b"c": good}))
    samples, bad = read_all(source)
    assert samples == [{"key": key, "data": values.tolist(), "label": 1} for key in ("a", "c")]
    assert reading.shape_of(source.schema.field("data")) == (2, 3, 4)
    assert [(each.key, each.reason) for each in bad] == [
        ("b", "it is float32[2, 4, 3]; expected fixed_size_list<item: float>[24] like the first")
    ]


def test_bytes_of_other_channel_counts_are_a_tensor_too(tmp_path):
    source = LmdbSource.list(write(tmp_path / "db", {b"pair": datum(shape=(2, 2, 2), data=bytes(range(8)), label=1)}))
    samples, _ = read_all(source)
    assert samples == [{"key": "pair", "data": list(range(8)), "label": 1}]
    assert str(source.schema.field("data").type.value_type) == "uint8"


def test_bad_datums_are_named_and_the_others_kept(tmp_path):
    good = datum(data=jpeg(), label=1, encoded=1)
    bad_values = {
        b"cut": good[:-40], b"junk": b"\xff" * 20, b"none": datum(label=1, encoded=1),
        b"shape": datum(shape=(3, 2, 2), data=b"abc"), b"six": datum(shape=(6, 1, 1), data=b"abcdef"),
    }  # fmt: skip
    first = {b"%d" % number: good for number in range(10)}
    samples, bad = read_all(LmdbSource.list(write(tmp_path / "db", {**first, **bad_values})))
    assert [sample["key"] for sample in samples] == [str(number) for number in range(10)]
    assert sorted(each.key for each in bad) == sorted(key.decode() for key in bad_values)


def test_plain_values_are_images_where_all_first_ones_are(tmp_path):
    images = {b"a": jpeg(seed=1), b"b": jpeg(seed=2)}
    source = LmdbSource.list(write(tmp_path / "images", images))
    assert read_all(source)[0] == [{"key": key.decode(), "image": image} for key, image in images.items()]
    assert is_image(source.schema.field("image"))
    source = LmdbSource.list(write(tmp_path / "mixed", {**images, b"length": b"2"}))
    assert [sample["value"] for sample in read_all(source)[0]] == [*images.values(), b"2"]
    assert not is_image(source.schema.field("value"))


def test_binary_keys_are_written_in_hexadecimal_and_keep_their_order(tmp_path):
    keys = [number.to_bytes(4, "big") for number in (0xFF000000, 0xFF000001, 0xFF0000FE)]
    source = LmdbSource.list(write(tmp_path / "db", dict.fromkeys(keys, b"value")))
    assert [sample["key"] for sample in read_all(source)[0]] == ["ff000000", "ff000001", "ff0000fe"]


def test_a_key_that_is_no_utf8_among_those_that_are_is_a_bad_sample(tmp_path):
    samples, bad = read_all(LmdbSource.list(write(tmp_path / "db", {b"a": b"1", b"\xff\xfe": b"2", b"b": b"3"})))
    assert [sample["key"] for sample in samples] == ["a", "b"]
    assert [each.key for each in bad] == ["fffe"]
    assert "not UTF-8" in bad[0].reason


def test_parts_are_ranges_of_keys_that_meet_and_can_be_read_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.records.lmdb_database._PART_SAMPLES", 7)
    values = {b"%05d" % number: os.urandom(number % 50) + b"x" for number in range(40)}
    source = pickle.loads(pickle.dumps(LmdbSource.list(write(tmp_path / "db", values))))
    assert [part.num_samples for part in source.parts] == [7, 7, 7, 7, 7, 5]
    assert len({part.name for part in source.parts}) == 6
    samples, bad = read_all(source)
    assert not bad
    assert {sample["key"].encode(): sample["value"] for sample in samples} == values
    reading = [source.read(part) for part in source.parts]
    together = [next(pieces).to_pylist() for pieces in reading]
    assert [sample for each in together for sample in each] == samples


def test_large_values_come_in_batches_of_bounded_size_and_none_is_lost(tmp_path):
    values = {b"%05d" % number: os.urandom(300_000) for number in range(9)}
    values[b"00004"] = os.urandom(2_500_000)
    source = LmdbSource.list(write(tmp_path / "db", values))
    batches = [piece for part in source.parts for piece in source.read(part)]
    assert all(batch.nbytes < (1 << 20) + 4096 or batch.num_rows == 1 for batch in batches)
    assert {sample["key"].encode(): sample["value"] for batch in batches for sample in batch.to_pylist()} == values


def test_no_more_than_a_batch_of_values_is_held_at_once(tmp_path):
    url = write(tmp_path / "db", {b"%05d" % number: os.urandom(300_000) for number in range(9)})
    assert len(read_pairs(f"{url}/data.mdb", b"", 100, skip_first=False)) == 4


def test_parts_can_be_read_by_threads_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.records.lmdb_database._PART_SAMPLES", 50)
    source = LmdbSource.list(write(tmp_path / "db", {b"%05d" % number: os.urandom(20_000) for number in range(400)}))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda part: sum(piece.num_rows for piece in source.read(part)), source.parts))
    assert found == [50] * 8


def test_folders_of_databases_are_splits_and_a_single_file_is_one(tmp_path):
    write(tmp_path / "all" / "tiny_train_lmdb", {b"a": b"1"})
    write(tmp_path / "all" / "tiny_val_lmdb", {b"a": b"2"})
    source = LmdbSource.list(str(tmp_path / "all"))
    assert [(part.split, part.num_samples) for part in source.parts] == [("train", 1), ("val", 1)]
    url = write(tmp_path / "test.mdb", {b"a": b"1"}, subdir=False)
    assert [part.split for part in LmdbSource.list(url).parts] == ["test"]
    assert [part.split for part in LmdbSource.list(url, SourceOptions(split="mine")).parts] == ["mine"]


def test_databases_of_one_split_do_not_share_keys(tmp_path):
    write(tmp_path / "all" / "one", {b"a": b"1"})
    write(tmp_path / "all" / "two", {b"a": b"2"})
    samples, _ = read_all(LmdbSource.list(str(tmp_path / "all")))
    assert samples == [{"key": "one/a", "value": b"1"}, {"key": "two/a", "value": b"2"}]


def test_databases_that_hold_different_things_are_refused(tmp_path):
    write(tmp_path / "all" / "one", {b"a": jpeg()})
    write(tmp_path / "all" / "two", {b"a": b"2"})
    with pytest.raises(ConfigError, match="two has the columns"):
        LmdbSource.list(str(tmp_path / "all"))


def test_a_change_of_the_database_changes_the_fingerprint(tmp_path):
    url = write(tmp_path / "db", {b"a": b"1"})
    before = LmdbSource.list(url)
    assert before.fingerprint() == LmdbSource.list(url).fingerprint()
    path = tmp_path / "db" / "data.mdb"
    listed = path.stat()
    write(tmp_path / "db", {b"a": b"2"})
    os.utime(path, ns=(listed.st_atime_ns, listed.st_mtime_ns))  # clocks are coarse; transactions are counted
    assert before.fingerprint() != LmdbSource.list(url).fingerprint()


def test_keys_that_vanish_after_the_listing_are_said_to_be_missing(tmp_path):
    url = write(tmp_path / "db", {b"a": b"1", b"b": b"2"})
    source = LmdbSource.list(url)
    with lmdb.open(url, map_size=1 << 28) as env, env.begin(write=True) as txn:
        txn.delete(b"b")
    samples, bad = read_all(source)
    assert [sample["key"] for sample in samples] == ["a"]
    assert [each.reason for each in bad] == [
        "1 sample cannot be read: the database has fewer keys than when it was listed"
    ]


def test_named_databases_are_refused_and_values_of_their_size_are_not(tmp_path):
    values = {b"a": b"x" * 48, b"b": os.urandom(48)}
    assert len(read_all(LmdbSource.list(write(tmp_path / "plain", values)))[0]) == 2
    with lmdb.open(str(tmp_path / "named"), map_size=1 << 24, max_dbs=2) as env:
        images = env.open_db(b"images")
        with env.begin(write=True) as txn:
            txn.put(b"first", b"1")
            txn.put(b"a", b"1", db=images)
    with pytest.raises(ConfigError, match="named databases, such as b'images'"):
        LmdbSource.list(str(tmp_path / "named"))


def test_several_values_of_a_key_are_refused(tmp_path):
    url = write(tmp_path / "db", {b"a": b"1"})
    path = tmp_path / "db" / "data.mdb"
    content = bytearray(path.read_bytes())
    for meta_page in (0, os.sysconf("SC_PAGE_SIZE")):
        content[meta_page + 92] |= 4  # DUPSORT, which only C sets on the main database
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="DUPSORT"):
        LmdbSource.list(url)


def test_an_empty_database_and_an_empty_folder_are_said_to_be(tmp_path):
    with pytest.raises(NotFoundError, match="the database is empty"):
        LmdbSource.list(write(tmp_path / "db", {}))
    (tmp_path / "none").mkdir()
    with pytest.raises(NotFoundError, match="no LMDB database in"):
        LmdbSource.list(str(tmp_path / "none"))
    with pytest.raises(NotFoundError, match="it does not exist"):
        LmdbSource.list(str(tmp_path / "gone"))


@pytest.mark.parametrize("content", [b"", b"junk" * 2000, b"\0" * 8192])
def test_what_is_no_database_is_refused(tmp_path, content):
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(ConfigError, match="is not LMDB"):
        LmdbSource.list(str(tmp_path))


def test_a_damaged_page_is_an_error_that_names_the_file(tmp_path):
    url = write(tmp_path / "db", {b"%05d" % number: b"x" * 200 for number in range(5000)})
    source = LmdbSource.list(url)
    path = tmp_path / "db" / "data.mdb"
    content = bytearray(path.read_bytes())
    leaves = [page for page in range(2, len(content) // 4096) if content[page * 4096 + 10] == 2]
    for page in leaves[len(leaves) // 2 :]:
        content[page * 4096 : page * 4096 + 24] = b"\xff" * 24
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match="restore another copy"):
        LmdbSource.list(url)
    samples, bad = read_all(source)
    assert bad
    assert all("cannot be read" in each.reason for each in bad)
    assert len(samples) < 5000


def test_a_database_that_has_fewer_keys_than_it_says_is_refused(tmp_path):
    url = write(tmp_path / "db", {b"a": b"1"})
    path = tmp_path / "db" / "data.mdb"
    content = bytearray(path.read_bytes())
    for meta_page in (0, os.sysconf("SC_PAGE_SIZE")):
        content[meta_page + 120] = 9
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match="declares 9 keys but has 1"):
        LmdbSource.list(url)


def test_a_link_out_of_the_source_is_refused(tmp_path):
    write(tmp_path / "outside", {b"a": b"1"})
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "inner").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a link out of the source"):
        LmdbSource.list(str(tmp_path / "source"))


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    label=st.integers(-(1 << 31), (1 << 31) - 1),
    floats=st.booleans(),
    packed=st.booleans(),
)
def test_a_datum_is_parsed_to_what_was_written(shape, label, floats, packed):
    values = np.arange(np.prod(shape), dtype=np.float32 if floats else np.uint8)
    content = {"floats": values} if floats else {"data": values.tobytes()}
    parsed = parse_datum(datum(shape=shape, label=label, packed=packed, **content))
    assert (parsed.shape, parsed.label, parsed.is_encoded) == (shape, label, False)
    assert np.array_equal(parsed.floats if floats else np.frombuffer(parsed.data, np.uint8), values)


WRITTEN = datum(shape=(1, 2, 2), data=b"abcd", label=5)


@counts_refusals(BadSampleError)
@given(st.binary(max_size=60) | changed_bytes(WRITTEN))
@example(WRITTEN)
def test_any_bytes_are_a_datum_or_no_datum_and_nothing_else(content):
    try:
        parse_datum(content)
    except BadSampleError:
        assert not is_datum(content)
        raise
