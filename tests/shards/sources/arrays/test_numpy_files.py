"""Numpy arrays as numpy saves them, and what must not be read."""

import io
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.arrays.numpy_files import NumpySource
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 8, 6, 3), np.uint8)
LABELS = np.arange(50) % 10


def read_all(source):
    return reading.read_all(source)


def tensors(table, source, name="x"):
    """Return a column as the array that it was."""
    shape = reading.shape_of(source.schema.field(name))
    column = table.column(name).combine_chunks()
    return np.asarray(column.flatten() if shape else column).reshape(table.num_rows, *shape)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


class TestNumpySource(StreamedSourceLaws):
    source = NumpySource

    def write(self, folder, numbers):
        save(folder / "number.npy", np.array(numbers))
        save(folder / "x.npy", np.zeros((len(numbers), 2), np.uint8))


class TestNumpyArchiveSource(StreamedSourceLaws):
    source = NumpySource

    def write(self, folder, numbers):
        np.savez(folder / "a.npz", number=np.array(numbers), x=np.zeros((len(numbers), 2)))


def test_arrays_of_a_folder_are_the_columns_of_its_split(tmp_path):
    for split, chosen in (("train", slice(0, 40)), ("val", slice(40, 50))):
        save(tmp_path / split / "x.npy", IMAGES[chosen])
        save(tmp_path / split / "y.npy", LABELS[chosen])
    (tmp_path / "readme.md").write_text("notes")
    source = NumpySource.list(str(tmp_path))
    table, bad = read_all(source)
    assert not bad
    assert [(part.split, part.num_samples) for part in source.parts] == [("train", 40), ("val", 10)]
    assert source.ignored == {".md": 1}
    assert np.array_equal(tensors(table, source), IMAGES)
    assert table.column("label").to_pylist() == LABELS.tolist()
    assert table.column("key").to_pylist()[:2] == ["train/x.npy#0", "train/x.npy#1"]
    assert table.column("key").to_pylist()[-1] == "val/x.npy#9"
    assert source.schema.field("x").type == pa.list_(pa.uint8(), 8 * 6 * 3)
    assert reading.shape_of(source.schema.field("x")) == (8, 6, 3)
    assert source.schema.field("label").type == pa.int32()


@pytest.mark.parametrize("template", ["{split}_{name}", "{name}_{split}", "{name}-{split}", "{split}.{name}"])
@pytest.mark.parametrize("is_archive", [False, True])
def test_a_split_in_the_names_is_left_out_of_them(tmp_path, template, is_archive):
    named = {
        template.format(split=split, name=name): values[chosen]
        for split, chosen in (("train", slice(0, 40)), ("test", slice(40, 50)))
        for name, values in (("x", IMAGES), ("y", LABELS))
    }
    if is_archive:
        np.savez(tmp_path / "mnist.npz", **named)
    else:
        for name, values in named.items():
            save(tmp_path / f"{name}.npy", values)
    source = NumpySource.list(str(tmp_path))
    table, bad = read_all(source)
    assert not bad
    assert {part.split: part.num_samples for part in source.parts} == {"train": 40, "test": 10}
    assert source.schema.names == ["key", "x", "label"]
    found = tensors(table, source)
    order = np.arange(50) if source.parts[0].split == "train" else np.roll(np.arange(50), 10)
    assert np.array_equal(found, IMAGES[order])


@pytest.mark.parametrize("save_archive", [np.savez, np.savez_compressed])
def test_archives_are_read_array_beside_array(tmp_path, save_archive):
    save_archive(tmp_path / "val.npz", images=IMAGES[..., 0], labels=LABELS.astype(np.uint8), weight=LABELS / 3)
    source = NumpySource.list(str(tmp_path))
    table, bad = read_all(source)
    assert not bad
    assert source.schema.names == ["key", "images", "label", "weight"]
    assert np.array_equal(tensors(table, source, "images"), IMAGES[..., 0])
    assert table.column("label").to_pylist() == LABELS.tolist()
    assert table.column("weight").to_pylist() == (LABELS / 3).tolist()
    assert {part.split for part in source.parts} == {"val"}
    assert table.column("key")[3].as_py() == "val.npz#3"


