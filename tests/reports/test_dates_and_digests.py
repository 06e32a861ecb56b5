"""Dates and times of Arrow are stored, compared, verified and read, also those that Python does not have."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

import datasvc
from datasvc.repository import Repository
from datasvc.shards.format import sample_index
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.salvage import text_digests
from datasvc.shards.ingestion.ingest import ingest
from datasvc.shards.versions.verify import verify
from tests.cli.command import run

DAYS = pa.array([2_932_897, -719_163], pa.int32()).cast(pa.date32())
MICROS = pa.array([253_402_300_800_000_000, 0], pa.timestamp("us"))
KINDS = {
    "date": (DAYS, np.datetime64(2_932_897, "D")),
    "timestamp": (MICROS, np.datetime64("10000-01-01T00:00:00.000000")),
    "zone": (MICROS.view(pa.timestamp("us", "Mars/Olympus")), np.datetime64("10000-01-01T00:00:00.000000")),
    "list": (pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), DAYS), [np.datetime64(2_932_897, "D")]),
    "struct": (pa.StructArray.from_arrays([DAYS], ["day"]), {"day": np.datetime64(2_932_897, "D")}),
}  # fmt: skip


@pytest.mark.parametrize("extension", ["parquet", "arrow"])
@pytest.mark.parametrize("name", KINDS)
def test_dates_that_python_lacks_are_stored_verified_and_read(tmp_path, name, extension):
    """apache/arrow#41266, apache/arrow#38444: dates beyond the years 1 to 9999 and unknown zones are valid."""
    values, first = KINDS[name]
    table = pa.table({"key": ["a", "b"], "v": values})
    path, url = str(tmp_path / f"in.{extension}"), str(tmp_path / "repo")
    if extension == "parquet":
        pq.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    repository = Repository.create(url)
    ingest(repository, path, "data", keep_order=True)
    version = datasvc.open(url).dataset("data")
    assert not verify(repository, "data", deep=True).problems
    assert version["train"][0] == {"key": "a", "v": first}


def times(values, unit="ns"):
    return pa.record_batch({"key": pa.array(["k"] * len(values)), "t": pa.array(values, pa.timestamp(unit))})


def test_times_that_differ_by_a_nanosecond_or_in_their_unit_are_different_samples():
    """apache/arrow#41266 and its neighbours: Python's text of a time ends at the microsecond."""
    one, other = digest_batch(times([1, 2]))[0]
    assert one != other
    assert digest_batch(times([1], "us"))[0] != digest_batch(times([1], "ns"))[0]


def test_digests_do_not_depend_on_chunks_dictionaries_widths_and_bytes_below_nulls():
    """The digest of a sample is that of its values, however Arrow stores them."""
    plain = pa.array([[1, None], None, [3]], pa.list_(pa.int64()))
    garbage = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()),
        pa.array([1, 9, 7, 8, 3], pa.int16(), mask=np.array([False, True, False, False, False])),
        mask=pa.array([False, True, False]),
    )
    large = plain.cast(pa.large_list(pa.int64()))
    texts = pa.array(["a", None, "b"])

    def digests(lists, words):
        columns = {"key": pa.array(["x", "y", "z"]), "l": lists, "w": words}
        return digest_batch(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))

    expected = digests(plain, texts)
    for lists in (plain, garbage, large, pa.concat_arrays([plain.slice(2), plain]).slice(1)):
        for words in (texts, texts.dictionary_encode(), texts.cast(pa.large_string())):
            assert digests(lists, words) == expected


def test_samples_of_an_old_version_are_compared_with_new_ones_and_verified(tmp_path, monkeypatch):
    """The neighbour: an index with digests of text beside one with digests of Arrow's values."""
    repository = Repository.create(str(tmp_path / "repo"))
    pq.write_table(
        pa.table({"key": ["a", "b"], "t": pa.array([0, 1000], pa.timestamp("us"))}), tmp_path / "a.parquet"
    )
    with monkeypatch.context() as old:
        old.setattr(sample_index, "INDEX_FORMAT", 2)
        old.setattr("datasvc.shards.ingestion.build_streamed.digest_batch", lambda batch: next(text_digests(batch)))
        ingest(repository, str(tmp_path / "a.parquet"), "data")
    assert not verify(repository, "data", deep=True).problems
    ingest(repository, str(tmp_path / "a.parquet"), "data", append=True, on_common="drop")
    assert len(datasvc.open(str(tmp_path / "repo")).dataset("data")["train"]) == 2
    assert not verify(repository, "data", deep=True).problems


def test_a_page_and_the_command_line_show_such_a_date(tmp_path):
    """Reading in other places goes the same way."""
    path, url = str(tmp_path / "a.parquet"), str(tmp_path / "repo")
    pq.write_table(pa.table({"key": ["a", "b"], "v": DAYS}), path)
    ingest(Repository.create(url), path, "data")
    assert "10000-01-01" in run("head", "data", "--repo", url).stdout
