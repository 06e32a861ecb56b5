import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.tabular.arrow_files import ArrowSource
from tests.examples import examples
from tests.shards.sources.reading import read_all
from tests.shards.sources.source_laws import StreamedSourceLaws
from tests.shards.sources.tables import tables

FORMATS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


def write(folder, name, table, *, form="file", batch=None, **options):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(table) if isinstance(table, dict) else table
    with FORMATS[form](path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch)
    return path


class TestArrowSource(StreamedSourceLaws):
    source = ArrowSource
    form, compression = "file", None

    def write(self, folder, numbers):
        table = {"number": numbers, "text": [f"word {number}" for number in numbers]}
        write(folder, "a.arrow", table, form=self.form, batch=7, compression=self.compression)


class TestArrowStreamSource(TestArrowSource):
    form = "stream"


class TestCompressedArrowSource(TestArrowSource):
    compression = "zstd"


@pytest.mark.parametrize("form", FORMATS)
@examples(40)
@given(table=tables(), batch=st.integers(1, 7))
def test_samples_are_the_rows_of_any_table(tmp_path_factory, form, table, batch):
    path = write(tmp_path_factory.mktemp("arrow"), "a.arrow", table, form=form, batch=batch)
    samples, bad = read_all(ArrowSource.list(str(path)))
    assert not bad
    assert samples.column("key").to_pylist() == [f"a.arrow#{row}" for row in range(table.num_rows)]
    assert samples.drop(["key"]).to_pylist() == table.to_pylist()
    assert samples.drop(["key"]).schema.types == table.schema.types


def test_feather_files_are_read_and_those_of_version_1_refused(tmp_path):
    pyarrow.feather.write_feather(pa.table({"x": [1, 2]}), tmp_path / "a.feather")
    assert read_all(ArrowSource.list(str(tmp_path)))[0].column("x").to_pylist() == [1, 2]
    (tmp_path / "b.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(ConfigError, match=r"b\.feather.*version 1"):
        ArrowSource.list(str(tmp_path))


def test_categories_are_decoded_however_long_their_words(tmp_path):
    words = pa.array(["red", None, "green"] * 100).dictionary_encode()
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 300), ["." * 200_000])
    tags = pa.ListArray.from_arrays(pa.array(range(301), pa.int32()), words)
    write(tmp_path, "a.arrow", {"colour": words, "long": long, "tags": tags})
    source = ArrowSource.list(str(tmp_path))
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for part in source.parts for _ in source.read(part)]
    assert max(held) < 8 << 20
    samples, _ = read_all(source)
    assert samples.schema.types[1:] == [pa.string(), pa.string(), pa.list_(pa.string())]
    assert samples.column("colour").to_pylist() == ["red", None, "green"] * 100
    assert samples.column("tags").to_pylist()[:2] == [["red"], [None]]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_huge_batch_is_never_held(tmp_path, form):
    noise = np.random.default_rng(0).integers(0, 256, (100, 1 << 20), np.uint8)
    write(tmp_path, "a.arrow", {"x": [sample.tobytes() for sample in noise]}, form=form)
    source = ArrowSource.list(str(tmp_path))
    held = []
    for found in source.read(source.parts[0]):
        assert found.column("x")[0].as_py() == noise[len(held)].tobytes()
        held.append(_mapped_bytes("a.arrow"))
    assert len(held) == 100
    assert max(held) < 48 << 20


