"""Data sets with compressed columns of text and numbers: smaller, and read like all others."""

import gc
import io
import json
import random
import re

import numpy as np
import pyarrow as pa
import pytest

from datasvc.api.purge import purge
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.loaders import TokenLoader
from datasvc.loaders.torch import Dataset
from datasvc.repository import Repository
from datasvc.shards import Shard, ShardWriter, ingest, open_dataset
from datasvc.shards.export.exporter import export
from datasvc.shards.format import compressed_batches, reader, schema, shard_table, writer
from datasvc.shards.format.compressed_batches import choose_columns
from datasvc.shards.format.ipc_reader import read_table
from datasvc.shards.format.overlaid_shard import open_table_shard
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.schema import has_compression, shard_schema, with_compression
from datasvc.shards.history.columns import compact, set_column
from datasvc.shards.query.query import query
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.verify import verify
from tests.cli.command import run
from tests.shards.written_versions import write_version

WORDS = [
    "a",
    "the",
    "small",
    "large",
    "red",
    "dog",
    "cat",
    "street",
    "house",
    "tree",
    "walks",
    "sees",
    "under",
    "near",
]
SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("caption", pa.string()),
        pa.field("noise", pa.int64()),
        pa.field("tokens", pa.list_(pa.uint16(), 4)),
        pa.field("label", pa.int32()),
    ]
)
COMPRESSED = with_compression(SCHEMA, compressed=True)


def caption(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(10, 40)))