def test_a_single_file_is_a_source_and_remote_ones_are_read_by_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.arrays.numpy_files._PART_BYTES", 1000)
    save(tmp_path / "data" / "images.npy", IMAGES)
    url = reading.to_memory(tmp_path / "data", "memory://numpy-single")
    local = NumpySource.list(str(tmp_path / "data" / "images.npy"))
    remote = NumpySource.list(f"{url}/images.npy")
    assert [part.num_samples for part in local.parts] == [6] * 8 + [2]
    tables = [read_all(source)[0] for source in (local, remote)]
    assert tables[0].equals(tables[1])
    assert np.array_equal(tensors(tables[0], local, "images"), IMAGES)
    assert len(set(tables[0].column("key").to_pylist())) == 50


def test_large_samples_come_in_batches_of_bounded_size(tmp_path):
    values = np.random.default_rng(0).random((7, 300_000), np.float32)
    save(tmp_path / "x.npy", values)
    source = NumpySource.list(str(tmp_path))
    assert np.array_equal(tensors(read_all(source)[0], source), values)


def test_small_samples_come_in_batches_of_bounded_size_keys_included(tmp_path):
    save(tmp_path / "x.npy", np.zeros((9000, 256), np.uint8))
    assert read_all(NumpySource.list(str(tmp_path)))[0].num_rows == 9000


def test_text_numbers_and_flags_are_plain_columns(tmp_path):
    np.savez(
        tmp_path / "a.npz", name=np.array(["où", "b", ""]), raw=np.array([b"\xff", b"b", b"c"]),
        flag=np.array([True, False, True]),
        half=np.array([0.5, 1, 2], np.float16), big=np.array([1, 2, 3], ">i4"), one=np.array([[[7]], [[8]], [[9]]]),
    )  # fmt: skip
    source = NumpySource.list(str(tmp_path))
    table, _ = read_all(source)
    assert table.drop_columns("key").to_pydict() == {
        "big": [1, 2, 3], "flag": [True, False, True], "half": [0.5, 1, 2], "name": ["où", "b", ""], "one": [7, 8, 9],
        "raw": [b"\xff", b"b", b"c"],
    }  # fmt: skip
    assert source.schema.field("raw").type == pa.large_binary()


def test_keys_come_from_an_array_where_one_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", id=np.array([5, 6]), name=np.array(["a", "b"]), x=np.zeros((2, 2)))
    assert read_all(NumpySource.list(str(tmp_path), SourceOptions(key="id")))[0].column("key").to_pylist() == [
        "5",
        "6",
    ]
    by_name = NumpySource.list(str(tmp_path), SourceOptions(key="name"))
    assert read_all(by_name)[0].column("key").to_pylist() == ["a", "b"]
    assert by_name.schema.names == ["key", "id", "x"]
    with pytest.raises(ConfigError, match="the key array 'gone' does not exist"):
        NumpySource.list(str(tmp_path), SourceOptions(key="gone"))
    with pytest.raises(ConfigError, match=r"array 'x' cannot hold keys: it is float64\[2, 2\]"):
        NumpySource.list(str(tmp_path), SourceOptions(key="x"))


def test_a_label_that_does_not_fit_is_a_bad_sample_and_the_others_are_kept(tmp_path):
    labels = np.arange(1000)
    labels[437] = 1 << 40
    save(tmp_path / "y.npy", labels)
    table, bad = read_all(NumpySource.list(str(tmp_path)))
    assert table.column("label").to_pylist() == [*range(437), *range(438, 1000)]
    assert [each.key for each in bad] == ["y.npy#437"]


def test_text_that_is_no_unicode_is_a_bad_sample(tmp_path):
    names = np.array(["a", "b", "c"])
    names.view(np.uint32)[1] = 0xD800
    save(tmp_path / "name.npy", names)
    table, bad = read_all(NumpySource.list(str(tmp_path)))
    assert table.column("name").to_pylist() == ["a", "c"]
    assert [each.key for each in bad] == ["name.npy#1"]


