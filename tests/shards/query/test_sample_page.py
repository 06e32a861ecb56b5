"""Pages of samples show what an iteration over the split gives, without reading blobs or all shards."""

from itertools import chain

import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Objects, Repository
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.query.query import choose_shards
from datasvc.shards.query.sample_details import read_sample
from datasvc.shards.query.sample_page import find_key, read_page
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.delete import delete
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.shards.written_versions import LABELLED_SCHEMA, TEXT_SCHEMA, write_version

NULLABLE_SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("blob", pa.large_binary()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32())),
    ]
)


def samples(start, stop):
    # Blobs are much larger than the rest of a sample, so sample indexes have frames.
    return [
        {"key": f"k{number:03}", "blob": bytes([number]) * (9000 + number), "label": number % 3}
        for number in range(start, stop)
    ]


def write_pets(repository, **options):
    shards = [samples(start, start + 10) for start in range(0, 50, 10)]
    write_version(repository, "pets", {"train": shards, "val": [samples(0, 4)]}, LABELLED_SCHEMA, "ab", **options)
    return repository


@pytest.fixture
def pets(repository):
    return write_pets(repository)


def keys(page):
    return [sample.key for sample in page.samples]


def all_pages(repository, **options):
    """Return the keys of all pages, one list per page."""
    pages, start = [], 0
    while start is not None:
        page = read_page(repository, "pets", start=start, **options)
        pages.append(keys(page))
        start = page.next_start
    return pages


@pytest.mark.parametrize("indexed", [True, False])
def test_pages_by_number_are_the_samples_in_order(url, indexed):  # noqa: F811
    pets = write_pets(Repository.create(url), indexed=indexed)
    delete(pets, "pets", keys=["k003", "k010", "k049"], split="train")
    split = open_dataset(pets, "pets")["train"]
    pages = all_pages(pets, count=20)
    assert [len(page) for page in pages] == [20, 20, 7]
    assert list(chain.from_iterable(pages)) == [sample["key"] for sample in split]
    page = read_page(pets, "pets", "train", start=2, count=2)
    found = [(sample.number, sample.class_name, sample.values, sample.blob_bytes) for sample in page.samples]
    assert found == [(2, None, {"label": 2}, {"blob": 9002}), (3, "b", {"label": 1}, {"blob": 9004})]
    reader = NumberedSamples(split)
    assert [reader.blob(number, "blob") for number in range(len(split))] == [sample["blob"] for sample in split]


def test_a_page_reads_no_blob(pets, monkeypatch):
    read = []
    monkeypatch.setattr(Objects, "read_range", lambda _objects, *span: read.append(span))
    monkeypatch.setattr("datasvc.shards.versions.dataset.OriginShards.open_shard", read.append)
    assert len(read_page(pets, "pets", count=50).samples) == 50
    assert not read


def test_nulls_texts_and_lists_are_shown_as_stored(repository):
    stored = [
        {"key": "a", "blob": None, "text": "t", "vector": [1.0]},
        {"key": "b", "blob": b"", "text": None, "vector": None},
    ]
    write_version(repository, "pets", {"train": [stored]}, NULLABLE_SCHEMA)
    first, second = read_page(repository, "pets").samples
    assert (first.values, first.blob_bytes) == ({"blob": None, "text": "t", "vector": [1.0]}, {})
    assert (second.values, second.blob_bytes) == ({"text": None, "vector": None}, {"blob": 0})
    reader = NumberedSamples(open_dataset(repository, "pets")["train"])
    assert (reader.blob(0, "blob"), reader.blob(1, "blob")) == (None, b"")


def test_a_split_of_texts_has_pages_too(url):  # noqa: F811
    """Record batches of texts have no frame in the sample index."""
    repository = Repository.create(url)
    shards = [[{"key": f"{number}{row}", "text": f"text {row}"} for row in range(5)] for number in range(3)]
    write_version(repository, "pets", {"train": shards}, TEXT_SCHEMA)
    page = read_page(repository, "pets", start=4, count=2)
    assert [(sample.key, sample.values) for sample in page.samples] == [
        ("04", {"text": "text 4"}),
        ("10", {"text": "text 0"}),
    ]


@pytest.mark.parametrize("max_shards", [1, 2, 64])
def test_pages_of_a_condition_have_every_sample_that_satisfies_it_once(pets, max_shards):
    delete(pets, "pets", keys=["k003", "k010", "k049"], split="train")
    expected = [sample["key"] for sample in open_dataset(pets, "pets")["train"] if sample["label"] == 1]
    pages = all_pages(pets, where="label = 1", count=4, max_shards=max_shards)
    assert list(chain.from_iterable(pages)) == expected
    assert all(len(page) <= 4 for page in pages)


def test_a_page_of_a_condition_searches_a_bounded_number_of_shards_and_continues(pets):
    page = read_page(pets, "pets", where="key >= 'k045'", max_shards=2)
    assert (keys(page), page.searched_shards, page.num_shards, page.next_start) == ([], 2, 5, 20)
    page = read_page(pets, "pets", where="key >= 'k045'", start=20, max_shards=3)
    assert (len(page.samples), page.next_start) == (5, None)


