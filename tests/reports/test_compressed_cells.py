"""A few kilobytes of Parquet or Arrow do not fill the memory."""

from contextlib import suppress
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError, DatasvcError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources.tabular.arrow_files import largest_batch
from datasvc.shards.sources.tabular.parquet_footer import largest_cells


@pytest.mark.slow
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


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("column", ["numbers", "dictionary"])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_a_small_arrow_file_that_announces_huge_buffers_is_refused_before_they_are_allocated(
    form, column, codec, repository, folder
):
    """ClickHouse/ClickHouse#113006, apache/arrow-rs#10959: a buffer takes what its first bytes announce."""
    folder.mkdir(exist_ok=True)
    values = pa.array([7] * 9_999) if column == "numbers" else pa.array(["x" * 79_992]).dictionary_encode()
    table = pa.table({"a": values})
    open_writer = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with open_writer(folder / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    raw = (folder / "a.arrow").read_bytes()
    ingest(repository, str(folder / "a.arrow"), "good")
    announced = (79_992).to_bytes(8, "little")
    assert announced in raw
    (folder / "a.arrow").write_bytes(raw.replace(announced, (1 << 40).to_bytes(8, "little")))
    with pytest.raises(ConfigError, match="would fill the memory"):
        ingest(repository, str(folder / "a.arrow"), "bad")


@pytest.mark.parametrize("seed", range(40))
def test_damaged_messages_of_arrow_take_no_time_and_raise_nothing(seed):
    """ClickHouse/ClickHouse#113006: offsets and lengths in a header are used before they are checked."""
    sink = pa.BufferOutputStream()
    table = pa.table({"a": [1, 2] * 99, "b": pa.array(["x", "y"] * 99).dictionary_encode()})
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    raw = bytearray(sink.getvalue())
    random = Random(seed)
    for _ in range(50):
        damaged = bytearray(raw)
        at = random.randrange(8, len(raw) - 8)
        damaged[at : at + 4] = random.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f", random.randbytes(4)))
        for content in (damaged, damaged[8:]):
            largest_batch(memoryview(content), is_file=content is damaged)


@pytest.mark.slow
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