def _mapped_bytes(name):
    """Return how much of a mapped file counts as this process's memory."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps.read().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
        for line in lines
        if line.endswith(f"/{name}")
    )


def test_a_sample_of_two_splits_keeps_its_place_in_its_file(tmp_path):
    write(tmp_path, "a.arrow", {"x": range(10)}, batch=3)
    samples, _ = read_all(ArrowSource.list(str(tmp_path), SourceOptions(split="all")))
    assert samples.column("key").to_pylist() == [f"a.arrow#{row}" for row in range(10)]


def test_files_that_differ_in_their_columns_are_named(tmp_path):
    write(tmp_path, "a.arrow", {"x": [1], "y": [1]})
    write(tmp_path, "b.arrow", {"x": [1]}, form="stream")
    with pytest.raises(ConfigError, match=r"columns of b\.arrow differ from those of a\.arrow: \['y'\] are missing"):
        ArrowSource.list(str(tmp_path))


def test_files_without_samples_are_not_found_unless_another_has_some(tmp_path):
    (tmp_path / "zero.arrow").touch()
    write(tmp_path, "none.arrow", {"x": pa.array([], pa.int64())})
    with pytest.raises(NotFoundError, match=r"no samples.*none\.arrow"):
        ArrowSource.list(str(tmp_path))
    write(tmp_path, "some.arrow", {"x": [1]})
    source = ArrowSource.list(str(tmp_path))
    assert read_all(source)[0].num_rows == 1
    assert source.ignored == {"(empty)": 1}


@pytest.mark.parametrize("content", [b"no table at all", b"ARROW1", b"ARROW1\0\0" + bytes(100), b"\xff" * 100])
def test_a_file_that_is_no_arrow_is_named_when_listed(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.arrow is not a readable Arrow file"):
        ArrowSource.list(str(tmp_path))


def test_a_file_without_its_end_is_named_when_listed(tmp_path):
    path = write(tmp_path, "a.arrow", {"x": range(1000)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"a\.arrow is not a readable Arrow file"):
        ArrowSource.list(str(tmp_path))


def test_a_stream_that_is_cut_off_ends_with_a_bad_sample(tmp_path):
    path = write(tmp_path, "a.arrow", {"x": range(1000)}, form="stream", batch=100)
    path.write_bytes(path.read_bytes()[:-300])
    samples, (bad,) = read_all(ArrowSource.list(str(tmp_path)))
    assert samples.column("x").to_pylist() == list(range(900))
    assert bad.key == "a.arrow#900"
    assert "from row 900 on" in bad.reason


def test_offsets_that_lead_astray_are_bad_samples(tmp_path):
    path = write(tmp_path, "a.arrow", {"text": ["aa", "bb", "cc"]})
    raw = path.read_bytes()
    offsets = np.array([0, 2, 4, 6], np.int32).tobytes()
    assert raw.count(offsets) == 1
    path.write_bytes(raw.replace(offsets, np.array([0, 2, 1 << 30, 6], np.int32).tobytes()))
    samples, bad = read_all(ArrowSource.list(str(path)))
    assert samples.num_rows + len(bad) == 3
    assert bad
    assert samples.column("text").to_pylist() == ["aa"]


NARROW, WIDE = pa.array([[1], [2, 3]], pa.list_(pa.int32())), pa.array([[1], [2, 3]], pa.list_(pa.int64()))
INDICES = pa.array([0, 1], pa.int32())


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    ("encoded", "plain"),
    [
        pytest.param(
            *(pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), NARROW), WIDE),
            marks=pytest.mark.skipif(
                int(pa.__version__.split(".")[0]) < 26, reason="pyarrow before 26 refuses encoded lists of two widths"
            ),
        ),
        (pa.DictionaryArray.from_arrays(INDICES, NARROW), WIDE),
        (pa.DictionaryArray.from_arrays(INDICES, pa.array([1, 2], pa.int32())), pa.array([1, 2], pa.int64())),
        (pa.array([1, 2], pa.int64()).dictionary_encode(), pa.array([1, 2], pa.int8())),
    ],
)
def test_files_that_differ_in_the_encoding_and_the_width_of_a_column_are_joined(
    tmp_path, encoded, plain, is_reversed
):
    columns = [encoded, plain][:: -1 if is_reversed else 1]
    for name, column in zip(("a", "b"), columns, strict=True):
        write(tmp_path, f"{name}.arrow", {"x": column})
    samples, bad = read_all(ArrowSource.list(str(tmp_path)))
    assert (samples.column("x").to_pylist(), bad) == (encoded.to_pylist() + plain.to_pylist(), [])
    assert samples.schema.field("x").type in (pa.int64(), pa.list_(pa.int64()))
