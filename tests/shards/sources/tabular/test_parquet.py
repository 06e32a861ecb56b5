import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.tabular.parquet import PART_BYTES, ParquetSource
from tests.examples import examples
from tests.samples import jpeg
from tests.shards.sources.reading import read_all
from tests.shards.sources.source_laws import StreamedSourceLaws
from tests.shards.sources.tables import tables


def write(folder, name, table, **options):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table) if isinstance(table, dict) else table, path, **options)
    return path


class TestParquetSource(StreamedSourceLaws):
    source = ParquetSource

    def write(self, folder, numbers):
        table = {"number": numbers, "text": [f"word {number}" for number in numbers]}
        write(folder, "a.parquet", table, row_group_size=7)


@examples(60)
@given(tables(), st.integers(1, 7))
def test_samples_are_the_rows_of_any_table(tmp_path_factory, table, row_group_size):
    path = write(tmp_path_factory.mktemp("parquet"), "a.parquet", table, row_group_size=row_group_size)
    samples, bad = read_all(ParquetSource.list(str(path)))
    assert not bad
    assert samples.column("key").to_pylist() == [f"a.parquet#{row}" for row in range(table.num_rows)]
    assert samples.drop(["key"]).to_pylist() == table.to_pylist()
    assert samples.drop(["key"]).schema.types == table.schema.types


@pytest.mark.slow
def test_small_row_groups_share_a_part_and_large_ones_do_not(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (60, 1 << 20), np.uint8)
    table = pa.table({"x": [sample.tobytes() for sample in noise]})
    write(tmp_path, "a.parquet", table, row_group_size=5, compression="none")
    source = ParquetSource.list(str(tmp_path))
    assert [part.num_samples for part in source.parts] == [15, 15, 15, 15]
    assert all(part.size_bytes <= PART_BYTES for part in source.parts)
    assert [part.name for part in source.parts] == [f"a.parquet#{row}" for row in (0, 15, 30, 45)]
    samples, _ = read_all(source)
    assert samples.column("x").to_pylist() == table.column("x").to_pylist()
    assert samples.column("key")[59].as_py() == "a.parquet#59"


@pytest.mark.slow
def test_a_huge_row_group_is_never_held(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (200, 1 << 20), np.uint8)
    table = pa.table({"x": [sample.tobytes() for sample in noise]})
    write(tmp_path, "a.parquet", table, write_batch_size=1, use_dictionary=False)
    del table, noise
    source = ParquetSource.list(str(tmp_path))
    (part,) = source.parts
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in source.read(part)]
    assert len(held) == 200
    assert max(held) < 24 << 20


def test_values_that_repeat_do_not_swell_a_batch(tmp_path):
    write(tmp_path, "a.parquet", {"prompt": ["." * 100_000] * 2000, "x": range(2000)})
    source = ParquetSource.list(str(tmp_path))
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for part in source.parts for _ in source.read(part)]
    assert max(held) < 24 << 20
    assert read_all(source)[0].num_rows == 2000


def test_categories_are_decoded(tmp_path):
    words = pa.array(["red", "green", None] * 10).dictionary_encode()
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 30), ["." * 200_000])
    write(tmp_path, "a.parquet", {"colour": words, "long": long})
    samples, _ = read_all(ParquetSource.list(str(tmp_path)))
    assert samples.schema.field("colour").type == pa.string()
    assert samples.column("colour").to_pylist() == ["red", "green", None] * 10
    assert samples.column("long").to_pylist() == ["." * 200_000] * 30


def test_images_and_class_names_come_from_hugging_face_metadata(tmp_path):
    features = '{"info": {"features": {"fine": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"img": pa.array([{"bytes": jpeg(), "path": None}], kind), "fine": [1]})
    write(tmp_path, "a.parquet", table.replace_schema_metadata({"huggingface": features}))
    source = ParquetSource.list(str(tmp_path))
    assert source.classes == ("cat", "dog")
    assert source.schema.names == ["key", "image", "label"]
    samples, _ = read_all(source)
    assert samples.to_pylist() == [{"key": "a.parquet#0", "image": jpeg(), "label": 1}]


def test_files_that_number_their_classes_differently_are_refused(tmp_path):
    for name, classes in (("a", '["cat", "dog"]'), ("b", '["dog", "cat"]')):
        features = f'{{"info": {{"features": {{"label": {{"names": {classes}, "_type": "ClassLabel"}}}}}}}}'
        table = pa.table({"label": [0]}).replace_schema_metadata({"huggingface": features})
        write(tmp_path, f"{name}.parquet", table)
    with pytest.raises(ConfigError, match=r"class names of b\.parquet and a\.parquet differ"):
        ParquetSource.list(str(tmp_path))


def test_a_key_column_serves_and_a_missing_key_is_a_bad_sample(tmp_path):
    write(tmp_path, "a.parquet", {"id": ["p", None, "q"], "x": [1, 2, 3]})
    samples, bad = read_all(ParquetSource.list(str(tmp_path), SourceOptions(key="id")))
    assert samples.to_pylist() == [{"key": "p", "x": 1}, {"key": "q", "x": 3}]
    assert [(sample.key, "null" in sample.reason) for sample in bad] == [("a.parquet#1", True)]


