"""Shards, sample indexes and shard tables that somebody hostile stored, with the digests that they should have."""

import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from datasvc.arrow_messages import Block, check_block, parse_footer
from datasvc.errors import CorruptDataError
from datasvc.loaders.torch import Dataset
from datasvc.repository import Repository
from datasvc.shards import Shard, image_schema, open_dataset
from datasvc.shards.format.ipc_reader import read_table
from datasvc.shards.format.schema import shard_schema, with_compression
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.query.query import query
from datasvc.shards.versions.verify import verify
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.samples import jpeg
from tests.shards.written_versions import TEXT_SCHEMA, describe_table, write_table

ROOT = Path(__file__).parents[2]
TEXTS = [f"text {number}" for number in range(6)]
IMAGES = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("image", pa.large_binary())])


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "form"), [*((seed, "plain") for seed in range(1, 5)), (5, "compressed")])
def test_changed_bytes_end_in_our_errors_or_are_read_alike_with_little_memory(tmp_path, seed, form):
    done = subprocess.run(
        [sys.executable, "-m", "tests.shards.hostile_shards", tmp_path, str(seed), form],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for kind in ("shard", "index", "table"):
        for outcome in ("read", "refused"):
            assert f'"{kind} {outcome}"' in done.stdout


def arrow_file(batch, schema=None, **options):
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema or batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_batch(batch)
    return sink.getvalue()


def texts_batch(texts=TEXTS):
    return pa.record_batch([[str(number) for number in range(len(texts))], texts], schema=TEXT_SCHEMA)


def with_far_offset(texts=TEXTS):
    """A shard whose texts end far behind the file."""
    content = arrow_file(texts_batch(texts))
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32).tobytes()
    assert content.count(offsets) == 1
    return content.replace(offsets, offsets[:8] + np.int32(2**31 - 8).tobytes() + offsets[12:])


def with_short_metadata(size_bytes=4):
    """A shard whose footer gives a record batch 4 bytes of metadata, at which Arrow ends the process."""
    content = bytearray(arrow_file(texts_batch()))
    (length,) = struct.unpack_from("<i", content, len(content) - 10)
    footer = len(content) - 10 - length
    (block,) = parse_footer(bytes(content[footer : footer + length]), footer)
    place = content.index(struct.pack("<qi", block.offset, block.metadata_bytes), footer)
    struct.pack_into("<i", content, place + 8, size_bytes)
    return bytes(content)


def bomb():
    """A shard of some kilobytes whose texts take 64 MiB."""
    return arrow_file(texts_batch(["x" * (64 << 20)]), compression="zstd")


def compressed(texts, change=lambda content: content):
    """A shard of the format with compressed columns, changed."""
    batch = texts_batch(texts)
    metadata = with_compression(batch.schema, compressed=True).metadata
    return change(arrow_file(batch.replace_schema_metadata(metadata), compression="zstd"))


def with_claim(num_bytes):
    """A shard whose compressed texts claim to have another size than they have."""
    size = struct.pack("<q", 6000)
    return compressed(["x" * 1000] * 6, lambda content: content.replace(size, struct.pack("<q", num_bytes)))


def with_dictionary():
    schema = TEXT_SCHEMA.set(1, pa.field("text", pa.dictionary(pa.int32(), pa.string())))
    return arrow_file(pa.record_batch([["a"], pa.array(["b"]).dictionary_encode()], schema=schema))


HOSTILE = {
    "far offset": (with_far_offset, "Offset invariant failure|offset"),
    "short metadata": (with_short_metadata, "invalid position of record batch 0"),
    "bomb": (bomb, "its buffers are compressed, which datasvc never writes here"),
    "compressed bomb": (
        lambda: compressed(["x" * (64 << 20)]),
        "compressed buffers claim to have 671088.* 64 times as many",
    ),
    "claim of 10 GB": (lambda: with_claim(10**10), "compressed buffers claim to have 100000000.* 64 times as many"),
    "negative claim": (lambda: with_claim(-2), "compressed buffers claim to have"),
    "dictionary": (with_dictionary, "dictionaries, which datasvc never writes"),
}


