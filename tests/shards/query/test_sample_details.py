"""Shards and samples that are found by the beginning of a digest."""

import hashlib

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.repository import Repository
from datasvc.shards.query.sample_details import _find_rows, find_samples, find_shards, is_digest_prefix
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.dataset import open_dataset
from tests.shards.written_versions import write_version

DIGESTS = [b"\xab\xcd\xef" + bytes(29), b"\xab\xcd\xef\x10" + bytes(28)]
digests = st.lists(st.none() | st.sampled_from(DIGESTS))


@given(digests, st.integers(6, 64), st.integers(0, 5))
@example(DIGESTS, 7, 0)
def test_the_rows_are_those_whose_digits_begin_with_the_prefix(values, length, start):
    column = pa.chunked_array([pa.array(values, pa.binary(32)).slice(start), pa.array(values, pa.binary(32))])
    prefix = ("abcdef" + 58 * "0")[:length]
    texts = [None if value is None else value.hex() for value in column.to_pylist()]
    expected = [(row, text) for row, text in enumerate(texts) if text is not None and text.startswith(prefix)]
    assert _find_rows(column, prefix) == expected


def test_shards_and_live_samples_are_found(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    shards = [[{"key": f"{shard}{row}", "text": f"{shard} {row}"} for row in range(3)] for shard in range(2)]
    write_version(repository, "texts", {"train": shards})
    write_version(repository, "old", {"train": shards}, indexed=False)
    split = open_dataset(repository, "texts")["train"]
    reader, (_, second) = NumberedSamples(split), split.table.shards()
    (match,) = find_shards(split.table, second.digest[:7])
    assert (match.digest, match.kind, match.shard) == (second.digest, "shard", 1)
    (index,) = find_shards(split.table, split.table.index(1))
    assert (index.kind, index.shard) == ("sample index", 1)
    place = reader.place(4)
    (sample, *more) = find_samples(reader, place.sample_digest[:9])
    assert (sample.kind, sample.number, sample.key, more) == ("sample", 4, "11", [])
    assert find_samples(reader, second.digest) == []  # longer than the digest of a sample
    assert find_samples(NumberedSamples(open_dataset(repository, "old")["train"]), place.sample_digest) == []


def test_a_digest_prefix_has_six_or_more_digits():
    digest = hashlib.sha256(b"").hexdigest()
    assert [is_digest_prefix(text) for text in (digest, digest[:6], digest[:5], digest + "0", "ABCDEF", "")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
