"""MDS written by MosaicML's own writer, by hand, and with whatever can be wrong with it.

The package `streaming` wants a dozen others when it is imported as a whole; its writer wants none of them, so its
parent packages are stood in for, and so are the compressions that are not installed.
"""

import decimal
import hashlib
import importlib.util
import io
import json
import pickle
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.mds.encodings import MdsColumn
from datasvc.shards.sources.mds.mds import MdsSource
from tests.samples import jpeg
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws
from tests.support.fuzzing import counts_refusals

DTYPES = ("uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64")
PACKAGES = (
    "streaming",
    "streaming.base",
    "streaming.base.format",
    "streaming.base.format.base",
    "streaming.base.format.mds",
)


@pytest.fixture(scope="module")
def mosaicml():
    """MosaicML's writer and encodings."""
    found = importlib.util.find_spec("streaming")
    if found is None:
        pytest.skip("mosaicml-streaming is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "streaming"]:
            patch.delitem(sys.modules, name)
        for name in PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(Path(found.origin).parent.joinpath(*name.split(".")[1:]))]
            patch.setitem(sys.modules, name, package)
        for name in ("brotli", "snappy", "zstd"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["zstd"].compress = lambda raw, level: zstandard.ZstdCompressor(level).compress(raw)
        from streaming.base.format.mds import encodings, writer

        yield types.SimpleNamespace(MDSWriter=writer.MDSWriter, encode=encodings.mds_encode)
        for name in [name for name in sys.modules if name.startswith("streaming.")]:
            patch.delitem(sys.modules, name)


def write(mosaicml, folder, columns, samples, **options):
    with mosaicml.MDSWriter(out=str(folder), columns=columns, **options) as out:
        for sample in samples:
            out.write(sample)
    return str(folder)


def by_hand(folder, contents=(b"one", b"two", b"three"), **changes):
    """Write a shard of one column of texts as the specification says, without MosaicML's JSON in its header."""
    bodies = [struct.pack("<I", len(text)) + text for text in contents]
    offsets = np.cumsum([4 + 4 * (len(bodies) + 1), *map(len, bodies)]).astype("<u4")
    raw = struct.pack("<I", len(bodies)) + offsets.tobytes() + b"".join(bodies)
    shard = {
        "version": 2, "format": "mds", "column_names": ["t"], "column_encodings": ["str"], "column_sizes": [None],
        "compression": None, "hashes": [], "samples": len(bodies), "size_limit": None, "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}}, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard.00000.mds").write_bytes(raw)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return raw


def read_all(source):
    table, bad = reading.read_all(source)
    return table.to_pylist(), bad


def texts(source):
    samples, bad = read_all(source)
    return [sample["t"] for sample in samples], bad


class TestMdsSource(StreamedSourceLaws):
    source = MdsSource
    column = key = "t"
    ignored = {}  # noqa: RUF012 - the index says which files there are

    def write(self, folder, numbers):
        by_hand(folder, [str(number).encode() for number in numbers])


def test_a_shard_made_by_hand_is_read(tmp_path):
    by_hand(tmp_path)
    source = MdsSource.list(str(tmp_path))
    samples, bad = read_all(source)
    assert not bad
    assert samples == [{"key": f"shard.00000.mds#{n}", "t": text} for n, text in enumerate(["one", "two", "three"])]
    assert [part.num_samples for part in source.parts] == [3]
    assert texts(MdsSource.list(str(tmp_path / "index.json"))) == texts(source)


def test_images_and_labels_of_the_real_writer_keep_their_bytes(tmp_path, mosaicml):
    images = [jpeg(seed=n) for n in range(20)]
    samples = [{"x": image, "class": n % 3} for n, image in enumerate(images)]
    for split, chosen in (("train", samples[:15]), ("val", samples[15:])):
        write(mosaicml, tmp_path / split, {"x": "jpeg", "class": "int"}, chosen, size_limit=6000)
    source = pickle.loads(pickle.dumps(MdsSource.list(str(tmp_path))))
    assert {part.split for part in source.parts} == {"train", "val"}
    assert len(source.parts) == 4
    found, bad = read_all(source)
    assert not bad
    assert [(sample["image"], sample["label"]) for sample in found] == [
        (each["x"], each["class"]) for each in samples
    ]
    assert is_image(source.schema.field("image"))
    assert source.schema.field("label").type == pa.int32()


def test_every_encoding_of_the_real_writer_is_read(tmp_path, mosaicml):
    scalars = {
        name: name
        for name in (
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "float32",
            "float64",
        )
    }
    columns = {
        **scalars, "i": "int", "s": "str", "b": "bytes", "j": "json", "si": "str_int", "sf": "str_float",
        "sd": "str_decimal", "fixed": "ndarray:float32:2,3", "typed": "ndarray:uint16", "free": "ndarray",
        "one": "ndarray:int32:1", "lj": "list[jpeg]", "lp": "list[pil]", "ja": "jpeg_array",
    }  # fmt: skip
    rng = np.random.default_rng(0)
    red = Image.new("RGB", (3, 2), (255, 0, 0))
    samples = [
        {**{name: np.dtype(name).type(n + 1) for name in scalars},
         "i": -n, "s": f"où {n}", "b": b"\xff" * n, "j": {"a": [n]}, "si": 10**15 + n, "sf": n / 3,
         "sd": decimal.Decimal(f"{n}.10"),
         "fixed": rng.random((2, 3), np.float32), "typed": rng.integers(0, 9, (n + 1, 2), np.uint16),
         "free": rng.integers(-9, 9, (300, 1, n + 1), np.int64), "one": np.array([n], np.int32),
         "lj": [red] * n, "lp": [red] * n, "ja": [jpeg(seed=n), jpeg(seed=9)]}
        for n in range(4)
    ]  # fmt: skip
    source = MdsSource.list(write(mosaicml, tmp_path / "all", columns, samples))
    found, bad = read_all(source)
    assert not bad
    for wanted, got in zip(samples, found, strict=True):
        for name in (*scalars, "i", "s", "b", "si", "sf"):
            assert got[name] == wanted[name], name
        assert json.loads(got["j"]) == wanted["j"]
        assert got["sd"] == str(wanted["sd"])
        assert got["fixed"] == wanted["fixed"].reshape(-1).tolist()
        assert got["one"] == wanted["one"][0]
        for name in ("typed", "free"):
            assert np.array_equal(np.reshape(got[name], got[f"{name}.shape"]), wanted[name])
        assert got["ja"] == wanted["ja"]
        assert [Image.open(io.BytesIO(each)).format for each in got["lj"]] == ["JPEG"] * len(wanted["lj"])
        assert all(np.array_equal(Image.open(io.BytesIO(each)), red) for each in got["lp"])
    assert reading.shape_of(source.schema.field("fixed")) == (2, 3)
    types_found = {name: source.schema.field(name).type for name in (*scalars, "typed", "free", "one")}
    assert types_found == {
        **{name: pa.from_numpy_dtype(np.dtype(name)) for name in scalars},
        "typed": pa.list_(pa.uint16()), "free": pa.list_(pa.int64()), "one": pa.int32(),
    }  # fmt: skip


def test_what_the_index_calls_an_image_is_one_whatever_the_first_sample_holds(tmp_path, mosaicml):
    url = write(mosaicml, tmp_path / "x", {"x": "jpeg"}, [{"x": b"junk"}, {"x": jpeg()}])
    assert is_image(MdsSource.list(url).schema.field("image"))


def test_two_columns_of_one_name_are_refused(tmp_path, mosaicml):
    sample = {"x": np.zeros(2, np.int8), "x.shape": 1}
    url = write(mosaicml, tmp_path / "x", {"x": "ndarray", "x.shape": "int"}, [sample])
    with pytest.raises(ConfigError, match="two columns would have the same name"):
        MdsSource.list(url)


def test_a_size_of_zero_means_that_sizes_vary_as_to_the_real_reader(tmp_path):
    by_hand(tmp_path, column_sizes=[0])
    assert texts(MdsSource.list(str(tmp_path))) == (["one", "two", "three"], [])


@pytest.mark.parametrize(
    "content", [b"\x08\x04\x03ab", b"\x08\x04\x03abcd", b"\x08\x08\x03", b"\x07\x04\x01a", b"\x08", b""]
)
def test_arrays_whose_shape_is_not_theirs_are_bad_samples(content):
    with pytest.raises(BadSampleError):
        MdsColumn("x", "ndarray", None).decode(memoryview(content))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "I;16"])