def commit(repository, contents, schema=TEXT_SCHEMA, num_samples=6):
    """Commit version 1 of "odd": an intact shard, then one shard for each of `contents`."""
    objects = repository.objects
    intact = [{"key": f"k{number}", "text": text} for number, text in enumerate(TEXTS)]
    table = write_table(objects, [intact] * (1 + len(contents)), schema, indexed=False)
    infos = [table.shard(0), *(objects.put(content) for content in contents)]
    table = table.with_column("digest", [bytes.fromhex(info.digest) for info in infos])
    table = table.with_column("bytes", [info.size_bytes for info in infos])
    table = table.with_column("samples", [6, *[num_samples] * len(contents)])
    entry = {"splits": {"train": describe_table(objects, table)}, "message": "", "skipped": 0}
    repository.versions("datasets", "odd").append(lambda _head: entry)
    return open_dataset(repository, "odd")["train"]


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_shard_is_refused_however_it_is_read(repository, case):
    build, message = HOSTILE[case]
    content = build()
    split = commit(repository, [content])
    with pytest.raises(CorruptDataError, match=message):
        Shard.from_bytes(content, "shard")
    with pytest.raises(CorruptDataError, match=message):
        split[6]
    with pytest.raises(CorruptDataError, match=message):
        Dataset(split)[6]
    with pytest.raises(CorruptDataError, match=message):
        query(repository, "odd", "select min(text) from train")


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("deep", [False, True])
def test_verify_names_a_hostile_shard(repository, case, deep):
    commit(repository, [HOSTILE[case][0]()])
    (problem,) = verify(repository, "odd", deep=deep).problems
    assert (problem.kind, problem.role, problem.shard, problem.num_samples) == ("contradictory", "shard", 1, 6)


def test_verify_reads_the_structure_of_remote_shards(url):  # noqa: F811
    repository = Repository.create(url)
    commit(repository, [bomb(), arrow_file(texts_batch()), with_short_metadata(), with_dictionary()])
    assert [problem.shard for problem in verify(repository, "odd").problems] == [1, 3, 4]


def test_a_shard_with_other_columns_or_samples_than_its_table_is_refused(repository):
    keys = pa.array([str(number) for number in range(6)])
    other_type = pa.record_batch(
        [keys, [b"x"] * 6], shard_schema([TEXT_SCHEMA.field(0), pa.field("text", pa.binary())])
    )
    unknown = pa.record_batch([keys, [b"x"] * 6], shard_schema([TEXT_SCHEMA.field(0), pa.field("more", pa.binary())]))
    split = commit(repository, [arrow_file(other_type), arrow_file(unknown), arrow_file(texts_batch(["x"]))])
    for number, message in (
        (6, "column 'text' of type binary, the shard table lists string"),
        (12, "column 'more' of type binary, the shard table lists no such column"),
        (18, "holds 1 sample, the shard table lists 6"),
    ):
        with pytest.raises(CorruptDataError, match=message):
            split[number]
        with pytest.raises(CorruptDataError, match=message):
            Dataset(split)[number]
    assert [problem.shard for problem in verify(repository, "odd").problems] == [1, 2, 3]


@pytest.mark.parametrize("width", [-1, 31, 2**31 - 1])
def test_an_image_of_another_size_than_its_table_says_is_refused(repository, width):
    image = {"key": "a", "image": jpeg(30, 20), "width": 30, "height": 20, "label": 0}
    table = write_table(repository.objects, [[image]], image_schema(labelled=True), indexed=False)
    content = repository.objects.read(table.shard(0).digest)
    assert table.check_shard(0, Shard.from_bytes(content, "shard")).num_samples == 1
    content = content.replace(np.int32(30).tobytes() + bytes(4), np.int32(width).tobytes() + bytes(4))
    with pytest.raises(CorruptDataError, match=f"{width}.*pixels, the shard table lists at most 30"):
        table.check_shard(0, Shard.from_bytes(content, "shard"))


@pytest.mark.parametrize("texts", [["x"] * 5, ["x"] * 7])
def test_a_query_refuses_a_shard_with_other_samples_than_its_table(repository, texts):
    commit(repository, [arrow_file(texts_batch(texts))])
    with pytest.raises(CorruptDataError, match=f"holds {len(texts)} samples or more, the shard table lists 6"):
        query(repository, "odd", "select count(*) from train")