class Trap:
    """Its unpickling would be noticed."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


@pytest.mark.parametrize("write", [np.save, lambda path, array: np.savez(path.with_suffix(".npz"), x=array)])
def test_objects_are_refused_and_never_unpickled(tmp_path, write):
    write(tmp_path / "x.npy", np.array([Trap(), 1], dtype=object))
    with pytest.raises(ConfigError, match="holds Python objects, which numpy stores as pickles"):
        NumpySource.list(str(tmp_path))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.float64(3), "is a single value"),
        (np.zeros(3, complex), "expected bool, integers, floats or text"),
        (np.zeros(3, "M8[s]"), "expected bool, integers, floats or text"),
        (np.zeros(3, [("a", "i4"), ("b", "f4")]), "expected bool, integers, floats or text"),
        (np.zeros(3, np.longdouble), "expected bool, integers or floats"),
        (np.asfortranarray(np.zeros((3, 4))), "Fortran order"),
        (np.array([["a", "b"]]), "several texts per sample"),
        (np.zeros((3, 0)), "expected positive dimensions"),
        (np.zeros((1, 300 << 20), np.uint8), "over 256 MiB; expected the samples along the first axis"),
    ],
)
def test_arrays_that_hold_no_samples_are_refused(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ConfigError, match=message):
        NumpySource.list(str(tmp_path))


def test_arrays_of_different_lengths_are_refused(tmp_path):
    save(tmp_path / "x.npy", IMAGES)
    save(tmp_path / "y.npy", LABELS[:-1])
    with pytest.raises(ConfigError, match=r"differ in length: {'x': 50, 'y': 49}"):
        NumpySource.list(str(tmp_path))


def test_splits_of_different_columns_are_refused(tmp_path):
    save(tmp_path / "train" / "x.npy", IMAGES)
    save(tmp_path / "val" / "x.npy", IMAGES[:, :4])
    with pytest.raises(
        ConfigError, match=r"val/x.npy has the columns {'x': 'uint8\[50, 4, 6, 3\]'}, but train/x.npy has"
    ):
        NumpySource.list(str(tmp_path))
    with pytest.raises(ConfigError, match=r"two arrays would be the columns \['x'\] of split 'all'"):
        np.savez(tmp_path / "m.npz", x_train=IMAGES, x_test=IMAGES)
        NumpySource.list(str(tmp_path / "m.npz"), SourceOptions(split="all"))


def test_a_file_cut_off_after_the_listing_gives_what_is_there_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.arrays.numpy_files.BATCH_SAMPLES", 10)
    save(tmp_path / "a.npy", LABELS)
    save(tmp_path / "b.npy", LABELS)
    source = NumpySource.list(str(tmp_path))
    whole = (tmp_path / "b.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(whole[: 128 + 25 * 8])
    table, bad = read_all(source)
    assert table.num_rows == 20
    assert [(each.key, each.reason) for each in bad] == [
        ("a.npy#20", "30 samples cannot be read: b.npy is truncated")
    ]


@pytest.mark.parametrize("save_archive", [np.savez, np.savez_compressed])
def test_a_flipped_byte_of_an_archive_is_found_before_a_sample_is_used(tmp_path, save_archive, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.arrays.numpy_files.BATCH_SAMPLES", 10)
    save_archive(tmp_path / "a.npz", x=IMAGES)
    source = NumpySource.list(str(tmp_path))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[len(content) * 3 // 4] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    table, bad = read_all(source)
    assert not table.num_rows
    assert [each.key for each in bad] == ["a.npz#0"]
    assert "50 samples cannot be read: a.npz cannot be decompressed" in bad[0].reason


def test_an_archive_that_claims_absurdly_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.arrays.npy._ALWAYS_ALLOWED_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((40, 1 << 18), np.uint8))
    with pytest.raises(ConfigError, match="refused as a zip bomb"):
        NumpySource.list(str(tmp_path))


def test_an_array_whose_header_and_size_disagree_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40,)})
    (tmp_path / "x.npy").write_bytes(header.getvalue())
    with pytest.raises(CorruptDataError, match="is truncated: it has 128 of"):
        NumpySource.list(str(tmp_path))
    (tmp_path / "x.npy").unlink()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(CorruptDataError, match="has 128 bytes, but its header declares"):
        NumpySource.list(str(tmp_path))


def test_an_archive_that_is_encrypted_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=LABELS)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(CorruptDataError, match="encrypted"):
        NumpySource.list(str(tmp_path))


dtypes = st.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(endianness="?"), arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
)  # fmt: skip


@given(array=arrays.arrays(dtypes, arrays.array_shapes(max_dims=4, max_side=4)), is_archive=st.booleans())
def test_any_array_of_numbers_comes_back(tmp_path_factory, array, is_archive):
    folder = tmp_path_factory.mktemp("any")
    if is_archive:
        np.savez(folder / "x.npz", x=array)
    else:
        np.save(folder / "x.npy", array)
    source = NumpySource.list(str(folder))
    table, bad = read_all(source)
    assert not bad
    found = tensors(table, source).reshape(array.shape)
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.tobytes() == array.astype(found.dtype).tobytes()