def test_raw_images_become_png_without_loss(tmp_path, mosaicml, mode):
    size = (13, 5)
    num_bytes = len(Image.new(mode, size).tobytes())
    image = Image.frombytes(mode, size, np.random.default_rng(1).bytes(num_bytes))
    found, bad = read_all(MdsSource.list(write(mosaicml, tmp_path / "raw", {"x": "pil"}, [{"x": image}])))
    assert not bad
    opened = Image.open(io.BytesIO(found[0]["image"]))
    assert (opened.format, opened.size) == ("PNG", size)
    assert opened.convert("L" if mode == "P" else mode).tobytes() == image.tobytes()


def test_a_raw_image_with_a_false_size_is_a_bad_sample(tmp_path, mosaicml):
    good = Image.new("RGB", (3, 2))
    bomb = np.array([1 << 31, 1 << 31, 3], np.uint32).tobytes() + b"RGB" + b"x" * 100
    float_image = Image.new("F", (3, 2))
    url = write(
        mosaicml, tmp_path / "raw", {"x": "pil"}, [{"x": each} for each in (good, bomb, float_image, b"", good)]
    )
    found, bad = read_all(MdsSource.list(url))
    assert [sample["key"][-2:] for sample in found] == ["#0", "#4"]
    assert [each.key[-2:] for each in bad] == ["#1", "#2", "#3"]
    assert "mode 'F' is not supported by PNG" in bad[1].reason


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz", "gz:1"])
@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_compressed_shards_are_read(tmp_path, mosaicml, compression, scheme):
    samples = [{"t": f"text {n}" * 50} for n in range(200)]
    url = write(
        mosaicml,
        tmp_path / "z",
        {"t": "str"},
        samples,
        compression=compression,
        hashes=["sha1", "xxh64"],
        size_limit=20_000,
    )
    names = [path.name for path in (tmp_path / "z").iterdir()]
    assert not any(name.endswith(".mds") for name in names)
    if scheme == "memory":
        url = reading.to_memory(tmp_path / "z", f"memory://mds-{compression.replace(':', '-')}")
    source = MdsSource.list(url)
    assert len(source.parts) > 2
    assert texts(source) == ([sample["t"] for sample in samples], [])