def test_a_text_that_is_not_utf_8_is_refused_when_it_is_read(repository):
    split = commit(repository, [arrow_file(texts_batch()).replace(b"text 3", b"text\xff3")])
    assert split[6]["text"] == "text 0"
    for read in (
        lambda: split[9],
        lambda: Dataset(split)[9],
        split.origin.open_shard(split.table.shard(1)).check_texts,
    ):
        with pytest.raises(CorruptDataError, match=r"UTF-?8"):
            read()
    assert [problem.shard for problem in verify(repository, "odd").problems] == [1]


def test_a_key_that_is_not_utf_8_is_refused_when_the_shard_is_opened():
    batch = pa.record_batch([["key a"], [b""]], IMAGES)
    with pytest.raises(CorruptDataError, match="Invalid UTF8"):
        Shard.from_bytes(arrow_file(batch).replace(b"key a", b"key\xffa"), "shard")


def test_list_views_of_the_same_values_are_refused():
    values = pa.array([1] * 1000, pa.int8())
    for num_views, is_refused in ((1, False), (100, True)):
        views = pa.ListViewArray.from_arrays([0] * num_views, [1000] * num_views, values)
        content = arrow_file(pa.record_batch([pa.ListArray.from_arrays([0, num_views], views)], ["x"]))
        if is_refused:
            with pytest.raises(CorruptDataError, match="more values in its list views than its bytes can hold"):
                read_table(content, "file")
        else:
            assert read_table(content, "file").to_pylist() == [{"x": [[1] * 1000]}]


def test_a_truncated_file_is_refused_at_every_length():
    content = arrow_file(texts_batch())
    for length in range(len(content)):
        with pytest.raises(CorruptDataError, match="is not an Arrow IPC file"):
            Shard.from_bytes(content[:length], "shard")


@pytest.mark.parametrize("metadata", [{"datasvc.shard.format": "one"}, {"datasvc.shard.format": "9" * 5000}])
def test_a_format_that_is_no_number_is_corrupt(metadata):
    batch = pa.record_batch([["a"]], pa.schema([pa.field("key", pa.string())], metadata))
    with pytest.raises(CorruptDataError, match="which is not a number"):
        Shard.from_bytes(arrow_file(batch), "shard")


def test_a_shard_without_keys_is_corrupt():
    batch = pa.record_batch([[1]], pa.schema([pa.field("key", pa.int64())], {"datasvc.shard.format": "1"}))
    with pytest.raises(CorruptDataError, match="has no column 'key' of strings"):
        Shard.from_bytes(arrow_file(batch), "shard")


@pytest.mark.parametrize(
    ("column", "value"), [("samples", -1), ("bytes", -1), ("bytes", 1 << 62), ("deleted", 7), ("samples", 1 << 62)]
)
def test_a_shard_table_with_impossible_numbers_is_corrupt(repository, column, value):
    table = write_table(repository.objects, [[{"key": "a", "text": "b"}]], TEXT_SCHEMA).with_column(column, [value])
    with pytest.raises(CorruptDataError, match="is not a shard table"):
        ShardTable.decode(table.encode(), "table")


def test_verify_survives_a_table_that_lists_more_samples_than_memory_has(repository):
    commit(repository, [arrow_file(texts_batch())], num_samples=1 << 50)
    (problem,) = verify(repository, "odd").problems
    assert (problem.shard, problem.num_samples) == (1, 1 << 50)


def test_intact_files_are_read():
    batch = pa.record_batch([["a", None], pa.nulls(2, pa.list_(pa.string()))], ["x", "y"])
    assert read_table(arrow_file(batch), "file").to_batches() == [batch]
    assert read_table(arrow_file(batch.slice(0, 0)), "file").num_rows == 0


@pytest.mark.parametrize("metadata", [bytes(8), b"\xff" * 8, struct.pack("<Ii", 0xFFFFFFFF, 8) + bytes(8)])
def test_metadata_that_is_no_flatbuffer_is_invalid(metadata):
    with pytest.raises(ValueError, match=r"."):
        check_block(metadata, Block(8, len(metadata), 0))