def test_samples_are_sorted_among_the_shards_that_are_read(pets):
    page = read_page(pets, "pets", order="octet_length(blob) desc", count=3)
    assert (keys(page), page.next_start, page.searched_shards) == (["k049", "k048", "k047"], 3, 5)
    assert keys(read_page(pets, "pets", order="label desc", start=1, count=2)) == ["k005", "k008"]
    page = read_page(pets, "pets", where="label = 0", order="key desc", count=1, max_shards=2)
    assert (keys(page), page.searched_shards) == (["k039"], 2)
    assert choose_shards(5, 2).tolist() == [1, 3]


def test_an_invalid_condition_or_order_is_refused_with_its_reason(pets):
    with pytest.raises(ConfigError, match=r"'labl = 1'.*pets@1/train.*labl.*columns are key, blob, label"):
        read_page(pets, "pets", where="labl = 1")
    with pytest.raises(ConfigError, match="cannot be evaluated"):
        read_page(pets, "pets", where="true) union (select 1")
    with pytest.raises(ConfigError, match="cannot be evaluated"):
        read_page(pets, "pets", where="exists (from read_text('/etc/passwd'))")
    with pytest.raises(ConfigError, match=r"'key::int' cannot be evaluated.*'k0\d\d'.*columns are key, blob, label"):
        read_page(pets, "pets", order="key::int")
    with pytest.raises(ConfigError, match="count is 0"):
        read_page(pets, "pets", count=0)
    assert len(read_page(pets, "pets", where="label = 1 -- a comment").samples) == 17


def test_a_key_is_found_and_a_hostile_key_is_only_a_text(repository):
    hostile = ["it's", '"; drop', "a\nb", "<b>", "nul\0l", "日本"]
    shards = [samples(0, 3), [{**samples(0, 1)[0], "key": key} for key in hostile]]
    write_version(repository, "pets", {"train": shards}, LABELLED_SCHEMA)
    reader = NumberedSamples(open_dataset(repository, "pets")["train"])
    assert [find_key(reader, key) for key in hostile] == [3, 4, 5, 6, 7, 8]
    for missing in ("k0", "", "' or true --"):
        with pytest.raises(NotFoundError, match="has no sample with the key"):
            find_key(reader, missing)


def test_a_sample_is_shown_with_its_place_and_its_duplicates(repository):
    first, second = samples(0, 3), samples(10, 14)
    again = [{**second[1], "key": "again", "label": 7}]
    splits = {"train": [first, [*second, {**first[1], "key": "deleted"}]], "val": [again]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, "ab")
    delete(repository, "pets", keys=["k010", "deleted"], split="train")
    found = read_sample(repository, "pets", "k011")
    split = open_dataset(repository, "pets")["train"]
    assert (found.sample.number, found.place.shard, found.place.row) == (3, 1, 1)
    assert found.place.shard_digest == split.table.shard(1).digest
    assert [tuple(other) for other in found.duplicates.samples] == [("val", 0, "again")]
    assert found.duplicates.searched_shards == found.duplicates.num_shards == 3
    assert not read_sample(repository, "pets", "k001").duplicates.samples
    assert found.to_json()["values"] == {"label": 2, "blob": {"bytes": 9011}}


def test_a_blob_that_was_changed_is_corrupt(pets):
    split = open_dataset(pets, "pets")["train"]
    path = pets.objects.local_path(split.table.shard(1).digest)
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes([12]) * 9012, bytes([13]) * 9012))
    reader = NumberedSamples(split)
    assert reader.summaries([12])[0].blob_bytes == {"blob": 9012}
    with pytest.raises(CorruptDataError):
        reader.blob(12, "blob")


def test_a_number_out_of_range_is_not_found(pets):
    reader = NumberedSamples(open_dataset(pets, "pets")["train"])
    with pytest.raises(NotFoundError, match=r"pets@1/train has no sample 50: it has 50 samples"):
        reader.summaries([50])
    assert not read_page(pets, "pets", start=50).samples
    assert not read_page(pets, "pets", start=99, where="label = 0").samples


def test_memory_of_blobs_is_given_back(pets, monkeypatch):
    monkeypatch.setattr("datasvc.shards.query.sample_reader._MAX_BLOB_BYTES", 3000)
    reader = NumberedSamples(open_dataset(pets, "pets")["train"])
    for number in np.arange(10).repeat(2).tolist():
        assert len(reader.blob(number, "blob")) == 9000 + number
    assert reader._open[0].read_bytes < 30000


def test_memory_of_open_shards_is_bounded(pets):
    reader = NumberedSamples(open_dataset(pets, "pets")["train"], max_bytes=40_000)
    for number in range(50):
        assert len(reader.blob(number, "blob")) == 9000 + number
    reader.summaries([0])
    open_bytes = [shard.num_bytes for shard in reader._open.values()]
    assert sum(open_bytes) <= 40_000 or len(open_bytes) == 1
