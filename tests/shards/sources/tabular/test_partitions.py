import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources.tabular.parquet import Partitions, partition_of


def write(folder, name, **columns):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_folders_named_as_hive_does_are_columns():
    assert partition_of("year=2024/city=S%C3%A3o%20Paulo/0.parquet") == {"year": "2024", "city": "São Paulo"}
    assert partition_of("city=__HIVE_DEFAULT_PARTITION__/0.parquet") == {"city": None}
    assert partition_of("plain/a=b.parquet") == {}


def test_a_label_in_a_folder_name_becomes_a_class(repository, tmp_path):
    write(tmp_path / "source", "label=dog/year=2024/0.parquet", value=[1, 2])
    write(tmp_path / "source", "label=cat/year=2023/0.parquet", value=[3])
    ingest(repository, str(tmp_path / "source"), "pets")
    split = open_dataset(repository, "pets")["train"]
    assert split.classes == ("cat", "dog")
    found = {(sample["value"], split.classes[sample["label"]], sample["year"]) for sample in split}
    assert found == {(1, "dog", "2024"), (2, "dog", "2024"), (3, "cat", "2023")}


def test_what_pyarrow_writes_partitioned_comes_back(repository, tmp_path):
    table = pa.table({"value": range(6), "city": ["a b", "c/d", None, "a b", "é", "c/d"]})
    pq.write_to_dataset(table, tmp_path / "source", partition_cols=["city"])
    ingest(repository, str(tmp_path / "source"), "cities")
    found = {(sample["value"], sample["city"]) for sample in open_dataset(repository, "cities")["train"]}
    assert found == set(zip(range(6), table.column("city").to_pylist(), strict=True))


def test_files_whose_folders_name_different_columns_are_refused(repository, tmp_path):
    write(tmp_path / "source", "a=1/0.parquet", value=[1])
    write(tmp_path / "source", "b=1/0.parquet", value=[1])
    with pytest.raises(ConfigError, match="ingest them as two sources"):
        ingest(repository, str(tmp_path / "source"), "odd")


def test_a_column_in_files_and_folders_is_refused(repository, tmp_path):
    write(tmp_path / "source", "value=1/0.parquet", value=[1])
    with pytest.raises(ConfigError, match="both in the files and in folder names"):
        ingest(repository, str(tmp_path / "source"), "odd")


def test_no_folder_names_add_nothing():
    partitions = Partitions(["0.parquet", "a/1.parquet"])
    assert partitions.schema.names == []
    batch = pa.record_batch({"value": [1]})
    assert partitions.add(batch, "a/1.parquet") == batch
