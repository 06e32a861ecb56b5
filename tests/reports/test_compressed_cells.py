"""A few kilobytes of Parquet do not fill the memory."""

from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError, DatasvcError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources.tabular.parquet_footer import largest_cells


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([[0] * 9_000_000], pa.list_(pa.int64())),
        ([[[0] * 3_000_000] * 4], pa.list_(pa.list_(pa.int64()))),
        ([["x"] * 18_000_000], pa.list_(pa.string())),
        (["x" * (70 << 20)], pa.large_string()),
        ([{"a": bytes(70 << 20)}], pa.struct([("a", pa.large_binary())])),
    ],
    ids=["list", "lists", "strings", "text", "bytes"],
)
def test_a_small_file_of_one_huge_cell_is_refused_before_it_is_decoded(value, kind, repository, folder):
    """hardwood-hq/hardwood#610, apache/datafusion#9814: some kB announce values that fill the memory."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"a": pa.array(value, kind)}), folder / "a.parquet", compression="zstd")
    with pytest.raises(ConfigError, match="would fill the memory"):
        ingest(repository, str(folder / "a.parquet"), "d")


def test_many_rows_of_one_value_are_ordinary(repository, folder):
    """apache/datafusion#9814: a constant column is compressed as much, and is read in batches."""
    folder.mkdir(exist_ok=True)
    columns = {"n": pa.array([7] * 30_000), "texts": pa.array([["a", "b"]] * 30_000)}
    pq.write_table(pa.table(columns), folder / "a.parquet", compression="zstd")
    ingest(repository, str(folder / "a.parquet"), "d")
    assert len(open_dataset(repository, "d")["train"]) == 30_000


def test_a_hostile_footer_takes_no_time_and_raises_nothing():
    """questdb/questdb#7223: sizes in a header are used before they are compared with anything."""
    for footer in (
        b"",
        b"\x19" * 4096,
        b"\x1c" * 4096,
        b"\xff" * 4096,
        b"\x49\xfc" + b"\xff" * 9,
        bytes(range(256)) * 16,
    ):
        assert largest_cells(footer, 1) is None


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_footer_is_an_error_of_ours(seed, repository, folder):
    """questdb/questdb#7223: a malformed footer crashes its reader."""
    folder.mkdir(exist_ok=True)
    path = folder / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2], "l": [[1], [2, 3]]}), path)
    raw = bytearray(path.read_bytes())
    raw[-9 - seed * 7 % 150] ^= 1 << (seed % 8)
    path.write_bytes(raw)
    with suppress(DatasvcError):
        ingest(repository, str(path), "d", on_bad="skip")