def test_text_that_is_not_utf8_is_a_bad_sample(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc")]
    )
    write(tmp_path, "a.parquet", {"text": broken})
    samples, bad = read_all(ParquetSource.list(str(tmp_path)))
    assert samples.column("text").to_pylist() == ["a", "c"]
    assert [sample.key for sample in bad] == ["a.parquet#1"]
    assert "UTF8" in bad[0].reason


def test_a_label_out_of_range_is_a_bad_sample(tmp_path):
    write(tmp_path, "a.parquet", {"label": [1, 1 << 40, 2]})
    samples, bad = read_all(ParquetSource.list(str(tmp_path)))
    assert samples.column("label").to_pylist() == [1, 2]
    assert [sample.key for sample in bad] == ["a.parquet#1"]


def test_integers_of_several_widths_share_the_widest(tmp_path):
    write(tmp_path, "a.parquet", {"x": pa.array([1], pa.int32())})
    write(tmp_path, "b.parquet", {"x": pa.array([1 << 40])})
    samples, _ = read_all(ParquetSource.list(str(tmp_path)))
    assert samples.column("x").to_pylist() == [1, 1 << 40]


def test_files_that_differ_in_their_columns_are_named(tmp_path):
    write(tmp_path, "a.parquet", {"x": [1]})
    write(tmp_path, "b.parquet", {"x": ["1"]})
    with pytest.raises(ConfigError, match=r"'x' is string in b\.parquet, but int64 in a\.parquet"):
        ParquetSource.list(str(tmp_path))


def test_empty_files_are_passed_over_unless_all_are(tmp_path):
    (tmp_path / "zero.parquet").touch()
    write(tmp_path, "norows.parquet", {"x": pa.array([], pa.int64())})
    with pytest.raises(NotFoundError, match=r"no samples"):
        ParquetSource.list(str(tmp_path))
    write(tmp_path, "full.parquet", {"x": [1]})
    (tmp_path / "readme.md").touch()
    source = ParquetSource.list(str(tmp_path))
    assert read_all(source)[0].num_rows == 1
    assert source.ignored == {"(empty)": 2, ".md": 1}


@pytest.mark.parametrize("damage", [lambda raw: b"no table", lambda raw: raw[:-20], lambda raw: raw[: len(raw) // 2]])
def test_a_file_that_is_no_parquet_is_named_when_listed(tmp_path, damage):
    path = write(tmp_path, "a.parquet", {"x": range(1000)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"a\.parquet is not a readable Parquet file"):
        ParquetSource.list(str(tmp_path))


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_pages_that_do_not_decode_end_the_part_with_a_bad_sample(tmp_path, compression):
    table = pa.table({"x": [f"{number:010}" * 10 for number in range(100_000)]})
    options = {"data_page_size": 1 << 14, "write_page_checksum": True, "use_dictionary": False}
    path = write(tmp_path, "a.parquet", table, compression=compression, **options)
    source = ParquetSource.list(str(path))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1  # a digit becomes another one
    path.write_bytes(raw)
    samples, (bad,) = read_all(source)
    assert 0 < samples.num_rows < 100_000
    assert samples.column("x").to_pylist() == table.column("x").to_pylist()[: samples.num_rows]
    assert bad.key == f"a.parquet#{samples.num_rows}"
    assert "99999" in bad.reason


def test_batches_stay_small_where_large_samples_follow_small_ones(tmp_path):
    blobs = [b"." * 10] * 3000 + [b"." * 700_000] * 6 + [b"." * 10] * 3000
    write(tmp_path, "a.parquet", {"x": blobs})
    samples, bad = read_all(ParquetSource.list(str(tmp_path)))
    assert not bad
    assert samples.column("x").to_pylist() == blobs


def test_a_column_that_is_missing_after_the_listing_is_an_error(tmp_path):
    write(tmp_path, "a.parquet", {"x": [1], "y": [1]})
    source = ParquetSource.list(str(tmp_path))
    write(tmp_path, "a.parquet", {"x": [1]})
    with pytest.raises(ConfigError, match=r"a\.parquet has changed: the columns \['y'\] are missing"):
        read_all(source)


def test_a_file_that_shrank_after_the_listing_is_an_error(tmp_path):
    path = write(tmp_path, "a.parquet", {"x": range(10)}, row_group_size=1)
    source = ParquetSource.list(str(path))
    write(tmp_path, "a.parquet", {"x": [1]})
    with pytest.raises(ConfigError, match="changed since it was listed"):
        read_all(source)


def test_files_of_one_name_in_two_folders_get_different_keys(tmp_path):
    for folder in ("a", "b"):
        write(tmp_path, f"{folder}/x.parquet", {"x": [1]})
    samples, _ = read_all(ParquetSource.list(f"{tmp_path}/{{a,b}}/x.parquet"))
    assert samples.column("key").to_pylist() == ["a/x.parquet#0", "b/x.parquet#0"]


def test_a_file_compressed_as_a_whole_is_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match="decompress it"):
        ParquetSource.list(str(tmp_path))