def test_a_damaged_compressed_shard_is_bad_and_the_others_are_kept(tmp_path, mosaicml):
    rng = np.random.default_rng(0)
    samples = [{"b": rng.bytes(300)} for _ in range(100)]
    url = write(mosaicml, tmp_path / "z", {"b": "bytes"}, samples, compression="gz", size_limit=9000)
    source = MdsSource.list(url)
    path = tmp_path / "z" / "shard.00001.mds.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40] = b"!" * 40
    path.write_bytes(content)
    table, bad = reading.read_all(source)
    assert bad
    assert all(each.key.startswith("shard.00001.mds") for each in bad)
    assert table.num_rows >= 100 - source.parts[1].num_samples


def test_other_compressions_are_refused_by_name(tmp_path):
    by_hand(tmp_path, compression="br:3", zip_data={"basename": "shard.00000.mds.br", "bytes": 5, "hashes": {}})
    (tmp_path / "shard.00000.mds").rename(tmp_path / "shard.00000.mds.br")
    with pytest.raises(ConfigError, match="is compressed by 'br'; datasvc reads gz and zstd"):
        MdsSource.list(str(tmp_path))


def test_a_shard_that_was_decompressed_already_is_read_as_it_is(tmp_path, mosaicml):
    url = write(mosaicml, tmp_path / "z", {"t": "str"}, [{"t": "a"}], compression="zstd", keep_local=True)
    compressed = tmp_path / "z" / "shard.00000.mds.zstd"
    (tmp_path / "z" / "shard.00000.mds").write_bytes(zstandard.ZstdDecompressor().decompress(compressed.read_bytes()))
    compressed.unlink()
    assert texts(MdsSource.list(url)) == (["a"], [])