def sample(number, image_bytes=0):
    rng = random.Random(number)
    return {
        "key": f"images/{number:06}.jpg",
        "image": rng.randbytes(10) * (image_bytes // 10) if number % 3 else None,
        "caption": None if number % 7 == 5 else caption(rng),
        "noise": rng.getrandbits(63),
        "tokens": [rng.randrange(50) for _ in range(4)],
        "label": number % 10,
    }


def written(samples, wanted=COMPRESSED):
    sink = io.BytesIO()
    with ShardWriter(sink, wanted) as opened:
        for each in samples:
            opened.append(each)
    return sink.getvalue(), opened


def texts(count, start=0):
    """Return samples as an iterable source gives them."""
    return [
        {"key": f"k{n:05}", "caption": caption(random.Random(n)), "label": n % 3} for n in range(start, start + count)
    ]


def test_columns_that_become_smaller_are_compressed_and_all_others_are_as_they_were():
    samples = [sample(number) for number in range(2000)]
    content, opened = written(samples)
    plain, _ = written(samples, SCHEMA)
    batch = pa.ipc.open_file(plain).get_batch(0)
    assert choose_columns(batch) == ("key", "caption", "label")
    assert batch.column("noise").buffers()[1].to_pybytes() in content
    assert batch.column("tokens").values.buffers()[1].to_pybytes() in content
    assert b"red dog" not in content
    assert opened.statistics.saved_bytes == pytest.approx(len(plain) - len(content), abs=100)
    assert pa.ipc.open_file(content).read_all().to_pylist() == samples  # by Arrow's own reader
    shard = Shard.from_bytes(content, "shard")
    assert [shard.sample(row) for row in range(2000)] == samples
    assert shard.items("caption", np.array([1999, 3, 3])) == [samples[row]["caption"] for row in (1999, 3, 3)]
    assert shard.items("missing", np.array([1])) == [None]


@pytest.mark.parametrize("ratio", [1.3, 100])
def test_the_measure_decides(monkeypatch, ratio):
    monkeypatch.setattr(compressed_batches, "_MIN_RATIO", ratio)
    samples = [sample(number) for number in range(300)]
    is_plain = written(samples)[0] == written(samples, SCHEMA)[0]
    assert is_plain == (ratio == 100)


def test_a_batch_that_readers_would_refuse_is_larger_than_it_would_have_to_be(monkeypatch):
    monkeypatch.setattr(writer, "BATCH_SAMPLES", 100)
    samples = [{**sample(number), "caption": caption(random.Random(number))} for number in range(100)]
    samples += [{**each, "key": "k", "caption": "x" * 100_000, "noise": 0, "tokens": [0] * 4} for each in samples]
    content, _ = written(samples)
    assert 10_000_000 / 64 < len(content) < 10_000_000 / 32
    shard = Shard.from_bytes(content, "shard")
    assert shard.items("caption", np.arange(200)) == [each["caption"] for each in samples]
    assert pa.ipc.open_file(content).read_all()["caption"].to_pylist() == [each["caption"] for each in samples]


@pytest.mark.parametrize("count", [1, 9, 17, 18, 100])
def test_a_shard_that_would_save_little_has_the_first_format(count):
    content, opened = written([{**sample(number), "caption": "a", "label": 0} for number in range(count)])
    assert opened.statistics.saved_bytes is None
    assert not has_compression(Shard.from_bytes(content, "shard").schema)


def test_only_shards_may_have_compressed_buffers():
    content, _ = written([sample(number) for number in range(2000)])
    with pytest.raises(CorruptDataError, match="its buffers are compressed, which datasvc never writes here"):
        read_table(content, "an index")


def test_images_and_tokens_stay_views_of_the_mapped_file(tmp_path):
    samples = [sample(number, 20_000) for number in range(400)]
    content, opened = written(samples)
    (tmp_path / "shard").write_bytes(content)
    shard = Shard.map(tmp_path / "shard")
    views = shard.blobs("image", np.arange(400))
    buffer = np.empty(20_000, np.uint8)
    for number in (1, 200, 398):
        assert shard.read(views[number], buffer) is not views[number]  # read from the file, at its position there
        assert buffer.tobytes() == samples[number]["image"]
    mapped = pa.py_buffer(shard._file.mapping)
    for chunk in shard.column("tokens").chunks:
        assert mapped.address < chunk.values.buffers()[1].address < mapped.address + mapped.size
    # The index has what is no image, and this is smaller too: the ranges of images are known.
    _, plain = written(samples, SCHEMA)
    frames, plain_frames = ([len(batch.frame) for batch in each.layout.batches] for each in (opened, plain))
    assert sum(frames) < 0.8 * sum(plain_frames)


def test_the_process_keeps_the_batches_that_were_used_last(monkeypatch):
    monkeypatch.setattr(writer, "BATCH_SAMPLES", 50)
    samples = [sample(number) for number in range(500)]
    shards = [Shard.from_bytes(written(samples)[0], name) for name in "ab"]
    decoded = shards[0]._batches._sizes_bytes[0]
    monkeypatch.setattr(reader, "_MAX_KEPT_BYTES", int(3.5 * decoded))
    for shard in shards:
        for row in range(0, 500, 50):
            assert shard.sample(row) == samples[row]
    assert [sorted(shard._batches._kept) for shard in shards] == [[], [7, 8, 9]]
    del shard, shards
    gc.collect()
    last = Shard.from_bytes(written(samples)[0], "c")
    assert last.values("label").tolist() == [number % 10 for number in range(500)]
    assert not last._batches._kept  # one column is decoded alone
    for row in (0, 50, 0, 100, 150, 200):
        last.sample(row)
    assert sorted(last._batches._kept) == [2, 3, 4]


@pytest.fixture
def captions(repository, tmp_path):
    """Ingests the same texts as "compressed" and as "plain", in shards of several record batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BATCH_SAMPLES", 200)
        for name, wanted in (("compressed", "auto"), ("plain", "none")):
            ingest(repository, texts(1500), name, compress_columns=wanted, shard_bytes=100_000)
    return repository


def rows(repository, ref):
    split = open_dataset(Repository.open(repository.url), ref)["train"]
    return sorted((split[number] for number in range(len(split))), key=lambda each: each["key"])


def shards_of(repository, ref):
    split = open_dataset(repository, ref)["train"]
    return [open_table_shard(repository.objects, split.table, number) for number in range(split.table.num_shards)]


def is_compressed(repository, ref):
    return {has_compression(shard.schema) for shard in shards_of(repository, ref)} == {True}


def assert_equal(repository, ref, expected):
    assert rows(repository, ref) == rows(repository, expected)
    assert not verify(repository, ref, deep=True).problems
    assert not verify(repository, ref).problems
    (difference,) = diff(repository, expected, ref).splits.values()
    assert [len(each) for each in (difference.added, difference.deleted, difference.changed)] == [0, 0, 0]


@pytest.mark.slow
def test_short_texts_become_half_as_large_with_any_number_of_workers(repository, tmp_path):
    lines = [json.dumps(each) for each in texts(6000)]
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines[number::3]))
    source = str(tmp_path / "*.jsonl")
    reports = [
        ingest(repository, source, name, compress_columns=wanted, workers=workers, shard_bytes=200_000)
        for name, wanted, workers in (("one", "auto", 1), ("two", "auto", 2), ("plain", None, 1))
    ]
    tables = [open_dataset(repository, name)["train"].table for name in ("one", "two", "plain")]
    assert tables[0].shards() == tables[1].shards()
    assert tables[0].num_shards > 2
    assert [has_compression(table.sample_schema) for table in tables] == [True, True, False]
    assert reports[2].size_bytes > 2 * reports[0].size_bytes
    (found,) = reports[0].compression.values()
    assert found["saved_bytes"] + found["bytes"] == pytest.approx(reports[2].size_bytes, rel=0.02)
    assert open_dataset(repository, "one").entry.content["compression"] == {"train": found}
    plain = open_dataset(repository, "plain").entry.content
    assert "compression" not in plain
    assert "compress_columns" not in plain["source"]["options"]
    assert_equal(repository, "one", "plain")


@pytest.mark.slow
def test_everything_reads_compressed_columns_as_it_reads_others(captions, tmp_path):
    assert is_compressed(captions, "compressed")
    assert_equal(captions, "compressed", "plain")
    sql = "select label, count(*), max(caption) from train where caption like '%dog%' group by 1 order by 1"
    assert query(captions, "compressed", sql) == query(captions, "plain", sql)
    where = "[caption like '%red dog%']"
    assert 0 < len(rows(captions, f"compressed{where}")) < 1500
    assert rows(captions, f"compressed{where}") == rows(captions, f"plain{where}")
    splits = [open_dataset(captions, name)["train"] for name in ("compressed", "plain")]
    assert list(Dataset(splits[0])) == list(Dataset(splits[1]))
    files = []
    for name in ("compressed", "plain"):
        export(captions, name, str(tmp_path / name), "webdataset")
        files.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.tar"))])
    assert files[0] == files[1] != []


@pytest.mark.slow
def test_later_versions_stay_compressed(captions):
    for name in ("compressed", "plain"):
        ingest(captions, texts(500, 1500), name, append=True)
        delete(captions, name, keys=["k00007"])
        patch = pa.table({"key": ["k00001"], "caption": ["another text"]})
        set_column(captions, name, "caption", patch)
    assert_equal(captions, "compressed", "plain")
    for name in ("compressed", "plain"):
        compact(captions, name)
        purge(captions, name, keys=["k00003", "k01999"], dry_run=False)
    assert_equal(captions, "compressed", "plain")
    assert {row["key"]: row["caption"] for row in rows(captions, "compressed")}["k00003"] == ""
    assert is_compressed(captions, "compressed")
    ingest(captions, texts(500, 2000), "compressed", append=True, compress_columns="none")
    assert not is_compressed(captions, "compressed")
    ingest(captions, texts(500, 1500), "plain2", compress_columns="none")
    ingest(captions, texts(500, 2000), "plain2", append=True, compress_columns="auto")
    assert has_compression(open_dataset(captions, "plain2")["train"].table.sample_schema)


def test_an_earlier_release_refuses_shards_and_tables_that_it_cannot_read(captions, monkeypatch):
    table = open_dataset(captions, "compressed")["train"].table
    monkeypatch.setattr(schema, "SHARD_FORMAT", 1)
    with pytest.raises(ConfigError, match="has shard format 2; this datasvc reads up to 1"):
        open_shard(captions.objects, table.shard(0))
    monkeypatch.setattr(shard_table, "TABLE_FORMAT", 4)
    with pytest.raises(ConfigError, match="has shard table format 5; this datasvc reads up to 4: upgrade datasvc"):
        _ = open_dataset(captions, "compressed")["train"].table
    assert len(open_dataset(captions, "plain")["train"]) == 1500


def test_damage_is_named_by_record_batch_and_only_its_samples_are_lost(captions):
    table = open_dataset(captions, "compressed")["train"].table
    path = captions.objects.local_path(table.shard(0).digest)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x28\xb5\x2f\xfd")] ^= 1  # the magic number of zstd, of a column of the first batch
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match="is corrupt: its bytes have the digest"):
        open_shard(captions.objects, table.shard(0))  # before anything is decoded
    (problem,) = verify(captions, "compressed", deep=True).problems
    assert (problem.kind, problem.num_samples) == ("changed", 200)
    with pytest.raises(CorruptDataError, match="record batch 0 of a shard is corrupt"):
        Shard.from_bytes(bytes(content), "a shard").sample(0)
    assert Shard.from_bytes(bytes(content), "a shard").sample(200)["caption"]


def test_the_command_says_how_much_smaller_the_shards_are(repository, tmp_path):
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, texts(2000))))
    done = run("ingest", tmp_path / "c.jsonl", "c", "--compress-columns", "auto", "--repo", repository.url)
    assert "train: compressed by zstd: " in done.stderr
    shown = run("show", "c", "--repo", repository.url).stdout
    assert re.search(
        r"shards of this ingest: compressed by zstd: [2-9]\.\d\d times smaller \(\S+ kB -> \S+ kB\)", shown
    )
    wrong = run("ingest", tmp_path / "c.jsonl", "c", "--compress-columns", "lz4", "--repo", repository.url)
    assert wrong.returncode == 2
    with pytest.raises(ConfigError, match="compress_columns is 'lz4'; expected 'auto' or 'none'"):
        ingest(repository, texts(2), "d", compress_columns="lz4")


def test_a_token_loader_gives_the_same_batches(repository):
    samples = [{key: value for key, value in sample(n).items() if key != "image"} for n in range(300)]
    fields = [field for field in SCHEMA if field.name != "image"]
    batches = []
    for name, wanted in (("plain", False), ("compressed", True)):
        write_version(
            repository, name, {"train": [samples]}, with_compression(shard_schema(fields), compressed=wanted)
        )
        loader = TokenLoader(
            open_dataset(repository, name)["train"], batch_size=32, training=True, tokens="tokens", labels=None
        )
        batches.append([batch.tokens.tolist() for batch in loader])
    assert is_compressed(repository, "compressed")
    assert batches[0] == batches[1]