class Trap:
    """Its unpickling would be noticed."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


def test_pickles_are_refused_and_never_run(tmp_path, mosaicml):
    url = write(mosaicml, tmp_path / "p", {"t": "pkl", "n": "int"}, [{"t": Trap(), "n": 1}])
    with pytest.raises(ConfigError, match="column 't' holds pickles, which run code"):
        MdsSource.list(url)


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha256"])
def test_a_flipped_byte_is_found_by_the_hash_of_the_index(tmp_path, mosaicml, algorithm):
    url = write(mosaicml, tmp_path / "h", {"t": "str"}, [{"t": "x" * 100}] * 50, hashes=[algorithm], size_limit=3000)
    source = MdsSource.list(url)
    path = tmp_path / "h" / "shard.00001.mds"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    samples, bad = read_all(source)
    assert len(samples) == 50 - source.parts[1].num_samples
    assert [each.key for each in bad] == ["shard.00001.mds"]
    assert f"its {algorithm} is {hashlib.new(algorithm, content).hexdigest()}; the index has" in bad[0].reason


def test_hashes_that_hashlib_lacks_are_ignored(tmp_path):
    by_hand(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"xxh64": "0" * 16, "shake_128": "0"}
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert len(texts(MdsSource.list(str(tmp_path)))[0]) == 3


def test_a_shard_cut_off_anywhere_gives_what_is_before_and_says_so(tmp_path):
    raw = by_hand(tmp_path)
    source = MdsSource.list(str(tmp_path))
    starts = np.frombuffer(raw[4:20], "<u4").tolist()
    for length in range(len(raw)):
        (tmp_path / "shard.00000.mds").write_bytes(raw[:length])
        found, bad = texts(source)
        assert found == ["one", "two", "three"][: sum(stop <= length for stop in starts[1:])]
        assert len(bad) == 1
        assert "cannot be read" in bad[0].reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"samples": 2}, "it declares 3 samples, the index 2"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 40, "hashes": {}}}, "the end 40 of the index"),
    ],
)
def test_a_shard_that_disagrees_with_the_index_is_not_used(tmp_path, changes, reason):
    by_hand(tmp_path / "a")
    by_hand(tmp_path / "b", **changes)
    found, bad = texts(MdsSource.list(str(tmp_path)))
    assert found == ["one", "two", "three"]
    assert [each.key for each in bad] == ["b/shard.00000.mds"]
    assert reason in bad[0].reason


def test_bytes_behind_the_last_sample_are_reported(tmp_path):
    raw = by_hand(tmp_path)
    (tmp_path / "shard.00000.mds").write_bytes(raw + b"more")
    found, bad = texts(MdsSource.list(str(tmp_path)))
    assert len(found) == 3
    assert len(bad) == 1
    assert bad[0].reason.endswith(f"it is longer than the {len(raw)} bytes in the index")


@pytest.mark.parametrize("offsets", [(20, 10, 34, 43), (8, 27, 34, 43), (20, 27, 34, 4_000_000_000)])
def test_invalid_offsets_make_a_bad_sample(tmp_path, offsets):
    raw = bytearray(by_hand(tmp_path))
    source = MdsSource.list(str(tmp_path))
    raw[4:20] = np.array(offsets, "<u4").tobytes()
    (tmp_path / "shard.00000.mds").write_bytes(raw)
    found, bad = texts(source)
    assert not found
    assert "its samples are between" in bad[0].reason
    with pytest.raises(CorruptDataError, match=r"none of the first samples of .* can be read"):
        MdsSource.list(str(tmp_path))


def test_samples_whose_sizes_or_values_are_wrong_are_named(tmp_path):
    raw = bytearray(by_hand(tmp_path))
    first, second, *_ = np.frombuffer(raw[4:20], "<u4").tolist()
    raw[first] += 1
    raw[second + 4] = 0xFF
    (tmp_path / "shard.00000.mds").write_bytes(raw)
    found, bad = texts(MdsSource.list(str(tmp_path)))
    assert found == ["three"]
    assert [each.key[-2:] for each in bad] == ["#0", "#1"]
    assert bad[0].reason == "its sizes sum to 4 bytes, but its values have 3"
    assert bad[1].reason.startswith("column 't' is not a valid str")


def test_keys_come_from_a_column_where_one_is_named(tmp_path, mosaicml):
    url = write(mosaicml, tmp_path / "k", {"id": "int", "t": "str"}, [{"id": n, "t": str(n)} for n in range(3)])
    source = MdsSource.list(url, SourceOptions(key="id"))
    assert read_all(source)[0] == [{"key": str(n), "t": str(n)} for n in range(3)]
    assert source.fingerprint() != MdsSource.list(url, SourceOptions(key="t")).fingerprint()


def test_a_merged_index_lists_the_shards_of_the_folders_below_it(tmp_path):
    by_hand(tmp_path / "train")
    by_hand(tmp_path / "val", contents=[b"four"])
    shards = []
    for split in ("train", "val"):
        (shard,) = json.loads((tmp_path / split / "index.json").read_text())["shards"]
        shard["raw_data"]["basename"] = f"{split}/shard.00000.mds"
        shards.append(shard)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    source = MdsSource.list(str(tmp_path))
    assert [(part.split, part.name) for part in source.parts] == [
        ("train", "train/shard.00000.mds"),
        ("val", "val/shard.00000.mds"),
    ]
    assert texts(source)[0] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("basename", ["../shard.00000.mds", "/etc/passwd", "a/../../x"])
def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path, basename):
    by_hand(tmp_path, raw_data={"basename": basename, "bytes": 43, "hashes": {}})
    with pytest.raises(ConfigError, match="which is outside its folder"):
        MdsSource.list(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ("{", CorruptDataError, "is not JSON"),
        pytest.param("[" * 100_000, CorruptDataError, "is not JSON", id="nested"),
        ("[]", ConfigError, "is not an index of MDS shards"),
        ('{"version": 1, "shards": []}', ConfigError, "has version 1"),
        ('{"version": 2, "shards": []}', NotFoundError, "lists no shards"),
        ('{"version": 2, "shards": [{}]}', ConfigError, "is not an index of MDS shards"),
        ('{"version": 2, "shards": [{"version": 2, "format": "json"}]}', ConfigError, "format 'json'"),
        ('{"version": 2, "shards": 5}', ConfigError, "is not an index of MDS shards"),
    ],
)
def test_what_is_no_index_of_mds_is_refused(tmp_path, index, error, message):
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(error, match=message):
        MdsSource.list(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"samples": -1}, ConfigError, "has -1 as a count"),
        ({"column_sizes": []}, ConfigError, "columns without encodings or sizes"),
        ({"column_encodings": ["magic"]}, ConfigError, "encoding 'magic'; expected one of"),
        ({"column_encodings": ["ndarray:object"]}, ConfigError, "has arrays of 'object'"),
        ({"column_encodings": ["ndarray:int8:x"]}, ConfigError, "has the shape 'x'; expected numbers"),
        ({"column_encodings": ["ndarray:int8:-2"]}, ConfigError, "expected positive dimensions"),
        (
            {"raw_data": {"basename": "gone.mds", "bytes": 3, "hashes": {}}},
            NotFoundError,
            "gone.mds, which is missing",
        ),
        ({"samples": 0}, NotFoundError, "its index lists no samples"),
        (
            {"raw_data": {"basename": "a.mds", "bytes": 3, "hashes": ["sha1"]}},
            ConfigError,
            "is not an index of MDS shards: ValueError",
        ),
    ],
)
def test_an_index_with_a_wrong_shard_is_refused(tmp_path, changes, error, message):
    by_hand(tmp_path, **changes)
    with pytest.raises(error, match=message):
        MdsSource.list(str(tmp_path))


def test_shards_of_different_columns_and_folders_without_index_are_refused(tmp_path):
    by_hand(tmp_path / "a")
    by_hand(tmp_path / "b", column_names=["other"])
    with pytest.raises(ConfigError, match="its shards have different columns"):
        MdsSource.list(str(tmp_path))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.mds").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"it has no index.json"):
        MdsSource.list(str(tmp_path / "c"))


arrays = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), min_size=1, max_size=4))


@given(arrays, st.sampled_from(["ndarray", "ndarray:{dtype}", "ndarray:{dtype}:{shape}"]))
def test_arrays_are_decoded_to_what_the_real_library_encoded(mosaicml, array, template):
    dtype, shape = array
    values = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    encoding = template.format(dtype=dtype, shape=",".join(map(str, shape)))
    decoded = MdsColumn("x", encoding, None).decode(memoryview(mosaicml.encode(encoding, values)))
    assert np.array_equal(np.reshape(decoded["x"], decoded.get("x.shape", shape)), values)
    assert np.asarray(decoded["x"]).dtype == dtype


ENCODINGS = (
    "str", "int", "uint8", "float64", "str_int", "str_float", "pil", "jpeg_array", "list[jpeg]", "list[pil]",
    "ndarray", "ndarray:int16", "ndarray:int16:2", "json",
)  # fmt: skip


@counts_refusals(BadSampleError)
@given(st.sampled_from(ENCODINGS), st.binary(max_size=40))
def test_any_bytes_decode_or_are_a_bad_sample(encoding, content):
    decoded = MdsColumn("x", encoding, None).decode(memoryview(content))
    assert decoded.keys() <= {"x", "x.shape"}
